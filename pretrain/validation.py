"""Validation loss at several depths, noise-free, over the same sequences each time."""

from collections.abc import Iterable, Mapping

import torch
from deepspeed import DeepSpeedEngine

from model.parallel import ParallelGroups
from pretrain.data import Batch
from pretrain.engine import release_after_evaluation


@torch.no_grad()
def validation_losses(
    engine: DeepSpeedEngine, batches: Mapping[str, Iterable[Batch]], depths: list[int], device: torch.device
) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """Mean loss a token, in nats, by depth: over all sources, and for each of several.

    Every data-parallel rank must bring the same sources and numbers of batches; all get the result.
    """
    engine.eval()
    # By source: the loss at each depth, then the count of tokens.
    sums = torch.zeros(len(batches), len(depths) + 1, dtype=torch.float64, device=device)
    for source, of_source in enumerate(batches.values()):
        for batch in of_source:
            on_device = batch.to(device)
            for index, depth in enumerate(depths):
                loss, _ = engine(
                    on_device.tokens,
                    on_device.targets,
                    depth=depth,
                    cu_seqlens=on_device.cu_seqlens,
                    weights_BS=on_device.loss_mask.float(),
                )
                sums[source, index] += loss
            sums[source, -1] += on_device.loss_mask.sum()
    torch.distributed.all_reduce(sums, group=ParallelGroups().get_data_parallel_group())
    engine.train()
    release_after_evaluation(engine)

    def means(row: torch.Tensor) -> dict[int, float]:
        return dict(zip(depths, (row[:-1] / row[-1]).tolist(), strict=True))

    by_source = {name: means(row) for name, row in zip(batches, sums, strict=True)} if len(batches) > 1 else {}
    return means(sums.sum(0)), by_source
