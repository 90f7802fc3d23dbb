"""One process as a whole world, so that the model can be built without a launcher."""

import torch
from torch.distributed import HashStore

from model.parallel import initialize_model_parallel


def world_of_one() -> None:
    """Initialises torch.distributed and Megatron's groups of one rank."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1)
