"""Sequences of recall that grow in training: from 64 at once DeltaFastWeightsRNN does not begin (docs/recall.md)."""

import math

FEWEST, SHORTEST = 4, 64  # keys and steps at first


def count_pairs(accuracy: float, pairs: int) -> int:
    """Return the keys of a training sequence: twice as many as are recalled of a whole one's, which has `pairs`."""
    return min(max(FEWEST, round(2 * accuracy * pairs)), pairs)


def shorten(some: int, steps: int, pairs: int, updates: int) -> tuple[int, int]:
    """Return the steps and the updates of a sequence that has `some` of its pairs."""
    updates = math.ceil(updates * some / pairs)
    shorter = max(2 * math.ceil(steps * some / pairs / 2), 2 * (2 * some + updates), SHORTEST)
    return min(shorter, steps), updates
