"""Few-shot mini-ImageNet, table 2 of Munkhdalai & Trischler 2018: fast weights beside Matching Networks and MAML.

Section 5.1 of "Metalearning with Hebbian fast weights": 64 classes to learn from, 16 to validate on, 20 to test on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.reproduce._experiment import except_for, one_line_errors, only, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.munkhdalai2018._episodes import (
    MAMLS,
    TITLES,
    Data,
    RivalSettings,
    Split,
    TasksRow,
    check_rivals,
    label_classes,
    make_rival,
    prepare_episodes,
)
from fastweights.tasks import mini_imagenet
from fastweights.tasks.mini_imagenet import PIXELS
from fastweights.training import Augment

EXPERIMENT = "munkhdalai2018/mini-imagenet"
QUICK_MINUTES = 4  # docs/results/munkhdalai2018-mini-imagenet: a 30th of its tasks, of one model
DATA = "mini-imagenet"

__all__ = ["DATA", "EXPERIMENT", "PAPER", "PRESETS", "QUICK_MINUTES", "TITLES", "Settings", "check", "run"]

# Per cent, by model, ways and shots, on each encoder; the paper quotes other authors' numbers.
PAPER: dict[tuple[str, int, int], float] = {
    ("hebbian", 5, 1): 50.21,
    ("hebbian", 5, 5): 64.75,
    ("gradient", 5, 1): 47.68,
    ("gradient", 5, 5): 59.48,
    ("matching", 5, 1): 43.6,
    ("matching", 5, 5): 55.3,
    ("maml", 5, 1): 48.7,
    ("maml", 5, 5): 63.1,
}
PAPER_RESIDUAL: dict[tuple[str, int, int], float] = {
    ("hebbian", 5, 1): 56.84,
    ("hebbian", 5, 5): 71.00,
    ("gradient", 5, 1): 54.14,
    ("gradient", 5, 5): 66.77,
}
_LEAST_AREA = 0.8  # share of an image that is cut out in training; smaller parts make learning slow
_FIRST_IMAGES = 256  # the encoder starts from their statistics; evenly from all training classes
RESIDUAL_SIZE = 1024  # features of the residual network, and units of the layer above it (table 4)


@dataclass(frozen=True)
class PhotographSettings:
    """The settings of fwCNN on photographs, beside those of every few-shot experiment."""

    learning_rate: float = 2e-3
    """Learning rate of Adam."""
    weight_decay: float = 0.2
    """Decay of the weights in an update, as a multiple of the learning rate; the paper has none."""
    pool: int = 20
    """Classes that the tasks of an update share, so that each image is encoded once; 0: none, as in the paper."""
    filters: int = 32
    """Convolutional encoder: filters of every convolution."""
    dropout: float = 0.2
    """Convolutional encoder: dropout on the features in training; the paper has none."""
    # Of other images the convolutional encoder takes the mean of their features and their mirror image's.
    cuts: bool = True
    """Cut parts out of training images and mirror them at random; unlike the paper, which has more images."""


@dataclass(frozen=True)
class Settings(PhotographSettings, RivalSettings):
    """Tell classes of photographs never seen from one or five of each."""

    tasks: int = except_for(MAMLS, 1_920_000, "Training tasks.")
    tasks_per_step: int = except_for(MAMLS, 64, "Training tasks in an update.")
    pool: int = except_for(
        MAMLS,
        20,
        "Classes that the tasks of an update share, so that each of their images is encoded once. 0 draws every task "
        "by itself, as the paper does.",
    )
    validate_every: int = except_for(MAMLS, 48_000, "Tasks between two validations.")
    encoder: Literal["convolutional", "residual"] = "convolutional"
    """Encoder: that of fwCNN, or that of fwResNet, which takes fifty times as long and has 1,024 hidden units."""
    label_noise: float = only("hebbian", 0.01, "Largest uniform noise added to the labels in training.")


PRESETS = {
    "quick": Settings(models=("hebbian",), tasks=64_000, validate_every=6400),
    "paper": Settings(seeds=(1, 2, 3)),
    "residual": Settings(
        models=("hebbian", "gradient"), encoder="residual", hidden_size=RESIDUAL_SIZE, label_noise=0.0
    ),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model for every seed.

    Raises:
        DataError: mini-ImageNet is missing or damaged.
    """
    residual = settings.encoder == "residual"
    return prepare_episodes(
        settings,
        folder,
        load,
        network,
        {"test": PAPER_RESIDUAL if residual else PAPER},
        without=("filters", "dropout") if residual else (),
        augment=augment(settings),
    )


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_rivals(settings, sizes=("filters",))
    if settings.encoder == "residual" and (sharing := set(settings.models) & set(MAMLS)):
        raise ValueError(
            f"models has {', '.join(sorted(sharing))}, whose tasks would share the residual encoder's running "
            "statistics: leave these models out, or use the convolutional encoder"
        )


def load(settings: Any) -> dict[Split, Data]:
    """Load the images of each split [N,3,84,84], and their classes."""
    data = mini_imagenet.load(settings.data_dir)
    train, validation, test = (label_classes(data.images[data.splits == split]) for split in range(3))
    return {"train": train, "validation": validation, "test": test}


def network(settings: Settings, row: TasksRow, data: dict[Split, Data]) -> torch_nn.Module:
    """Return the model of a row."""
    if settings.encoder == "residual":
        return make_rival(settings, row, few_shot.ResidualEncoder(3, size=PIXELS, half=settings.half), data)
    return make_rival(settings, row, make_encoder(settings, data), data)


def make_encoder(settings: Any, data: dict[Split, Data]) -> few_shot.ConvEncoder:
    """Return the encoder of fwCNN, images [N,3,84,84] -> features, which starts from the training images there are."""
    encoder = few_shot.ConvEncoder(
        3,
        settings.filters,
        size=PIXELS,
        standardise=True,
        mirrored=settings.cuts,
        dropout=settings.dropout,
        half=settings.half,
    )
    images = data["train"].examples
    encoder.initialise_from(images[torch.arange(0, len(images), max(1, len(images) // _FIRST_IMAGES))])
    return encoder


def augment(settings: Any) -> Augment | None:
    """Return the function that changes the images of an update, or None."""
    if not settings.cuts:
        return None

    def cut(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        # As bright as the image allows: the encoder evens out brightness, but could not restore clipped pixels.
        return mini_imagenet.augment(images, PIXELS, least_area=_LEAST_AREA, light=0.0, generator=generator)

    return cut
