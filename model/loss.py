"""The head and its loss: logits, cross-entropy and their gradients, one chunk of tokens at a time, so that the logits of all tokens
never exist at once.

The gradients are computed with the loss, while a chunk's logits are there, and the backward pass only scales them: no logits are
recomputed and the weight is not needed again (ZeRO-3 may have partitioned it by then). The vocabulary is split by rows of the weight
over a process group.

Shapes: T tokens, C tokens of a chunk, S tokens of a slice, V columns of this rank (rows of its weight), D hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK_LOGITS = 2**26  # logits a chunk, about: 134 MB in bf16, and more than a thousand tokens for the matrix products
TILE = 128  # tokens a chunk are a multiple of it where they can be: matrix products work in such tiles
SLICE = 2**22  # elements of a temporary, about: 17 MB in fp32, and on a GPU work enough for a launch


def tokens_per_chunk(columns: int) -> int:
    """C for `columns` = V."""
    tokens = max(CHUNK_LOGITS // columns, 1)
    return tokens - tokens % TILE if tokens > TILE else tokens


def rows_per_slice(width: int) -> int:
    """Rows of `width` elements in a temporary."""
    return max(SLICE // width, 1)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    *,
    first_column: int,
    vocab_size: int,
    group: ProcessGroup,
) -> Tensor:
    """Weighted sum of the tokens' cross-entropies of logits `hidden @ weight.T`, the same on every rank of `group`.

    Where gradients are wanted, they are computed here and held until the backward pass, which can run once. The gradient for
    `hidden` is this rank's part, to be summed over the group by the caller; the one for `weight` is that of this rank's rows.
    Two all-reduces a chunk, none in a group of one. Autocast is not supported: `hidden` and `weight` have the same dtype.

    Args:
        hidden: [T, D], the same on every rank.
        weight: [V, D], this rank's rows; the same V on every rank.
        targets: int64 [T], ids below `vocab_size`.
        token_weights: fp32 [T]; no gradient flows to them.
        first_column: the id that row 0 of `weight` stands for.
        vocab_size: rows that stand for this id or a higher one are padding: they have no probability and no gradient.
        group: ranks that hold the rows together.

    Returns:
        Scalar in at least fp32.
    """
    # Inside the Function's forward gradients are always off, and ctx.needs_input_grad ignores torch.no_grad().
    wanted = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        hidden,
        weight,
        targets,
        token_weights,
        first_column,
        vocab_size,
        group,
        wanted and hidden.requires_grad,
        wanted and weight.requires_grad,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor,
        first_column: int,
        vocab_size: int,
        group: ProcessGroup,
        hidden_wanted: bool,
        weight_wanted: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        chunk = tokens_per_chunk(len(weight))
        starts = range(0, len(hidden), chunk)
        loss = hidden.new_zeros((), dtype=wide)
        logits_CV = hidden.new_empty((min(chunk, len(hidden)), len(weight)))
        # Contiguous whatever `hidden` is: megatron-core 0.16.1 skips the sum over the group of a gradient that is not.
        dhidden_TD = hidden.new_empty(hidden.shape) if hidden_wanted else None
        # The sum over chunks is wide: in bf16 it would lose what a chunk adds.
        dweight_VD = weight.new_zeros(weight.shape, dtype=wide if len(starts) > 1 else weight.dtype) if weight_wanted else None
        for start in starts:
            part = slice(start, start + chunk)
            hidden_CD = hidden[part]
            logits_CV = logits_CV[: len(hidden_CD)]  # the last chunk may be shorter
            torch.mm(hidden_CD, weight.t(), out=logits_CV)
            columns, weights = targets[part] - first_column, token_weights[part].to(wide)
            loss += _chunk_loss(logits_CV, columns, weights, vocab_size - first_column, group, hidden_wanted or weight_wanted)
            if dhidden_TD is not None:
                torch.mm(logits_CV, weight, out=dhidden_TD[part])
            if dweight_VD is not None:
                _add_product(dweight_VD, logits_CV.t(), hidden_CD)
        del logits_CV  # before the sum over chunks is rounded to a second tensor
        ctx.scaled = False
        ctx.save_for_backward(dhidden_TD, None if dweight_VD is None else dweight_VD.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.scaled:
            raise RuntimeError(
                "The gradients of linear_cross_entropy were used up by the first backward pass (they are scaled in place, to save memory). "
                "Call it again for a second backward pass instead of retain_graph=True."
            )
        ctx.scaled = True
        dhidden_TD, dweight_VD = ctx.saved_tensors
        return (
            None if dhidden_TD is None else dhidden_TD * gradient,
            None if dweight_VD is None else dweight_VD.mul_(gradient),  # in place: it is as large as the weight
            *(None,) * 7,
        )


def _chunk_loss(logits_CV: Tensor, columns_C: Tensor, weights_C: Tensor, vocab_columns: int, group: ProcessGroup, gradient: bool) -> Tensor:
    """The chunk's part of the loss. Overwrites the logits with the loss's gradient for them if `gradient`.

    Wide are only some rows at once; a group of several computes their exponentials twice, before and after the sum over its ranks.

    Args:
        columns_C: the targets as columns of this rank; outside [0, V) where the target is another rank's.
        weights_C: in the dtype to compute in.
        vocab_columns: columns from here on are padding; may be negative or more than V.
    """
    logits_CV[:, max(vocab_columns, 0) :] = float("-inf")
    here_C = (columns_C >= 0) & (columns_C < logits_CV.shape[1])
    columns_C1 = torch.where(here_C, columns_C, 0)[:, None]

    maximum_C1 = logits_CV.amax(dim=1, keepdim=True).to(weights_C.dtype)
    if group.size() > 1:
        all_reduce(maximum_C1, ReduceOp.MAX, group)
    target_C = torch.where(here_C, logits_CV.gather(1, columns_C1)[:, 0] - maximum_C1[:, 0], 0)

    rows = min(rows_per_slice(logits_CV.shape[1]), len(logits_CV))
    slices = [slice(start, start + rows) for start in range(0, len(logits_CV), rows)]
    wide_SV = logits_CV.new_empty((rows, logits_CV.shape[1]), dtype=weights_C.dtype)
    sums_C = torch.empty_like(weights_C)
    at_target_C1 = torch.where(here_C, -weights_C, 0)[:, None]

    def exponentiate(part: slice) -> Tensor:
        return wide_SV[: len(logits_CV[part])].copy_(logits_CV[part]).sub_(maximum_C1[part]).exp_()

    def to_gradient(part: slice, exponentials_SV: Tensor) -> None:  # weight x (probability - 1 at the target)
        exponentials_SV.mul_((weights_C[part] / sums_C[part])[:, None])
        logits_CV[part] = exponentials_SV.scatter_add_(1, columns_C1[part], at_target_C1[part])

    for part in slices:
        exponentials_SV = exponentiate(part)
        torch.sum(exponentials_SV, dim=1, out=sums_C[part])
        if gradient and group.size() == 1:
            to_gradient(part, exponentials_SV)
    if group.size() > 1:
        sums_2C = torch.stack((sums_C, target_C))
        all_reduce(sums_2C, ReduceOp.SUM, group)
        sums_C, target_C = sums_2C
        if gradient:
            for part in slices:
                to_gradient(part, exponentiate(part))
    return (weights_C * (sums_C.log() - target_C)).sum()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b: then the product is rounded to their dtype, the sum is not."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        rows = rows_per_slice(total.shape[1])
        for total_part, a_part in zip(total.split(rows), a.split(rows), strict=True):
            total_part.add_(a_part @ b)
