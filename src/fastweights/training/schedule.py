"""The length and speed of training."""

import math
from dataclasses import dataclass

from fastweights.checks import check_choice, check_positive, check_sizes

ANNEALING = ("none", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The length and speed of training."""

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    annealing: str = "none"  # or "cosine": the learning rate falls to zero by the last of the `epochs`
    clip_norm: float = 5.0
    patience: int = 5  # epochs without a better validation score before training stops
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_sizes(epochs=self.epochs, batch_size=self.batch_size, patience=self.patience)
        check_positive(learning_rate=self.learning_rate)
        check_choice(ANNEALING, annealing=self.annealing)
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive (inf does not clip), got {self.clip_norm}")
        if not self.checkpoint_seconds >= 0:
            raise ValueError(f"checkpoint_seconds must not be negative, got {self.checkpoint_seconds}")

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate when this share of all the steps is done, 0 to 1.

        Examples:
            >>> from fastweights.training import Schedule
            >>> schedule = Schedule(epochs=10, learning_rate=0.1, annealing="cosine")
            >>> [round(schedule.learning_rate_at(progress), 3) for progress in (0.0, 0.5, 1.0)]
            [0.1, 0.05, 0.0]
        """
        if self.annealing == "none":
            return self.learning_rate
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
