"""Omniglot curriculum, figures 3, 8 and 9 of Rae et al. 2018: Hebbian Softmax against softmax as classes are added.

Section 4.1 of "Fast parametric learning with activation memorization".
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fastweights.checks import check_not_negative
from fastweights.nn import HebbianSoftmax
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Curve, Member, Progress, RunFolder, read_members
from fastweights.tasks import omniglot
from fastweights.training import CurriculumSchedule, epoch_order, train_curriculum

EXPERIMENT = "rae2018/omniglot-curriculum"
QUICK_MINUTES = 16  # docs/results/rae2018-omniglot-curriculum: 956 s of seeds 1 to 3
DATA = "omniglot"

ModelName = Literal["softmax", "hebbian"]
TITLES: dict[ModelName, str] = {"softmax": "Softmax", "hebbian": "Hebbian Softmax"}

FROM = 80  # classes: from there on the paper finds Hebbian Softmax faster
EARLY = 500  # steps after which learning rates are compared
FEATURES = 64  # filters of every block, and of the network's output


@dataclass(frozen=True)
class Settings:
    """Omniglot curriculum of Rae et al. 2018: five more classes whenever those shown are told apart."""

    models: tuple[ModelName, ...] = ("softmax", "hebbian")
    """Models to train and test, each a row of the table."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the weights, the order of the classes, and the batches: one training run for each."""
    learning_rates: tuple[float, ...] = (8e-3,)
    """Learning rates of RMSprop; several give figure 8, a row for each."""

    first_classes: int = 30
    """Classes shown at the beginning."""
    added_classes: int = 5
    """Classes that a completed level adds."""
    last_classes: int = 200
    """Classes shown at the end of a run; there are 1,623."""
    threshold: float = 0.6
    """Accuracy that completes a level, on held-out drawings of the classes shown so far, out of all classes."""
    test_every: int = 5
    """Steps between two tests of the level."""
    most_steps: int = 10_000
    """Most steps of a run."""

    batch_size: int = 32
    """Drawings in a step."""
    smoothing: float = 0.9
    """Fraction of RMSprop's running mean of squares kept after each step."""
    dropout: float = 0.2
    """Dropout on the activations that the softmax layer reads."""
    degrees: float = omniglot.DEGREES
    """Largest angle, in degrees, by which a drawing is turned left or right in training."""
    shift: float = omniglot.SHIFT
    """Largest distance, in pixels, by which a drawing is shifted in training, in both directions."""

    gamma: float = only(
        "hebbian",
        1 / 15,
        "Smallest weight of an activation in the smoothed weights of its class: 1 / (training drawings of a class).",
    )
    limit: int = only("hebbian", 500, "Occurrences after which a class is no longer smoothed.")
    objective: Literal["l2", "inner_product", "svm", "sparse_softmax"] = only(
        "hebbian", "l2", "Inner objective by which a class's weights are smoothed."
    )
    counting: Literal["literal", "running_mean", "constant"] = only(
        "hebbian", "literal", "Way in which the smoothing fades as a class is seen more often, or stays (constant)."
    )

    data_dir: Path | None = None
    """Folder that has the folder of Omniglot; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    "paper": Settings(seeds=tuple(range(1, 11)), last_classes=400),
}


class ConvNet(nn.Module):
    """Four blocks of 3 x 3 convolution, batch normalisation, ReLU and 2 x 2 max pooling: images -> activations.

    The network of Matching Networks (Vinyals et al. 2016), which section 4.1 takes over.

    Shapes: images [B,1,28,28], float -> [B,64], one value of each filter, never negative.

    Examples:
        >>> import torch
        >>> from fastweights.reproduce.rae2018.omniglot_curriculum import ConvNet
        >>> ConvNet()(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 64])
    """

    def __init__(self) -> None:
        super().__init__()
        blocks = []
        for features in (1, FEATURES, FEATURES, FEATURES):
            # The normalisation has a bias of its own.
            blocks += [nn.Conv2d(features, FEATURES, 3, padding=1, bias=False), nn.BatchNorm2d(FEATURES)]
            blocks += [nn.ReLU(), nn.MaxPool2d(2)]
        # Features side by side in memory: on a processor a step takes half the time.
        self.blocks = nn.Sequential(*blocks).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        activations: Tensor = self.blocks(images).flatten(1)
        return activations


class Classifier(nn.Module):
    """A body, the convolutional network, under a softmax layer: images [B,1,28,28] -> logits [B,V], and their loss.

    Examples:
        >>> import torch
        >>> from fastweights.nn import HebbianSoftmax
        >>> from fastweights.reproduce.rae2018.omniglot_curriculum import Classifier
        >>> model = Classifier(HebbianSoftmax(64, 10))
        >>> model(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """

    def __init__(self, head: HebbianSoftmax, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = ConvNet() if body is None else body
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(self.body(images), targets)


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model, learning rate and seed of the settings.

    Raises:
        DataError: Omniglot is missing or damaged.
    """
    drawings = omniglot.load(settings.data_dir)
    augment = partial(omniglot.augment, degrees=settings.degrees, shift=settings.shift)
    members = {
        (model, learning_rate, seed): RunFolder(
            Path(folder, f"{model}-{learning_rate:g}-seed{seed}"),
            {"model": title_of(model, learning_rate), "hidden_size": FEATURES, "seed": seed}
            | settings_of(settings, "softmax", without=("learning_rates",))
            | {"learning_rate": learning_rate}
            | settings_of(settings, model, without=("learning_rates",)),
        )
        for model in settings.models
        for learning_rate in settings.learning_rates
        for seed in settings.seeds
    }

    def train_member(model: ModelName, learning_rate: float, seed: int, member: RunFolder, progress: Progress) -> None:
        train, held_out = split_drawings(drawings, seed)
        network = Classifier(make_head(model, settings, len(train))).to(settings.device)
        optimizer = torch.optim.RMSprop(network.parameters(), lr=learning_rate, alpha=settings.smoothing)
        network.head.attach(optimizer)
        train_curriculum(
            network,
            optimizer,
            train.to(settings.device),
            held_out.to(settings.device),
            schedule(settings, learning_rate),
            member,
            seed=seed,
            augment=augment,
            title=f"{title_of(model, learning_rate)}, seed {seed}",
            progress=progress,
        )

    return Members(members, train_member, lambda: table(settings, read_members(folder)))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    sizes = ("first_classes", "added_classes", "last_classes", "test_every", "most_steps", "batch_size")
    check_settings(settings, sizes=sizes, lists=("models", "seeds", "learning_rates"))
    for learning_rate in settings.learning_rates:
        schedule(settings, learning_rate)
    make_head("hebbian", settings, settings.last_classes)
    if settings.last_classes > omniglot.CLASSES:
        raise ValueError(f"last_classes must be at most {omniglot.CLASSES:,}, got {settings.last_classes}")
    check_not_negative(degrees=settings.degrees, shift=settings.shift)
    if not 0 <= settings.smoothing < 1:
        raise ValueError(f"smoothing must be 0 or more and less than 1, got {settings.smoothing}")


def split_drawings(drawings: omniglot.Omniglot, seed: int) -> tuple[Tensor, Tensor]:
    """Return the drawings to train on [V,15,1,28,28] and those held out [V,5,1,28,28]; the seed orders the classes."""
    train, held_out = omniglot.curriculum_split(drawings)
    order = epoch_order(len(train), seed, 0)
    return train[order].unsqueeze(2), held_out[order].unsqueeze(2)


def make_head(model: ModelName, settings: Settings, classes: int) -> HebbianSoftmax:
    """Return the softmax layer of a model."""
    return HebbianSoftmax(
        FEATURES,
        classes,
        gamma=settings.gamma,
        limit=settings.limit if model == "hebbian" else 0,  # limit 0 is the plain softmax, bit for bit
        dropout=settings.dropout,
        objective=settings.objective,
        counting=settings.counting,
    )


def schedule(settings: Settings, learning_rate: float) -> CurriculumSchedule:
    """Return how long and how fast a member is trained.

    Raises:
        ValueError: a number out of range.
    """
    return CurriculumSchedule(
        epochs=max(1, settings.most_steps // settings.test_every),
        batch_size=settings.batch_size,
        learning_rate=learning_rate,
        clip_norm=math.inf,
        checkpoint_seconds=settings.checkpoint_seconds,
        test_every=settings.test_every,
        first_classes=settings.first_classes,
        added_classes=settings.added_classes,
        last_classes=settings.last_classes,
        threshold=settings.threshold,
    )


def title_of(model: ModelName, learning_rate: float) -> str:
    """Return a row's name: the learning rate stands in it where it is not the usual one."""
    usual = learning_rate == Settings().learning_rates[0]
    return TITLES[model] if usual else f"{TITLES[model]}, learning rate {learning_rate:g}"


def table(settings: Settings, members: list[Member]) -> dict[str, Any]:
    """Return the table's rows, and the curves of figures 3 and 9."""
    curves = [Curve("classes", "classes shown", spread=True)]
    if len(settings.learning_rates) == 1:  # more lines would hide one another
        curves.append(Curve("level_steps", "steps to complete the level", against="level", spread=True))
    return {
        "requested": [
            (title_of(model, rate), FEATURES) for model in settings.models for rate in settings.learning_rates
        ],
        "rows": rows(members),
        "curves": curves,
    }


def rows(members: list[Member]) -> list[dict[str, Any]]:
    """Return the figures' message in numbers: steps before and after 80 classes, and the ratio of the heads by seed.

    Of several learning rates there is also the number of classes that each has reached early.
    """
    taken: dict[str, dict[str, dict[int, float]]] = {}  # metric, model, seed
    for member in sorted(
        members, key=lambda member: (member.model.startswith(TITLES["hebbian"]), _learning_rate(member))
    ):
        if member.result is not None and member.seed is not None:
            numbers = _count_steps(member)
            if len(set(map(_learning_rate, members))) > 1:
                numbers = {f"classes after {EARLY} steps": _classes_after(member, EARLY)} | numbers
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


def _count_steps(member: Member) -> dict[str, float]:
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


def _learning_rate(member: Member) -> float:
    return float(member.settings["learning_rate"])


def _classes_after(member: Member, step: int) -> float:
    result = member.result or {}
    first, added = member.settings["first_classes"], member.settings["added_classes"]
    return float(first + added * sum(completed <= step for _, completed in result["levels"]))
