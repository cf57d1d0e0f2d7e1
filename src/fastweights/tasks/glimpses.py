"""The fixed sequence of glimpses of Ba et al. 2016, section 4.2: an image as 24 patches at two scales.

The text breaks an image "down into four non-overlapping quadrants recursively with two scale levels", which gives 4
coarse and 16 fine patches, and has sequences of 24. Our reading: four visits, one to each quadrant, of the quadrant
made coarse, its own four quadrants, and the coarse one again, so that what the fine ones showed can be joined to it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

GLIMPSES = 24
VISITS = 4  # visits, one to each quadrant: coarse, four fine, coarse


def take_glimpses(images: Tensor) -> Tensor:
    """Take the 24 glimpses of each image, in the order in which they are looked at.

    Quadrants come from left to right and from top to bottom, at both scales. A coarse glimpse is the quadrant at half
    the resolution, the mean of every 2 x 2 pixels; a fine one is a quarter of it as it is.

    Args:
        images: [B,S,S], S a multiple of 4; floating point, or uint8, which is brought to 0 to 1.

    Returns:
        The pixels of each patch, row after row, [B,24,(S/4)^2].

    Raises:
        TypeError: `images` is no tensor of floating point or of uint8.
        ValueError: it has another shape.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import glimpses
        >>> glimpses.take_glimpses(torch.rand(3, 28, 28)).shape  # of 7 x 7 pixels each
        torch.Size([3, 24, 49])
        >>> image = torch.arange(16.0).view(1, 4, 4)             # of one pixel each
        >>> glimpses.take_glimpses(image)[0, :6].flatten().tolist()
        [2.5, 0.0, 1.0, 4.0, 5.0, 2.5]
    """
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor, got a {type(images).__name__}: torch.as_tensor(images)")
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise TypeError(f"images must be floating point or torch.uint8 of 0 to 255, got {images.dtype}")
    if images.dim() != 3 or images.shape[1] != images.shape[2] or images.shape[1] % 4 or images.shape[1] == 0:
        raise ValueError(f"images must be [B,S,S] with S a multiple of 4, got shape {tuple(images.shape)}")
    pixels = images if images.is_floating_point() else images.float() / 255
    quadrants = _quarter(pixels)  # [B,4,S/2,S/2]
    fine = _quarter(quadrants)  # [B,4,4,S/4,S/4]
    coarse = F.avg_pool2d(quadrants, 2).unsqueeze(2)
    return torch.cat([coarse, fine, coarse], 2).flatten(3).flatten(1, 2)


def mark_stores() -> Tensor:
    """Return after which glimpses a memory stores what it has seen, bool [24]: after the coarse one of each visit.

    It is the control signal that section 4.2 gives with the sequence: the coarse glimpse is put aside while the fine
    ones are looked at, and the result of the visit, when the coarse one came again, is kept for the visits to come.

    Examples:
        >>> from fastweights.tasks import glimpses
        >>> glimpses.mark_stores().int().tolist()[:12]
        [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    """
    return torch.tensor([True, False, False, False, False, True]).repeat(VISITS)


def _quarter(images: Tensor) -> Tensor:
    """Return the four quadrants of each image: [...,S,S] -> [...,4,S/2,S/2]."""
    half = images.shape[-1] // 2
    halves = images.reshape(*images.shape[:-2], 2, half, 2, half)
    return halves.transpose(-3, -2).flatten(-4, -3)
