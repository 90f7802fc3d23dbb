"""Every test here builds layers, so each module runs in a world of one."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def world(world_of_one: None) -> None:
    """`tests.conftest.world_of_one`, asked for by all."""
