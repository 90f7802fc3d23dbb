"""The depth of a step: range, distribution, and reproducibility without state."""

from collections import Counter
from dataclasses import replace

import pytest

from model.config import GRTConfig
from model.depth import sample_depth

CONFIG = GRTConfig(max_depth=6, min_depth=2)
GOLDEN = [6, 3, 6, 3, 6, 3, 3, 2, 3, 4, 2, 4]


def depths(config: GRTConfig, steps: int, seed: int = 1) -> list[int]:
    return [sample_depth(config, seed, step) for step in range(steps)]


def test_uniform_draws_every_depth_equally_often() -> None:
    counts = Counter(depths(CONFIG, 5000))
    assert sorted(counts) == [2, 3, 4, 5, 6]
    assert max(counts.values()) - min(counts.values()) < 4 * (5000 * 0.2 * 0.8) ** 0.5


def test_golden_depths_freeze_the_sampler() -> None:
    assert depths(CONFIG, 12) == GOLDEN


def test_fixed_is_always_the_largest() -> None:
    assert set(depths(replace(CONFIG, depth_sampler="fixed"), 50)) == {6}


def test_stratified_runs_every_depth_once_a_cycle_in_changing_order() -> None:
    drawn = depths(replace(CONFIG, depth_sampler="stratified"), 50)
    cycles = [drawn[start : start + 5] for start in range(0, 50, 5)]
    assert all(sorted(cycle) == [2, 3, 4, 5, 6] for cycle in cycles)
    assert len({tuple(cycle) for cycle in cycles}) > 3


def test_poisson_has_the_mean_and_a_heavy_tail() -> None:
    drawn = depths(replace(CONFIG, depth_sampler="poisson", min_depth=1, max_depth=8), 4000)
    assert abs(sum(drawn) / len(drawn) - 8) < 0.4
    assert max(drawn) > 16
    assert min(drawn) >= 1


@pytest.mark.parametrize("sampler", ["uniform", "stratified", "poisson"])
def test_seed_and_step_decide(sampler: str) -> None:
    config = replace(CONFIG, depth_sampler=sampler)  # type: ignore[arg-type]  # a str from the parameter list
    assert depths(config, 40, seed=3) == depths(config, 40, seed=3)
    assert depths(config, 40, seed=3) != depths(config, 40, seed=4)
    assert sample_depth(config, 3, 2**33 + 5) in range(1, 4 * 6 + 1)


def test_dense_model_has_depth_zero() -> None:
    assert sample_depth(GRTConfig(core_blocks=0, max_depth=0, min_depth=0), 1, 1) == 0
