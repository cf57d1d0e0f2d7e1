"""The settings that the few-shot experiments of Munkhdalai & Trischler 2018 share, and the schedule they make."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastweights.training import EpisodeSchedule

OF_EVERY_SCHEDULE = ("validation_tasks", "test_tasks", "learning_rate", "annealing", "averaging", "weight_decay")


@dataclass(frozen=True)
class EpisodicSettings:
    """What every few-shot experiment can be asked for."""

    ways: tuple[int, ...] = (5,)
    """Classes of a task in the tests; the largest of them in validation."""
    training_ways: int = 5
    """Classes of a task in training: one network answers tasks of every number up to it. MAML's answer those of the
    number that they were trained on alone, and are trained for each of `ways`."""
    shots: tuple[int, ...] = (1, 5)
    """Described examples of a class in the tests."""
    training_shots: int = 1
    """Described examples of a class in training and validation: one network answers tasks of every number."""
    seeds: tuple[int, ...] = (1,)
    """One training run for each: of the weights and the tasks."""

    tasks: int = 64_000
    """To train on."""
    tasks_per_step: int = 64
    """Tasks in an update."""
    pool: int = 40
    """Classes that the tasks of an update are drawn from: each of their examples is encoded once. 0 draws every task by
    itself, as the paper does."""
    queries: int = 3
    """Of each class, in training."""
    validate_every: int = 3200
    """Tasks between two validations."""
    validation_tasks: int = 400
    """To validate on, the same each time."""
    test_tasks: int = 1000
    """To test on."""
    test_queries: int = 15
    """Of each class, in validation and test."""
    learning_rate: float = 1e-3
    """Of Adam."""
    annealing: Literal["none", "cosine"] = "cosine"
    """How the learning rate changes: not at all, as the paper's, or along a cosine to zero."""
    averaging: float = 0.999
    """The most that a running mean of the weights, which is validated and tested, keeps of itself an update. 0: the
    weights themselves, as in the paper."""
    weight_decay: float = 0.0
    """Of the weights in an update, as a multiple of the learning rate."""
    hidden_size: int = 288
    """Units of the layer under the softmax layer."""

    half: bool = False
    """Encode in bfloat16 where that is safe; several times as fast on processors with AMX."""
    data_dir: Path | None = None
    """The folder that has the folder of the data set; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""


def shared_schedule(settings: Any, model: str) -> EpisodeSchedule:
    """The schedule of a model whose tasks share their examples.

    Raises:
        ValueError: numbers of tasks that do not go into one another, or a learning rate out of range.
    """
    names = ("tasks", "tasks_per_step", "validate_every", *OF_EVERY_SCHEDULE)
    return EpisodeSchedule(pool=settings.pool or None, **{name: getattr(settings, name) for name in names})
