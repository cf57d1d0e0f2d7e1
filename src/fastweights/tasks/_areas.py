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
    """The same before it is rounded, in double precision."""
    side = images.shape[-1]
    # How much of each old pixel lies in each new one along a side, in parts of 1 / size of an old pixel. All sums are
    # whole numbers, exact in any order.
    new, old = side * torch.arange(size).unsqueeze(1), size * torch.arange(side)
    overlaps = (torch.minimum(new + side, old + size) - torch.maximum(new, old)).clamp(min=0).double()
    return overlaps @ images.double() @ overlaps.T / side**2
