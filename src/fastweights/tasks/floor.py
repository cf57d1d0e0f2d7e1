"""The floor of a retrieval task: the score of the best model that knows the values, but not which is asked for."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Floor(NamedTuple):
    """The score of the best model that ignores the query, as the two papers give it."""

    accuracy: float  # 0 to 1
    bits: float  # cross entropy
    error: float  # per cent
    cross_entropy: float  # nats


def exact_floor(numbers: Sequence[int], kinds: int) -> Floor:
    """Compute the floor over every number of values, each as likely, and every way in which values can repeat.

    Accuracy: the value that is stored most often is answered. Cross entropy: each value is given its share.

    Args:
        numbers: how many values are stored.
        kinds: how many different values there are, each as likely.

    Examples:
        >>> from fastweights.tasks.floor import exact_floor
        >>> exact_floor([1], kinds=10)
        Floor(accuracy=1.0, bits=0.0, error=0.0, cross_entropy=0.0)
    """
    accuracy = bits = nats = 0.0
    for number in numbers:
        for counts, probability in repetitions(number, kinds):
            shares = [count / number for count in counts]
            accuracy += probability * max(shares) / len(numbers)
            bits -= probability * sum(share * math.log2(share) for share in shares) / len(numbers)
            nats -= probability * sum(share * math.log(share) for share in shares) / len(numbers)
    return Floor(accuracy, bits, 100 * (1 - accuracy), nats)


def repetitions(draws: int, kinds: int) -> Iterator[tuple[list[int], float]]:
    """Yield every way in which uniform draws can repeat: how often each drawn kind came, falling, and its chance.

    Examples:
        >>> from fastweights.tasks.floor import repetitions
        >>> list(repetitions(2, 10))
        [([2], 0.1), ([1, 1], 0.9)]
    """
    for counts in _partitions(draws, draws, kinds):
        yield counts, _probability(counts, draws, kinds)


def _partitions(total: int, largest: int, parts: int) -> list[list[int]]:
    """Return how `total` draws can fall on at most `parts` kinds: the counts in falling order."""
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
    """Return the chance that uniform draws repeat in this way, whichever kinds they are."""
    arrangements = math.factorial(draws)
    for count in counts:
        arrangements //= math.factorial(count)
    choices = math.perm(kinds, len(counts))
    for count in set(counts):
        choices //= math.factorial(counts.count(count))
    return float(arrangements * choices / kinds**draws)
