"""Rare classes of Omniglot: a softmax and the Hebbian Softmax of Rae et al. 2018, by how often a class was seen.

No experiment of the paper's, but its question, on a data set of the kind that users have: many classes, few of which
have many examples. Shown in the guide "Rare classes".
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fastweights.nn import HebbianSoftmax
from fastweights.reproduce import command
from fastweights.reproduce._rae2018 import FEATURES, TITLES, Classifier, ConvNet, ModelName
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.runs import Curve, RunFolder, Score, write_result
from fastweights.tasks import omniglot
from fastweights.training import Schedule, show_progress, train

EXPERIMENT = "rae2018/rare-classes"

# Of the 20 drawings of a class: 5 for the test, as in the paper, 3 for validation, and up to 12 to learn from.
TEST, VALIDATION, MOST = 5, 3, 12
BUCKETS = ((1, 1), (2, 2), (3, 5), (6, MOST))  # drawings to learn from
FEWEST = 8  # classes: that no bucket is empty


@dataclass(frozen=True)
class Settings:
    """Omniglot with a long tail: of the classes' drawings some have 12 to learn from and most have few."""

    models: tuple[ModelName, ...] = ("softmax", "hebbian")
    """The rows of the table."""
    seeds: tuple[int, ...] = (1,)
    """One training run for each: of the weights, of the order of the drawings and of dropout."""

    classes: int = 300
    """Characters, drawn from all alphabets."""
    data_seed: int = 0
    """Of which characters, and of which are rare; every run shares them."""

    epochs: int = 20
    """Passes over the drawings; the best on validation is tested."""
    batch_size: int = 64
    """Drawings in a step."""
    learning_rate: float = 1e-2
    """Softmax: of Adam; it falls along a cosine to zero."""
    hebbian_learning_rate: float = 3e-3
    """Hebbian Softmax: the same; the rate of each head is the best of three on validation, each half a decade apart."""
    dropout: float = 0.2
    """On the activations that the logits are computed of."""
    gamma: float = 0.25
    """Hebbian Softmax: the least that a class takes of its activations."""
    limit: int = 1000
    """Hebbian Softmax: occurrences after which a class is learnt by gradient descent alone."""

    data_dir: Path | None = None
    """The folder that has the folder of Omniglot; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


PRESETS = {"quick": Settings(), "paper": Settings(seeds=(1, 2, 3, 4, 5))}

_OF_THE_TABLE = ("models", "seeds", "data_dir")
_OF_HEBBIAN = ("gamma", "limit")
_LEARNING_RATES = ("learning_rate", "hebbian_learning_rate")


def classifier(model: ModelName, settings: Settings) -> Classifier:
    """A head on the paper's convolutional network, whose activations are normalised."""
    # Smoothing needs activations that are centred: those of a ReLU point all in much the same direction.
    body = nn.Sequential(ConvNet(), nn.LayerNorm(FEATURES, elementwise_affine=False))
    # A head that never smooths is a plain softmax, with the same start and the same dropout.
    limit = settings.limit if model == "hebbian" else 0
    head = HebbianSoftmax(FEATURES, settings.classes, gamma=settings.gamma, limit=limit, dropout=settings.dropout)
    return Classifier(head, body)


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every model and seed of the settings, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: Omniglot is not there and cannot be downloaded.
        TrainingError: the numbers are not finite.
    """
    schedules = _checked(settings)
    members = _members(settings, folder)
    parts = splits(settings)
    make_ready(EXPERIMENT, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    _write_table(settings, folder, preset)
    with show_progress() as progress:
        for (model, seed), member in members.items():
            with member, torch.random.fork_rng():
                torch.manual_seed(seed)
                network = classifier(model, settings).to(settings.device)
                title = f"{TITLES[model]}, seed {seed}"
                own = schedules[model]
                train(network, parts, own, member, seed=seed, loss=network.loss, title=title, progress=progress)
            _write_table(settings, folder, preset)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    _checked(settings)


def drawings(classes: int) -> Tensor:
    """How many drawings each class has to learn from, [classes]: from 12 down to 1, by equal factors.

    Examples:
        >>> from fastweights.reproduce.rae2018_rare_classes import drawings
        >>> drawings(8).tolist()
        [12, 8, 6, 4, 3, 2, 1, 1]
    """
    falling = torch.linspace(1, 0, classes, dtype=torch.float64)
    return (MOST**falling).round().long()


def splits(settings: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Images [N,1,28,28], ink as 1, and classes [N] to learn from, to validate and to test, and the test by bucket.

    Raises:
        DataError: Omniglot is not there and cannot be downloaded.
    """
    images = omniglot.load(settings.data_dir).images
    generator = torch.Generator().manual_seed(settings.data_seed)
    images = images[torch.randperm(len(images), generator=generator)[: settings.classes]]
    counts = drawings(settings.classes)
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
    """A bucket in words."""
    return f"{least} drawing{'s' if least > 1 else ''}" if least == most else f"{least} to {most} drawings"


def _members(settings: Settings, folder: Path) -> dict[tuple[ModelName, int], RunFolder]:
    members = {}
    for model in settings.models:
        for seed in settings.seeds:
            elsewhere = {*OF_THE_MACHINE, *_OF_THE_TABLE, *_LEARNING_RATES}
            elsewhere |= set() if model == "hebbian" else {*_OF_HEBBIAN}
            own = {"model": TITLES[model], "hidden_size": FEATURES, "seed": seed}
            own |= {name: value for name, value in vars(settings).items() if name not in elsewhere}
            own["learning_rate"] = _learning_rate(settings, model)
            members[model, seed] = RunFolder(folder / f"{model}-seed{seed}", own)
    return members


def _checked(settings: Settings) -> dict[ModelName, Schedule]:
    """The schedules, once everything that the settings ask for has been seen to be possible."""
    with refused():
        check_settings(settings, positive=("classes",), not_empty=("models", "seeds"))
        if not FEWEST <= settings.classes <= omniglot.CLASSES:
            raise ValueError(f"classes must be between {FEWEST} and {omniglot.CLASSES:,}, got {settings.classes}")
        for model in settings.models:
            classifier(model, settings)
        return {
            model: Schedule(
                epochs=settings.epochs,
                batch_size=settings.batch_size,
                learning_rate=_learning_rate(settings, model),
                annealing="cosine",
                patience=max(settings.epochs, 1),
                checkpoint_seconds=settings.checkpoint_seconds,
            )
            for model in settings.models
        }


def _learning_rate(settings: Settings, model: ModelName) -> float:
    return settings.hebbian_learning_rate if model == "hebbian" else settings.learning_rate


def _write_table(settings: Settings, folder: Path, preset: str) -> None:
    names = ["test", *(f"test {span(*bucket)}" for bucket in BUCKETS)]
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[(TITLES[model], FEATURES) for model in settings.models],
        scores=[Score(f"{name} error, %", {}, None) for name in names],
        curves=[Curve("validation_error", "validation error, %")],
    )
