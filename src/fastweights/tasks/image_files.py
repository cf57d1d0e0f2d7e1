"""Files of images, read in one way to train a network and to ask it, and made as large as the network takes them."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastweights.errors import FastWeightsError, one_line

if TYPE_CHECKING:
    from PIL import Image

HEIC = (".heic", ".heif")  # endings of what telephones write, which Pillow cannot read
LEAST_CONTRAST = 25  # least difference of ink and paper, of 255

_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # eight bits a channel or fewer
_FRAMED = 4  # an image larger than this many times the network's side is a scan, and the drawing is cut out
_MARGIN = 1.5  # side of a cut by that of its ink: Omniglot's longer sides are two thirds of the image
_BRIGHT = 127  # grey levels, from 0 to 255
_SHADE = 64  # grey levels: paper does not vary by more


def read_image(path: Path, refusal: type[FastWeightsError]) -> "Image.Image":
    """Read a file as a viewer shows it: upright, in red, green and blue, what is transparent on white.

    Raises:
        refusal: it cannot be read, or has no levels from 0 to 255 or 65,535, such as one of floating point.
    """
    from PIL import Image

    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise refusal(f"there is no file {path}")
        with warnings.catch_warnings():
            # Pillow only warns of an image that is large enough to fill memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                return upright(opened, path, refusal)
    except (refusal, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise errors of any type on a damaged file
        if path.suffix.lower() in HEIC:
            raise refusal(f"{path} is HEIC, which cannot be read here: save it as .jpg or .png") from error
        raise refusal(f"{path} cannot be read as an image: {one_line(error)}") from error


def upright(image: "Image.Image", name: Path | str, refusal: type[FastWeightsError]) -> "Image.Image":
    """Return an image as a viewer shows it: upright, in red, green and blue, what is transparent on white.

    Raises:
        refusal: it has no levels from 0 to 255 or 65,535, such as one of floating point; it is called by its name.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        levels = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    if image.mode not in _MODES:
        raise refusal(f"{name} has the mode {image.mode}: save it with 8 bits a channel, grey or RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def photograph(image: "Image.Image", size: int) -> Tensor:
    """Return the square in the middle of an image [channels,size,size], uint8."""
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return area_means(_tensor(image.crop((left, top, left + side, top + side))), size)


def drawing(image: "Image.Image", size: int, path: Path | str, refusal: type[FastWeightsError]) -> Tensor:
    """Return the drawing of an image, as ink that is 255 on paper that is 0 [channels,size,size], uint8.

    Dark ink on light paper is inverted, and the contrast is stretched: the median of the pixels is paper. Images of up
    to 4 * size pixels a side are taken whole; larger ones are scans, of which the part with ink is cut out.

    Raises:
        refusal: it is blank, it has more ink than paper or ink along most of its edges, or its paper is not even.
    """
    from PIL import ImageOps

    if np.median(_border(image)) > _BRIGHT:
        image = ImageOps.invert(image)
    framed = _FRAMED * size
    ink = _ink(image, framed, path, refusal)
    if np.mean(_border(ink) > _SHADE) > 1 / 3:
        raise refusal(f"{path} has uneven paper: light it evenly, and leave paper around the drawing")
    if max(image.size) > framed:
        # So few pixels that the contrast of thin strokes, which are faint in them, is stretched.
        ink = _ink(image.crop(_cut(ink, image.size)), 2 * size, path, refusal)
    return area_means(_tensor(ink), size)


def _ink(image: "Image.Image", most: int, path: Path | str, refusal: type[FastWeightsError]) -> "Image.Image":
    """Return the ink as 255 and the paper as 0, in at most so many pixels a side."""
    from PIL import Image, ImageOps

    small = image.copy()
    small.thumbnail((most, most), Image.Resampling.BOX)
    inks = []
    for channel in small.split():
        levels = np.asarray(channel)
        sure = int(np.median(levels)) + LEAST_CONTRAST
        share = float((levels >= sure).mean())  # red ink is none in red light
        # The median is paper, and of the pixels that are surely ink the strongest tenth is full ink.
        inks.append(ImageOps.autocontrast(channel, cutoff=(50, 10 * share)) if share else channel.point([0] * 256))
    if not any(channel.getbbox() for channel in inks):
        raise refusal(
            f"{path} is blank, mostly ink, or has ink along its edges: at {small.width} x {small.height} pixels, "
            f"no ink differs from paper by {LEAST_CONTRAST} of 255; leave paper around the drawing"
        )
    return Image.merge(small.mode, inks)


def _cut(ink: "Image.Image", whole: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the part of an image that has ink in its small copy, with a margin."""
    dark = np.atleast_3d(np.asarray(ink)).max(2) > _BRIGHT
    rows, columns = (np.flatnonzero(dark.any(axis)) for axis in (1, 0))
    scale = max(whole) / max(ink.size)
    half = _MARGIN * scale * max(np.ptp(rows) + 1, np.ptp(columns) + 1) / 2
    (left, right), (top, bottom) = (
        (max(0, int(middle - half)), min(most, int(middle + half)))
        for places, most in ((columns, whole[0]), (rows, whole[1]))
        for middle in [scale * (places[0] + places[-1] + 1) / 2]
    )
    return left, top, right, bottom


def _border(image: "Image.Image") -> NDArray[np.uint8]:
    grey = np.asarray(image.convert("L"))
    return np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])


def _tensor(image: "Image.Image") -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)


def area_means(images: Tensor, size: int) -> Tensor:
    """Resize images by the mean over the area of each new pixel, to the nearest; about what is no square lie zeros.

    Every machine computes the same bits: all sums are whole numbers.

    Shapes: images [...,height,width] uint8 -> [...,size,size] uint8.

    >>> area_means(torch.tensor([[0, 100, 20], [0, 100, 20], [60, 60, 60]], dtype=torch.uint8), 1)
    tensor([[47]], dtype=torch.uint8)
    """
    height, width = images.shape[-2:]
    side = max(height, width)
    # Not of the square itself, which would be vast about a long and narrow image.
    sums = _overlaps(height, side, size) @ images.double() @ _overlaps(width, side, size).T
    return (sums / side**2).round().byte()


def _overlaps(count: int, side: int, size: int) -> Tensor:
    """Return how much of `count` old middle pixels lies in each new one, in parts of 1 / size of an old."""
    new, old = side * torch.arange(size).unsqueeze(1), size * ((side - count) // 2 + torch.arange(count))
    return (torch.minimum(new + side, old + size) - torch.maximum(new, old)).clamp(min=0).double()
