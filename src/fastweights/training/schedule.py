"""How long and how fast to train, and in which order."""

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    clip_norm: float = 5.0
    patience: int = 5  # epochs without a better validation score before training stops
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive (inf does not clip), got {self.clip_norm}")
        if not self.checkpoint_seconds >= 0:
            raise ValueError(f"checkpoint_seconds must not be negative, got {self.checkpoint_seconds}")


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch, [count] int64: a pure function of its arguments.

    Examples:
        >>> from fastweights.training import epoch_order
        >>> epoch_order(5, seed=1, epoch=0).sort().values.tolist()
        [0, 1, 2, 3, 4]
        >>> bool((epoch_order(100, seed=1, epoch=0) == epoch_order(100, seed=1, epoch=1)).all())
        False
    """
    return torch.from_numpy(numpy.random.default_rng([seed, epoch]).permutation(count))
