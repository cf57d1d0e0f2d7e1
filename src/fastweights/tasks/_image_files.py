"""Files of images, read in one way: what a network was trained on is what it is asked about."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import FastWeightsError
from fastweights.tasks._archives import one_line
from fastweights.tasks._areas import area_means, exact_area_means

if TYPE_CHECKING:
    from PIL import Image

LEAST_CONTRAST = 25.0  # of 255, between ink and paper
_LEAST_LEFT = 2.0  # of 255: the darkest pixel of a drawing made small; less is a speck
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # eight bits a channel or fewer


def read_image(path: Path, refusal: type[FastWeightsError]) -> tuple[Tensor, Tensor]:
    """A file's red, green and blue [3,height,width] and its grey [1,height,width], uint8, as a viewer shows it.

    Raises:
        refusal: it cannot be read, or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise refusal(f"{path} is no file")
    try:
        with warnings.catch_warnings():
            # Pillow only warns of an image that is large enough to fill memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                image = ImageOps.exif_transpose(opened)
                if image.mode not in _MODES:
                    raise refusal(f"{path} is of mode {image.mode}: save it with 8 bits a channel, grey or RGB")
                colour = _opaque(image)
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError, Image.DecompressionBombWarning) as error:
        if isinstance(error, refusal):
            raise
        raise refusal(f"{path} cannot be read as an image: {one_line(error)}") from error
    return _tensor(colour), _tensor(colour.convert("L"))


def _opaque(image: "Image.Image") -> "Image.Image":
    """In red, green and blue; what is transparent lies on white paper."""
    from PIL import Image

    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _tensor(image: "Image.Image") -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)


def drawing(image: Tensor, size: int, path: Path, refusal: type[FastWeightsError]) -> Tensor:
    """Ink as 255 on paper that is 0 [channels,size,size], the whole of a file's dark ink on light paper, uint8.

    Its darkest pixel is 255 at that size too: thin strokes are as dark as broad ones, where their mean over an area
    that is mostly paper would be next to nothing.

    Raises:
        refusal: it is mostly dark, or blank.
    """
    means = exact_area_means(_square(_inked(image, path, refusal), whole=True), size)
    most = float(means.max())
    if most < _LEAST_LEFT:
        raise refusal(
            f"{path} is blank: at {size} x {size} pixels its darkest ink is {most:.2g} of 255; cut the drawing out"
        )
    return (means * (255 / most)).round().byte()


def photograph(image: Tensor, size: int) -> Tensor:
    """The middle of an image [channels,size,size], uint8."""
    return area_means(_square(image, whole=False), size)


def _inked(image: Tensor, path: Path, refusal: type[FastWeightsError]) -> Tensor:
    """Ink as 255 on paper that is 0 [channels,height,width], of dark ink on light paper, uint8.

    Paper is what most of an image is, and ink its darkest: of a scan, neither is black or white.

    Raises:
        refusal: it is mostly dark, or blank.
    """
    if float(image.float().mean()) < 255 / 2:
        raise refusal(f"{path} is mostly dark: an image file must show dark ink on light paper; turn it over")
    flat = image.flatten(1).float()
    paper, ink = flat.median(1).values, flat.amin(1)
    contrast = paper - ink
    if float(contrast.max()) < LEAST_CONTRAST:
        raise refusal(f"{path} is blank: its darkest pixel is {ink.max():.0f} and its paper {paper.max():.0f}, of 255")
    found = 255 * (paper[:, None] - flat) / contrast.clamp(min=LEAST_CONTRAST)[:, None]
    return found.clamp(0, 255).round().to(torch.uint8).view_as(image)


def _square(image: Tensor, *, whole: bool) -> Tensor:
    """A square [channels,side,side] with the whole image on paper, else its middle."""
    height, width = image.shape[1:]
    if whole:
        down, right = (max(height, width) - height), (max(height, width) - width)
        return F.pad(image, (right // 2, right - right // 2, down // 2, down - down // 2))
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return image[:, top : top + side, left : left + side]
