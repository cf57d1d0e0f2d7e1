"""The nearest entries of a query where rounding is in doubt about some: those equally far as the last by their age.

Distances of one text's positions are equal where they differ by less than rounding makes of them: positions at which
the same was read have the same hidden state only up to that.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SLACK = 2**9  # rounding errors of a query's length: more than a network's own layers leave of equal inputs
PAIRS = 2**18  # numbers of the pairs of keys and queries that are subtracted at once


def score_error(queries: Tensor, lengths: Tensor, farthest: Tensor, longest: float) -> Tensor:
    """Return how far a score |k|^2 - 2 q.k plus |q|^2 can be from the squared distance.

    A sum of d products is off by at most d rounding errors of the sum of their sizes, |q| |k|, in whatever order it is
    added up. A key longer than |q| plus the farthest distance is farther in any case.

    Args:
        queries: [Q,d].
        lengths: |q|^2, [Q].
        farthest: the squared distance that decides, [Q].
        longest: |k|^2 of the longest key.
    """
    query = lengths.sqrt()
    key = (query + farthest.sqrt()).clamp(max=longest**0.5) * (1 + 1e-6)
    least = queries.shape[1] * torch.finfo(queries.dtype).tiny
    return product_error(queries) * (key.square() + 2 * query * key + lengths) + least


def product_error(queries: Tensor) -> float:
    """Return how far a product of queries [Q,d] with a key can be off, relative to the product of their lengths."""
    rounding = (queries.shape[1] + 8) * torch.finfo(queries.dtype).eps
    return rounding + (_product_rounding(queries.device) if queries.dtype == torch.float32 else 0.0)


def relative_slack(dtype: torch.dtype) -> float:
    """Return how far apart distances may be that are equal, relative to a query's length."""
    return SLACK * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def pick_nearest(squares: Tensor, queries: Tensor, count: int, ages: Tensor) -> Tensor:
    """Return the places of the nearest [Q,count], in any order; those equally far as the last of them by their age.

    Args:
        squares: squared distances [Q,n], infinite of what is not to be seen.
        queries: [Q,d].
        count: at most n.
        ages: [Q,n] or [n] integers; the oldest have the greatest.
    """
    distances = squares.sqrt()
    slack = relative_slack(queries.dtype) * queries.to(distances.dtype).norm(dim=1, keepdim=True)
    last = distances.topk(count, dim=1, largest=False).values[:, -1:]
    most = torch.iinfo(ages.dtype).max
    rank = torch.where(distances <= last + slack, -ages, most).masked_fill_(distances < last - slack, -most)
    return rank.topk(count, dim=1, largest=False).indices


def pick_by_products(
    squares: Tensor, queries: Tensor, count: int, ages: Tensor, measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Do the same with squared distances that come from products: those that decide are measured again.

    Args:
        squares: as of `pick_nearest`, and so are queries, count and ages.
        queries: [Q,d].
        count: at most n.
        ages: [Q,n] or [n].
        measure: returns the squared distances in float64 [n] of queries and places [n], by difference.
    """
    lengths = queries.square().sum(1, keepdim=True)
    last = squares.topk(count, dim=1, largest=False).values[:, -1:]
    error, slack = score_error(queries, lengths, last, math.inf), relative_slack(queries.dtype) * lengths.sqrt()
    high = ((last + error).sqrt() + 2 * slack).square() + error
    low = ((last - error).clamp(min=0).sqrt() - 2 * slack).clamp(min=0).square() - error
    doubtful = (squares >= low) & (squares <= high) & (last < math.inf)
    exact = squares.double()
    pairs = doubtful.nonzero()
    for rows, places in (part.unbind(1) for part in torch.split(pairs, max(1, PAIRS // queries.shape[1]))):
        exact[rows, places] = measure(rows, places)
    return pick_nearest(exact, queries, count, ages)


def measure_pairs(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the squared distances [n] of pairs [n,d] in float64, by difference: of equal keys they are equal."""
    return (keys.double() - queries).square_().sum(1)


def _product_rounding(device: torch.device) -> float:
    """Return what the user lets matrix products of float32 lose, relative to the size of each product."""
    every: Any = torch.backends
    one = every.cuda if device.type == "cuda" else every.mkldnn
    for place in (one.matmul, one, every):  # "none" is as the next says
        precision = getattr(place, "fp32_precision", "none")
        if precision != "none":
            break
    return {"bf16": 2.0**-6, "tf32": 2.0**-9}.get(precision, 0.0)
