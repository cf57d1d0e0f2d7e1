"""Multi-query associative recall of Zoology (Arora et al. 2024): every layer in one frame, accuracy against state size.

Figure 2 of "Zoology: measuring and improving recall in efficient language models", and its forgetting variant.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fastweights.errors import RunError
from fastweights.reproduce._experiment import one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.recall._bench import (
    BOTH,
    TITLES,
    BenchSettings,
    Problem,
    Split,
    check_bench,
    prepare_bench,
    redraw_from,
)
from fastweights.reproduce.recall._growing import count_pairs, shorten
from fastweights.tasks import recall as task

EXPERIMENT = "recall/mqar"
QUICK_MINUTES = 10
DATA = None
METRICS = ("validation_accuracy",)

__all__ = ["DATA", "EXPERIMENT", "METRICS", "PRESETS", "QUICK_MINUTES", "TITLES", "Settings", "check", "run"]


@dataclass(frozen=True)
class Settings(BenchSettings):
    """Multi-query associative recall: which value did this key have?"""

    learning_rates: tuple[float, ...] = (5e-3,)
    """Learning rates of AdamW, a row for each and one for the best on validation: the ranking depends on them."""
    dropout: float = 0.0
    """Dropout of the embedding."""
    mlp_multiple: int = 0
    """Hidden units of a block's MLP for each feature; 0 leaves the MLPs out, as in figure 2 of Zoology."""

    steps: int = 64
    """Tokens of a sequence."""
    pairs: int = 4
    """Keys of a sequence, each with a value and queried once."""
    growing: bool = False
    """Train on 4 keys, then on twice as many as validation shows to be recalled; each pass draws others."""
    updates: int = 0
    """Keys that are given another value before the first query: the forgetting variant."""
    vocabulary_size: int = task.VOCABULARY_SIZE
    """Size of the vocabulary: half of the tokens are keys, half are values."""
    power_a: float = task.POWER
    """Exponent of the power law of the distance to a query: near 0 most are near, at 1 all equally likely."""
    random_non_queries: bool = True
    """Random tokens between the queries, in place of zeros."""


# Zoology's learning rates: four from 1e-4 to 1e-2, evenly on a log scale.
_SWEPT = Settings(
    models=tuple(TITLES),
    embedding_sizes=(64, 128, 256),
    learning_rates=(1e-4, 4.6e-4, 2.2e-3, 1e-2),
    train_examples=100_000,
    epochs=64,
)
PRESETS = {
    "quick": Settings(),
    "full": _SWEPT,
    "full-256": replace(_SWEPT, steps=256, pairs=64),
    "forgetting": replace(_SWEPT, updates=4),
    # Can one layer recall and follow a state? One head, because 64 pairs of one sequence need 64 features of a key.
    # From 64 keys at once DeltaFastWeightsRNN does not begin, and growing three seeds had 99 % after 23 to 31 passes.
    "both": replace(Settings(), models=BOTH, steps=256, pairs=64, delta_heads=1, renew=True, growing=True, epochs=40),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model, size, learning rate and seed of the settings."""
    floor = task.floor(settings.steps, settings.pairs, updates=settings.updates, power_a=settings.power_a)
    problem = Problem(
        draw_splits(settings),
        {"test": floor.accuracy},
        vocabulary_size=settings.vocabulary_size,
        positions=settings.steps,
        redraw=redraw_from(
            settings,
            lambda count, generator, accuracy: task.sample(
                count, generator=generator, **_sequence(settings, _pairs_of_pass(settings, accuracy))
            ),
        )
        if settings.renew or settings.growing
        else None,
    )
    return prepare_bench(settings, folder, problem)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    task.sample(0, generator=torch.Generator(), **_sequence(settings, settings.pairs))
    check_bench(settings)


def draw_splits(settings: Settings) -> dict[str, Split]:
    """Draw the sequences of training, validation and test: inputs and targets [N,T].

    Raises:
        RunError: they do not fit into memory.
    """
    sizes = (settings.train_examples, settings.validation_examples, settings.test_examples)
    generator = torch.Generator().manual_seed(settings.data_seed)
    try:
        pairs = (_pairs_of_pass(settings, 0.0), settings.pairs, settings.pairs)
        drawn = [
            task.sample(size, generator=generator, **_sequence(settings, some))
            for size, some in zip(sizes, pairs, strict=True)
        ]
        return {
            name: (inputs.to(settings.device), targets.to(settings.device))
            for name, (inputs, targets) in zip(("train", "validation", "test"), drawn, strict=True)
        }
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory ends
        raise RunError(f"{sum(sizes):,} sequences do not fit into memory; ask for fewer") from error


def _pairs_of_pass(settings: Settings, accuracy: float) -> int:
    """Return the keys of a training sequence, by the last accuracy on validation."""
    return count_pairs(accuracy, settings.pairs) if settings.growing else settings.pairs


def _sequence(settings: Settings, pairs: int) -> dict[str, Any]:
    """Return the arguments of `task.sample` for a sequence of so many of the settings' keys."""
    names = ("vocabulary_size", "power_a", "random_non_queries")
    steps, updates = shorten(pairs, settings.steps, settings.pairs, settings.updates)
    sizes = {"steps": steps, "pairs": pairs, "updates": updates}
    return sizes | {name: getattr(settings, name) for name in names}
