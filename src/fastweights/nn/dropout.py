"""Random numbers of a batch, such as dropout's, that do not depend on how many processes share it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class _Part(NamedTuple):
    rows: Tensor  # [n] int64, rows of the batch that this process computes
    total: int  # number of rows in the batch
    dim: int  # where the batch lies in a tensor, unless the caller knows better


_parts: dict[str, _Part] = {}  # keyed by the batch of the rows; empty where this process computes all


class _SharedDropout(TorchFunctionMode):
    """Has torch's own dropout drawn by `drop`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return _drop(torch.dropout, *args, **kwargs or {})
        if func in (F.dropout1d, F.dropout2d, F.dropout3d):
            return _drop(torch.feature_dropout, *args, **kwargs or {})
        return func(*args, **kwargs or {})


@contextmanager
def part_of_batch(rows: Tensor, total: int, *, dim: int = -2, of: str = "batch") -> Iterator[None]:
    """Compute some rows of a batch: what is drawn is drawn for the whole batch, and that of the rows is taken.

    Processes that draw from the same seed then draw what one process draws. It holds for `drop`, `draw_mask` and
    `draw_part`, and for dropout of `torch.nn` and `torch.nn.functional`.

    Args:
        rows: indices of the rows, [n] int64.
        total: rows of the whole batch.
        dim: the dimension of the batch in the tensors that are dropped from.
        of: what the rows are of, where a batch is shared in two ways: examples ("batch") and the "tasks" made of them.

    Examples:
        >>> import torch
        >>> from fastweights.nn.dropout import drop, part_of_batch
        >>> x = torch.ones(1, 4, 3)                          # [...,B,D]
        >>> parts = []
        >>> for rows in (torch.arange(2), torch.arange(2, 4)):
        ...     generator = torch.manual_seed(0)
        ...     with part_of_batch(rows, 4):
        ...         parts.append(drop(x[:, rows], 0.5, training=True))
        >>> generator = torch.manual_seed(0)
        >>> torch.equal(torch.cat(parts, dim=1), drop(x, 0.5, training=True))
        True
    """
    before = _parts.get(of)
    _parts[of] = _Part(rows, total, dim)
    try:
        with _SharedDropout():
            yield
    finally:
        del _parts[of]
        if before is not None:
            _parts[of] = before


def draw_part(draw: Callable[[Tensor], Tensor], like: Tensor, *, dim: int | None = None, of: str = "batch") -> Tensor:
    """Return a tensor like this one, filled by `draw`, which is called with an empty tensor of the whole batch.

    Args:
        draw: fills a tensor at random and returns it.
        like: a tensor of the rows that this process computes.
        dim: the dimension of the batch; None is that of `part_of_batch`.
        of: what the rows are of.

    Raises:
        ValueError: the dimension does not hold the rows.
    """
    part = _parts.get(of)
    if part is None:
        return draw(torch.empty_like(like))
    dim = (part.dim if dim is None else dim) % like.dim()
    each, rest = divmod(like.shape[dim], len(part.rows))  # more than one where others were flattened into the batch
    if rest:
        raise ValueError(
            f"a tensor {list(like.shape)} does not have this process's {len(part.rows)} rows of the batch in dimension "
            f"{dim}: its dropout would depend on the number of processes; train in one process"
        )
    # In the order in which numbers are drawn for a tensor that lies in memory as this one does.
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    shape = [part.total * each if place == dim else like.shape[place] for place in order]
    whole = draw(like.new_empty(shape).permute([order.index(place) for place in range(like.dim())]))
    rows = part.rows.to(like.device)
    if each > 1:
        rows = (rows.unsqueeze(1) * each + torch.arange(each, device=like.device)).flatten()
    return whole.index_select(dim, rows)


def drop(
    x: Tensor, dropout: float, training: bool, *, shape: Sequence[int] | None = None, dim: int | None = None
) -> Tensor:
    """Drop some of the numbers of x, or of an x that was flattened from this shape; `dim` is that of the batch."""
    if not _parts or not training or not dropout:
        return F.dropout(x, dropout, training)
    return _drop(torch.dropout, x.reshape(x.shape if shape is None else shape), dropout, dim=dim).reshape(x.shape)


def draw_mask(like: Tensor, shape: Sequence[int], dropout: float, *, batched: bool = True) -> Tensor:
    """Draw what dropout multiplies by, 0 or what keeps the mean: [...,B,D], or [...,D] for all of a batch alike."""

    def draw(mask: Tensor) -> Tensor:
        return mask.bernoulli_(1 - dropout).div_(1 - dropout)

    mask = like.new_empty(*shape)
    return draw_part(draw, mask, dim=-2) if batched else draw(mask)


def _drop(
    kind: Callable[[Tensor, float, bool], Tensor],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    dim: int | None = None,
) -> Tensor:
    """Drop as this operator of torch does; the arguments are those of `torch.nn.functional.dropout`."""
    if not training or not p:
        return input
    mask = draw_part(lambda ones: kind(ones.fill_(1), p, True), input, dim=dim)
    return input.mul_(mask) if inplace else input * mask
