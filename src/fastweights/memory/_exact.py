"""Exact nearest neighbours: candidates by fast scores, distances by difference, and a proof that none was missed."""

import itertools
from typing import Any

import torch
from torch import Tensor

from fastweights.memory._candidates import QUERIES, below, candidates, scored_blocks
from fastweights.memory._checks import compute_dtype, exact_dtype, squared_lengths
from fastweights.memory._ring import Ring

PAIRS = 2**18  # numbers of the pairs of keys and queries that are subtracted at once
CANDIDATES = 2**22  # of all queries of a block


def nearest(ring: Ring, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices and squared distances [Q,count], by distance and then by index; `count` at most the entries."""
    distances = queries.new_empty(len(queries), count, dtype=exact_dtype(queries.device))
    indices = torch.empty(len(queries), count, dtype=torch.int64, device=queries.device)
    longest, given = longest_key(ring), queries.to(compute_dtype(queries.dtype))
    step = max(1, min(QUERIES, CANDIDATES // count))
    with torch.autocast(queries.device.type, enabled=False):
        for first in range(0, len(queries), step):
            part = slice(first, first + step)
            distances[part], indices[part] = _nearest(ring, given[part], count, longest)
    return indices, distances


def _nearest(ring: Ring, queries: Tensor, count: int, longest: float) -> tuple[Tensor, Tensor]:
    """Of queries in the dtype that scores are to be computed in."""
    wanted = with_spares(ring, count)
    found, limits = candidates(ring, queries, wanted)
    distances, indices = ranked(ring, queries, found, count)
    if wanted < ring.count:
        made_sure(ring, queries, distances, indices, limits, longest)
    return distances, indices


def with_spares(ring: Ring, count: int) -> int:
    """How many candidates to take, so that rounding is seldom in doubt about `count` of them."""
    return min(ring.count, count + 16 + count // 8)


def made_sure(ring: Ring, queries: Tensor, distances: Tensor, indices: Tensor, limits: Tensor, longest: float) -> None:
    """Mend the nearest found, [Q,count], where an entry whose score is not below `limits` [Q] may be nearer."""
    lengths = squared_lengths(queries).to(distances.dtype)
    error = score_error(queries, lengths, distances[:, -1], longest)
    unsure = limits + lengths - error <= distances[:, -1]
    # Far from the origin scores of float32 are all rounding; elsewhere many entries are about equally far.
    rough = unsure & (error > 1e-3 * distances[:, -1]) & (queries.dtype != distances.dtype)
    count = distances.shape[1]
    if rows := rough.nonzero()[:, 0].tolist():
        distances[rows], indices[rows] = _nearest(ring, queries[rows].to(distances.dtype), count, longest)
    if rows := (unsure & ~rough).nonzero()[:, 0].tolist():
        farthest, margin = distances[rows, -1], (error - lengths)[rows]
        distances[rows], indices[rows] = _all_within(ring, queries[rows], count, farthest, margin)


def longest_key(ring: Ring) -> float:
    """The greatest squared length."""
    return max((float(ring.lengths[run].max()) for run in ring.slots(0, ring.count)), default=0.0)


def score_error(queries: Tensor, lengths: Tensor, farthest: Tensor, longest: float) -> Tensor:
    """By how much a score plus |q|^2 can differ from the squared distance: queries [Q,d], lengths |q|^2 [Q] -> [Q].

    A sum of d products is off by at most d rounding errors of the sum of their sizes, |q| |k|, in whatever order it is
    added up. A key longer than |q| plus the farthest distance is farther in any case.
    """
    size, number = queries.shape[1], torch.finfo(queries.dtype)
    rounding = (size + 8) * number.eps
    if queries.dtype == torch.float32:
        rounding += _product_rounding(queries.device)
    query = lengths.sqrt()
    key = (query + farthest.sqrt()).clamp(max=longest**0.5) * (1 + 1e-6)
    return rounding * (key.square() + 2 * query * key + lengths) + size * number.tiny


def _product_rounding(device: torch.device) -> float:
    """What the user lets matrix products of float32 lose, relative to the size of each product."""
    every: Any = torch.backends
    one = every.cuda if device.type == "cuda" else every.mkldnn
    for place in (one.matmul, one, every):  # "none" is as the next says
        precision = getattr(place, "fp32_precision", "none")
        if precision != "none":
            break
    return {"bf16": 2.0**-6, "tf32": 2.0**-9}.get(precision, 0.0)


def ranked(ring: Ring, queries: Tensor, indices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest of given entries [Q,n] (any order, none twice): distances and indices [Q,count]."""
    indices = indices.sort(dim=1).values
    distances = torch.empty(indices.shape, dtype=exact_dtype(queries.device), device=queries.device)
    queries = queries.to(distances.dtype)
    across = max(1, min(indices.shape[1], PAIRS // queries.shape[1]))
    down = max(1, PAIRS // (across * queries.shape[1]))
    for row, column in itertools.product(range(0, len(indices), down), range(0, indices.shape[1], across)):
        part = slice(row, row + down), slice(column, column + across)
        difference = ring.keys_at(indices[part]).to(distances.dtype)
        difference -= queries[part[0], None]
        distances[part] = difference.square_().sum(2)
    distances, order = distances.sort(dim=1, stable=True)  # of equal distances the lowest index first
    return distances[:, :count], indices.gather(1, order[:, :count])


def distances_of(ring: Ring, queries: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
    """Squared distances [n] of pairs of a query's row [n] and an entry's index [n], by difference."""
    dtype = exact_dtype(queries.device)
    out = torch.empty(len(rows), dtype=dtype, device=queries.device)
    queries = queries.to(dtype)
    step = max(1, PAIRS // queries.shape[1])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        difference = ring.keys_at(indices[part]).to(dtype)
        difference -= queries.index_select(0, rows[part])
        out[part] = difference.square_().sum(1)
    return out


def _all_within(ring: Ring, queries: Tensor, count: int, farthest: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Distances and indices [Q,count] by the distances of all entries whose scores do not rule them out.

    `farthest` [Q] is the distance of as many entries at least, `margin` [Q] what a distance and a score can differ by.
    """
    farthest = farthest.clone()
    best = [farthest.new_empty(0) for _ in queries]
    found = [torch.empty(0, dtype=torch.int64, device=queries.device) for _ in queries]
    for first, _, scores in scored_blocks(ring, queries):
        limits = (farthest + margin).to(queries.dtype)
        for _ in range(2):  # past the rounding of the cast, and past the limit itself
            limits = torch.nextafter(limits, torch.full_like(limits, float("inf")))
        rows, columns = below(scores, limits)
        near = distances_of(ring, queries, rows, columns + first)
        kept = near <= farthest[rows]
        rows, columns, near = rows[kept], columns[kept] + first, near[kept]
        for row in sorted(set(rows.tolist())):
            mine = (rows == row).nonzero()[:, 0]
            mine = mine[columns[mine].argsort()]
            # Blocks come in the order of their indices, so that a stable sort leaves equal distances in it.
            both = torch.cat([best[row], near[mine]])
            order = both.argsort(stable=True)[:count]
            best[row], found[row] = both[order], torch.cat([found[row], columns[mine]])[order]
            if len(order) == count:
                farthest[row] = best[row][-1]
    return torch.stack(best), torch.stack(found)
