"""MNIST: handwritten digits, and the permutations of their pixels that make tasks of them."""

import gzip
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_integers
from fastweights.errors import DataError, one_line
from fastweights.tasks import datasets
from fastweights.tasks._archives import DAMAGED, DataFile

SIDE = 28  # pixels
PIXELS = SIDE * SIDE
CLASSES = 10

_IMAGES, _LABELS = 0x803, 0x801  # unsigned bytes in three dimensions, and in one


class MNIST(NamedTuple):
    """The digits, with ink as 255 on paper that is 0, and which digit each is."""

    train_images: Tensor  # [60000, 28, 28], uint8
    train_labels: Tensor  # [60000], int64
    test_images: Tensor  # [10000, 28, 28], uint8
    test_labels: Tensor  # [10000], int64


def load(data_dir: str | os.PathLike[str] | None = None) -> MNIST:
    """Load all digits from the four official idx files.

    They are looked for, and downloaded, as `datasets.get` does.

    Shapes: train_images [60000, 28, 28] uint8, train_labels [60000] int64, and 10,000 of both for the test.

    Raises:
        DataError: as `datasets.get`, or a file is damaged or is not what its name says.

    Examples:
        >>> from fastweights.tasks import mnist
        >>> data = mnist.load("/data")  # doctest: +SKIP
        >>> data.test_images.shape, data.test_labels[:3].tolist()  # doctest: +SKIP
        (torch.Size([10000, 28, 28]), [7, 2, 1])
    """
    folder = datasets.get("mnist", data_dir)
    train_images, train_labels, test_images, test_labels = datasets.DATASETS["mnist"].files
    return MNIST(
        _images(folder, train_images),
        _labels(folder, train_labels),
        _images(folder, test_images),
        _labels(folder, test_labels),
    )


def permutation(seed: int, task: int) -> Tensor:
    """Return where each pixel of a task comes from, [784] int64: a pure function of its arguments.

    Every task has its pixels permuted, the first one too, as in Kirkpatrick et al. 2017 and Sprechmann et al. 2018; in
    Goodfellow et al. 2013 the first is MNIST as it is, which is the same to a network without a notion of neighbours.

    Raises:
        ValueError: an argument is negative.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import mnist
        >>> images = torch.zeros(5, 28, 28, dtype=torch.uint8)
        >>> images.flatten(1)[:, mnist.permutation(seed=1, task=0)].shape
        torch.Size([5, 784])
    """
    check_integers(0, seed=seed, task=task)
    return torch.from_numpy(np.random.default_rng([seed, task]).permutation(PIXELS))


def _images(folder: Path, file: DataFile) -> Tensor:
    count = (file.size - 16) // PIXELS
    pixels = _read(folder, file, (_IMAGES, count, SIDE, SIDE), f"{count:,} images of {SIDE} x {SIDE} pixels")
    return pixels.view(count, SIDE, SIDE)


def _labels(folder: Path, file: DataFile) -> Tensor:
    count = file.size - 8
    labels = _read(folder, file, (_LABELS, count), f"{count:,} labels, 0 to {CLASSES - 1}")
    if int(labels.max()) >= CLASSES:
        raise DataError(_describe_fault(folder, file, f"it has a label {int(labels.max())}", f"0 to {CLASSES - 1}"))
    return labels.long()


def _read(folder: Path, file: DataFile, header: tuple[int, ...], right: str) -> Tensor:
    """Return the bytes after the header, which must be this one."""
    form = f">{len(header)}I"
    length = struct.calcsize(form)
    try:
        with gzip.open(folder / file.name) as stream:
            data = stream.read(file.size + 1)  # one byte more shows that there are too many
    except (OSError, *DAMAGED) as error:
        raise DataError(_describe_fault(folder, file, f"cannot be read: {one_line(error)}", right)) from error
    found = struct.unpack_from(form, data) if len(data) >= length else ()
    if found != header:
        raise DataError(_describe_fault(folder, file, f"it begins with {list(found)}, not with {list(header)}", right))
    if len(data) != file.size:
        most = " or more" if len(data) > file.size else ""
        raise DataError(_describe_fault(folder, file, f"it has {len(data):,} bytes{most}, not {file.size:,}", right))
    return torch.frombuffer(bytearray(data[length:]), dtype=torch.uint8)


def _describe_fault(folder: Path, file: DataFile, reason: str, right: str) -> str:
    return f"{folder / file.name}: {reason}; expected {right}: get it again from {file.url}"
