"""Validation loss at several depths, noise-free, over the same sequences each time."""

from collections.abc import Iterable

import torch
from deepspeed import DeepSpeedEngine

from model.parallel import ParallelGroups
from pretrain.data import Batch
from pretrain.engine import release_after_evaluation


@torch.no_grad()
def validation_losses(engine: DeepSpeedEngine, batches: Iterable[Batch], depths: list[int], device: torch.device) -> dict[int, float]:
    """Mean loss a token, in nats, by depth. Every data-parallel rank must bring the same number of batches; all get the result."""
    engine.eval()
    sums = torch.zeros(len(depths) + 1, dtype=torch.float64, device=device)  # loss by depth, then the count of tokens
    for batch in batches:
        tokens, targets, mask = batch.tokens.to(device), batch.targets.to(device), batch.loss_mask.to(device)
        for index, depth in enumerate(depths):
            loss, _ = engine(tokens, targets, depth=depth, weights_BS=mask.float())
            sums[index] += loss
        sums[-1] += mask.sum()
    torch.distributed.all_reduce(sums, group=ParallelGroups().get_data_parallel_group())
    engine.train()
    release_after_evaluation(engine)
    return dict(zip(depths, (sums[:-1] / sums[-1]).tolist(), strict=True))
