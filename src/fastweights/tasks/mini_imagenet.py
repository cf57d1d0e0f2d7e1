"""mini-ImageNet: 100 classes of ImageNet in images of 84 x 84 pixels (Vinyals et al. 2016), as split by Ravi and
Larochelle.

The splits are of classes: 64 to learn from, 16 to validate on and 20 to test on. The files known here have the first
200 of the 600 images of each class.
"""

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import DataError
from fastweights.tasks import datasets
from fastweights.tasks._archives import read_images
from fastweights.tasks._packed import Arrays, load_or_make

PIXELS = 84  # the side of an image
SPLITS = {"train": 64, "val": 16, "test": 20}  # classes

_FORMAT = 1  # version of the packed file: another number leaves older files alone


class MiniImageNet(NamedTuple):
    """The images, class after class, and what they are of."""

    images: Tensor  # [classes, images, 3, 84, 84], uint8: red, green and blue
    names: list[str]  # names of the classes, such as n01532829 of WordNet
    splits: Tensor  # [classes], int64: 0 to learn from, 1 to validate on, 2 to test on


def load(data_dir: str | os.PathLike[str] | None = None) -> MiniImageNet:
    """Load all images from images.zip and the three lists.

    They are looked for as `datasets.get` does. The first call decodes them and packs the pixels, 423 MB, into the
    user's cache, from which later calls read; a cache that cannot be written is not an error. Classes are in the order
    of train.csv, val.csv and test.csv, images in that of their lines.

    Shapes: images [100, 200, 3, 84, 84] uint8; splits [100] int64.

    Raises:
        DataError: as `datasets.get`, or the archive is damaged, or does not hold what the lists name.

    Examples:
        >>> from fastweights.tasks import mini_imagenet
        >>> data = mini_imagenet.load("/data")  # doctest: +SKIP
        >>> data.images.shape, data.names[0]  # doctest: +SKIP
        (torch.Size([100, 200, 3, 84, 84]), 'n01532829')
    """
    folder = datasets.get("mini-imagenet", data_dir)
    lists = [folder / f"{split}.csv" for split in SPLITS]
    archive = folder / "images.zip"
    arrays = load_or_make(
        f"mini-imagenet-{_FORMAT}", ("images", "names", "splits"), [archive, *lists], lambda: _decode(archive, lists)
    )
    return MiniImageNet(
        torch.from_numpy(arrays["images"]), arrays["names"].tolist(), torch.from_numpy(arrays["splits"])
    )


def augment(
    images: Tensor,
    size: int,
    *,
    least_area: float = 0.5,
    light: float = 0.4,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Cut a part out of each image and mirror every other: [B,3,S,S] uint8 or float -> [B,3,size,size] float.

    The part has `least_area` to 1 of the area and 3/4 to 4/3 of the proportions; each image is brightened and given
    contrast by up to `light` either way. Without a generator what is drawn is torch's own, as dropout.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.mini_imagenet import augment
        >>> augment(torch.rand(2, 3, 84, 84), size=64).shape
        torch.Size([2, 3, 64, 64])
    """
    count, device = len(images), images.device
    where = device if generator is None else generator.device
    area, proportion, across, down, mirror, brightness, contrast = torch.rand(
        7, count, generator=generator, device=where
    ).to(device)
    side = (area * (1 - least_area) + least_area).sqrt()
    stretch = (4 / 3) ** (proportion - 0.5)
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    transform = torch.zeros(count, 2, 3, device=device)
    transform[:, 0, 0], transform[:, 1, 1] = torch.where(mirror < 0.5, -width, width), height
    transform[:, 0, 2], transform[:, 1, 2] = (2 * across - 1) * (1 - width), (2 * down - 1) * (1 - height)
    grid = F.affine_grid(transform, [count, 3, size, size], align_corners=False)
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images
    cut = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
    mean = cut.mean((1, 2, 3), keepdim=True)
    gains = (1 - light + 2 * light * torch.stack([contrast, brightness])).view(2, -1, 1, 1, 1)
    lit: Tensor = (cut - mean) * gains[0] + mean * gains[1]
    return lit.clamp(0, 1)


def _decode(archive: Path, lists: Iterable[Path]) -> Arrays:
    """Return the arrays to pack: the fields of `MiniImageNet`."""
    files: dict[str, list[str]] = {}  # file names of each class
    splits: list[int] = []
    for index, path in enumerate(lists):
        classes = _read_list(path)
        expected = SPLITS[path.stem]
        if len(classes) != expected or classes.keys() & files.keys():
            shared = len(classes.keys() & files.keys())
            raise DataError(
                f"{path}: it names {len(classes)} classes, {shared} of them in the lists before; expected {expected}, "
                "none of them"
            )
        files |= classes
        splits += [index] * len(classes)
    counts = {len(names) for names in files.values()}
    if len(counts) != 1:
        raise DataError(
            f"{archive.parent}: its lists name {min(counts)} to {max(counts)} images of a class; expected equal numbers"
        )
    places = {name: (index, number) for index, names in enumerate(files.values()) for number, name in enumerate(names)}
    images = np.empty((len(files), counts.pop(), 3, PIXELS, PIXELS), np.uint8)
    found = 0
    try:
        for member, image in read_images(archive, PIXELS, colour=True):
            place = places.pop(member.rpartition("/")[2], None)
            if place is None:
                raise DataError(f"its member {member!r} is in no list, or in the lists twice")
            images[place] = image.transpose(2, 0, 1)
            found += 1
        if places:
            raise DataError(f"it has {found:,} images, without {next(iter(places))}")
    except DataError as error:
        raise DataError(f"{archive}: {error}; expected the images of the lists beside it") from error
    return {"images": images, "names": np.array(list(files)), "splits": np.array(splits, np.int64)}


def _read_list(path: Path) -> dict[str, list[str]]:
    """Return the file names of each class of a list, in the order of its lines."""
    classes: dict[str, list[str]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = csv.reader(stream)
            header = next(rows, [])
            if header != ["filename", "label"]:
                raise DataError(f"{path}: its first line is {','.join(header)!r}; expected 'filename,label'")
            for row in rows:
                if len(row) != 2:
                    raise DataError(f"{path}, line {rows.line_num}: {','.join(row)!r} is not a file name and a label")
                classes.setdefault(row[1], []).append(row[0])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return classes
