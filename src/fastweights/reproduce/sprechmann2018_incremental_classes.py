"""Incremental classes, table 1 and figures 4 to 7 of Sprechmann et al. 2018: MbPA as a network meets new classes.

Section 4.2 of "Memory-based parameter adaptation". A residual network is trained on half of the classes of
mini-ImageNet, or of a user's folder of images; then its softmax layer is shown all of them.
"""

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastweights.reproduce import command
from fastweights.reproduce._incremental_data import Encoder, Features, features, load
from fastweights.reproduce._incremental_picture import write_picture
from fastweights.reproduce._incremental_stream import Method, ModelName, Stream, finish, finished, follow
from fastweights.reproduce._incremental_table import TITLES, rows
from fastweights.reproduce._settings import check_settings, make_ready, refused
from fastweights.runs import Curve, RunFolder, read_members, write_result
from fastweights.training import show_progress

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "run"]

EXPERIMENT = "sprechmann2018/incremental-classes"


@dataclass(frozen=True)
class Settings:
    """A network that knows half of the classes is shown all of them: which method answers soonest."""

    models: tuple[ModelName, ...] = ("mbpa", "non-parametric", "mixture", "parametric")
    """The rows of the table."""
    seeds: tuple[int, ...] = (2, 3)
    """One random split of the classes into old and new for each; the settings below were chosen on that of seed 1."""

    images: Path | None = None
    """A folder with a folder of images for each class, such as ImageNet's training set; none is mini-ImageNet."""
    images_per_class: int = 200
    """The first so many of each class are used."""
    test_images: int = 40
    """Of those of each class, to test on."""
    validation_images: int = 20
    """Of those of each class, to validate on; the rest is to learn from."""

    width: int = 32
    """Residual network: channels of its first blocks; its activations are 8 times as many."""
    encoder_epochs: int = 45
    """Residual network: passes over the old classes."""
    encoder_learning_rate: float = 0.05
    """Residual network: of gradient descent with momentum; it falls along a cosine to zero."""
    encoder_weight_decay: float = 5e-4
    """Residual network: what is taken of its weights at every step, for each unit of the learning rate."""
    encoder_dropout: float = 0.1
    """Residual network: on its activations, in training."""
    encoder_batch_size: int = 32
    """Residual network: images in a step."""
    label_smoothing: float = 0.1
    """Residual network: the share of each label that goes to all classes alike."""
    crop_size: int = 64
    """Residual network: pixels of the side of what is cut out of an image in training; whole images are tested."""
    half: bool = False
    """Residual network: compute in bfloat16 where that is safe; several times as fast on processors with AMX."""
    encoders: Path | None = None
    """Where the residual networks are kept, for the runs of other presets too; by default `encoders` in the run's
    folder. A network is known by its settings, and `--fresh` leaves it alone."""

    epochs: float = 3.0
    """Passes over all classes."""
    scarce: float = 1.0
    """The share of its images that every other new class is shown with, for figure 5."""
    batch_size: int = 32
    """Images in a step of the softmax layer."""
    learning_rates: tuple[float, ...] = (3e-3,)
    """Of Adam for the softmax layer; several for figure 6, a row for each."""
    capacities: tuple[int, ...] = (20_000,)
    """Entries of the memory; several for figure 6, a row for each."""
    neighbours: tuple[int, ...] = (50,)
    """Entries that a query retrieves; several for figure 7, a row for each."""
    mixing: float = 0.5
    """Mixture: the share of the parametric model, lambda of equation 5."""
    steps: int = 10
    """MbPA: steps of local adaptation."""
    local_rate: float = 0.001
    """MbPA: their learning rate."""
    optimizer: str = "rmsprop"
    """MbPA: their optimizer: sgd, rmsprop or adam."""

    data_dir: Path | None = None
    """The folder that has the folder of mini-ImageNet; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""


PRESETS = {
    "quick": Settings(seeds=(2,), width=16, encoder_epochs=12, crop_size=48),
    "paper": Settings(seeds=(2, 3, 4, 5)),
    "unbalanced": Settings(seeds=(2, 3, 4, 5), models=("mbpa", "mixture", "parametric"), epochs=20.0, scarce=0.1),
    "memory-size": Settings(seeds=(2, 3, 4, 5), models=("mbpa",), capacities=(500, 1000, 2000, 5000, 10_000, 20_000)),
    "learning-rates": Settings(
        seeds=(2, 3, 4, 5), models=("mbpa", "mixture", "parametric"), learning_rates=(1e-3, 3e-3, 1e-2)
    ),
    "neighbours": Settings(seeds=(2, 3, 4, 5), models=("mbpa",), neighbours=(5, 10, 20, 50, 100, 200)),
}


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train a residual network for every split, show its softmax layer all classes, and write the table after each row.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: the images are missing or damaged.
        TrainingError: the numbers are not finite.
    """
    check(settings)
    members = _members(settings, folder)
    with refused():
        data = load(
            settings.images,
            settings.data_dir,
            most=settings.images_per_class,
            validation=settings.validation_images,
            test=settings.test_images,
        )
    make_ready(EXPERIMENT, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    _write_table(settings, folder, preset)
    with show_progress() as progress:

        @functools.lru_cache(maxsize=1)
        def of_split(seed: int) -> Features:
            network = _encoder_folder(settings, folder, seed)
            return features(data, seed, _encoder(settings), network, settings.device, progress)

        for (method, seed), member in members.items():
            with member:
                if finished(member):
                    continue
                stream = Stream(
                    of_split(seed), method, seed=seed, scarce=settings.scarce, batch_size=settings.batch_size
                )
                curve = follow(stream, settings.epochs, member, f"{_title(settings, method)}, split {seed}", progress)
                if method.model == "mbpa":
                    write_picture(member.path / "neighbours.png", stream, data)
                finish(stream, curve, member, progress)
            _write_table(settings, folder, preset)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        images = ("images_per_class", "test_images", "validation_images")
        network = ("width", "encoder_epochs", "crop_size", "encoder_batch_size")
        positive = (*images, *network, "batch_size", "capacities", "neighbours", "steps")
        not_empty = ("models", "seeds", "learning_rates", "capacities", "neighbours")
        check_settings(settings, positive=positive, not_empty=not_empty)
        if not 0 < settings.epochs <= 1000:
            raise ValueError(f"epochs must be more than 0 and at most 1,000, got {settings.epochs}")
        if not 0 < settings.scarce <= 1:
            raise ValueError(f"scarce must be a share, more than 0 and at most 1, got {settings.scarce}")
        for name in ("mixing", "encoder_dropout", "label_smoothing"):
            if not 0 <= getattr(settings, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(settings, name)}")
        for rate in (*settings.learning_rates, settings.encoder_learning_rate, settings.local_rate):
            if not 0 < rate < 100:
                raise ValueError(f"learning rates must be positive and less than 100, got {rate}")
        if settings.optimizer not in ("sgd", "rmsprop", "adam"):
            raise ValueError(f"optimizer must be sgd, rmsprop or adam, got {settings.optimizer!r}")


def _encoder(settings: Settings) -> Encoder:
    return Encoder(
        width=settings.width,
        epochs=settings.encoder_epochs,
        learning_rate=settings.encoder_learning_rate,
        weight_decay=settings.encoder_weight_decay,
        dropout=settings.encoder_dropout,
        label_smoothing=settings.label_smoothing,
        batch_size=settings.encoder_batch_size,
        crop_size=settings.crop_size,
        half=settings.half,
    )


def _data_settings(settings: Settings) -> dict[str, Any]:
    names = ("images_per_class", "test_images", "validation_images")
    images = None if settings.images is None else str(settings.images)
    return {"images": images} | {name: getattr(settings, name) for name in names}


def _encoder_folder(settings: Settings, folder: Path, seed: int) -> RunFolder:
    own = {"model": "ResNet", "hidden_size": 8 * settings.width, "seed": seed}
    own |= vars(_encoder(settings)) | _data_settings(settings)
    # Networks of other settings have other names: they stay side by side, and --fresh leaves them alone.
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]
    return RunFolder((settings.encoders or folder / "encoders") / f"seed{seed}-{digest}", own)


def _methods(settings: Settings) -> list[Method]:
    """The rows, each once: the parametric model has no memory, and the non-parametric one does not learn."""
    found: dict[Method, None] = {}
    for model in settings.models:
        for rate in settings.learning_rates[: 1 if model == "non-parametric" else None]:
            for capacity in settings.capacities[: 1 if model == "parametric" else None]:
                for neighbours in settings.neighbours[: 1 if model == "parametric" else None]:
                    tuned = {name: getattr(settings, name) for name in ("mixing", "steps", "local_rate", "optimizer")}
                    method = Method(model, learning_rate=rate, capacity=capacity, neighbours=neighbours, **tuned)
                    found[method] = None
    return list(found)


def _title(settings: Settings, method: Method) -> str:
    """What tells a row from the others: only what the method has, and the settings vary."""
    words = {
        "learning_rate": (settings.learning_rates, f"learning rate {method.learning_rate:g}"),
        "capacity": (settings.capacities, f"{method.capacity:,} entries"),
        "neighbours": (settings.neighbours, f"{method.neighbours} neighbours"),
    }
    varied = [text for name, (values, text) in words.items() if name in method.settings() and len(values) > 1]
    return ", ".join([TITLES[method.model], *varied])


def _members(settings: Settings, folder: Path) -> dict[tuple[Method, int], RunFolder]:
    """One split after another, so that no more than one is held in memory."""
    shared = {name: getattr(settings, name) for name in ("epochs", "scarce", "batch_size")} | _data_settings(settings)
    shared |= {f"encoder {name}": value for name, value in vars(_encoder(settings)).items()}
    members = {}
    for seed in settings.seeds:
        for method in _methods(settings):
            own = {"model": _title(settings, method), "hidden_size": 8 * settings.width, "seed": seed}
            own |= shared | method.settings()
            name = re.sub(r"[^a-z0-9.]+", "-", f"{_title(settings, method)}-seed{seed}".lower())
            members[method, seed] = RunFolder(folder / name, own)
    return members


def _write_table(settings: Settings, folder: Path, preset: str) -> None:
    titles = {_title(settings, method): method.model for method in _methods(settings)}
    scarce = settings.scarce < 1
    curves = [
        Curve("accuracy", "all classes, top-1, %", against="passes", spread=True),
        Curve("novel_accuracy", "novel classes, top-1, %", against="passes", spread=True),
        Curve("pretrained_accuracy", "pre-trained classes, top-1, %", against="passes", spread=True),
    ]
    if scarce:
        curves.append(Curve("scarce_accuracy", "scarce novel classes, top-1, %", against="passes", spread=True))
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[(title, 8 * settings.width) for title in titles],
        rows=rows(
            read_members(folder), titles, settings.epochs, scarce=scarce, paper=settings.images is None and not scarce
        ),
        curves=curves,
    )
