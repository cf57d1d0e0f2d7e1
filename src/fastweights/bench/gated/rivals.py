"""The rivals of one case that can run here, and for the others the reason why not."""

from collections.abc import Callable

from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import Selection
from fastweights.bench.gated.compiled import compiled
from fastweights.bench.gated.problem import Problem

Calls = dict[str, Callable[[], None]]


def rivals(problem: Problem, selection: Selection) -> tuple[Calls, dict[str, str]]:
    """What can be timed, and why the rest cannot be."""
    wanted = selection.compiles(problem.case)
    names = (*problem.forwards(), *wanted)
    skipped = {name: reason for name in names if (reason := cases.too_large(name, problem.case)) is not None}
    calls = {name: problem.timed(forward) for name, forward in problem.forwards().items() if name not in skipped}
    if fitting := [name for name in wanted if name not in skipped]:
        found, failed = compiled(problem, fitting, selection.compile_limit)
        for name, forward in found.items():
            calls[name] = problem.timed(forward)
            calls[name]()  # compiles: no measure of how many rounds fit
        skipped |= failed
    return calls, skipped
