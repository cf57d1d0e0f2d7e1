"""Few-shot mini-ImageNet, table 2 of Munkhdalai & Trischler 2018: fast weights beside Matching Networks and MAML.

Section 5.1 of "Metalearning with Hebbian fast weights": 64 classes to learn from, 16 to validate on, 20 to test on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.reproduce import _few_shot_models, _resnet
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
from fastweights.reproduce._few_shot_settings import EpisodicSettings
from fastweights.reproduce._settings import refused
from fastweights.tasks import mini_imagenet
from fastweights.tasks.mini_imagenet import PIXELS
from fastweights.training.episodes import Augment

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "run"]

EXPERIMENT = "munkhdalai2018/mini-imagenet"

# Per cent, 5 ways, by encoder, model and shots; the paper quotes those of others.
_CONVOLUTIONAL: dict[tuple[str, int, int], float] = {
    ("hebbian", 5, 1): 50.21,
    ("hebbian", 5, 5): 64.75,
    ("gradient", 5, 1): 47.68,
    ("gradient", 5, 5): 59.48,
    ("matching", 5, 1): 43.6,
    ("matching", 5, 5): 55.3,
    ("maml", 5, 1): 48.7,
    ("maml", 5, 5): 63.1,
}
_RESIDUAL: dict[tuple[str, int, int], float] = {
    ("hebbian", 5, 1): 56.84,
    ("hebbian", 5, 5): 71.00,
    ("gradient", 5, 1): 54.14,
    ("gradient", 5, 5): 66.77,
}
_LEAST_AREA = 0.8  # of an image that is cut out in training; smaller parts make learning slow
_TO_START_FROM = 256  # images, evenly from all training classes
_OF_CONVOLUTIONAL = {"filters", "dropout"}
RESIDUAL_SIZE = 1024  # of what the residual network gives, and of the layer above it (table 4)


@dataclass(frozen=True)
class Photographs(EpisodicSettings):
    """How fwCNN learns from photographs."""

    learning_rate: float = 2e-3
    """Of Adam."""
    weight_decay: float = 0.2
    """Of the weights in an update, as a multiple of the learning rate; not so in the paper."""
    pool: int = 20
    """Classes that the tasks of an update are drawn from: each of their images is encoded once. 0 draws every task by
    itself, as the paper does."""
    filters: int = 32
    """Convolutional: of every convolution."""
    dropout: float = 0.2
    """Convolutional: of the features, in training; not so in the paper."""
    cuts: bool = True
    """A part of at least 0.8 of the area is cut out of each training image, and mirrored at random; of others, the
    convolutional encoder's features are the mean of theirs and their mirror image's. Not so in the paper, which has
    three times the images."""


@dataclass(frozen=True)
class Settings(Photographs, RivalSettings):
    """Tell classes of photographs never seen from one or five of each."""

    tasks: int = 1_920_000
    """To train on."""
    tasks_per_step: int = 64
    """Tasks in an update."""
    validate_every: int = 48_000
    """Tasks between two validations."""
    encoder: Literal["convolutional", "residual"] = "convolutional"
    """fwCNN's, or fwResNet's, which takes fifty times as long and has 1,024 hidden units."""
    label_noise: float = 0.01
    """Hebbian: uniform noise of the labels either way, in training."""


PRESETS = {
    "quick": Settings(models=("hebbian",), tasks=64_000, validate_every=6400),
    "paper": Settings(seeds=(1, 2, 3)),
    "residual": Settings(
        models=("hebbian", "gradient"), encoder="residual", hidden_size=RESIDUAL_SIZE, label_noise=0.0
    ),
}


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every model for every seed, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: mini-ImageNet is missing or damaged.
        TrainingError: the numbers are not finite.
    """
    check(settings)
    table = TABLE
    if settings.encoder == "residual":
        table = TABLE._replace(paper={"test": _RESIDUAL}, foreign=lambda model: foreign(model) | _OF_CONVOLUTIONAL)
    run_table(table, settings, folder, preset=preset, fresh=fresh)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        check_rivals(TABLE, settings, positive=("filters",))
        if settings.encoder == "residual" and (found := set(settings.models) & set(OF_ONE_NUMBER)):
            raise ValueError(
                f"models has {', '.join(sorted(found))}, whose tasks would share the residual encoder's running "
                "statistics: leave it out, or give the convolutional encoder"
            )


def encoder(settings: Any, data: dict[Split, Data]) -> torch_nn.Module:
    """The network under the heads: images [N,3,84,84] -> features."""
    if settings.encoder == "residual":
        return few_shot.ResidualEncoder(3, size=PIXELS, half=settings.half)
    return convolutional(settings, data)


def convolutional(settings: Any, data: dict[Split, Data]) -> few_shot.ConvEncoder:
    """The same of fwCNN, which starts from what training images there are."""
    found = few_shot.ConvEncoder(
        3,
        settings.filters,
        size=PIXELS,
        standardise=True,
        mirrored=settings.cuts,
        dropout=settings.dropout,
        half=settings.half,
    )
    images = data["train"].examples
    found.initialise_from(images[torch.arange(0, len(images), max(1, len(images) // _TO_START_FROM))])
    return found


def load(settings: Any) -> dict[Split, Data]:
    """The images of each split, and their classes."""
    data = mini_imagenet.load(settings.data_dir)
    train, validation, test = (labelled(data.images[data.splits == split]) for split in range(3))
    return {"train": train, "validation": validation, "test": test}


def network(settings: Settings, row: Row, data: dict[Split, Data]) -> torch_nn.Module:
    """The model of a row."""
    return _few_shot_models.network(row, encoder(settings, data), settings, data)


def augment(settings: Any) -> Augment | None:
    """What is done to the images of an update."""
    if not settings.cuts:
        return None

    def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        # As much light as there is: the encoder takes out what changes with it, but not what would be cut off.
        return _resnet.augment(images, PIXELS, least_area=_LEAST_AREA, light=0.0, generator=generator)

    return augmented


TABLE = Table(
    experiment=EXPERIMENT,
    presets=PRESETS,
    titles=TITLES,
    paper={"test": _CONVOLUTIONAL},
    load=load,
    network=network,
    hidden_size=hidden_size,
    schedule=schedule,
    foreign=foreign,
    augment=augment,
    of_one_number=OF_ONE_NUMBER,
)
