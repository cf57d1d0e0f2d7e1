"""Images of old and new classes, the residual network that was trained on the old ones, and what it makes of all."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.reproduce._resnet import ResNet, augment
from fastweights.runs import RunFolder
from fastweights.tasks import image_folder, mini_imagenet
from fastweights.training import Progress, Schedule, epoch_order, train

_BLOCK = 256  # images that are embedded at once
PARTS = ("train", "validation", "test")


class Images(NamedTuple):
    """Images of all classes, parted by image."""

    images: Tensor  # [N,3,S,S] uint8
    labels: Tensor  # [N] int64
    part: Tensor  # [N] int64: to learn from, to validate and to test on, as PARTS
    names: list[str]  # of the classes


class Features(NamedTuple):
    """What a softmax layer is given of a split of the classes."""

    parts: dict[str, tuple[Tensor, Tensor]]  # activations [n,d] and labels [n]: the old classes come first
    old: int  # classes
    head: nn.Linear  # on all classes: as pre-trained on the old ones, zero for the new


@dataclass(frozen=True)
class Encoder:
    """How the residual network is trained on the old classes."""

    width: int
    epochs: int
    learning_rate: float
    weight_decay: float
    dropout: float
    label_smoothing: float
    batch_size: int
    crop_size: int
    half: bool


def load(images: Path | None, data_dir: Path | None, *, most: int, validation: int, test: int) -> Images:
    """mini-ImageNet, or a user's folder of classes: of each class the first `test` images are to test on, the next
    `validation` to validate on, and the rest to learn from.

    Raises:
        DataError: the images are not there or damaged.
        ValueError: a class has too few of them.
    """
    if images is None:
        data = mini_imagenet.load(data_dir)
        pixels = data.images[:, :most].flatten(0, 1)
        labels = torch.arange(len(data.names)).repeat_interleave(data.images[:, :most].shape[1])
        names = data.names
    else:
        pixels, labels, names = image_folder.load(images, most=most)
    if len(names) < 4:
        raise ValueError(f"{len(names)} classes cannot be parted into old and new ones: give at least four")
    counts = labels.bincount(minlength=len(names))
    if int(counts.min()) <= test + validation:
        name, least = names[int(counts.argmin())], int(counts.min())
        raise ValueError(
            f"class {name} has {least} images, of which {test} are to test and {validation} to validate on: none is "
            "left to learn from"
        )
    number = within_class(labels)
    part = torch.where(number < test, 2, torch.where(number < test + validation, 1, 0))
    return Images(pixels, labels, part, names)


def within_class(labels: Tensor) -> Tensor:
    """The number of each example among those of its class, [N] int64 -> [N].

    Examples:
        >>> import torch
        >>> from fastweights.reproduce._incremental_data import within_class
        >>> within_class(torch.tensor([1, 0, 1, 1, 0]))
        tensor([0, 0, 1, 2, 1])
    """
    number = torch.empty_like(labels)
    number[labels.argsort(stable=True)] = torch.cat([torch.arange(int(count)) for count in labels.bincount()])
    return number


def features(data: Images, seed: int, encoder: Encoder, folder: RunFolder, device: str, progress: Progress) -> Features:
    """Train the network of a split, or take it up again, and let it embed every image.

    The split is drawn by the seed: half of the classes are old, and the classes are numbered anew in its order.
    """
    labels = renumbered(data, seed).argsort()[data.labels]
    old = len(data.names) // 2
    with folder, torch.random.fork_rng():
        torch.manual_seed(seed)
        body = ResNet(encoder.width, half=encoder.half)
        head = nn.Linear(body.features, old)
        network = nn.Sequential(body, nn.Dropout(encoder.dropout), head).to(device)
        _train(network, _of_classes(data, labels, old, device), seed, encoder, folder, progress)
    network.eval()
    progress.note("the network embeds all images")
    with torch.no_grad():
        activations = torch.cat([body(images.to(device)) for images in torch.split(data.images, _BLOCK)])
        wider = nn.Linear(body.features, len(data.names)).to(device)
        for mine, theirs in ((wider.weight, head.weight), (wider.bias, head.bias)):
            mine.zero_()[:old] = theirs
    parts = {
        name: (activations[(data.part == index).to(device)], labels[data.part == index].to(device))
        for index, name in enumerate(PARTS)
    }
    return Features(parts, old, wider)


def renumbered(data: Images, seed: int) -> Tensor:
    """The classes in the order in which a split numbers them, [classes] int64: the first half is old."""
    return epoch_order(len(data.names), seed, 0)


def _of_classes(data: Images, labels: Tensor, old: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    chosen = {name: (data.part == index) & (labels < old) for index, name in enumerate(PARTS)}
    return {name: (data.images[where].to(device), labels[where].to(device)) for name, where in chosen.items()}


def _train(
    network: nn.Sequential,
    parts: dict[str, tuple[Tensor, Tensor]],
    seed: int,
    encoder: Encoder,
    folder: RunFolder,
    progress: Progress,
) -> None:
    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            network(augment(images, encoder.crop_size)), labels, label_smoothing=encoder.label_smoothing
        )

    optimizer = torch.optim.SGD(
        network.parameters(), lr=encoder.learning_rate, momentum=0.9, nesterov=True, weight_decay=encoder.weight_decay
    )
    schedule = Schedule(
        epochs=encoder.epochs,
        batch_size=encoder.batch_size,
        learning_rate=encoder.learning_rate,
        annealing="cosine",
        patience=encoder.epochs,
    )
    title = f"residual network, split {seed}"
    train(network, parts, schedule, folder, seed=seed, loss=loss, optimizer=optimizer, title=title, progress=progress)
