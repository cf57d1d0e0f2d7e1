"""Files of images, read in one way: what a network was trained on is what it is asked about."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fastweights.errors import FastWeightsError
from fastweights.tasks._archives import one_line
from fastweights.tasks._areas import area_means

if TYPE_CHECKING:
    from PIL import Image

_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # eight bits a channel or fewer


def read_image(path: Path, refusal: type[FastWeightsError]) -> tuple[Tensor, Tensor]:
    """A file's red, green and blue [3,height,width] and its grey [1,height,width], uint8, as a viewer shows it.

    Raises:
        refusal: it cannot be read, or has more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise refusal(f"{path} is no file")
        with warnings.catch_warnings():
            # Pillow only warns of an image that is large enough to fill memory.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                image = ImageOps.exif_transpose(opened)
                if image.mode not in _MODES:
                    raise refusal(f"{path} is of mode {image.mode}: save it with 8 bits a channel, grey or RGB")
                colour = _opaque(image)
    except (refusal, MemoryError):
        raise
    except Exception as error:  # Pillow's readers of a damaged file end in whatever error they meet
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


def photograph(image: Tensor, size: int) -> Tensor:
    """The middle of an image [channels,size,size], uint8."""
    return area_means(_middle(image), size)


def _middle(image: Tensor) -> Tensor:
    """The square in the middle of an image [channels,side,side]."""
    height, width = image.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return image[:, top : top + side, left : left + side]
