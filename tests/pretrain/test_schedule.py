"""The learning rate at the points where a formula could be wrong, and its independence of how a run came there."""

from dataclasses import replace

import pytest

from pretrain.schedule import ScheduleConfig, learning_rate

COSINE = ScheduleConfig(total_tokens=1100, learning_rate=1e-3, min_learning_rate=1e-4, warmup_tokens=100)
STABLE = ScheduleConfig(1100, learning_rate=1e-3, min_learning_rate=1e-4, warmup_tokens=100, kind="warmup_stable_decay", decay_tokens=200)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        (10, 1e-4),  # a first step of 10 tokens: above 0
        (50, 5e-4),
        (100, 1e-3),
        (350, 1e-4 + 9e-4 * 0.8535533905932737),  # a quarter of the way: (1 + cos 45 degrees) / 2
        (600, 5.5e-4),
        (1100, 1e-4),
        (1130, 1e-4),  # the last step goes past the end
    ],
)
def test_cosine(tokens: int, rate: float) -> None:
    assert learning_rate(COSINE, tokens) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("tokens", "rate"), [(50, 5e-4), (100, 1e-3), (899, 1e-3), (900, 1e-3), (1000, 5.5e-4), (1100, 1e-4), (1130, 1e-4)]
)
def test_warmup_stable_decay(tokens: int, rate: float) -> None:
    assert learning_rate(STABLE, tokens) == pytest.approx(rate, rel=1e-12)


def test_without_a_decay_the_rate_stays_to_the_end_and_past_it() -> None:
    config = replace(STABLE, decay_tokens=0)
    assert [learning_rate(config, tokens) for tokens in (500, 1100, 1130)] == [1e-3, 1e-3, 1e-3]


@pytest.mark.parametrize("config", [COSINE, STABLE], ids=lambda config: config.kind)
def test_the_curve_has_no_jump_and_never_rises_after_the_warmup(config: ScheduleConfig) -> None:
    rates = [learning_rate(config, tokens) for tokens in range(1, 1101)]
    assert max(abs(a - b) for a, b in zip(rates, rates[1:], strict=False)) <= 1.0001e-5  # the warm-up's slope
    assert rates[99:] == sorted(rates[99:], reverse=True)


def test_a_warmup_as_long_as_the_run() -> None:
    assert learning_rate(replace(COSINE, warmup_tokens=1100), 1100) == 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_tokens": 0}, "schedule.total_tokens is 0; it must be at least 1"),
        ({"min_learning_rate": 2e-3}, "schedule.min_learning_rate is 0.002; it must be from 0 to learning_rate 0.001"),
        ({"learning_rate": float("nan")}, "learning_rate nan"),
        ({"warmup_tokens": 1101}, r"schedule.warmup_tokens \(1101\).*at most total_tokens \(1100\)"),
        ({"learning_rate": -1.0}, "schedule.learning_rate is -1.0; it must be greater than 0"),
        ({"decay_tokens": 10}, "decay_tokens is of kind warmup_stable_decay"),
        ({"decay_tokens": -1}, r"decay_tokens \(-1\) must not be negative"),
    ],
)
def test_values_out_of_range_are_named(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(COSINE, **change)  # type: ignore[arg-type]  # a dict of several fields' values has no narrower type
