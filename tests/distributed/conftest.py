"""A world of one in the tests' own process, for what a layout is compared with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from model.parallel import initialize_model_parallel


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("world")) / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    initialize_model_parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
