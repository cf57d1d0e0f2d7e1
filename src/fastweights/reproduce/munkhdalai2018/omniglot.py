"""Few-shot Omniglot, table 1 of Munkhdalai & Trischler 2018: fast weights, Matching Networks, MAML, one encoder.

Section 5.1 of "Metalearning with Hebbian fast weights": 1,200 characters and their turns to learn from, 423 to test on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.errors import RunError
from fastweights.reproduce._experiment import except_for, one_line_errors, only, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.munkhdalai2018._episodes import (
    MAMLS,
    TITLES,
    TRAINING_WAYS,
    Data,
    RivalSettings,
    Split,
    TasksRow,
    check_rivals,
    label_classes,
    make_rival,
    prepare_episodes,
)
from fastweights.runs import Member
from fastweights.tasks import omniglot

EXPERIMENT = "munkhdalai2018/omniglot"
QUICK_MINUTES = 5  # docs/results/munkhdalai2018-omniglot: a 25th of its tasks, of two models
DATA = "omniglot"
SIZE = 28  # pixels of a side
_BINDING = ("hebbian", "gradient")  # these bind by products of features, and learn not to rely on a few of them

# Per cent, by model, ways and shots; the paper quotes other authors' numbers.
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
    """Classes of a task in the tests; the largest of them in validation."""
    training_ways: int = except_for(MAMLS, 30, TRAINING_WAYS)
    tasks: int = except_for(MAMLS, 32_000, "Training tasks.")
    tasks_per_step: int = except_for(MAMLS, 20, "Training tasks in an update.")
    learning_rate: float = 2e-3
    """Learning rate of Adam."""
    filters: int = 64
    """Filters of every convolution."""
    dropout: float = only(
        _BINDING,
        0.1,
        "Dropout on the features in training; the paper has none. The other models learn more slowly with it.",
    )
    by: Literal["class", "alphabet"] = "class"
    """Split of the characters into training and test: at random, as in the paper, or by whole alphabets."""
    rotations: bool = True
    """Add characters turned by 90, 180 and 270 degrees as further classes in training."""
    reflections: bool = True
    """Add mirrored characters as further classes in training; the paper has none."""
    distortions: bool = True
    """Slightly turn, slant, stretch and shift drawings in training; the paper does not."""


PRESETS = {
    "quick": Settings(models=("hebbian", "matching")),
    "paper": Settings(seeds=(1, 2, 3), tasks=800_000, validate_every=20_000),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model for every seed.

    Raises:
        DataError: Omniglot is missing or damaged.
    """
    paper = {"test": PAPER if settings.by == "class" else {}}
    augment = distort if settings.distortions else None
    return prepare_episodes(settings, folder, load, network, paper, augment=augment)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_rivals(settings, sizes=("filters",))


def load(settings: Settings) -> dict[Split, Data]:
    """Load the drawings of each split [N,1,28,28], and their classes."""
    data = omniglot.load(settings.data_dir, size=SIZE)
    split = omniglot.few_shot_split(data, by=settings.by)
    train, validation, test = (data.images[classes] for classes in (split.train, split.validation, split.test))
    if settings.rotations:
        train = omniglot.rotate(train)
    if settings.reflections:
        train = torch.cat([train, train.flip(-1)])
    return {
        "train": label_classes(train.unsqueeze(2)),
        "validation": label_classes(validation.unsqueeze(2)),
        "test": label_classes(test.unsqueeze(2)),
    }


def network(settings: Settings, row: TasksRow, data: dict[Split, Data]) -> torch_nn.Module:
    """Return the model of a row."""
    encoder = few_shot.ConvEncoder(
        1,
        settings.filters,
        size=SIZE,
        interpolated=settings.distortions,
        dropout=settings.dropout if row.model in _BINDING else 0.0,
        half=settings.half,
    )
    return make_rival(settings, row, encoder, data)


def build_trained(member: Member, weights: Mapping[str, torch.Tensor]) -> few_shot.FewShotClassifier:
    """Return the classifier of a member with its trained weights, to be computed in float32 on any processor.

    Raises:
        RunError: it is of MAML or of fine-tuning, which train as they are described.
    """
    own = member.settings
    kept = {field.name: own[field.name] for field in fields(Settings) if field.name in own}
    settings = Settings(**{**kept, "half": False, "ways": tuple(own["ways"]), "shots": tuple(own["shots"])})
    [model] = [name for name, title in TITLES.items() if title == own["model"]]
    trained = network(settings, TasksRow(model, own["training_ways"], own["training_shots"]), {})
    if type(trained) is not few_shot.FewShotNetwork:
        raise RunError(f"{member.name} is a {type(trained).__name__}, but a classifier needs a FewShotNetwork")
    trained.load_state_dict(weights)
    words = (
        f"Omniglot (Lake et al. 2015), the classes to learn from of omniglot.few_shot_split(by={settings.by!r}), "
        f"{own['training_ways']}-way {own['training_shots']}-shot, {(member.result or {})['tasks']:,} tasks, "
        f"seed {own['seed']}, commit {member.environment['commit']}"
    )
    licence = "Apache-2.0 (the drawings it was trained on: MIT)"
    return few_shot.FewShotClassifier(trained, shots=own["training_shots"], ink=True, trained_on=words, licence=licence)


def distort(drawings: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Distort the drawings of an update, [E,1,28,28] uint8 -> float of 0 to 1."""
    return omniglot.distort(drawings.float() / 255, generator=generator)
