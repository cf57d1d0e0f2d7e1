"""Images as a few-shot network was trained on them: tensors are checked, and files are read."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.errors import ExamplesError, one_line
from fastweights.tasks.image_files import LEAST_CONTRAST, drawing, photograph, read_image, upright

if TYPE_CHECKING:
    from PIL import Image

_OUTSIDE = 1e-3  # tolerance of the range 0 to 1, for errors of interpolation
_LEAST_INK = LEAST_CONTRAST / 255  # the darkest of a drawing's pixels
_MOST_INK = 0.5  # the largest mean of a drawing: more, and its paper was taken for ink


class Kind(NamedTuple):
    """The kind of images that a network takes."""

    channels: int
    size: int
    ink: bool  # drawings: ink is 1 on paper that is 0


def read_pixels(images: Any, kind: Kind, *, resize: bool) -> Tensor:
    """Return images [N,channels,size,size], uint8 or float32 of 0 to 1, as they are given.

    They are a tensor, an array, or a list of files or of images of PIL.

    Raises:
        ExamplesError: they are none of these, there is none, another shape, dtype or range, or a file that cannot be
            read or is of another size or mode.
    """
    if isinstance(images, np.ndarray):
        try:
            # A copy, in this machine's order of bytes: an array may be read-only, or a view.
            images = torch.from_numpy(np.array(images, images.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise ExamplesError(f"images must be uint8, or floating point of 0 to 1; got {images.dtype}") from error
    elif not isinstance(images, Tensor):
        if isinstance(images, str | bytes | os.PathLike) or not hasattr(images, "__iter__"):
            raise ExamplesError(f"images must be a tensor or an array [N,...], or a list of files; got {images!r}")
        from PIL import Image

        images = list(images)
        for one in images:
            if not isinstance(one, str | os.PathLike | Image.Image):
                raise ExamplesError(
                    f"a list of images must hold image files or images of PIL, got a {type(one).__name__} in it"
                )
    if isinstance(images, Tensor) and images.ndim == 0:
        raise ExamplesError("images must be [N,...], got a single number")
    if len(images) == 0:
        raise ExamplesError("there are no images: give at least one")
    if isinstance(images, Tensor):
        return _read_tensor(images.detach(), kind, resize=resize)
    return torch.stack([_read_image(one, number, kind, resize=resize) for number, one in enumerate(images)])


def _read_tensor(images: Tensor, kind: Kind, *, resize: bool) -> Tensor:
    """Return the images, uint8 or float32, once they are known to be of the network's kind."""
    side = [kind.channels, kind.size, kind.size]
    if list(images.shape[1:]) != side:
        raise ExamplesError(
            f"images must be [N,{','.join(map(str, side))}], as the network was trained on; got {list(images.shape)}"
            + ("; resize is for image files" if resize else "")
        )
    if images.dtype == torch.uint8:
        if int(images.max()) == 1:
            raise ExamplesError(
                "uint8 images must range from 0 to 255, got 0 to 1: multiply them by 255, or give float32"
            )
        scaled = images.float() / 255
    elif images.is_floating_point():
        images = images.float()
        if (wrong := images.isnan().flatten(1).any(1)).any():
            raise ExamplesError(f"image {int(wrong.int().argmax())} has NaN in it")
        least, most = (float(bound) for bound in images.aminmax())
        if least < -_OUTSIDE or most > 1 + _OUTSIDE:
            advice = "divide them by their largest value, or give uint8" if 1 < most < math.inf else "scale them"
            raise ExamplesError(
                f"images of floating point must lie between 0 and 1, got {least:g} to {most:g}: {advice}"
            )
        scaled = images
    else:
        raise ExamplesError(f"images must be uint8, or floating point of 0 to 1; got {images.dtype}")
    if kind.ink:
        _check_ink(scaled)
    return images


def _check_ink(images: Tensor) -> None:
    means, most = images.mean((1, 2, 3)), images.amax((1, 2, 3))
    if bool((means > _MOST_INK).any()):
        raise ExamplesError(
            f"image {int(means.argmax())} is mostly ink: in tensors, ink is 1 (uint8: 255) and paper is 0; invert "
            "dark drawings on light paper first"
        )
    if bool((most < _LEAST_INK).any()):
        raise ExamplesError(f"image {int(most.argmin())} is blank: its darkest ink is {float(most.min()):.3g} of 1")


def _read_image(one: "str | os.PathLike[str] | Image.Image", number: int, kind: Kind, *, resize: bool) -> Tensor:
    """Return one image [channels,size,size], uint8, of a file or of a list where it has a number."""
    name: Path | str
    if isinstance(one, str | os.PathLike):
        name = Path(os.path.expanduser(one))
        image = read_image(name, ExamplesError)
    else:
        name = f"image {number}"
        try:
            image = upright(one, name, ExamplesError)
        except OSError as error:  # of a file that PIL has not read to its end so far
            raise ExamplesError(f"{name} cannot be read: {one_line(error)}") from error
    width, height = image.size
    if not resize and image.size != (kind.size, kind.size):
        raise ExamplesError(
            f"{name} has {width} x {height} pixels, the network takes {kind.size} x {kind.size}: give resize=True "
            "(--resize) for the mean over areas, or save it at that size"
        )
    if kind.channels == 1:
        red, green, blue = image.split()
        if not resize and not red.tobytes() == green.tobytes() == blue.tobytes():
            raise ExamplesError(
                f"{name} is in colour, the network takes grey: give resize=True (--resize) to convert it to grey, or "
                "save it as grey"
            )
        image = image.convert("L")
    return drawing(image, kind.size, name, ExamplesError) if kind.ink else photograph(image, kind.size)
