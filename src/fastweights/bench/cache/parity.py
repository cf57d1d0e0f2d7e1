"""A figure counts only while parity is green."""

from fastweights.bench.cache.cases import LOOP, POSITIONS
from fastweights.bench.cache.problem import Problem
from fastweights.errors import FastWeightsError

MOST = 1e-6


def require_parity(problem: Problem) -> None:
    """The loss is that of the loop over time, to 1e-6 of it.

    Raises:
        FastWeightsError: it is not.
    """
    expected, found = (float(losses(POSITIONS[LOOP]).double().sum()) for losses in (problem.loop(), problem.ours()))
    error = abs(found - expected) / abs(expected)
    if not error <= MOST:  # a NaN is red
        raise FastWeightsError(
            f"parity is red, so nothing is timed: the loss at {problem.case} differs from the loop's by {error:.1e}"
        )
