"""Images resized by the mean over areas, in whole numbers, so that every machine computes the same bits."""

import torch
from torch import Tensor


def area_means(images: Tensor, size: int) -> Tensor:
    """The mean over the area of each new pixel, to the nearest: [...,side,side] uint8 -> [...,size,size] uint8.

    >>> area_means(torch.tensor([[0, 100, 20], [0, 100, 20], [60, 60, 60]], dtype=torch.uint8), 1)
    tensor([[47]], dtype=torch.uint8)
    """
    return exact_area_means(images, size).round().byte()


def exact_area_means(images: Tensor, size: int) -> Tensor:
    """The same before it is rounded, in double precision; what is no square lies in the middle of one of zeros."""
    height, width = images.shape[-2:]
    side = max(height, width)
    # All sums are whole numbers, exact in any order. The square itself would be vast about a long and narrow image.
    return _overlaps(height, side, size) @ images.double() @ _overlaps(width, side, size).T / side**2


def _overlaps(count: int, side: int, size: int) -> Tensor:
    """How much of `count` old pixels in the middle of a side lies in each new one, in parts of 1 / size of an old."""
    new, old = side * torch.arange(size).unsqueeze(1), size * ((side - count) // 2 + torch.arange(count))
    return (torch.minimum(new + side, old + size) - torch.maximum(new, old)).clamp(min=0).double()
