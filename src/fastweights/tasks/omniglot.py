"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people (Lake et al. 2015, Science 350).

Its classes come in the curriculum of Rae et al. 2018, section 4.1, and in the few-shot tasks of Munkhdalai & Trischler
2018. Both resize the drawings of 105 x 105 pixels to 28 x 28; what their texts leave open:

- How they are resized. Here by the mean over the area of each new pixel, in whole numbers, so that every machine
  computes the same bits.
- How far they are shifted ("a small amount of data augmentation ... (rotation in [-30, 30], translation)"). Here by up
  to 2 pixels of 28, `SHIFT`, in both directions; and the angles and shifts are drawn uniformly.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_choice, check_not_negative
from fastweights.errors import DataError
from fastweights.tasks import datasets
from fastweights.tasks._archives import DataFile, read_images
from fastweights.tasks._packed import Arrays, load_or_make
from fastweights.tasks.image_files import area_means

PIXELS = 105  # the side of a drawing in the archives
CLASSES = 1623  # classes of both archives
DRAWINGS = 20  # drawings of each class
TEST_DRAWINGS = 5  # test drawings of each class, in the curriculum
FEW_SHOT_CLASSES = 1200  # classes for training and validation in the few-shot tasks
VALIDATION_CLASSES = 100  # classes out of these for validation
DEGREES = 30.0  # largest angle by which drawings are turned, either way
SHIFT = 2.0  # pixels, either way
VALIDATION_ALPHABETS = 3  # out of the background's 30: about as many classes

_MEMBER = re.compile(r"(images_\w+)/([^/]+)/([^/]+)/\d+_(\d\d)\.png")
_FORMAT = 1  # version of the packed file: another number leaves older files alone


class Omniglot(NamedTuple):
    """The drawings, with ink as 255 on paper that is 0, and the names of what was drawn."""

    images: Tensor  # [classes, 20, size, size], uint8
    alphabets: list[str]
    alphabet: Tensor  # [classes], int64: which of the alphabets a class is of
    names: list[str]  # names of the classes: alphabet/character
    background: int  # number of classes from images_background, which come first; the others are from images_evaluation


def load(data_dir: str | os.PathLike[str] | None = None, *, size: int = 28) -> Omniglot:
    """Load all drawings, of `size` x `size` pixels, from the two official zip files.

    They are looked for, and downloaded, as `datasets.get` does. The first call decodes them and packs the drawings into
    the user's cache, from which later calls read; the folder of the data is never written to, and a cache that cannot
    be is not an error. Classes are ordered by name within each archive, the background's before the evaluation's;
    drawings by their number, 01 to 20.

    Shapes: images [1623, 20, size, size] uint8, the mean over the area of each pixel, 255 where all is ink and 0 where
    all is paper; alphabet [1623] int64.

    Raises:
        DataError: as `datasets.get`, or an archive is damaged or does not hold the 964 or 659 classes of 20 drawings.
        ValueError: `size` is not between 1 and 105.

    Examples:
        >>> from fastweights.tasks import omniglot
        >>> data = omniglot.load("/data")  # doctest: +SKIP
        >>> data.images.shape, data.names[0]  # doctest: +SKIP
        (torch.Size([1623, 20, 28, 28]), 'Alphabet_of_the_Magi/character01')
        >>> try:
        ...     omniglot.load(size=224)
        ... except ValueError as error:
        ...     print(error)
        size must lie between 1 and 105, the pixels of the drawings themselves, got 224
    """
    if not 1 <= size <= PIXELS:
        raise ValueError(f"size must lie between 1 and {PIXELS}, the pixels of the drawings themselves, got {size}")
    folder = datasets.get("omniglot", data_dir)
    files = datasets.DATASETS["omniglot"].files
    paths = [folder / file.name for file in files]
    fields = ("images", "alphabets", "alphabet", "names", "background")
    arrays = load_or_make(f"omniglot-{_FORMAT}-{size}", fields, paths, lambda: _decode(folder, files, size))
    return Omniglot(
        torch.from_numpy(arrays["images"]),
        arrays["alphabets"].tolist(),
        torch.from_numpy(arrays["alphabet"]),
        arrays["names"].tolist(),
        int(arrays["background"]),
    )


def curriculum_split(data: Omniglot) -> tuple[Tensor, Tensor]:
    """Part the drawings as Rae et al. 2018, section 4.1: the first 5 of each class are for the test, 15 for training.

    Shapes: train [classes, 15, size, size] and test [classes, 5, size, size], views of `data.images`.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import omniglot
        >>> images = torch.zeros(2, 20, 28, 28, dtype=torch.uint8)
        >>> data = omniglot.Omniglot(images, ["Greek"], torch.tensor([0, 0]), ["Greek/alpha", "Greek/beta"], 2)
        >>> train, test = omniglot.curriculum_split(data)
        >>> train.shape, test.shape
        (torch.Size([2, 15, 28, 28]), torch.Size([2, 5, 28, 28]))
    """
    return data.images[:, TEST_DRAWINGS:], data.images[:, :TEST_DRAWINGS]


class FewShotSplit(NamedTuple):
    """The classes to train on, to validate on and to test on; no class is in two of them."""

    train: Tensor  # [classes], int64
    validation: Tensor
    test: Tensor


def few_shot_split(data: Omniglot, *, by: Literal["class", "alphabet"] = "class", seed: int = 0) -> FewShotSplit:
    """Part the classes for few-shot tasks.

    By class, as Munkhdalai & Trischler 2018, section 5.1: 1,200 drawn at random, 100 of them to validate on, and the
    other 423 to test on; a test class may be of an alphabet that was learnt from. By alphabet, as the archives are
    meant: the 20 alphabets of images_evaluation to test on, 3 drawn of the 30 of images_background to validate on and
    the other 27 to learn from.

    Args:
        data: all drawings.
        by: "class" or "alphabet".
        seed: of the draw.

    Raises:
        ValueError: `by` is neither, or `data` has other than 1,623 classes.

    Examples:
        >>> from fastweights.tasks import omniglot
        >>> data = omniglot.load("/data")  # doctest: +SKIP
        >>> [len(classes) for classes in omniglot.few_shot_split(data)]  # doctest: +SKIP
        [1100, 100, 423]
    """
    check_choice(("class", "alphabet"), by=by)
    if len(data.images) != CLASSES:
        raise ValueError(f"the split needs Omniglot's {CLASSES} classes, got {len(data.images)}")
    generator = torch.Generator().manual_seed(seed)
    if by == "class":
        order = torch.randperm(CLASSES, generator=generator)
        learnt = FEW_SHOT_CLASSES - VALIDATION_CLASSES
        return FewShotSplit(order[:learnt], order[learnt:FEW_SHOT_CLASSES], order[FEW_SHOT_CLASSES:])
    known = torch.unique(data.alphabet[: data.background])
    kept = known[torch.randperm(len(known), generator=generator)[:VALIDATION_ALPHABETS]]
    held_out = torch.isin(data.alphabet[: data.background], kept)
    classes = torch.arange(CLASSES)
    return FewShotSplit(
        classes[: data.background][~held_out], classes[: data.background][held_out], classes[data.background :]
    )


def rotate(images: Tensor) -> Tensor:
    """Turn classes by 0, 90, 180 and 270 degrees, each turn a class of its own (Munkhdalai & Trischler 2018).

    Shapes: images [classes,...,size,size] -> [4 * classes,...,size,size], all classes unturned first.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import omniglot
        >>> omniglot.rotate(torch.tensor([[[[1, 2], [3, 4]]]]))[1].tolist()
        [[[2, 4], [1, 3]]]
    """
    return torch.cat([torch.rot90(images, turns, (-2, -1)) for turns in range(4)])


def augment(images: Tensor, *, generator: torch.Generator, degrees: float = DEGREES, shift: float = SHIFT) -> Tensor:
    """Turn and shift each image by an angle and two distances of its own, as Rae et al. 2018, section 4.1.

    The angle is uniform within `degrees` either way, the distances down and to the right are uniform within `shift`
    pixels either way, not whole ones: pixels are interpolated bilinearly. An image is turned about its middle, and
    what comes in from outside is 0, paper. The numbers are drawn on the generator's device, so that one generator gives
    the same images on any; all else happens on that of the images.

    Shapes: images [B, 1, size, size], not empty, float32 or float64; the result is like it.

    Raises:
        ValueError: `images` has another shape or dtype, or `degrees` or `shift` is negative or not finite.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import omniglot
        >>> images = torch.zeros(32, 1, 28, 28)
        >>> images[:, :, 4:24, 13:15] = 1
        >>> generator = torch.Generator().manual_seed(0)
        >>> turned = omniglot.augment(images, generator=generator)
        >>> turned.shape, torch.equal(turned[0], turned[1])
        (torch.Size([32, 1, 28, 28]), False)
        >>> torch.allclose(omniglot.augment(images, generator=generator, degrees=0, shift=0), images, atol=1e-5)
        True
    """
    _check_images(images)
    check_not_negative(degrees=degrees, shift=shift)
    draws = torch.rand(3, len(images), generator=generator, device=generator.device, dtype=images.dtype)
    angle, down, right = (2 * draws - 1).to(images.device)
    return _move(images, _turn(math.radians(degrees) * angle), shift * down, shift * right)


def distort(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Turn, slant, stretch and shift each image in a way of its own, as Koch et al. 2015, section 4.1, but farther.

    "Siamese neural networks for one-shot image recognition": an angle within 10 degrees, a slant within 0.3 and a
    stretch within 0.8 to 1.2 along each side, and a shift within 2 pixels (theirs of larger images) along each side;
    each of the seven is drawn uniformly, and left out half of the time. Numbers are drawn on the generator's device.

    Shapes: images [B, 1, size, size], not empty, float32 or float64; the result is like it.

    Raises:
        ValueError: `images` has another shape or dtype.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import omniglot
        >>> images = torch.zeros(32, 1, 28, 28)
        >>> images[:, :, 4:24, 13:15] = 1
        >>> distorted = omniglot.distort(images, generator=torch.Generator().manual_seed(0))
        >>> distorted.shape, torch.equal(distorted[0], distorted[1])
        (torch.Size([32, 1, 28, 28]), False)
    """
    _check_images(images)
    draws = torch.rand(2, 7, len(images), generator=generator, device=generator.device, dtype=images.dtype)
    limits = torch.tensor([math.radians(10), 0.3, 0.3, 0.2, 0.2, 2, 2], dtype=images.dtype, device=draws.device)
    parts = limits.unsqueeze(1) * torch.where(draws[0] < 0.5, 2 * draws[1] - 1, 0)
    angle, slant_x, slant_y, stretch_x, stretch_y, down, right = parts.to(images.device)
    one = torch.ones_like(angle)
    slant = torch.stack([one, slant_x, slant_y, one], dim=1).view(-1, 2, 2)
    stretch = torch.stack([1 + stretch_x, 1 + stretch_y], dim=1).unsqueeze(1)
    # Small products by hand: TF32 or bfloat16 would lose places.
    slanted = (_turn(angle).unsqueeze(3) * slant.unsqueeze(1)).sum(2)
    return _move(images, slanted * stretch, down, right)


def _check_images(images: Tensor) -> None:
    if images.dim() != 4 or images.shape[1] != 1 or images.shape[2] != images.shape[3] or images.numel() == 0:
        raise ValueError(f"images must be [B, 1, size, size] and not empty, got {list(images.shape)}")
    if images.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"images must be float32 or float64 (such as images.float() / 255), got {images.dtype}")


def _turn(radians: Tensor) -> Tensor:
    """Return the matrices [B, 2, 2] that undo an anticlockwise turn, with y pointing down."""
    cosine, sine = radians.cos(), radians.sin()
    return torch.stack([cosine, -sine, sine, cosine], dim=1).view(-1, 2, 2)


def _move(images: Tensor, back: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Map each image [B, 1, size, size] about its middle, by the inverse of `back` [B, 2, 2], then shift it by [B]."""
    # Where in the old image each pixel of the new one comes from: shifted back, then mapped back, in the frame of
    # grid_sample, in which x points right, y points down, and the image reaches from -1 to 1. Not by affine_grid: its
    # matrix product takes as long as all of this, and loses places where TF32 or bfloat16 is allowed in products.
    size = images.shape[-1]
    centres = (2 * torch.arange(size, dtype=images.dtype, device=images.device) + 1) / size - 1
    x, y = ((centres - 2 / size * shift.unsqueeze(1)).unsqueeze(1) for shift in (right, down))  # [B, 1, size]
    across = back[:, :, :1] * x  # terms that each column adds to the old x and y
    along = back[:, :, 1:] * y  # terms of each row
    grid = (across.unsqueeze(2) + along.unsqueeze(3)).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _decode(folder: Path, files: Iterable[DataFile], size: int) -> Arrays:
    """Return the arrays to pack: the fields of `Omniglot`."""
    parts = [_read_archive(folder / file.name, file, size) for file in files]
    alphabets: list[str] = []
    alphabet: list[int] = []
    for _, classes in parts:
        known = sorted({name for name, _ in classes})
        alphabet += [len(alphabets) + known.index(name) for name, _ in classes]
        alphabets += known
    return {
        "images": torch.cat([images for images, _ in parts]).numpy(),
        "alphabets": np.array(alphabets),
        "alphabet": np.array(alphabet, dtype=np.int64),
        "names": np.array(["/".join(names) for _, classes in parts for names in classes]),
        "background": np.array(len(parts[0][1])),
    }


def _read_archive(path: Path, file: DataFile, size: int) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return an archive's images [classes, 20, size, size] in the order of names, and the (alphabet, character)s."""
    drawings = torch.empty(file.size, PIXELS, PIXELS, dtype=torch.uint8)
    found: dict[tuple[str, str, str], int] = {}  # where in the archive each drawing is
    try:
        for key, drawing in _drawings(path, file):
            if key in found:
                raise DataError(f"it has two drawings {'/'.join(key)}")
            if len(found) == file.size:
                raise DataError(f"it has more than {file.size:,} drawings")
            drawings[len(found)] = drawing
            found[key] = len(found)
        classes = sorted({(alphabet, character) for alphabet, character, _ in found})
        numbers = [f"{number:02}" for number in range(1, DRAWINGS + 1)]
        keys = [(*names, number) for names in classes for number in numbers]
        if lacking := [key for key in keys if key not in found]:
            raise DataError(f"it has no drawing {'/'.join(lacking[0])}")
        if len(keys) != len(found) or len(found) != file.size:
            raise DataError(f"it has {len(found):,} drawings of {len(classes):,} classes")
    except DataError as error:
        right = f"{file.size // DRAWINGS} classes of {DRAWINGS} drawings, 01 to {DRAWINGS}, {PIXELS} x {PIXELS} pixels"
        raise DataError(f"{path}: {error}; expected {right}: get it again from {file.url}") from error
    places = torch.tensor([found[key] for key in keys]).view(-1, DRAWINGS)
    return torch.stack([_shrink(drawings[place], size) for place in places]), classes


def _drawings(path: Path, file: DataFile) -> Iterator[tuple[tuple[str, str, str], Tensor]]:
    """Yield the (alphabet, character, number) and grey pixels [105, 105] of each drawing, in the archive's order."""
    for name, image in read_images(path, PIXELS):
        parts = _MEMBER.fullmatch(name)
        if parts is None or f"{parts[1]}.zip" != file.name:
            right = f"{file.name.removesuffix('.zip')}/Greek/character01/0001_01.png"
            raise DataError(f"its member {name!r} is not named like a drawing, such as {right!r}")
        yield (parts[2], parts[3], parts[4]), torch.from_numpy(image)


def _shrink(drawings: Tensor, size: int) -> Tensor:
    """Return the ink [N, size, size] of grey pixels [N, 105, 105]: the mean over each new pixel's area, rounded."""
    # As 105 x 105 is odd, no mean is halfway between two bytes.
    return area_means(255 - drawings, size)  # the archives have black ink, 0, on white paper
