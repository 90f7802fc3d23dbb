"""The training model against a plain float64 PyTorch GRT, and the properties that follow from the equations."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import ComputeConfig, GRTConfig
from model.grt import GRT, noise_positions
from model.noise import Stream, normals
from model.parallel import layer_config
from tests.reference import parameter_shapes, random_parameters, reference_forward

SMALL = GRTConfig(vocab_size=250, hidden_size=32, num_heads=4, core_blocks=2, max_depth=3, max_positions=24)
SEED = 11
OPTIONS = [
    {},
    {"position": "rope"},
    {"norm": "rmsnorm", "mlp": "swiglu"},
    {"num_kv_heads": 2, "position": "rope"},
    {"gate_input_norm": False},
    {"gate_noise_per": "element", "gate_temperature": 0.5},
    {"prelude_blocks": 3, "core_blocks": 0, "coda_blocks": 0, "max_depth": 0, "min_depth": 0},
]


def build(config: GRTConfig, dtype: torch.dtype = torch.float64, compute: ComputeConfig | None = None) -> tuple[GRT, dict[str, Tensor]]:
    """The training model with random weights, and the same weights by name."""
    parameters = random_parameters(config, seed=3, dtype=dtype)
    model = GRT(config, layer_config(1, dtype), SEED, compute)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model, parameters


def tokens(batch: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def drawn_noise(config: GRTConfig, sequences_B: Tensor, length: int, depth: int) -> tuple[list[Tensor], list[Tensor]]:
    """The noise that the model adds, as the reference takes it: by recurrence, [B, S, channels]."""
    positions_BS = noise_positions(sequences_B, length).t()
    gate_channels = 1 if config.gate_noise_per == "token" else config.hidden_size
    state = [(normals(SEED, positions_BS, config.hidden_size, Stream.STATE, r) * config.state_noise).double() for r in range(1, depth + 1)]
    gate = [(normals(SEED, positions_BS, gate_channels, Stream.GATE, r) * config.gate_noise).double() for r in range(1, depth + 1)]
    return state, gate


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


def check_against_reference(config: GRTConfig, compute: ComputeConfig, depth: int, noisy: bool = True, tolerance: float = 1e-10) -> None:
    """Logits, and the gradients of a random projection of them, in float64 with random weights."""
    model, parameters = build(config, compute=compute)
    for value in parameters.values():
        value.requires_grad_()
    tokens_BS, sequences_B = tokens(), torch.tensor([5, 70_000])
    noise = drawn_noise(config, sequences_B, tokens_BS.shape[1], depth) if noisy else ()

    logits_BSV = model(tokens_BS, depth=depth, sequences_B=sequences_B if noisy else None)[0].transpose(0, 1)
    expected_BSV = reference_forward(parameters, config, tokens_BS, depth, *noise)
    assert relative_error(logits_BSV[..., : config.vocab_size], expected_BSV) < tolerance
    assert bool((logits_BSV[..., config.vocab_size :] == float("-inf")).all())

    direction = torch.randn(expected_BSV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (logits_BSV[..., : config.vocab_size] * direction).sum().backward()
    (expected_BSV * direction).sum().backward()
    for name, parameter in model.named_parameters():
        expected = parameters[name].grad
        if expected is None or not expected.any():
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert parameter.grad is not None, name
            assert relative_error(parameter.grad, expected) < tolerance, name


@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_and_gradients_equal_the_reference(options: dict[str, object], depth: int) -> None:
    config = replace(SMALL, **options)  # type: ignore[arg-type]  # one dict for fields of several types
    check_against_reference(config, ComputeConfig(gate_ops="ref"), depth)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_with_fused_operators_too(fused_operators: None, options: dict[str, object]) -> None:
    """With noise as closely as its fp32 sines and logarithms agree with torch's."""
    config = replace(SMALL, **options)  # type: ignore[arg-type]  # one dict for fields of several types
    check_against_reference(config, ComputeConfig(gate_ops="fused"), 3, noisy=False)
    check_against_reference(config, ComputeConfig(gate_ops="fused"), 3, tolerance=1e-6)


def test_loss_is_the_reference_cross_entropy_over_the_true_vocabulary() -> None:
    model, parameters = build(SMALL)
    tokens_BS, targets_BS = tokens(), tokens(seed=1)
    expected_BSV = reference_forward(parameters, SMALL, tokens_BS, 2)
    losses_BS = F.cross_entropy(expected_BSV.transpose(1, 2), targets_BS, reduction="none")
    assert model(tokens_BS, targets_BS, depth=2)[0].item() == pytest.approx(losses_BS.mean().item(), rel=1e-6)
    weights_BS = torch.rand(tokens_BS.shape)
    weighted = model(tokens_BS, targets_BS, depth=2, weights_BS=weights_BS)[0].item()
    assert weighted == pytest.approx((losses_BS * weights_BS).sum().item(), rel=1e-6)


def test_evaluation_has_no_noise_and_training_noise_depends_on_the_sequence_number() -> None:
    model, _ = build(SMALL)
    tokens_BS = tokens(batch=1)
    quiet = model(tokens_BS, depth=2)[0]
    assert torch.equal(quiet, model(tokens_BS, depth=2)[0])
    first, again, other = (model(tokens_BS, depth=2, sequences_B=torch.tensor([number]))[0] for number in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, quiet)
    assert not torch.equal(first, other)


def test_gate_clamped_to_one_gives_the_prelude_to_coda_logits() -> None:
    model, _ = build(SMALL, torch.float32)
    tokens_BS = tokens()
    shallow = model(tokens_BS, depth=0)[0]
    assert not torch.equal(shallow, model(tokens_BS, depth=3)[0])
    assert model.core is not None
    with torch.no_grad():
        model.core.gate.w2.bias.fill_(1e4)
    assert torch.equal(shallow, model(tokens_BS, depth=3)[0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_later_token_never_changes_an_earlier_logit(options: dict[str, object]) -> None:
    model, _ = build(replace(SMALL, **options), torch.float32)  # type: ignore[arg-type]  # one dict for fields of several types
    tokens_BS = tokens()
    changed = tokens_BS.clone()
    changed[:, 12] = (changed[:, 12] + 1) % SMALL.vocab_size
    before, after = (model(t, depth=3)[0] for t in (tokens_BS, changed))
    assert torch.equal(before[:12], after[:12])
    assert not torch.equal(before[12:], after[12:])


def test_gate_starts_nearly_copying_the_state_through() -> None:
    model = GRT(SMALL, layer_config(1, torch.float32), SEED)
    _, statistics = model(tokens(), depth=3, measure=True)
    assert statistics.shape == (3, 2)
    assert not statistics.requires_grad
    torch.testing.assert_close(statistics[:, 0], torch.full((3,), 0.982), atol=2e-3, rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_documents_are_kept_apart(options: dict[str, object]) -> None:
    """Two sequences of two documents each give the logits of the four documents alone."""
    model, _ = build(replace(SMALL, **options))  # type: ignore[arg-type]  # one dict for fields of several types
    batch = tokens(2, 20)
    cu_seqlens = torch.tensor([0, 8, 20, 23, 40, 40, 40, 40], dtype=torch.int32)
    packed = model(batch, depth=2, cu_seqlens=cu_seqlens)[0]
    for row, begin, end in ((0, 0, 8), (0, 8, 20), (1, 0, 3), (1, 3, 20)):
        alone = model(batch[row : row + 1, begin:end], depth=2)[0]
        torch.testing.assert_close(packed[begin:end, row : row + 1], alone, rtol=1e-10, atol=1e-10)


def test_sequence_longer_than_the_positions_is_refused() -> None:
    model, _ = build(SMALL)
    with pytest.raises(ValueError, match="25 tokens; model.max_positions allows 24"):
        model(tokens(1, 25), depth=1)


def test_initial_weights_have_the_stated_deviations() -> None:
    config = replace(SMALL, hidden_size=128)
    weights = dict(GRT(config, layer_config(1, torch.float32), SEED).named_parameters())
    residual = 0.02 / (2 * (1 + 2 * 3 + 1)) ** 0.5
    for name, std in {
        "embedding.tokens.weight": 0.02,
        "embedding.positions.weight": 0.02,
        "prelude.0.attention.q.weight": 0.02,
        "prelude.0.attention.out.weight": residual,
        "core.blocks.1.mlp.up.weight": 0.02,
        "core.blocks.1.mlp.down.weight": residual,
        "core.projection.weight": 0.02,
        "core.gate.w1.weight": 0.02,
        "core.gate.w2.weight": 0.02,
    }.items():
        assert float(weights[name].detach().std()) == pytest.approx(std, rel=0.05), name
    assert not weights["core.gate.w2.bias"].any()
    assert bool((weights["core.gate.input_norm.weight"] == 1).all())


def test_initial_weight_depends_on_seed_and_name_alone() -> None:
    def weights(config: GRTConfig, seed: int) -> dict[str, Tensor]:
        return dict(GRT(config, layer_config(1, torch.float32), seed).named_parameters())

    base, wider_stack, reseeded = weights(SMALL, 1), weights(replace(SMALL, coda_blocks=2), 1), weights(SMALL, 2)
    for name in ("core.projection.weight", "prelude.0.attention.q.weight", "embedding.tokens.weight"):
        assert torch.equal(base[name], wider_stack[name])
        assert not torch.equal(base[name], reseeded[name])
    assert not torch.equal(base["core.blocks.0.mlp.up.weight"], base["core.blocks.1.mlp.up.weight"])


def test_deterministic_embeddings_compute_the_same_without_the_operator_that_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model, _ = build(SMALL)
        monkeypatch.setattr(F, "embedding", None)
        (gradient,) = torch.autograd.grad(model(tokens(), tokens(seed=1), depth=2)[0], [model.embedding.tokens.weight])
    finally:
        torch.use_deterministic_algorithms(False)
        monkeypatch.undo()
    model, _ = build(SMALL)
    (expected,) = torch.autograd.grad(model(tokens(), tokens(seed=1), depth=2)[0], [model.embedding.tokens.weight])
    assert relative_error(gradient, expected) < 1e-12
