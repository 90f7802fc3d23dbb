from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model import attention
from model.attention import attention_documents, causal_attention, document_positions

LENGTH, BATCH = 12, 2
CU_SEQLENS = torch.tensor([0, 5, 6, 12, 21, 24, 24, 24], dtype=torch.int32)  # the second sequence begins at 12
DOCUMENTS = [(0, slice(0, 5)), (0, slice(5, 6)), (0, slice(6, 12)), (1, slice(0, 9)), (1, slice(9, 12))]


def inputs(kv_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(LENGTH, BATCH, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each document as a sequence of its own."""
    out = torch.zeros_like(q)
    for row, part in DOCUMENTS:
        pieces = [x[part, row].transpose(0, 1) for x in (q, k, v)]
        out[part, row] = attend(*pieces).transpose(0, 1)
    return out


def varlen_by_contract(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, window_size: tuple[int, int], enable_gqa: bool
) -> Tensor:
    """What torch.nn.attention.varlen.varlen_attn is documented to compute, which runs on GPUs only."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert window_size == (-1, 0) and torch.equal(cu_q, cu_k) and max_q == max_k
    assert int(cu_q.diff().max()) <= max_q and int(cu_q[-1]) == len(q)
    parts = []
    for begin, end in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        pieces = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        parts.append(attend(*pieces).transpose(0, 1))
    return torch.cat(parts)


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    return [out, *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", ["mask", "varlen"])
def test_attention_stays_inside_documents(kernel: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_contract)
    monkeypatch.setattr(attention, "flash_reads_documents", lambda *_: kernel == "varlen")
    documents = attention_documents(CU_SEQLENS, torch.Size((BATCH, LENGTH)), torch.float64, head_size=8)
    assert documents.dtype == (torch.int32 if kernel == "varlen" else torch.bool)
    tensors = inputs(kv_heads)
    found = gradients(lambda q, k, v: causal_attention(q, k, v, documents), tensors)
    torch.testing.assert_close(found, gradients(one_by_one, tensors), rtol=1e-12, atol=1e-12)


def test_positions_begin_anew_in_each_document() -> None:
    positions = document_positions(CU_SEQLENS, torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    assert positions.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]]


def test_no_cpu_and_no_wide_number_goes_to_flash_attention() -> None:
    assert not attention.flash_reads_documents(torch.device("cpu"), torch.bfloat16, 64)
    assert not attention.flash_reads_documents(torch.device("cuda"), torch.float32, 64)
