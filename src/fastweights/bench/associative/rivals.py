"""The rivals of one case that can run here, and for the others the reason why not."""

import time
from collections.abc import Callable

from fastweights.bench.associative import cases
from fastweights.bench.associative.cases import Selection
from fastweights.bench.associative.compiled import compiled
from fastweights.bench.associative.problem import Problem

Calls = dict[str, Callable[[], None]]
MOST_SECONDS = 5.0  # an eager call that takes longer is left out: three rounds of it would not fit the budget
_LONG = 100  # steps from which a quarter of them foretells the whole


def rivals(problem: Problem, selection: Selection) -> tuple[Calls, dict[str, str]]:
    """What can be timed, and why the rest cannot be."""
    calls: Calls = {}
    skipped: dict[str, str] = {}
    for name, forward in problem.forwards().items():
        reason = cases.too_large(name, problem.case) or (too_slow(name, problem) if name in cases.EAGER else None)
        if reason is None:
            calls[name] = problem.timed(forward)
        else:
            skipped[name] = reason
    if selection.compiles(problem.case):
        found, failed = compiled(problem, selection.compile_limit)
        for name, forward in found.items():
            calls[name] = problem.timed(forward)
            calls[name]()  # compiles: no measure of how many rounds fit
        skipped |= failed
    return calls, skipped


def too_slow(name: str, problem: Problem) -> str | None:
    """Why an eager form is not run to its end: a quarter of the steps foretells more than `MOST_SECONDS`."""
    steps = problem.case.steps
    if steps < _LONG:
        return None
    call = problem.timed(problem.forwards()[name], steps // 4)
    began = time.perf_counter()
    call()
    taken = time.perf_counter() - began
    # Attention reads all that came before; a matrix costs the same at every step.
    foretold = taken * (16 if name == cases.ATTENTION else 4)
    return None if foretold <= MOST_SECONDS else f"would take about {foretold:.0f} s a call"
