"""The exported model code against the equations (`tests/reference.py`), and the behaviour that transformers expects of it."""

import itertools
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from model.config import GRTConfig
from model.layers import rotary_embedding
from tests.reference import random_parameters, reference_forward
from tests.tools.exported import exported_model, small_config
from tools.hf.modeling_grt import CACHE_NAME, GRTForCausalLM, rotary_angles

TOKENS = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(0))

GRID = [
    dict(zip(("position", "norm", "mlp", "num_kv_heads", "gate_input_norm"), values, strict=True))
    for values in itertools.product(("learned", "rope"), ("layernorm", "rmsnorm"), ("gelu", "swiglu"), (None, 2), (True, False))
]
MODERN: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "num_kv_heads": 2}
DENSE: dict[str, Any] = {"core_blocks": 0, "max_depth": 0, "min_depth": 0}


def build(
    dtype: torch.dtype = torch.float64, attention: str = "sdpa", **changes: Any
) -> tuple[GRTConfig, dict[str, Tensor], GRTForCausalLM]:
    config = small_config(**changes)
    parameters = random_parameters(config, 0, dtype)
    return config, parameters, exported_model(config, parameters, dtype, attention)


def greedy(model: GRTForCausalLM, tokens: Tensor, **arguments: Any) -> Tensor:
    return model.generate(tokens, max_new_tokens=12, min_new_tokens=12, do_sample=False, **arguments)


@pytest.mark.parametrize("options", GRID, ids=lambda options: "-".join(map(str, options.values())))
@torch.no_grad()
def test_logits_equal_the_equations_at_any_depth(options: dict[str, Any]) -> None:
    config, parameters, model = build(**options, gate_temperature=1.5)
    for depth in (0, 1, 3, 6):
        expected = reference_forward(parameters, config, TOKENS, depth)
        torch.testing.assert_close(model(TOKENS, num_steps=depth).logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, MODERN, DENSE], ids=["paper", "modern", "dense"])
@torch.no_grad()
def test_each_attention_implementation_equals_the_equations(attention: str, options: dict[str, Any]) -> None:
    config, parameters, model = build(attention=attention, **options)
    expected = reference_forward(parameters, config, TOKENS, config.max_depth)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotary_angles_are_those_of_training_bit_for_bit(dtype: torch.dtype) -> None:
    positions = torch.arange(5000)[None]
    _, _, model = build(torch.float32, **MODERN)
    ours = torch.stack(rotary_angles(model.config, positions, dtype))  # [2, 1, 1, S, H]
    training = rotary_embedding(positions, 8, 10000.0, dtype)  # [2, S, 1, 1, H]
    assert torch.equal(ours.flatten(), training.flatten())


@torch.no_grad()
def test_fp32_logits_equal_the_equations() -> None:
    config, parameters, model = build(torch.float32)
    expected = reference_forward(parameters, config, TOKENS, 3)
    assert (model(TOKENS).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("options", [{}, MODERN], ids=["paper", "modern"])
@pytest.mark.parametrize("depth", [0, 1, 3, 6])
def test_greedy_generation_is_the_same_with_and_without_cache(options: dict[str, Any], depth: int) -> None:
    _, _, model = build(**options)
    assert torch.equal(greedy(model, TOKENS, num_steps=depth), greedy(model, TOKENS, num_steps=depth, use_cache=False))


def test_dense_generation_is_the_same_with_and_without_cache() -> None:
    _, _, model = build(**DENSE)
    assert torch.equal(greedy(model, TOKENS), greedy(model, TOKENS, use_cache=False))


def test_num_steps_reaches_every_generated_token() -> None:
    _, _, model = build()
    generated = greedy(model, TOKENS, num_steps=1)
    with torch.no_grad():
        logits = model(generated, num_steps=1).logits
    assert torch.equal(generated[:, 12:], logits[:, 11:-1].argmax(-1))
    assert not torch.equal(generated, greedy(model, TOKENS))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_cache_names_are_accepted(name: str) -> None:
    _, _, model = build()
    first = model(TOKENS[:, :8], use_cache=True)
    second = model(TOKENS[:, 8:], **{name: first[CACHE_NAME]})
    torch.testing.assert_close(second.logits, model(TOKENS).logits[:, 8:])
    assert first[CACHE_NAME].get_seq_length() == 12


@torch.no_grad()
def test_cache_slots_are_prelude_coda_then_core_by_recurrence() -> None:
    _, _, model = build()
    shallow, deep = model(TOKENS, num_steps=1)[CACHE_NAME], model(TOKENS, num_steps=3)[CACHE_NAME]
    assert (len(shallow.layers), len(deep.layers)) == (1 + 2 + 2, 1 + 2 + 2 * 3)
    same = [torch.equal(a.keys, b.keys) for a, b in zip(shallow.layers, deep.layers, strict=False)]
    assert same == [True, False, False, True, True]  # only the coda sees the depth


@torch.no_grad()
def test_a_cache_made_for_max_depth_grows_when_more_is_asked() -> None:
    _, _, model = build()
    cache = DynamicCache(config=model.config)
    assert len(cache.layers) == model.config.num_hidden_layers == 9
    model(TOKENS, cache=cache, num_steps=5)
    assert len(cache.layers) == 13


def test_depth_may_fall_but_not_rise_within_a_sequence() -> None:
    _, _, model = build()
    with torch.no_grad():
        cache = model(TOKENS[:, :8], num_steps=2)[CACHE_NAME]
        model(TOKENS[:, 8:9], num_steps=1, cache=cache)
        with pytest.raises(ValueError, match="went through fewer recurrences"):
            model(TOKENS[:, 9:], num_steps=3, cache=cache)


def test_static_cache_generates_the_same_and_refuses_more_depth_than_it_holds() -> None:
    _, _, model = build(torch.float32)
    assert torch.equal(greedy(model, TOKENS, cache_implementation="static"), greedy(model, TOKENS))
    with pytest.raises(ValueError, match="needs 15 cache slots"):
        model(TOKENS, num_steps=6, cache=StaticCache(config=model.config, max_cache_len=20))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, MODERN], ids=["learned", "rope"])
def test_left_padding_changes_nothing(attention: str, options: dict[str, Any]) -> None:
    _, _, model = build(attention=attention, **options)
    padded = torch.cat([torch.full((2, 5), 2), TOKENS], dim=1)
    mask = (torch.arange(17) >= 5).long().expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 5:], model(TOKENS).logits)
    assert torch.equal(greedy(model, padded, attention_mask=mask)[:, 17:], greedy(model, TOKENS)[:, 12:])


def test_padding_does_not_count_against_the_longest_sequence() -> None:
    _, _, model = build(max_positions=12)
    padded = torch.cat([torch.full((2, 5), 2), TOKENS], dim=1)
    with torch.no_grad():
        model(padded, attention_mask=(torch.arange(17) >= 5).long().expand(2, -1))
        with pytest.raises(ValueError, match="17 tokens; this model takes at most 12"):
            model(padded)


@pytest.mark.parametrize("options", [{}, MODERN], ids=["learned", "rope"])
def test_generating_beyond_the_longest_sequence_is_an_error(options: dict[str, Any]) -> None:
    _, _, model = build(max_positions=16, **options)
    with pytest.raises(ValueError, match="17 tokens; this model takes at most 16"):
        greedy(model, TOKENS)


def test_impossible_num_steps_are_named() -> None:
    _, _, model = build()
    with pytest.raises(ValueError, match="num_steps is -1"):
        model(TOKENS, num_steps=-1)
    _, _, dense = build(**DENSE)
    with pytest.raises(ValueError, match="dense"):
        dense(TOKENS, num_steps=2)


@torch.no_grad()
def test_logits_to_keep_are_the_last() -> None:
    _, _, model = build()
    logits = model(TOKENS).logits
    torch.testing.assert_close(model(TOKENS, logits_to_keep=3).logits, logits[:, -3:])
    torch.testing.assert_close(model(TOKENS, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]])


def test_loss_is_the_mean_over_unmasked_next_tokens_and_reaches_every_weight() -> None:
    _, _, model = build()
    labels = TOKENS.clone()
    labels[0, :6] = -100
    outputs = model(TOKENS, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss.double(), expected, rtol=1e-5, atol=1e-5)
    outputs.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_beam_search_runs_through_the_recurrent_cache() -> None:
    _, _, model = build()
    assert torch.equal(greedy(model, TOKENS, num_beams=3), greedy(model, TOKENS, num_beams=3, use_cache=False))


@torch.no_grad()
def test_save_and_load_keep_the_tie_and_the_logits(tmp_path: Path) -> None:
    _, _, model = build(torch.float32)
    model.save_pretrained(tmp_path)
    result: Any = GRTForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, loading = result
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@torch.no_grad()
def test_bf16_keeps_the_gate_bias_in_fp32(tmp_path: Path) -> None:
    config, parameters, model = build(torch.float32)
    model.save_pretrained(tmp_path)
    narrow = GRTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    bias = narrow.model.core.gate.w2.bias
    assert torch.equal(bias, parameters["core.gate.w2.bias"] + config.gate_bias)
    assert {parameter.dtype for name, parameter in narrow.named_parameters() if parameter is not bias} == {torch.bfloat16}
    expected = model(TOKENS).logits
    assert (narrow(TOKENS).logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["5.10.2", "5.23.0"])
def test_the_export_works_on_other_versions_of_transformers(version: str, tmp_path: Path) -> None:
    """Runs these tests in a virtual environment with that version; what it does not install it sees from this one."""
    venv.create(tmp_path, with_pip=True)
    own, shared = (sysconfig.get_path("purelib", vars=paths) for paths in ({"base": str(tmp_path)}, {}))
    (Path(own) / "shared.pth").write_text(shared)  # after its own packages on the path
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"transformers=={version}"], check=True)
    loaded = subprocess.run(
        [python, "-c", "import transformers; print(transformers.__version__)"], check=True, capture_output=True, text=True
    )
    assert loaded.stdout.strip() == version
    tests = [Path(__file__).with_name(f"test_{subject}.py") for subject in ("hf_model", "convert_to_hf", "generate")]
    subprocess.run([python, "-m", "pytest", "--quiet", *tests], check=True, cwd=Path(__file__).parents[2])
