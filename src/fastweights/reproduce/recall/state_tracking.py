"""State tracking: parity and the words of S3 and S5, learnt on short sequences and tested on longer ones.

The task of Merrill et al. 2024, "The illusion of state in state-space models", in the frame of `recall/mqar`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastweights.errors import RunError
from fastweights.reproduce._experiment import one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.recall._bench import (
    BOTH,
    TITLES,
    BenchSettings,
    ModelName,
    Problem,
    Split,
    check_bench,
    prepare_bench,
    redraw_from,
)
from fastweights.tasks import state_tracking as task
from fastweights.tasks.recall import IGNORED

EXPERIMENT = "recall/state-tracking"
QUICK_MINUTES = 10
DATA = None
METRICS = ("validation_accuracy",)

# Each split of the test scores the steps after the first of these multiples of the training's length, up to the second.
SPANS = {"test": (0, 1), "twice_test": (1, 2), "four_times_test": (2, 4)}

__all__ = ["DATA", "EXPERIMENT", "METRICS", "PRESETS", "QUICK_MINUTES", "SPANS", "TITLES", "Settings", "check", "run"]


@dataclass(frozen=True)
class Settings(BenchSettings):
    """State tracking: what is the product of all elements so far?"""

    models: tuple[ModelName, ...] = ("lstm", "delta")
    """Mixers to compare in the frame, each a line of the figures."""
    group: task.Group = "parity"
    """Group whose products are tracked: parity, S3 or S5."""
    steps: int = 40
    """Elements of a word in training and validation; the test's words have up to four times as many."""
    growing: bool = False
    """Train on the first two steps of the words, then on 1.5 times the length that validation solves."""
    enough: float = 1.0
    """Validation accuracy at which training ends."""
    dropout: float = 0.0
    """Dropout of the embedding."""


_SWEPT = Settings(
    models=tuple(TITLES),
    embedding_sizes=(64, 128),
    learning_rates=(1e-4, 4.6e-4, 2.2e-3, 1e-2),
    train_examples=100_000,
)
PRESETS = {
    "quick": Settings(),
    "full": _SWEPT,
    "both": replace(Settings(), models=BOTH, delta_heads=1),
    # From this many whole words none of eight layers learnt any of S5 (docs/recall.md).
    "growing": replace(Settings(), group="S5", growing=True, epochs=40),
    "negative-eigenvalues": replace(_SWEPT, models=("delta", "gated-delta"), negative_eigenvalues=True),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model, size, learning rate and seed of the settings."""
    guess = 1 / task.size(settings.group)
    floors = dict.fromkeys(SPANS, guess) | {"test": task.floor(settings.steps, settings.group).accuracy}
    problem = Problem(
        draw_splits(settings),
        floors,
        vocabulary_size=task.size(settings.group),
        guess=guess if settings.growing else None,
        redraw=redraw_from(
            settings,
            lambda count, generator, _: task.sample(count, settings.steps, settings.group, generator=generator),
        )
        if settings.renew
        else None,
    )
    return prepare_bench(settings, folder, problem)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    task.sample(0, settings.steps, settings.group, generator=torch.Generator())
    check_bench(settings)


def draw_splits(settings: Settings) -> dict[str, Split]:
    """Draw the words of training, validation and test, and their products: [N,T].

    Raises:
        RunError: they do not fit into memory.
    """
    generator = torch.Generator().manual_seed(settings.data_seed)
    sizes = (settings.train_examples, settings.validation_examples, settings.test_examples)
    lengths = (settings.steps, settings.steps, SPANS["four_times_test"][1] * settings.steps)
    try:
        train, validation, test = (
            task.sample(size, steps, settings.group, generator=generator)
            for size, steps in zip(sizes, lengths, strict=True)
        )
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory ends
        raise RunError(f"{sum(sizes):,} words do not fit into memory; ask for fewer") from error
    splits: dict[str, Split] = {"train": train, "validation": validation}
    for name, (first, last) in SPANS.items():
        inputs, targets = (field[:, : last * settings.steps].clone() for field in test)
        targets[:, : first * settings.steps] = IGNORED
        splits[name] = inputs, targets
    device = settings.device
    return {name: (inputs.to(device), targets.to(device)) for name, (inputs, targets) in splits.items()}
