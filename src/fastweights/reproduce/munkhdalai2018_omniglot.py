"""Few-shot Omniglot, table 1 of Munkhdalai & Trischler 2018: fast weights, Matching Networks, MAML, one encoder.

Section 5.1 of "Metalearning with Hebbian fast weights": 1,200 characters and their turns to learn from, 423 to test on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.reproduce import _few_shot_models
from fastweights.reproduce._few_shot import Data, Row, Split, Table, labelled, run_table
from fastweights.reproduce._few_shot_models import (
    OF_ONE_NUMBER,
    TITLES,
    RivalSettings,
    check_rivals,
    foreign,
    hidden_size,
    schedule,
)
from fastweights.reproduce._settings import refused
from fastweights.tasks import omniglot
from fastweights.training.episodes import Augment

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "run"]

EXPERIMENT = "munkhdalai2018/omniglot"
SIZE = 28  # pixels of a side
_BIND = ("hebbian", "gradient")  # by products of features, and learn not to bind by a few of them

# Per cent, by model, ways and shots; the paper quotes those of others.
PAPER: dict[tuple[str, int, int], float] = {
    ("hebbian", 5, 1): 99.4,
    ("hebbian", 5, 5): 99.77,
    ("hebbian", 20, 1): 97.27,
    ("hebbian", 20, 5): 98.85,
    ("gradient", 5, 1): 98.3,
    ("gradient", 5, 5): 99.32,
    ("gradient", 20, 1): 94.98,
    ("gradient", 20, 5): 97.47,
    ("matching", 5, 1): 98.1,
    ("matching", 5, 5): 98.9,
    ("matching", 20, 1): 93.8,
    ("matching", 20, 5): 98.5,
    ("maml", 5, 1): 98.7,
    ("maml", 5, 5): 99.9,
    ("maml", 20, 1): 95.8,
    ("maml", 20, 5): 98.9,
}


@dataclass(frozen=True)
class Settings(RivalSettings):
    """Tell characters never seen from one or five drawings of each."""

    ways: tuple[int, ...] = (5, 20)
    """Classes of a task in the tests; of the most of them in validation."""
    training_ways: int = 30
    """Classes of a task in training: one network answers tasks of every number up to it. MAML's answer those of the
    number that they were trained on alone, and are trained for each of `ways`."""
    tasks: int = 32_000
    """To train on."""
    tasks_per_step: int = 20
    """Tasks in an update."""
    learning_rate: float = 2e-3
    """Of Adam."""
    filters: int = 64
    """Of every convolution."""
    dropout: float = 0.1
    """Fast weights: of the features, in training; not so in the paper. The other models learn more slowly with it."""
    by: Literal["class", "alphabet"] = "class"
    """What parts the characters to learn from and to test on: chance, as the paper's, or whole alphabets."""
    rotations: bool = True
    """A character turned by 90, 180 or 270 degrees is a further class, in training."""
    reflections: bool = True
    """A character in a mirror is a further class, in training; not so in the paper."""
    distortions: bool = True
    """Drawings are slightly turned, slanted, stretched and shifted, in training; not so in the paper."""


PRESETS = {
    "quick": Settings(models=("hebbian", "matching")),
    "paper": Settings(seeds=(1, 2, 3), tasks=800_000, validate_every=20_000),
}


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every model for every seed, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: Omniglot is missing or damaged.
        TrainingError: the numbers are not finite.
    """
    check(settings)
    paper: dict[tuple[str, int, int], float] = PAPER if settings.by == "class" else {}
    run_table(TABLE._replace(paper={"test": paper}), settings, folder, preset=preset, fresh=fresh)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        check_rivals(TABLE, settings, positive=("filters",))


def load(settings: Settings) -> dict[Split, Data]:
    """The drawings of each split [N,1,28,28], and their classes."""
    data = omniglot.load(settings.data_dir, size=SIZE)
    split = omniglot.few_shot_split(data, by=settings.by)
    images = {"train": data.images[split.train], "validation": data.images[split.validation]}
    images["test"] = data.images[split.test]
    if settings.rotations:
        images["train"] = omniglot.rotated(images["train"])
    if settings.reflections:
        images["train"] = torch.cat([images["train"], images["train"].flip(-1)])
    return {name: labelled(found.unsqueeze(2)) for name, found in images.items()}  # type: ignore[misc]


def network(settings: Settings, row: Row, data: dict[Split, Data]) -> torch_nn.Module:
    """The model of a row."""
    encoder = few_shot.ConvEncoder(
        1,
        settings.filters,
        size=SIZE,
        interpolated=settings.distortions,
        dropout=settings.dropout if row.model in _BIND else 0.0,
        half=settings.half,
    )
    return _few_shot_models.network(row, encoder, settings, data)


def augment(settings: Settings) -> Augment | None:
    """What is done to the drawings of an update."""
    if not settings.distortions:
        return None
    return lambda images, generator: omniglot.distort(images.float() / 255, generator=generator)


TABLE = Table(
    experiment=EXPERIMENT,
    presets=PRESETS,
    titles=TITLES,
    paper={"test": PAPER},
    load=load,
    network=network,
    hidden_size=hidden_size,
    schedule=schedule,
    foreign=lambda model: foreign(model) | (set() if model in _BIND else {"dropout"}),
    augment=augment,
    of_one_number=OF_ONE_NUMBER,
)
