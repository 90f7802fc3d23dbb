"""Causal attention over whole sequences, or inside the documents that lie in them, through the fastest kernel at hand.

Documents are given as `cu_seqlens`, the offsets at which they begin among the batch's tokens laid end to end. On a GPU flash attention
reads them as they are, and computes nothing across documents; elsewhere they become a mask.

Shapes: S sequence, B batch, N query heads and K key-value heads of this rank, H head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn


def document_number(cu_seqlens: Tensor, shape: torch.Size) -> Tensor:
    """int64 [B, S]: the document of each token, for `shape` [B, S]."""
    offsets = torch.arange(shape.numel(), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return (torch.searchsorted(cu_seqlens, offsets, right=True) - 1).view(shape)


def document_positions(cu_seqlens: Tensor, tokens_BS: Tensor) -> Tensor:
    """int64 [B, S]: the position of each token in its document."""
    offsets = torch.arange(tokens_BS.numel(), device=tokens_BS.device).view_as(tokens_BS)
    return offsets - cu_seqlens[document_number(cu_seqlens, tokens_BS.shape)]


def attention_documents(cu_seqlens: Tensor, shape: torch.Size, dtype: torch.dtype, head_size: int) -> Tensor:
    """What `causal_attention` takes: `cu_seqlens` where a kernel reads it, else a mask, bool [B, 1, S, S]."""
    if flash_reads_documents(cu_seqlens.device, dtype, head_size):
        return cu_seqlens
    number_BS = document_number(cu_seqlens, shape)
    return (number_BS[:, :, None] == number_BS[:, None, :]).tril()[:, None]


def flash_reads_documents(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Flash attention's requirements: Ampere or later, 16 bits a number, heads of at most 256."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_size <= 256 and head_size % 8 == 0 and torch.cuda.get_device_capability(device) >= (8, 0)


def causal_attention(q_SBNH: Tensor, k_SBKH: Tensor, v_SBKH: Tensor, documents: Tensor | None) -> Tensor:
    """Attention of each token to those before it and itself, [S, B, N, H].

    Args:
        documents: from `attention_documents`; None: one document a sequence.
    """
    grouped = q_SBNH.shape[2] != k_SBKH.shape[2]
    if documents is not None and documents.dtype == torch.int32:
        length, batch = q_SBNH.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q_SBNH, k_SBKH, v_SBKH))  # [B * S, heads, H]
        attended = varlen_attn(q, k, v, documents, documents, length, length, window_size=(-1, 0), enable_gqa=grouped)
        assert isinstance(attended, Tensor)  # a tuple where return_aux asks for one
        return attended.unflatten(0, (batch, length)).transpose(0, 1)
    attended_BNSH = F.scaled_dot_product_attention(
        q_SBNH.permute(1, 2, 0, 3),
        k_SBKH.permute(1, 2, 0, 3),
        v_SBKH.permute(1, 2, 0, 3),
        attn_mask=documents,
        is_causal=documents is None,
        enable_gqa=grouped,
    )
    return attended_BNSH.permute(2, 0, 1, 3)
