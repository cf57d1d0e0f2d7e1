"""MNIST in glimpses, table 1 of Ba et al. 2016: IRNN, LSTM, ConvNet, fast weights that are told when to store.

Section 4.2 and appendix A.2 of "Using fast weights to attend to the recent past".
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from torch import Tensor

from fastweights.reproduce._experiment import run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.ba2016.glimpses import TITLES, GlimpseSettings, check_glimpses, prepare_glimpses
from fastweights.tasks import mnist

__all__ = ["DATA", "EXPERIMENT", "PAPER", "PRESETS", "QUICK_MINUTES", "TITLES", "Settings", "check", "run"]

EXPERIMENT = "ba2016/mnist-glimpses"
QUICK_MINUTES = 16  # docs/results/ba2016-mnist-glimpses: 962 s, on a machine that was busy with other work
DATA = "mnist"
VALIDATION = 5000  # digits held out of the 60,000 training digits

# Test error in per cent: table 1.
PAPER: dict[tuple[str, int | None], float] = {
    ("IRNN", 50): 12.95,
    ("IRNN", 100): 1.95,
    ("IRNN", 200): 1.42,
    ("LSTM", 50): 12.0,
    ("LSTM", 100): 1.55,
    ("LSTM", 200): 1.10,
    ("ConvNet", 50): 1.81,
    ("ConvNet", 100): 1.00,
    ("ConvNet", 200): 0.9,
    ("Fast weights", 50): 7.21,
    ("Fast weights", 100): 1.30,
    ("Fast weights", 200): 0.85,
}


@dataclass(frozen=True)
class Settings(GlimpseSettings):
    """Which digit is it, in 24 patches of 7 x 7 pixels, one after another?"""

    data_seed: int = 0
    """Seed that chooses the 5,000 training digits to validate on; all runs share it."""


_CHOSEN = Settings(standardize=True, dropout=0.2, rate=None)  # docs/papers/ba2016.md has the trials
PRESETS = {"quick": _CHOSEN, "paper": replace(_CHOSEN, hidden_sizes=(50, 100, 200), seeds=(1, 2, 3), epochs=60)}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model, size and seed of the settings.

    Raises:
        DataError: MNIST is not there and cannot be downloaded.
    """
    splits = load_splits(settings)
    return prepare_glimpses(
        settings,
        folder,
        splits,
        PAPER,
        classes=mnist.CLASSES,
        layers=3,
    )


def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_glimpses(settings, mnist.SIDE, layers=3)


def load_splits(settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images [N,28,28] uint8 and digits [N] of training, validation and test.

    Raises:
        DataError: MNIST is not there and cannot be downloaded.
    """
    data = mnist.load(settings.data_dir)
    order = torch.from_numpy(numpy.random.default_rng(settings.data_seed).permutation(len(data.train_labels)))
    validation, train = order[:VALIDATION], order[VALIDATION:]
    return {
        "train": (data.train_images[train], data.train_labels[train]),
        "validation": (data.train_images[validation], data.train_labels[validation]),
        "test": (data.test_images, data.test_labels),
    }
