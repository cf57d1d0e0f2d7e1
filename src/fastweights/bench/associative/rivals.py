"""The rivals of one case that can run here, and for the others the reason why not."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from fastweights.bench.associative import cases
from fastweights.bench.associative.cases import Selection
from fastweights.bench.associative.problem import Forward, Problem

Calls = dict[str, Callable[[], None]]
MOST_SECONDS = 10.0  # an eager call that takes longer is left out: three rounds of it would not fit any budget
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
        torch._dynamo.reset()  # or sizes of earlier cases would count as dynamic
        for name, forward in _compiled(problem).items():
            call = problem.timed(forward)
            reason = compile_failure(call, selection.compile_limit)
            if reason is None:
                calls[name] = call
            else:
                skipped[name] = reason
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


def _compiled(problem: Problem) -> dict[str, Forward]:
    forwards = problem.forwards()

    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=False)

    return {
        cases.COMPILED_ATTENTION: compiled(forwards[cases.ATTENTION]),
        cases.COMPILED_MATRIX: compiled(forwards[cases.MATRIX]),
        cases.COMPILED_STEP: problem.stepwise(compiled(problem.matrix_step)),
    }


def compile_failure(call: Callable[[], None], limit: float) -> str | None:
    """Make the first call of something compiled, which compiles it; the reason where that fails or takes too long."""
    try:
        with _at_most(limit):
            call()
    except _TimeUpError:
        return f"compiling took more than {limit:.0f} s"
    except Exception as error:  # whatever the compiler raises is its verdict, and the others are timed all the same
        return f"compiling failed: {' '.join(str(error).split())[:100] or type(error).__name__}"
    return None


class _TimeUpError(BaseException):
    """Not an Exception, so that the compiler passes it on as it does an interrupt."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals reach only the main thread
        yield
        return

    def time_up(signum: int, frame: FrameType | None) -> None:
        raise _TimeUpError

    before = signal.signal(signal.SIGALRM, time_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
