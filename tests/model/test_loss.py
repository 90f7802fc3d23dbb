"""The chunked head and loss against plain float64 PyTorch, and what it allocates."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import loss
from model.loss import linear_cross_entropy

TOKENS, COLUMNS, VOCAB_SIZE, WIDTH = 22, 40, 37, 8  # columns 37 to 39 are padding
CHUNK = 5  # tokens: four chunks of 5 and one of 2
SLICE = 2  # tokens of logits that are wide at once: two slices of 2 and one of 1 in a chunk


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", CHUNK * COLUMNS + COLUMNS // 2)
    monkeypatch.setattr(loss, "SLICE", SLICE * COLUMNS)


def inputs(dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight (both with gradients), targets with the first and last id, unequal token weights with zeros."""
    generator = torch.Generator().manual_seed(5)
    hidden_TD = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(COLUMNS, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets_T = torch.randint(0, VOCAB_SIZE, (tokens,), generator=generator)
    targets_T[1], targets_T[2] = 0, VOCAB_SIZE - 1
    token_weights_T = torch.rand(tokens, generator=generator)
    token_weights_T[3] = token_weights_T[-1] = 0
    return hidden_TD, weight_VD, targets_T, token_weights_T


def chunked_loss(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, token_weights_T: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    return linear_cross_entropy(hidden_TD, weight_VD, targets_T, token_weights_T, first_column=0, vocab_size=VOCAB_SIZE, group=group)


def reference(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, token_weights_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients for hidden and weight in float64, over the true vocabulary only."""
    hidden_TD, weight_VD = (x.detach().double().requires_grad_() for x in (hidden_TD, weight_VD))
    losses_T = F.cross_entropy(hidden_TD @ weight_VD[:VOCAB_SIZE].t(), targets_T, reduction="none")
    value = (losses_T * token_weights_T.double()).sum()
    dhidden_TD, dweight_VD = torch.autograd.grad(value, (hidden_TD, weight_VD))
    return value.detach(), dhidden_TD, dweight_VD


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)], ids=str)
@pytest.mark.usefixtures("chunked")
def test_value_and_gradients_equal_the_reference(dtype: torch.dtype, tolerance: float) -> None:
    hidden_TD, weight_VD, targets_T, token_weights_T = inputs(dtype)
    value = chunked_loss(hidden_TD, weight_VD, targets_T, token_weights_T)
    value.backward()
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    gradients = [x.grad for x in (hidden_TD, weight_VD) if x.grad is not None]
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    for found, expected in zip([value.detach(), *gradients], reference(hidden_TD, weight_VD, targets_T, token_weights_T), strict=True):
        assert relative_error(found, expected) < tolerance


@pytest.mark.usefixtures("chunked")
def test_padding_columns_and_tokens_of_weight_zero_get_no_gradient() -> None:
    hidden_TD, weight_VD, targets_T, token_weights_T = inputs(torch.float32)
    chunked_loss(hidden_TD, weight_VD, targets_T, token_weights_T).backward()
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    assert not hidden_TD.grad[token_weights_T == 0].any()
    assert not weight_VD.grad[VOCAB_SIZE:].any()


def test_the_number_of_chunks_changes_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for tokens in (1, CHUNK, TOKENS - 1, TOKENS, 10 * TOKENS):
        monkeypatch.setattr(loss, "CHUNK_LOGITS", tokens * COLUMNS)
        hidden_TD, weight_VD, *rest = inputs(torch.float64)
        value = chunked_loss(hidden_TD, weight_VD, *rest)
        results.append((value, *torch.autograd.grad(value, (hidden_TD, weight_VD))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-14)


def test_a_chunk_is_whole_tiles_where_it_can_be_and_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loss.tokens_per_chunk(50304) == 1280  # of 1334
    assert loss.tokens_per_chunk(2**27) == 1
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 100 * COLUMNS)
    assert loss.tokens_per_chunk(COLUMNS) == 100


@pytest.mark.usefixtures("chunked")
def test_gradients_scale_with_what_follows_the_loss() -> None:
    hidden_TD, weight_VD, *rest = inputs(torch.float64)
    (chunked_loss(hidden_TD, weight_VD, *rest) * -3).backward()
    _, dhidden_TD, dweight_VD = reference(hidden_TD, weight_VD, *rest)
    torch.testing.assert_close(hidden_TD.grad, -3 * dhidden_TD)
    torch.testing.assert_close(weight_VD.grad, -3 * dweight_VD)


@pytest.mark.usefixtures("chunked")
def test_a_second_backward_pass_is_refused() -> None:
    value = chunked_loss(*inputs(torch.float32))
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by the first backward pass"):
        value.backward()


@pytest.mark.usefixtures("chunked")
def test_the_gradient_for_a_transposed_hidden_is_contiguous() -> None:
    hidden_TD, weight_VD, targets_T, token_weights_T = inputs(torch.float64)
    hidden_DT = hidden_TD.detach().t().contiguous().requires_grad_()
    value = chunked_loss(hidden_DT.t(), weight_VD, targets_T, token_weights_T)
    (gradient_DT,) = torch.autograd.grad(value, hidden_DT)
    assert gradient_DT.t().is_contiguous()
    torch.testing.assert_close(gradient_DT.t(), reference(hidden_TD, weight_VD, targets_T, token_weights_T)[1])


def test_over_many_chunks_a_bf16_weight_gradient_loses_no_more_than_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's product is rounded to bf16: 1.15 times the error of one chunk. A sum in bf16 would be 6 times worse."""
    tokens = 512
    hidden_TD, weight_VD, *rest = inputs(torch.bfloat16, tokens)
    expected_VD = reference(hidden_TD, weight_VD, *rest)[2]
    errors = []
    for chunk in (tokens, 2):
        monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk * COLUMNS)
        monkeypatch.setattr(loss, "TILE", 1)
        (gradient_VD,) = torch.autograd.grad(chunked_loss(hidden_TD, weight_VD, *rest), weight_VD)
        errors.append(relative_error(gradient_VD, expected_VD))
    assert errors[1] < 1.3 * errors[0]


class Operations(TorchDispatchMode):
    """Counts operations by name, and the bytes that live tensors hold which these operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in existing:
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, x.numel())
        self.storages = {key: value for key, value in self.storages.items() if not value[0].expired()}
        self.peak = max(self.peak, self.held())
        return result

    def held(self) -> int:
        return sum(size for weak, size in self.storages.values() if not weak.expired())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("chunked")
def test_no_more_than_a_chunk_of_logits_and_the_gradients_are_ever_held(dtype: torch.dtype) -> None:
    hidden_TD, weight_VD, *rest = inputs(dtype)
    narrow = dtype == torch.bfloat16
    logits, dhidden, dweight = CHUNK * COLUMNS, TOKENS * WIDTH, COLUMNS * WIDTH  # elements
    small = 48 * CHUNK  # bytes: vectors of a chunk's tokens, scalars
    with Operations() as operations:
        value = chunked_loss(hidden_TD, weight_VD, *rest)
        held = operations.held()
        if narrow:  # sliced: softmax in fp32, and products in bf16, half as large; at the end the sum is rounded
            chunk = 2 * dhidden + 4 * dweight + 2 * logits + 4 * SLICE * COLUMNS
            assert operations.peak <= max(chunk, 2 * dhidden + (4 + 2) * dweight) + small
        else:
            assert operations.peak <= 4 * (dhidden + dweight + logits + SLICE * COLUMNS) + small
        assert held <= dtype.itemsize * (dhidden + dweight) + 8
        operations.peak = 0
        value.backward()
        assert operations.peak <= held + dtype.itemsize * dhidden + 64
        assert operations.largest <= max(logits, dweight)


def matrix_products(hidden_TD: Tensor, weight_VD: Tensor, *rest: Tensor) -> int:
    with Operations() as operations:
        chunked_loss(hidden_TD, weight_VD, *rest)
    return sum(operations.calls.get(name, 0) for name in ("mm", "addmm", "addmm_"))


@pytest.mark.usefixtures("chunked")
def test_only_the_gradients_that_are_wanted_are_computed() -> None:
    hidden_TD, weight_VD, *rest = inputs(torch.float32)
    chunks = 5
    assert matrix_products(hidden_TD, weight_VD, *rest) == 3 * chunks
    assert matrix_products(hidden_TD.detach(), weight_VD, *rest) == 2 * chunks
    assert matrix_products(hidden_TD, weight_VD.detach(), *rest) == 2 * chunks
    assert matrix_products(hidden_TD.detach(), weight_VD.detach(), *rest) == chunks
    with torch.no_grad():
        assert matrix_products(hidden_TD, weight_VD, *rest) == chunks
        value = chunked_loss(hidden_TD, weight_VD, *rest)
    assert not value.requires_grad
    assert relative_error(value, reference(hidden_TD, weight_VD, *rest)[0]) < 1e-6


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.usefixtures("chunked")
def test_a_gradient_is_right_where_the_other_input_is_frozen(frozen: str) -> None:
    hidden_TD, weight_VD, *rest = inputs(torch.float64)
    _, dhidden_TD, dweight_VD = reference(hidden_TD, weight_VD, *rest)
    (hidden_TD if frozen == "hidden" else weight_VD).requires_grad_(False)
    chunked_loss(hidden_TD, weight_VD, *rest).backward()
    if frozen == "hidden":
        torch.testing.assert_close(weight_VD.grad, dweight_VD)
    else:
        torch.testing.assert_close(hidden_TD.grad, dhidden_TD)


@pytest.mark.usefixtures("chunked")
def test_the_weight_may_be_gone_in_the_backward_pass() -> None:
    """As under ZeRO-3, which keeps the parameter and frees its data."""
    hidden_TD, weight_VD, *rest = inputs(torch.float64)
    _, dhidden_TD, dweight_VD = reference(hidden_TD, weight_VD, *rest)
    value = chunked_loss(hidden_TD, weight_VD, *rest)
    weight_VD.data = weight_VD.new_empty(0)
    found = torch.autograd.grad(value, (hidden_TD, weight_VD))
    torch.testing.assert_close(found, (dhidden_TD, dweight_VD))
