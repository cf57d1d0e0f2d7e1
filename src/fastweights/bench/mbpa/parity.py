"""A figure counts only while parity is green."""

from fastweights.bench import parity
from fastweights.bench.mbpa import cases
from fastweights.bench.mbpa.problem import Problem
from fastweights.errors import FastWeightsError

MOST = 1e-6


def require_parity(problem: Problem) -> None:
    """Every rival gives the outputs of the autograd loop, to 1e-6 of their norm.

    Raises:
        FastWeightsError: one does not.
    """
    queries = problem.queries[: problem.case.queries(cases.LOOP)]
    expected = problem.loop(queries)
    for rival in problem.case.rivals:
        error = parity.distance(problem.answer(rival)(queries), expected)
        if not error <= MOST:  # a NaN is red
            raise FastWeightsError(
                f"parity is red, so nothing is timed: {rival} at {problem.case} differs from the autograd loop by "
                f"{error:.1e}"
            )
