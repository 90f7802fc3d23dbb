"""Losses that stand out are found, and a run ends that they keep from going on. How a step is left out: distributed/test_non_finite.py."""

from pretrain.spikes import LEAST, MOST_IN_A_ROW, WINDOW, Patience, SpikeDetector


def fed(losses: list[float], threshold: float = 6.0) -> tuple[SpikeDetector, list[float]]:
    """A detector that has seen `losses`, and those that it called spikes."""
    detector = SpikeDetector("log", threshold)
    return detector, [loss for loss in losses if detector.is_spike(loss)]


def wave(count: int) -> list[float]:
    return [3 + 0.1 * (-1) ** number for number in range(count)]  # mean 3, standard deviation 0.1


def test_a_loss_far_above_the_last_ones_is_a_spike_and_not_remembered() -> None:
    detector, spikes = fed([*wave(LEAST), 3.59, *wave(LEAST), 9.0, *wave(4), float("nan"), float("inf")])
    assert [str(spike) for spike in spikes] == ["9.0", "nan", "inf"]
    assert 9.0 not in detector.losses and len(detector.losses) == 2 * LEAST + 5


def test_nothing_finite_is_a_spike_before_there_is_something_to_compare_with() -> None:
    assert fed([*wave(LEAST - 1), 1000.0])[1] == []
    assert fed([*wave(LEAST), 1000.0])[1] == [1000.0]


def test_a_falling_loss_and_a_low_one_are_none() -> None:
    assert fed([10 - 0.02 * number for number in range(400)] + [0.0])[1] == []


def test_a_resumed_detector_judges_as_the_first() -> None:
    detector, _ = fed(wave(500))
    assert len(detector.losses) == WINDOW
    assert [SpikeDetector("log", 6.0, detector.losses).is_spike(loss) for loss in (3.5, 3.7, 4.2)] == [False, True, True]


def test_patience_ends_with_too_many_steps_in_a_row_or_rollbacks_to_one_checkpoint() -> None:
    patience = Patience()
    for _ in range(2):
        for _ in range(MOST_IN_A_ROW - 1):
            patience.after_step(applied=False)
        assert patience.is_over is None
        patience.after_step(applied=True)
    for saved_step in (0, 0, 0, 0, 100, 200, 200, 200):
        patience.before_rollback(saved_step)
        assert patience.is_over is None
    patience.before_rollback(200)
    assert patience.is_over == "4 spikes since the checkpoint of step 200, 3 of them rolled back"
