"""Losses that stand out: a batch of bad data, or a step that went wrong somewhere.

A loss is a spike if it is not finite, or lies further above the mean of the last ones than so many of their standard deviations. It is
judged after the backward pass, before the optimizer's step, by all ranks alike.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from torch import Tensor

from pretrain.config import SpikePolicy
from pretrain.engine import average_over_ranks

WINDOW, LEAST = 128, 32  # losses that are compared with: the last 128, and none before there are 32
MOST_IN_A_ROW = 20  # steps that change nothing
MOST_ROLLBACKS = 3  # without a new checkpoint


class SpikeDetector:
    """Judges the loss of one step after the other.

    Args:
        policy: what a spike leads to; None: nothing is judged.
        threshold: standard deviations.
        losses: the last ones before, if the run was resumed.

    Attributes:
        found: the loss of the step judged last, if it is a spike.
    """

    def __init__(self, policy: SpikePolicy | None, threshold: float, losses: Sequence[float] = ()) -> None:
        self.found: float | None = None
        self.losses = list(losses)[-WINDOW:]
        self._policy, self._threshold = policy, threshold

    def refuses(self, rank_loss: Tensor) -> bool:
        """Whether to leave out the step with this loss, a scalar that is averaged over the ranks here."""
        if self._policy is None:
            return False
        loss = float(average_over_ranks(rank_loss.clone()))
        self.found = loss if self.is_spike(loss) else None
        return self.refused

    @property
    def refused(self) -> bool:
        """Whether the step judged last is left out."""
        return self.found is not None and self._policy in ("skip", "rollback")

    @property
    def rolls_back(self) -> bool:
        """Whether the step judged last leads back to a checkpoint."""
        return self.found is not None and self._policy == "rollback"

    def is_spike(self, loss: float) -> bool:
        """Judges a step's mean loss; one that is no spike is remembered."""
        if not math.isfinite(loss):
            return True
        if len(self.losses) >= LEAST and loss > fmean(self.losses) + self._threshold * pstdev(self.losses):
            return True
        self.losses = [*self.losses, loss][-WINDOW:]
        return False


class Patience:
    """Tells when a run cannot go on. The same on every rank."""

    def __init__(self) -> None:
        self._unchanged = 0  # steps in a row
        self._rollbacks: Counter[int] = Counter()  # by the step of the newest checkpoint

    def after_step(self, applied: bool) -> None:
        self._unchanged = 0 if applied else self._unchanged + 1

    def before_rollback(self, saved_step: int) -> None:
        """
        Args:
            saved_step: of the newest checkpoint; 0: there is none to go back to, and the step is left out only.
        """
        if saved_step:
            self._rollbacks[saved_step] += 1

    @property
    def is_over(self) -> str | None:
        """Why the run cannot go on, if it cannot."""
        if self._unchanged >= MOST_IN_A_ROW:
            return f"{self._unchanged} steps in a row changed nothing"
        for step, count in self._rollbacks.items():
            if count > MOST_ROLLBACKS:
                return f"{count} spikes since the checkpoint of step {step}, {count - 1} of them rolled back"
        return None
