"""Incremental classes, table 1 and figures 4 to 7 of Sprechmann et al. 2018: MbPA as a network meets new classes.

Section 4.2 of "Memory-based parameter adaptation". A residual network is trained on half of the classes of
mini-ImageNet, or of a user's folder of images; then its softmax layer is shown all of them.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_between, check_choice
from fastweights.processes import refuse_several
from fastweights.reproduce._experiment import check_settings, except_for, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.sprechmann2018._stream import (
    PARTS,
    Features,
    Images,
    Method,
    ModelName,
    StreamLearner,
    finish,
    follow,
    load_images,
    order_classes,
    write_picture,
)
from fastweights.runs import Curve, Member, Progress, Record, RunFolder, read_members
from fastweights.tasks import mini_imagenet
from fastweights.training import Schedule, train

EXPERIMENT = "sprechmann2018/incremental-classes"
QUICK_MINUTES = 10  # a run on an AMD EPYC: 556 s of one core
DATA = "mini-imagenet"

REPORTED = (0.1, 1.0, 3.0)  # passes over the stream
TITLES: dict[ModelName, str] = {
    "mbpa": "MbPA",
    "non-parametric": "Non-parametric",
    "mixture": "Mixture",
    "parametric": "Parametric",
}
# The paper's per cent, on ImageNet: top-1 and the area under its curve after each of REPORTED.
PAPER: dict[tuple[str, ModelName], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("novel", "mbpa"): ((46.2, 64.5, 65.7), (27.4, 57.7, 63.0)),
    ("novel", "non-parametric"): ((40.0, 53.3, 52.9), (28.3, 47.9, 51.8)),
    ("novel", "mixture"): ((31.6, 56.0, 59.1), (18.6, 47.4, 54.7)),
    ("novel", "parametric"): ((16.2, 53.6, 57.9), (5.7, 41.7, 51.9)),
    ("pre-trained", "mbpa"): ((68.5, 70.9, 70.9), (71.4, 70.3, 70.3)),
    ("pre-trained", "non-parametric"): ((62.7, 69.4, 70.0), (45.9, 65.8, 68.7)),
    ("pre-trained", "mixture"): ((71.9, 70.3, 70.2), (74.8, 70.6, 70.1)),
    ("pre-trained", "parametric"): ((71.4, 68.1, 68.8), (76.0, 68.6, 68.3)),
}

PAPER_IMAGES = 1_281_167 / 1000  # images of each class that an epoch of the paper shows: ImageNet's

SUBSETS = {"novel": "novel_accuracy", "pre-trained": "pretrained_accuracy"}
_EMBEDDED = 256  # images at once
_BLOCKS = 2  # blocks of each of the residual network's four widths, as in ResNet-18
_MEAN, _DEVIATION = (
    (0.47, 0.45, 0.40),
    (0.28, 0.27, 0.28),
)  # mean and deviation of ImageNet's red, green and blue, 0 to 1
# What decides the numbers of a residual network, under the names of its settings.json.
_OF_ENCODER = {
    "width": "width",
    "epochs": "encoder_epochs",
    "learning_rate": "encoder_learning_rate",
    "weight_decay": "encoder_weight_decay",
    "dropout": "encoder_dropout",
    "label_smoothing": "label_smoothing",
    "batch_size": "encoder_batch_size",
    "crop_size": "crop_size",
    "half": "half",
}
# What decides the numbers of a method, under the names of its settings.json.
_OF_METHOD = {
    "learning_rate": "learning_rates",
    "capacity": "capacities",
    "neighbours": "neighbours",
    "mixing": "mixing",
    "steps": "steps",
    "local_rate": "local_rate",
    "optimizer": "optimizer",
}
_VARIED = ("learning_rates", "capacities", "neighbours")  # several numbers of one make a row for each


@dataclass(frozen=True)
class Settings:
    """A network that knows half of the classes is shown all of them: which method answers soonest."""

    models: tuple[ModelName, ...] = ("mbpa", "non-parametric", "mixture", "parametric")
    """Models to train and test, each a row of the table."""
    seeds: tuple[int, ...] = (2, 3)
    """Seeds of the splits of the classes into old and new, a split for each; the settings were chosen on seed 1."""

    images: Path | None = None
    """Folder with a folder of images for each class, such as ImageNet's training set; by default mini-ImageNet."""
    images_per_class: int = 200
    """Images used of each class: the first ones."""
    test_images: int = 40
    """Images of each class to test on."""
    validation_images: int = 20
    """Images of each class to validate on; the rest are for training."""

    width: int = 32
    """Residual network: channels of its first blocks; its output has 8 times as many."""
    encoder_epochs: int = 45
    """Residual network: passes over the old classes."""
    encoder_learning_rate: float = 0.05
    """Residual network: learning rate of gradient descent with momentum; it falls along a cosine to zero."""
    encoder_weight_decay: float = 5e-4
    """Residual network: decay of its weights in a step, as a multiple of the learning rate."""
    encoder_dropout: float = 0.1
    """Residual network: dropout on its activations, in training."""
    encoder_batch_size: int = 32
    """Residual network: images in a step."""
    label_smoothing: float = 0.1
    """Residual network: fraction of each label that is spread evenly over all classes."""
    crop_size: int = 64
    """Residual network: side, in pixels, of the part cut out of an image in training; tests take whole images."""
    half: bool = False
    """Residual network: compute in bfloat16 where that is safe; several times as fast on processors with AMX."""
    encoders: Path | None = None
    """Folder of the residual networks, for runs to share; by default `encoders` in the run's. --fresh leaves it."""

    epochs: float = 3.0
    """Passes over all classes."""
    scarce: float = 1.0
    """Fraction of the images kept for every second new class, for figure 5."""
    batch_size: int = 32
    """Images in a step of the softmax layer."""
    learning_rates: tuple[float, ...] = except_for(
        ("non-parametric",),
        (3e-3,),
        "Learning rates of Adam for the softmax layer; several give figure 6, a row for each.",
    )
    capacities: tuple[int, ...] = except_for(
        ("parametric",), (20_000,), "Entries of the memory; several give figure 6, a row for each."
    )
    neighbours: tuple[int, ...] = except_for(
        ("parametric",), (50,), "Entries that a query retrieves; several give figure 7, a row for each."
    )
    mixing: float = only("mixture", 0.5, "Weight of the parametric model in the mixture: lambda of equation 5.")
    steps: int = only("mbpa", 10, "Steps of local adaptation.")
    local_rate: float = only("mbpa", 0.001, "Learning rate of local adaptation.")
    optimizer: str = only("mbpa", "rmsprop", "Optimizer of local adaptation: sgd, rmsprop or adam.")

    data_dir: Path | None = None
    """Folder that has the folder of mini-ImageNet; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""


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


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Train a residual network for every split, show its softmax layer all classes.

    Raises:
        DataError: the images are missing or damaged.
    """
    refuse_several(EXPERIMENT)
    with one_line_errors():
        data = load_images(settings)
    of_images = {"images": None if settings.images is None else str(settings.images)}
    of_images |= {name: getattr(settings, name) for name in ("images_per_class", "test_images", "validation_images")}
    of_encoder = {name: getattr(settings, field) for name, field in _OF_ENCODER.items()}
    shared = {name: getattr(settings, name) for name in ("epochs", "scarce", "batch_size")} | of_images
    shared |= {f"encoder {name}": value for name, value in of_encoder.items()}
    members = {}
    for seed in settings.seeds:  # split after split, so that only one is in memory
        for method in methods(settings):
            title = title_of(settings, method)
            own = {"model": title, "hidden_size": 8 * settings.width, "seed": seed} | shared
            name = re.sub(r"[^a-z0-9.]+", "-", f"{title}-seed{seed}".lower())
            members[method, seed] = RunFolder(Path(folder, name), own | describe_method(settings, method))

    @functools.lru_cache(maxsize=1)
    def features(seed: int, progress: Progress) -> Features:
        own = {"model": "ResNet", "hidden_size": 8 * settings.width, "seed": seed} | of_encoder | of_images
        # Networks of other settings have other names: they stay side by side, and --fresh leaves them alone.
        digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]
        encoder = RunFolder((settings.encoders or Path(folder, "encoders")) / f"seed{seed}-{digest}", own)
        return embed(data, seed, settings, encoder, progress)

    def train_member(method: Method, seed: int, member: RunFolder, progress: Progress) -> None:
        inputs = features(seed, progress)
        learner = StreamLearner(inputs, method, seed=seed, scarce=settings.scarce, batch_size=settings.batch_size)
        title = f"{title_of(settings, method)}, split {seed}"
        curve = follow(learner, settings.epochs, member, title, progress)
        if method.model == "mbpa":
            write_picture(member.path / "neighbours.png", learner, data)
        finish(learner, curve, member, progress)

    return Members(members, train_member, lambda: table(settings, read_members(folder)), skip_finished=True)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    images = ("images_per_class", "test_images", "validation_images")
    network = ("width", "encoder_epochs", "crop_size", "encoder_batch_size")
    sizes = (*images, *network, "batch_size", "capacities", "neighbours", "steps")
    check_settings(settings, sizes=sizes, lists=("models", "seeds", *_VARIED))
    if not 0 < settings.epochs <= 1000:
        raise ValueError(f"epochs must be more than 0 and at most 1,000, got {settings.epochs}")
    if not 0 < settings.scarce <= 1:
        raise ValueError(f"scarce must be a fraction, more than 0 and at most 1, got {settings.scarce}")
    check_between(0, 1, **{name: getattr(settings, name) for name in ("mixing", "encoder_dropout", "label_smoothing")})
    for learning_rate in (*settings.learning_rates, settings.encoder_learning_rate, settings.local_rate):
        if not 0 < learning_rate < 100:
            raise ValueError(f"learning rates must be positive and less than 100, got {learning_rate}")
    check_choice(("sgd", "rmsprop", "adam"), optimizer=settings.optimizer)


def methods(settings: Settings) -> list[Method]:
    """Return the rows, each once: the parametric model has no memory, and the non-parametric one does not learn."""
    adaptation = settings.mixing, settings.steps, settings.local_rate, settings.optimizer
    rows = []
    for model in settings.models:
        own = settings_of(settings, model)
        varied = (getattr(settings, name)[: None if name in own else 1] for name in _VARIED)
        for learning_rate, capacity, neighbours in itertools.product(*varied):
            rows.append(Method(model, learning_rate, capacity, neighbours, *adaptation))
    return rows


def describe_method(settings: Settings, method: Method) -> Record:
    """Return the settings that decide a method's numbers, for its settings.json: no method has all of them."""
    own, values = settings_of(settings, method.model), vars(method)
    values = values | {"local_rate": method.local_learning_rate}
    return {name: values[name] for name, field in _OF_METHOD.items() if field in own}


def title_of(settings: Settings, method: Method) -> str:
    """Return a row's name, which has those of the method's settings that vary."""
    words = {
        "learning_rates": f"learning rate {method.learning_rate:g}",
        "capacities": f"{method.capacity:,} entries",
        "neighbours": f"{method.neighbours} neighbours",
    }
    own = settings_of(settings, method.model)
    return ", ".join([TITLES[method.model], *(text for name, text in words.items() if len(own.get(name, ())) > 1)])


class ResNet(nn.Module):
    """A residual network of 18 layers, the first at half the resolution of the images (He et al. 2016, basic blocks).

    Shapes: images [B,3,S,S], uint8 or float of 0 to 1 -> [B,8 * width] float32.

    Args:
        width: channels of the first blocks; the others have 2, 4 and 8 times as many.
        half: compute in bfloat16 where that is safe (autocast): twice as fast on a processor that multiplies matrices
            of it (AMX), slow on others.

    Examples:
        >>> import torch
        >>> from fastweights.reproduce.sprechmann2018.incremental_classes import ResNet
        >>> ResNet(width=4)(torch.rand(2, 3, 84, 84)).shape
        torch.Size([2, 32])
    """

    def __init__(self, width: int, *, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU())
        channels = width
        for stage in range(4):
            for block in range(_BLOCKS):
                layers.append(_Block(channels, width * 2**stage, stride=2 if stage and not block else 1))
                channels = width * 2**stage
        self.features = channels
        self.layers = nn.Sequential(*layers)
        # Channels side by side in memory: on a processor a step takes half the time. With fewer channels than a
        # register has places oneDNN's gradient of a strided 1 x 1 convolution writes past its memory (its issue 6035).
        if width >= 16:
            self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        centred = (pixels - self.mean) / self.deviation  # type: ignore[operator]
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half_precision):
            activations: Tensor = self.layers(centred)
        return activations.float().mean((2, 3))


class _Block(nn.Module):
    """relu(x + F(x)), F two convolutions; where the shape changes x passes a convolution of 1 x 1 (He et al., eq 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + cast(Tensor, self.second_norm(self.second(inner))))


def embed(data: Images, seed: int, settings: Settings, folder: RunFolder, progress: Progress) -> Features:
    """Train the network of a split, or take it up again, and let it embed every image.

    The split is drawn by the seed: half of the classes are old, and the classes are numbered again in its order.
    """
    device = settings.device
    labels = order_classes(data, seed).argsort()[data.labels]
    old = len(data.names) // 2
    with folder, torch.random.fork_rng():
        torch.manual_seed(seed)
        body = ResNet(settings.width, half=settings.half)
        head = nn.Linear(body.features, old)
        network = nn.Sequential(body, nn.Dropout(settings.encoder_dropout), head).to(device)
        chosen = {name: (data.part == index) & (labels < old) for index, name in enumerate(PARTS)}
        parts = {name: (data.images[where].to(device), labels[where].to(device)) for name, where in chosen.items()}
        train_encoder(network, parts, seed, settings, folder, progress)
    network.eval()
    progress.note("the network embeds all images")
    with torch.no_grad():
        activations = torch.cat([body(images.to(device)) for images in torch.split(data.images, _EMBEDDED)])
        wider = nn.Linear(body.features, len(data.names)).to(device)
        for mine, theirs in ((wider.weight, head.weight), (wider.bias, head.bias)):
            mine.zero_()[:old] = theirs
    parts = {
        name: (activations[(data.part == index).to(device)], labels[data.part == index].to(device))
        for index, name in enumerate(PARTS)
    }
    return Features(parts, old, wider)


def train_encoder(
    network: nn.Sequential,
    parts: dict[str, tuple[Tensor, Tensor]],
    seed: int,
    settings: Settings,
    folder: RunFolder,
    progress: Progress,
) -> None:
    """Train a residual network on parts of the images, with its best epoch on validation kept."""

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits = network(mini_imagenet.augment(images, settings.crop_size))
        return F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing)

    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=settings.encoder_learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=settings.encoder_weight_decay,
    )
    schedule = Schedule(
        epochs=settings.encoder_epochs,
        batch_size=settings.encoder_batch_size,
        learning_rate=settings.encoder_learning_rate,
        annealing="cosine",
        patience=settings.encoder_epochs,
    )
    title = f"residual network, split {seed}"
    train(network, parts, schedule, folder, seed=seed, loss=loss, optimizer=optimizer, title=title, progress=progress)


def table(settings: Settings, members: list[Member]) -> dict[str, Any]:
    """Return the table's rows, and the curves of figures 4 and 5."""
    titles = {title_of(settings, method): method.model for method in methods(settings)}
    scarce = settings.scarce < 1
    kinds = {"accuracy": "all", "novel_accuracy": "novel", "pretrained_accuracy": "pre-trained"}
    kinds |= {"scarce_accuracy": "scarce novel"} if scarce else {}
    paper = settings.images is None and not scarce
    return {
        "requested": [(title, 8 * settings.width) for title in titles],
        "rows": rows(members, titles, settings.epochs, scarce=scarce, paper=paper),
        "curves": [
            Curve(key, f"{kind} classes, top-1, %", against="passes", spread=True) for key, kind in kinds.items()
        ],
    }


def rows(
    members: list[Member], models: Mapping[str, ModelName], epochs: float, *, scarce: bool, paper: bool
) -> list[dict[str, Any]]:
    """Return the table's rows, subset by subset: top-1 and area of the finished members of each title.

    With `paper` its numbers stand beside those of its own four methods, where as many images of each class were shown:
    an epoch of ImageNet shows nine times as many as one of mini-ImageNet.
    """
    table_rows = []
    marks = sorted({*(mark for mark in REPORTED if mark <= epochs), epochs})
    for subset, key in {**SUBSETS, **({"scarce novel": "scarce_accuracy"} if scarce else {})}.items():
        for kind, name in enumerate(("top-1", "area under the curve")):
            for mark in marks:
                for title, model in models.items():
                    index = _as_in_the_paper(members, mark) if paper and title == TITLES[model] else None
                    curves = read_curves(members, title, key)
                    table_rows.append(
                        {
                            "model": title,
                            "hidden_size": next((m.hidden_size for m in members if m.model == title), None),
                            "metric": f"{subset}, {name} after {mark:g} epochs, %",
                            "ours": [(area(curve, mark) if kind else dict(curve)[mark]) for curve in curves],
                            "paper": None if index is None else PAPER[subset, model][kind][index],
                            "floor": None,
                        }
                    )
    return table_rows


def images_shown(member: Member) -> int:
    """Return how many images of each class a pass shows."""
    own = member.settings
    return int(own["images_per_class"] - own["test_images"] - own["validation_images"])


def _as_in_the_paper(members: list[Member], mark: float) -> int | None:
    """Return which of REPORTED showed about as many images of a class, in the paper, as `mark` passes do here."""
    if not members:
        return None
    shown = mark * images_shown(members[0])
    return next((i for i, epoch in enumerate(REPORTED) if 0.8 < shown / (epoch * PAPER_IMAGES) < 1.25), None)


def area(curve: list[tuple[float, float]], until: float) -> float:
    """Return the mean height of a curve of (epochs, score) from 0 to `until`, by trapezia.

    Examples:
        >>> from fastweights.reproduce.sprechmann2018.incremental_classes import area
        >>> area([(0.0, 0.0), (1.0, 10.0), (3.0, 10.0)], until=3.0)
        8.333333333333334
    """
    inside = [point for point in curve if point[0] <= until]
    pairs = itertools.pairwise(inside)
    return sum((later - first) * (one + other) / 2 for (first, one), (later, other) in pairs) / until


def read_curves(members: list[Member], title: str, key: str) -> list[list[tuple[float, float]]]:
    """Return the curves of a row's finished members by seed, each of (epochs, accuracy)."""
    finished = sorted((m for m in members if m.model == title and m.result), key=lambda member: member.seed or 0)
    return [[(point["passes"], point[key]) for point in member.epochs] for member in finished]
