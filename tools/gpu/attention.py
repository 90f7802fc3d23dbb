"""Does attention stay inside documents on this device? The kernel that training takes there, against a mask in float64."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.attention import attention_documents, causal_attention
from tools.gpu.operators import at_most
from tools.gpu.runner import Row, Setting

LENGTH, BATCH, HEADS, HEAD_SIZE = 512, 4, 8, 64


def inside_documents(setting: Setting) -> Iterator[Row]:
    """bf16, with as many key-value heads as heads, and with fewer; documents of 1 to some hundred tokens."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.rand(BATCH, LENGTH, generator=generator) < 0.02
    begins[:, 0] = True
    offsets = begins.flatten().nonzero().flatten().int()
    cu_seqlens = torch.cat((offsets, torch.full((3,), BATCH * LENGTH, dtype=torch.int32)))
    for kv_heads in (HEADS, 2):
        shapes = [(LENGTH, BATCH, heads, HEAD_SIZE) for heads in (HEADS, kv_heads, kv_heads)]
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16() for shape in shapes]
        found = _output_and_gradients(inputs, cu_seqlens.to(setting.device))
        exact = _output_and_gradients([x.double() for x in inputs], cu_seqlens)
        pairs = zip(found, exact, strict=True)
        error = max(float((x.cpu().double() - y).norm() / y.norm()) for x, y in pairs)
        yield at_most(f"attention inside documents, {HEADS} heads, {kv_heads} of keys", "relative error", error, 0.02)


def _output_and_gradients(inputs: list[Tensor], cu_seqlens: Tensor) -> list[Tensor]:
    q, k, v = (x.to(cu_seqlens.device).requires_grad_() for x in inputs)
    documents = attention_documents(cu_seqlens, torch.Size((BATCH, LENGTH)), q.dtype, HEAD_SIZE)
    out = causal_attention(q, k, v, documents)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
