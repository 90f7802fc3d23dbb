"""The learning rate as a function of consumed tokens: nothing to store, and no dependence on batch layout."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule and length of the run; every length is in tokens.

    Raises:
        ValueError: a field is out of range.
    """

    total_tokens: int  # the run ends at the first step that reaches it
    learning_rate: float = 6e-4
    min_learning_rate: float = 6e-5
    warmup_tokens: int = 0
    kind: Literal["cosine", "warmup_stable_decay"] = "cosine"
    decay_tokens: int = 0  # warmup_stable_decay: length of the final linear decay

    def __post_init__(self) -> None:
        if self.total_tokens < 1:
            raise ValueError(f"schedule.total_tokens is {self.total_tokens}; it must be at least 1.")
        if self.learning_rate <= 0:
            raise ValueError(f"schedule.learning_rate is {self.learning_rate}; it must be greater than 0.")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                f"schedule.min_learning_rate is {self.min_learning_rate}; it must be from 0 to learning_rate {self.learning_rate}."
            )
        if min(self.warmup_tokens, self.decay_tokens) < 0 or self.warmup_tokens + self.decay_tokens > self.total_tokens:
            raise ValueError(
                f"schedule.warmup_tokens ({self.warmup_tokens}) and decay_tokens ({self.decay_tokens}) must not be negative, and together "
                f"at most total_tokens ({self.total_tokens})."
            )
        if self.kind == "cosine" and self.decay_tokens:
            raise ValueError("schedule.decay_tokens is of kind warmup_stable_decay: a cosine decays from the warm-up to total_tokens.")


def learning_rate(config: ScheduleConfig, tokens: int) -> float:
    """Learning rate of the step that brings the consumed tokens to `tokens` (so the first step's is above 0)."""
    peak, floor = config.learning_rate, config.min_learning_rate
    if tokens < config.warmup_tokens:
        return peak * tokens / config.warmup_tokens
    if config.kind == "cosine":
        progress = (tokens - config.warmup_tokens) / max(config.total_tokens - config.warmup_tokens, 1)
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    remaining = config.total_tokens - tokens
    if config.decay_tokens == 0 or remaining >= config.decay_tokens:  # the last step may go past the end: remaining below 0
        return peak
    return floor + (peak - floor) * max(remaining, 0) / config.decay_tokens
