"""How uniform draws repeat: what the floors that are computed exactly sum over."""

import math
from collections.abc import Iterator


def repetitions(draws: int, kinds: int) -> Iterator[tuple[list[int], float]]:
    """Every way in which draws of so many kinds can repeat, with its chance: how often each drawn kind came, falling.

    Examples:
        >>> from fastweights.tasks._repetitions import repetitions
        >>> list(repetitions(2, 10))
        [([2], 0.1), ([1, 1], 0.9)]
    """
    for counts in _partitions(draws, draws, kinds):
        yield counts, _probability(counts, draws, kinds)


def _partitions(total: int, largest: int, parts: int) -> list[list[int]]:
    """How `total` draws can fall on at most `parts` kinds: the counts in falling order."""
    if total == 0:
        return [[]]
    if parts == 0:
        return []
    return [
        [first, *rest]
        for first in range(min(total, largest), 0, -1)
        for rest in _partitions(total - first, first, parts - 1)
    ]


def _probability(counts: list[int], draws: int, kinds: int) -> float:
    """The chance that uniform draws repeat in this way, whichever kinds they are."""
    arrangements = math.factorial(draws)
    for count in counts:
        arrangements //= math.factorial(count)
    choices = math.perm(kinds, len(counts))
    for count in set(counts):
        choices //= math.factorial(counts.count(count))
    return float(arrangements * choices / kinds**draws)
