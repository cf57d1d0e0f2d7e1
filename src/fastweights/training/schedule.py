"""How long and how fast to train."""

import math
from dataclasses import dataclass

ANNEALING = ("none", "cosine")


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    annealing: str = "none"  # or "cosine": the learning rate falls to zero by the last of the `epochs`
    clip_norm: float = 5.0
    patience: int = 5  # epochs without a better validation score before training stops
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if self.annealing not in ANNEALING:
            raise ValueError(f"annealing must be one of {', '.join(ANNEALING)}, got {self.annealing!r}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive (inf does not clip), got {self.clip_norm}")
        if not self.checkpoint_seconds >= 0:
            raise ValueError(f"checkpoint_seconds must not be negative, got {self.checkpoint_seconds}")

    def learning_rate_at(self, progress: float) -> float:
        """The learning rate when this share of all the steps is done, 0 to 1.

        Examples:
            >>> from fastweights.training import Schedule
            >>> schedule = Schedule(epochs=10, learning_rate=0.1, annealing="cosine")
            >>> [round(schedule.learning_rate_at(progress), 3) for progress in (0.0, 0.5, 1.0)]
            [0.1, 0.05, 0.0]
        """
        if self.annealing == "none":
            return self.learning_rate
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
