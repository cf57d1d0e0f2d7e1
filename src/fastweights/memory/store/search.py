"""Exact nearest neighbours: candidates by fast scores, distances by difference, and a proof that none was missed.

Of entries that are equally far the oldest is the nearer one.

A score is |k|^2 - 2 q.k. It differs from the squared distance by |q|^2, which ranks nothing, and by rounding, whose
bound (`score_error`) shows which queries have to be looked at again. Scores are made in blocks that never grow with the
memory.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.memory.store.ring import Ring, squared_lengths
from fastweights.ops.nearest import PAIRS, score_error
from fastweights.ops.products import multiply

SCORES = 2**21  # scores of one block: a few megabytes, which fit a processor's cache
CONVERTED = 2**22  # numbers of keys in another dtype
QUERIES = 256  # queries of one block
GROUP = 32  # scores whose least one is compared first
CANDIDATES = 2**22  # candidates of all queries of a block


def find_nearest(ring: Ring, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return indices and squared distances [Q,count], by distance and then by index; `count` at most the entries."""
    distances = queries.new_empty(len(queries), count, dtype=ring.exact_dtype)
    indices = torch.empty(len(queries), count, dtype=torch.int64, device=queries.device)
    longest, computed = ring.longest_key(), queries.to(ring.lengths.dtype)
    step = max(1, min(QUERIES, CANDIDATES // count))
    with torch.autocast(queries.device.type, enabled=False):
        for first in range(0, len(queries), step):
            part = slice(first, first + step)
            distances[part], indices[part] = _find_nearest(ring, computed[part], count, longest)
    return indices, distances


def _find_nearest(ring: Ring, queries: Tensor, count: int, longest: float) -> tuple[Tensor, Tensor]:
    """Search for queries in the dtype that scores are to be computed in."""
    wanted = count_candidates(ring, count)
    candidates, limits = _find_candidates(ring, queries, wanted)
    distances, indices = rank(ring, queries, candidates, count)
    if wanted < ring.count:
        make_sure(ring, queries, distances, indices, limits, longest)
    return distances, indices


def count_candidates(ring: Ring, count: int) -> int:
    """Return how many candidates to take, so that rounding is seldom in doubt about `count` of them."""
    return min(ring.count, count + 16 + count // 8)


def make_sure(ring: Ring, queries: Tensor, distances: Tensor, indices: Tensor, limits: Tensor, longest: float) -> None:
    """Correct the nearest, [Q,count], where an entry whose score is not below `limits` [Q] may be nearer."""
    lengths = squared_lengths(queries).to(distances.dtype)
    error = score_error(queries, lengths, distances[:, -1], longest)
    unsure = limits + lengths - error <= distances[:, -1]
    # Far from the origin scores of float32 are all rounding; elsewhere many entries are about equally far.
    rough = unsure & (error > 1e-3 * distances[:, -1]) & (queries.dtype != distances.dtype)
    count = distances.shape[1]
    if rows := rough.nonzero()[:, 0].tolist():
        distances[rows], indices[rows] = _find_nearest(ring, queries[rows].to(distances.dtype), count, longest)
    if rows := (unsure & ~rough).nonzero()[:, 0].tolist():
        farthest, margin = distances[rows, -1], (error - lengths)[rows]
        distances[rows], indices[rows] = _find_all_within(ring, queries[rows], count, farthest, margin)


def rank(ring: Ring, queries: Tensor, indices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the nearest of given entries [Q,n] (any order, none twice): distances and indices [Q,count]."""
    indices = indices.sort(dim=1).values
    distances = torch.empty(indices.shape, dtype=ring.exact_dtype, device=queries.device)
    queries = queries.to(distances.dtype)
    across = max(1, min(indices.shape[1], PAIRS // queries.shape[1]))
    down = max(1, PAIRS // (across * queries.shape[1]))
    for row, column in itertools.product(range(0, len(indices), down), range(0, indices.shape[1], across)):
        part = slice(row, row + down), slice(column, column + across)
        difference = ring.keys_at(indices[part]).to(distances.dtype)
        difference -= queries[part[0], None]
        distances[part] = difference.square_().sum(2)
    distances, order = distances.sort(dim=1, stable=True)  # stable: among equal distances the lowest index is first
    return distances[:, :count], indices.gather(1, order[:, :count])


def _distances_of(ring: Ring, queries: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
    """Return the squared distances [n] of pairs of a query's row [n] and an entry's index [n], by difference."""
    out = torch.empty(len(rows), dtype=ring.exact_dtype, device=queries.device)
    queries = queries.to(out.dtype)
    step = max(1, PAIRS // queries.shape[1])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        difference = ring.keys_at(indices[part]).to(out.dtype)
        difference -= queries.index_select(0, rows[part])
        out[part] = difference.square_().sum(1)
    return out


def _find_all_within(
    ring: Ring, queries: Tensor, count: int, farthest: Tensor, margin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return distances and indices [Q,count] by the distances of all entries whose scores do not rule them out.

    `farthest` [Q] is the distance of as many entries at least, `margin` [Q] how far a distance and a score can differ.
    """
    farthest = farthest.clone()
    best = [farthest.new_empty(0) for _ in queries]
    best_indices = [torch.empty(0, dtype=torch.int64, device=queries.device) for _ in queries]
    for first, _, scores in _score_blocks(ring, queries):
        limits = (farthest + margin).to(queries.dtype)
        for _ in range(2):  # past the rounding of the cast, and past the limit itself
            limits = torch.nextafter(limits, torch.full_like(limits, float("inf")))
        rows, columns, _ = _look_into_groups(scores, limits, *_find_groups_below(scores, limits))
        near = _distances_of(ring, queries, rows, columns + first)
        kept = near <= farthest[rows]
        rows, columns, near = rows[kept], columns[kept] + first, near[kept]
        for row in sorted(set(rows.tolist())):
            mine = (rows == row).nonzero()[:, 0]
            mine = mine[columns[mine].argsort()]
            # Blocks come in the order of their indices, so that a stable sort leaves equal distances in it.
            both = torch.cat([best[row], near[mine]])
            order = both.argsort(stable=True)[:count]
            best[row], best_indices[row] = both[order], torch.cat([best_indices[row], columns[mine]])[order]
            if len(order) == count:
                farthest[row] = best[row][-1]
    return torch.stack(best), torch.stack(best_indices)


class Best:
    """The `wanted` least scores of each query so far, of dense blocks or of single hits."""

    def __init__(self, queries: Tensor, wanted: int) -> None:
        self.wanted = wanted
        self.scores = queries.new_empty(len(queries), 0)  # [Q,wanted] once there are so many, ascending
        self.indices = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
        self._hits: list[tuple[Tensor, Tensor, Tensor]] = []
        self._pending = 0

    @property
    def full(self) -> bool:
        return self.scores.shape[1] == self.wanted

    def limits(self) -> Tensor:
        """Return the limit of each query, [Q]: a score that is not less is none of the best."""
        return self.scores[:, -1]

    def add(self, scores: Tensor, first: int) -> None:
        """Add all scores [Q,n] of the entries from `first` on."""
        best, places = scores.topk(min(self.wanted, scores.shape[1]), dim=1, largest=False)
        self._merge(best, places + first)

    def add_hits(self, rows: Tensor, scores: Tensor, indices: Tensor) -> None:
        """Add single scores [n], of the queries in these rows."""
        self._hits.append((rows, scores, indices))
        self._pending += len(rows)
        if self._pending > SCORES // 8:
            self.settle()

    def settle(self) -> None:
        """Merge the hits, so that the limits are as low as they can be."""
        if not self._pending:
            return
        rows, scores, indices = (torch.cat(part) for part in zip(*self._hits, strict=True))
        self._hits, self._pending = [], 0
        order = rows.argsort()
        rows, scores, indices = rows[order], scores[order], indices[order]
        counts = torch.bincount(rows, minlength=len(self.scores))
        places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        width = max(self.wanted, SCORES // len(self.scores))
        for begin in range(0, int(counts.max()), width):  # more than once only if a few queries have most of the hits
            part = (places >= begin) & (places < begin + width)
            columns = min(width, int(counts.max()) - begin)
            dense = scores.new_full((len(self.scores), columns), float("inf"))
            dense_indices = indices.new_zeros(len(self.scores), columns)
            dense[rows[part], places[part] - begin] = scores[part]
            dense_indices[rows[part], places[part] - begin] = indices[part]
            self._merge(dense, dense_indices)

    def _merge(self, scores: Tensor, indices: Tensor) -> None:
        scores, indices = torch.cat([self.scores, scores], 1), torch.cat([self.indices, indices], 1)
        self.scores, places = scores.topk(min(self.wanted, scores.shape[1]), dim=1, largest=False)
        self.indices = indices.gather(1, places)


def _find_candidates(ring: Ring, queries: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Return indices [Q,wanted] of the least scores, and the greatest of those [Q]; `wanted` at most the entries.

    Only the first blocks are sorted through. After those a block has few scores below the worst of the best so far,
    and comparing the least of each group of 32 finds where.
    """
    best = Best(queries, wanted)
    seen = settled = 0
    for first, keys, scores in _score_blocks(ring, queries):
        if not best.full or seen < 16 * wanted or keys.device.type != "cpu":
            best.add(scores, first)
            settled = seen
        elif _add_below(best, scores, first):
            best.settle()
            settled = seen
        seen += len(keys)
        if seen >= 2 * settled:
            best.settle()
            settled = seen
    best.settle()
    return best.indices, best.limits()


def _score_blocks(ring: Ring, queries: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (index of the first entry, keys [n,d], scores [Q,n]) of each block."""
    most = SCORES if queries.device.type == "cpu" else 16 * SCORES  # a GPU is slower at starting work than at doing it
    size = max(GROUP, min(2**16, most // len(queries)) // GROUP * GROUP)
    if ring.keys.dtype != queries.dtype:
        size = max(GROUP, min(size, CONVERTED // queries.shape[1]))
    doubled = -2 * queries
    for first, keys, lengths in ring.blocks(size):
        factors = keys.to(queries.dtype)
        if lengths.dtype != queries.dtype:
            lengths = factors.square().sum(1)
        yield first, keys, multiply(doubled, factors, lengths)


def _add_below(best: Best, scores: Tensor, first: int) -> bool:
    """Add the scores that are among the best; return True if they were too many to be taken one by one."""
    limits = best.limits()
    rows, groups = _find_groups_below(scores, limits)
    if len(rows) * GROUP > scores.numel() // 2:
        best.add(scores, first)
        return True
    if len(rows):
        rows, columns, hits = _look_into_groups(scores, limits, rows, groups)
        best.add_hits(rows, hits, columns + first)
    return False


def _group(scores: Tensor) -> Tensor:
    """Group columns, [Q,n] -> [Q,GROUP,groups]: column j is in group j % groups."""
    count, short = divmod(scores.shape[1], GROUP)
    if short:
        scores = torch.nn.functional.pad(scores, (0, GROUP - short), value=float("inf"))
        count += 1
    return scores.view(len(scores), GROUP, count)


def _find_groups_below(scores: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and groups of the scores [Q,n] where one is less than the query's limit [Q]."""
    rows, groups = (_group(scores).amin(1) < limits[:, None]).nonzero(as_tuple=True)
    return rows, groups


def _look_into_groups(scores: Tensor, limits: Tensor, rows: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, columns and scores [n] of those groups' scores that are less than their query's limit [Q]."""
    grouped = _group(scores)
    members = grouped[rows, :, groups]  # [hits,GROUP]
    hit, place = (members < limits[rows][:, None]).nonzero(as_tuple=True)
    return rows[hit], place * grouped.shape[2] + groups[hit], members[hit, place]
