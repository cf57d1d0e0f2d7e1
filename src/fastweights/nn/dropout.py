"""Dropout whose draws do not depend on how many processes share a batch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import functional as F

_part = (0, 1)  # which part of the batch this process computes, of how many


@contextmanager
def part_of_batch(number: int, count: int) -> Iterator[None]:
    """Compute one of `count` equal parts of a batch: masks are drawn for the whole batch, and those of the part taken.

    Processes that draw from the same seed then drop what one process drops.

    Examples:
        >>> import torch
        >>> from fastweights.nn.dropout import drop, part_of_batch
        >>> x = torch.ones(1, 4, 3)                          # [...,B,D]
        >>> parts = []
        >>> for number in range(2):
        ...     torch.manual_seed(0)
        ...     with part_of_batch(number, 2):
        ...         parts.append(drop(x[:, 2 * number : 2 * number + 2], 0.5, training=True))
        <torch._C.Generator ...
        <torch._C.Generator ...
        >>> generator = torch.manual_seed(0)
        >>> torch.equal(torch.cat(parts, dim=1), drop(x, 0.5, training=True))
        True
    """
    global _part
    before, _part = _part, (number, count)
    try:
        yield
    finally:
        _part = before


def drop(x: Tensor, dropout: float, training: bool, *, shape: Sequence[int] | None = None) -> Tensor:
    """Drop some of the numbers of x [...,B,D], or of an x that was flattened from this shape."""
    number, count = _part
    if count == 1 or not training or not dropout:
        return F.dropout(x, dropout, training)
    shape = x.shape if shape is None else shape
    whole = F.dropout(x.new_ones(*shape[:-2], count * shape[-2], shape[-1]), dropout)
    return x * whole.narrow(-2, number * shape[-2], shape[-2]).reshape(x.shape)


def draw_mask(like: Tensor, shape: Sequence[int], dropout: float, *, batched: bool = True) -> Tensor:
    """Draw what dropout multiplies by, 0 or what keeps the mean: [...,B,D], or [...,D] for all of a batch alike."""
    number, count = _part if batched else (0, 1)
    mask = like.new_empty(*shape[:-2], count * shape[-2], shape[-1]).bernoulli_(1 - dropout).div_(1 - dropout)
    return mask.narrow(-2, number * shape[-2], shape[-2])
