"""The entries that may be among the nearest, by blocks of scores |k|^2 - 2 q.k that never grow with the memory.

A score differs from the squared distance by |q|^2, which ranks nothing, and by rounding, which `_exact.py` deals with.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.memory._ring import Ring

SCORES = 2**21  # of one block: a few megabytes, near what a processor keeps at hand
CONVERTED = 2**22  # numbers of keys in another dtype
QUERIES = 256  # of one block
GROUP = 32  # scores whose least one is compared first


def block_size(queries: int, device: torch.device) -> int:
    """How many keys a block has for so many queries."""
    scores = SCORES if device.type == "cpu" else 16 * SCORES  # a GPU is slower at starting work than at doing it
    return max(GROUP, min(2**16, scores // queries) // GROUP * GROUP)


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
        """[Q]: a score that is not less is none of the best."""
        return self.scores[:, -1]

    def add(self, scores: Tensor, first: int) -> None:
        """All scores [Q,n] of the entries from `first` on."""
        best, places = scores.topk(min(self.wanted, scores.shape[1]), dim=1, largest=False)
        self._merge(best, places + first)

    def add_hits(self, rows: Tensor, scores: Tensor, indices: Tensor) -> None:
        """Single scores [n], of the queries in these rows."""
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
            found = indices.new_zeros(len(self.scores), columns)
            dense[rows[part], places[part] - begin] = scores[part]
            found[rows[part], places[part] - begin] = indices[part]
            self._merge(dense, found)

    def _merge(self, scores: Tensor, indices: Tensor) -> None:
        scores, indices = torch.cat([self.scores, scores], 1), torch.cat([self.indices, indices], 1)
        self.scores, places = scores.topk(min(self.wanted, scores.shape[1]), dim=1, largest=False)
        self.indices = indices.gather(1, places)


def candidates(ring: Ring, queries: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Indices [Q,wanted] of the least scores, and the greatest of those scores [Q]; `wanted` at most the entries.

    Only the first blocks are sorted through. After those a block has few scores below the worst of the best so far,
    and comparing the least of each group of 32 finds where.
    """
    best = Best(queries, wanted)
    seen = settled = 0
    for first, keys, scores in scored_blocks(ring, queries):
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


def scored_blocks(ring: Ring, queries: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(index of the first entry, keys [n,d], scores [Q,n]) of each block; the scores hold until the next one."""
    size = block_size(len(queries), queries.device)
    if ring.keys.dtype != queries.dtype:
        size = max(GROUP, min(size, CONVERTED // queries.shape[1]))
    memory = queries.new_empty(len(queries) * min(size, ring.capacity))  # one for all: fresh pages cost as much again
    for first, keys, lengths in ring.blocks(size):
        scores = memory[: len(queries) * len(keys)].view(len(queries), len(keys))
        factors = keys.to(queries.dtype)
        if lengths.dtype != queries.dtype:
            lengths = factors.square().sum(1)
        torch.addmm(lengths, queries, factors.T, alpha=-2, out=scores)
        yield first, keys, scores


def below(scores: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the scores [Q,n] that are less than their query's limit [Q]."""
    rows, groups = _groups_below(scores, limits)
    return _in_groups(scores, limits, rows, groups)[:2]


def _add_below(best: Best, scores: Tensor, first: int) -> bool:
    """Add the scores that are among the best; True if they were too many to be taken one by one."""
    limits = best.limits()
    rows, groups = _groups_below(scores, limits)
    if len(rows) * GROUP > scores.numel() // 2:
        best.add(scores, first)
        return True
    if len(rows):
        rows, columns, found = _in_groups(scores, limits, rows, groups)
        best.add_hits(rows, found, columns + first)
    return False


def _grouped(scores: Tensor) -> tuple[Tensor, int]:
    """[Q,n] -> [Q,groups of one column each,number of groups]: column j is in group j % number."""
    count, short = divmod(scores.shape[1], GROUP)
    if short:
        scores = torch.nn.functional.pad(scores, (0, GROUP - short), value=float("inf"))
        count += 1
    return scores.view(len(scores), GROUP, count), count


def _groups_below(scores: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    least = _grouped(scores)[0].amin(1)
    rows, groups = (least < limits[:, None]).nonzero(as_tuple=True)
    return rows, groups


def _in_groups(scores: Tensor, limits: Tensor, rows: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grouped, count = _grouped(scores)
    members = grouped[rows, :, groups]  # [hits,GROUP]
    hit, place = (members < limits[rows][:, None]).nonzero(as_tuple=True)
    return rows[hit], place * count + groups[hit], members[hit, place]
