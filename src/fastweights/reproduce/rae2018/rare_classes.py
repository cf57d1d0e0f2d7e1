"""Rare classes of Omniglot: a softmax and the Hebbian Softmax of Rae et al. 2018, by how often a class was seen.

No experiment of the paper's, but its question, on a data set of the kind that users have: many classes, few of which
have many examples. Shown in the guide "Rare classes".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.nn import HebbianSoftmax
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.rae2018.omniglot_curriculum import FEATURES, TITLES, Classifier, ConvNet, ModelName
from fastweights.runs import Curve, Progress, RunFolder, Score
from fastweights.tasks import omniglot
from fastweights.training import Schedule, train

EXPERIMENT = "rae2018/rare-classes"
QUICK_MINUTES = 6  # docs/results/rae2018-rare-classes: 387 s a seed
DATA = "omniglot"

# Of the 20 drawings of a class: 5 for the test, as in the paper, 3 for validation, and up to 12 to learn from.
TEST, VALIDATION, MOST = 5, 3, 12
BUCKETS = ((1, 1), (2, 2), (3, 5), (6, MOST))  # drawings to learn from
FEWEST = 8  # classes: fewer would leave a bucket empty


@dataclass(frozen=True)
class Settings:
    """Omniglot with a long tail: some classes have 12 drawings to learn from, and most have few."""

    models: tuple[ModelName, ...] = ("softmax", "hebbian")
    """Models to train and test, each a row of the table."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights, of the order of the drawings and of dropout: one training run for each."""

    classes: int = 300
    """Number of characters, drawn from all alphabets."""
    data_seed: int = 0
    """Seed that chooses the characters, and the rare ones among them; all runs share it."""

    epochs: int = 20
    """Passes over the drawings; the best on validation is tested."""
    batch_size: int = 64
    """Drawings in a step."""
    learning_rate: float = only(
        "softmax", 1e-2, "Learning rate of Adam; it falls along a cosine to zero.", recorded_as="learning_rate"
    )
    hebbian_learning_rate: float = only(
        "hebbian",
        3e-3,
        "Learning rate of Adam; for each head the best of three on validation, half a decade apart.",
        recorded_as="learning_rate",
    )
    dropout: float = 0.2
    """Dropout on the activations that the logits are computed from."""
    gamma: float = only("hebbian", 0.25, "Smallest weight of an activation in the smoothed weights of its class.")
    limit: int = only("hebbian", 1000, "Occurrences after which a class is learnt by gradient descent alone.")

    data_dir: Path | None = None
    """Folder that has the folder of Omniglot; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


PRESETS = {"quick": Settings(), "paper": Settings(seeds=(1, 2, 3, 4, 5))}


def make_classifier(model: ModelName, settings: Settings) -> Classifier:
    """Return a head on the paper's convolutional network, whose activations are normalised."""
    # Smoothing needs centred activations: those of a ReLU all point in much the same direction.
    body = nn.Sequential(ConvNet(), nn.LayerNorm(FEATURES, elementwise_affine=False))
    # A head that never smooths is a plain softmax, with the same start and the same dropout.
    limit = settings.limit if model == "hebbian" else 0
    head = HebbianSoftmax(FEATURES, settings.classes, gamma=settings.gamma, limit=limit, dropout=settings.dropout)
    return Classifier(head, body)


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model and seed of the settings.

    Raises:
        DataError: Omniglot is not there and cannot be downloaded.
    """
    parts = split_drawings(settings)
    members = {
        (model, seed): RunFolder(
            Path(folder, f"{model}-seed{seed}"),
            {"model": TITLES[model], "hidden_size": FEATURES, "seed": seed} | settings_of(settings, model),
        )
        for model in settings.models
        for seed in settings.seeds
    }

    def train_member(model: ModelName, seed: int, member: RunFolder, progress: Progress) -> None:
        network = make_classifier(model, settings).to(settings.device)
        own, title = schedule(settings, model), f"{TITLES[model]}, seed {seed}"
        train(network, parts, own, member, seed=seed, loss=network.loss, title=title, progress=progress)

    return Members(members, train_member, lambda: table(settings))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("classes", "epochs"))
    if not FEWEST <= settings.classes <= omniglot.CLASSES:
        raise ValueError(f"classes must be between {FEWEST} and {omniglot.CLASSES:,}, got {settings.classes}")
    for model in settings.models:
        make_classifier(model, settings)
        schedule(settings, model)


def count_drawings(classes: int) -> Tensor:
    """Return the number of drawings that each class has to learn from, [classes]: from 12 down to 1, by equal factors.

    Examples:
        >>> from fastweights.reproduce.rae2018.rare_classes import count_drawings
        >>> count_drawings(8).tolist()
        [12, 8, 6, 4, 3, 2, 1, 1]
    """
    falling = torch.linspace(1, 0, classes, dtype=torch.float64)
    return (MOST**falling).round().long()


def split_drawings(settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images [N,1,28,28], ink as 1, and classes [N] of the splits; the test is there by bucket too.

    Raises:
        DataError: Omniglot is not there and cannot be downloaded.
    """
    images = omniglot.load(settings.data_dir).images
    generator = torch.Generator().manual_seed(settings.data_seed)
    images = images[torch.randperm(len(images), generator=generator)[: settings.classes]]
    counts = count_drawings(settings.classes)
    number = torch.arange(images.shape[1]) - TEST - VALIDATION  # negative: not to learn from
    test, validation = number < -VALIDATION, (number < 0) & (number >= -VALIDATION)
    chosen = {
        "train": (number >= 0) & (number < counts[:, None]),
        "validation": validation.expand(len(images), -1),
        "test": test.expand(len(images), -1),
    }
    for least, most in BUCKETS:
        chosen[_split(least, most)] = test & ((counts >= least) & (counts <= most))[:, None]
    return {
        name: (
            images[where].unsqueeze(1).float().div(255).to(settings.device),
            where.nonzero()[:, 0].to(settings.device),
        )
        for name, where in chosen.items()
    }


def _split(least: int, most: int) -> str:
    return f"test {span(least, most)}".replace(" ", "_")


def span(least: int, most: int) -> str:
    """Return a bucket in words."""
    return f"{least} drawing{'s' if least > 1 else ''}" if least == most else f"{least} to {most} drawings"


def schedule(settings: Settings, model: ModelName) -> Schedule:
    """Return how long and how fast a model is trained.

    Raises:
        ValueError: a number out of range.
    """
    return Schedule(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings_of(settings, model)["learning_rate"],
        annealing="cosine",
        patience=settings.epochs,
        checkpoint_seconds=settings.checkpoint_seconds,
    )


def table(settings: Settings) -> dict[str, Any]:
    """Return the table's rows, scores and curve."""
    names = ["test", *(f"test {span(*bucket)}" for bucket in BUCKETS)]
    return {
        "requested": [(TITLES[model], FEATURES) for model in settings.models],
        "scores": [Score(f"{name} error, %", {}, None) for name in names],
        "curves": [Curve("validation_error", "validation error, %")],
    }
