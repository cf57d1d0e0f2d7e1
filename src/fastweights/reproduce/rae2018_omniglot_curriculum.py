"""Omniglot curriculum, figures 3, 8 and 9 of Rae et al. 2018: Hebbian Softmax against softmax as classes are added.

Section 4.1 of "Fast parametric learning with activation memorization".
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fastweights.nn import HebbianSoftmax
from fastweights.reproduce import command
from fastweights.reproduce._rae2018 import FEATURES, TITLES, Classifier, ModelName
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.runs import Curve, Member, RunFolder, read_members, write_result
from fastweights.tasks import omniglot
from fastweights.training import CurriculumSchedule, epoch_order, show_progress, train_curriculum

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "data", "run"]

EXPERIMENT = "rae2018/omniglot-curriculum"

FROM = 80  # classes: from there on the paper finds Hebbian Softmax faster
EARLY = 500  # steps after which learning rates are compared

_OF_THE_TABLE = ("models", "seeds", "learning_rates", "data_dir")
_OF_HEBBIAN = ("gamma", "limit", "objective", "counting")


@dataclass(frozen=True)
class Settings:
    """Omniglot curriculum of Rae et al. 2018: five more classes whenever those shown are told apart."""

    models: tuple[ModelName, ...] = ("softmax", "hebbian")
    """The rows of the table."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One training run for each: of the weights, the order of the classes, and the batches."""
    learning_rates: tuple[float, ...] = (8e-3,)
    """Of RMSprop; several for figure 8, a row for each."""

    first_classes: int = 30
    """Classes shown at the beginning."""
    added_classes: int = 5
    """Classes that a completed level adds."""
    last_classes: int = 200
    """A run ends when so many are shown; there are 1,623."""
    threshold: float = 0.6
    """A level is completed by a higher accuracy on the held-out drawings of the classes shown, out of all classes."""
    test_every: int = 5
    """Steps between two tests of the level."""
    most_steps: int = 10_000
    """A run ends at the latest after so many steps."""

    batch_size: int = 32
    """Drawings in a step."""
    smoothing: float = 0.9
    """Of RMSprop: what is left of its running mean of squares after a step."""
    dropout: float = 0.2
    """On the activations that the softmax layer reads."""
    degrees: float = omniglot.DEGREES
    """How far a drawing is turned in training, at most, either way."""
    shift: float = omniglot.SHIFT
    """How many pixels a drawing is shifted in training, at most, in both directions."""

    gamma: float = 1 / 15
    """Hebbian Softmax: the least that a class takes of its activations: 1 / (training drawings of a class)."""
    limit: int = 500
    """Hebbian Softmax: occurrences after which a class is smoothed no more."""
    objective: Literal["l2", "inner_product", "svm", "sparse_softmax"] = "l2"
    """Hebbian Softmax: what a class's weights are smoothed towards."""
    counting: Literal["literal", "running_mean"] = "literal"
    """Hebbian Softmax: how the smoothing fades as a class is seen more often."""

    data_dir: Path | None = None
    """The folder that has the folder of Omniglot; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    "paper": Settings(seeds=tuple(range(1, 11)), last_classes=400),
}


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every model, learning rate and seed of the settings, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: Omniglot is missing or damaged.
        TrainingError: the numbers are not finite.
    """
    check(settings)
    members = _members(settings, folder)
    drawings = omniglot.load(settings.data_dir)
    make_ready(EXPERIMENT, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    _write_table(settings, folder, preset)
    augment = partial(omniglot.augment, degrees=settings.degrees, shift=settings.shift)
    with show_progress() as progress:
        for (model, rate, seed), member in members.items():
            train, held_out = data(drawings, seed)
            with member, torch.random.fork_rng():
                torch.manual_seed(seed)
                network = Classifier(_head(model, settings, len(train))).to(settings.device)
                optimizer = torch.optim.RMSprop(network.parameters(), lr=rate, alpha=settings.smoothing)
                network.head.attach(optimizer)
                train_curriculum(
                    network,
                    optimizer,
                    train.to(settings.device),
                    held_out.to(settings.device),
                    _schedule(settings, rate),
                    member,
                    seed=seed,
                    augment=augment,
                    title=f"{_title(model, rate)}, seed {seed}",
                    progress=progress,
                )
            _write_table(settings, folder, preset)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        positive = ("first_classes", "added_classes", "last_classes", "test_every", "most_steps", "batch_size")
        check_settings(settings, positive=positive, not_empty=("models", "seeds", "learning_rates"))
        for rate in settings.learning_rates:
            _schedule(settings, rate)
        _head("hebbian", settings, settings.last_classes)
        if settings.last_classes > omniglot.CLASSES:
            raise ValueError(f"last_classes must be at most {omniglot.CLASSES:,}, got {settings.last_classes}")
        for name in ("degrees", "shift"):
            if not 0 <= getattr(settings, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(settings, name)}")
        if not 0 <= settings.smoothing < 1:
            raise ValueError(f"smoothing must be 0 or more and less than 1, got {settings.smoothing}")


def data(drawings: omniglot.Omniglot, seed: int) -> tuple[Tensor, Tensor]:
    """The drawings to train on [V,15,1,28,28] and those held out [V,5,1,28,28], in the order in which a seed shows the
    classes."""
    train, held_out = omniglot.curriculum_split(drawings)
    order = epoch_order(len(train), seed, 0)
    return train[order].unsqueeze(2), held_out[order].unsqueeze(2)


def _head(model: ModelName, settings: Settings, classes: int) -> HebbianSoftmax:
    return HebbianSoftmax(
        FEATURES,
        classes,
        gamma=settings.gamma,
        limit=settings.limit if model == "hebbian" else 0,  # which is the plain softmax, bit for bit
        dropout=settings.dropout,
        objective=settings.objective,
        counting=settings.counting,
    )


def _schedule(settings: Settings, rate: float) -> CurriculumSchedule:
    return CurriculumSchedule(
        epochs=max(1, settings.most_steps // settings.test_every),
        batch_size=settings.batch_size,
        learning_rate=rate,
        clip_norm=math.inf,
        checkpoint_seconds=settings.checkpoint_seconds,
        test_every=settings.test_every,
        first_classes=settings.first_classes,
        added_classes=settings.added_classes,
        last_classes=settings.last_classes,
        threshold=settings.threshold,
    )


def _title(model: ModelName, rate: float) -> str:
    return TITLES[model] if rate == Settings().learning_rates[0] else f"{TITLES[model]}, learning rate {rate:g}"


def _members(settings: Settings, folder: Path) -> dict[tuple[ModelName, float, int], RunFolder]:
    members = {}
    shared = {
        name: value
        for name, value in vars(settings).items()
        if name not in {*OF_THE_MACHINE, *_OF_THE_TABLE, *_OF_HEBBIAN}
    }
    for model in settings.models:
        for rate in settings.learning_rates:
            for seed in settings.seeds:
                own: dict[str, Any] = {"model": _title(model, rate), "hidden_size": FEATURES, "seed": seed}
                own |= shared | {"learning_rate": rate}
                own |= {name: getattr(settings, name) for name in _OF_HEBBIAN if model == "hebbian"}
                members[model, rate, seed] = RunFolder(folder / f"{model}-{rate:g}-seed{seed}", own)
    return members


def _write_table(settings: Settings, folder: Path, preset: str) -> None:
    curves = [Curve("classes", "classes shown", spread=True)]
    if len(settings.learning_rates) == 1:  # many lines of as many levels would hide one another
        curves.append(Curve("level_steps", "steps to complete the level", against="level", spread=True))
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[(_title(model, rate), FEATURES) for model in settings.models for rate in settings.learning_rates],
        rows=_rows(read_members(folder)),
        curves=curves,
    )


def _rows(members: list[Member]) -> list[dict[str, Any]]:
    """What the figures say in numbers: steps before and after 80 classes, and the ratio of the two heads by seed; of
    several learning rates how far each has come."""
    taken: dict[str, dict[str, dict[int, float]]] = {}  # metric, model, seed
    for member in sorted(members, key=lambda member: (member.model.startswith(TITLES["hebbian"]), _rate(member))):
        if member.result is not None and member.seed is not None:
            numbers = _numbers(member)
            if len(set(map(_rate, members))) > 1:
                numbers = {f"classes after {EARLY} steps": _classes_at(member, EARLY)} | numbers
            for metric, value in numbers.items():
                taken.setdefault(metric, {}).setdefault(member.model, {})[member.seed] = value
    for metric, models in list(taken.items()):
        for model, hebbian in models.items():
            plain = models.get(model.replace(TITLES["hebbian"], TITLES["softmax"]), {})
            both = sorted(hebbian.keys() & plain.keys())
            if model.startswith(TITLES["hebbian"]) and both:
                ratio = {seed: plain[seed] / hebbian[seed] for seed in both}
                taken.setdefault(f"times as fast, {metric}", {})[model] = ratio
    return [
        {"model": model, "hidden_size": FEATURES, "metric": metric, "ours": [ours[seed] for seed in sorted(ours)]}
        for metric, models in taken.items()
        for model, ours in models.items()
    ]


def _numbers(member: Member) -> dict[str, float]:
    result = member.result or {}
    steps = dict(map(tuple, result["levels"]))  # classes of a level: when it was completed
    last = result["classes"]
    before = min((classes for classes in steps if classes >= FROM), default=None)
    if before is None or last < member.settings["last_classes"]:
        return {}
    end = max(steps.values())
    numbers = {f"steps to {before} classes": float(steps[before])}
    if end > steps[before]:
        numbers[f"steps from {before} to {last} classes"] = float(end - steps[before])
    return numbers


def _rate(member: Member) -> float:
    return float(member.settings["learning_rate"])


def _classes_at(member: Member, step: int) -> float:
    result = member.result or {}
    first, added = member.settings["first_classes"], member.settings["added_classes"]
    return float(first + added * sum(completed <= step for _, completed in result["levels"]))
