"""Median times of rivals that take turns in one process."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Timing", "measure_processor_seconds", "medians", "plan"]

WARM_UP = 3
LEAST_ROUNDS = 3

Call = Callable[[], object]


class Timing(NamedTuple):
    """A median, and the number of rounds that it is over."""

    milliseconds: float
    rounds: int


def measure_seconds(call: Call) -> float:
    """Return the seconds that a call takes by the clock."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_processor_seconds(call: Call) -> float:
    """Return the seconds that a call keeps processors busy: other work on the machine hardly counts.

    Examples:
        >>> import time
        >>> measure_processor_seconds(lambda: time.sleep(0.2)) < 0.1
        True
    """
    began = time.process_time()
    call()
    return time.process_time() - began


def medians(
    rivals: Mapping[str, Call],
    rounds: int,
    budget: float = math.inf,
    measure: Callable[[Call], float] = measure_seconds,
) -> dict[str, Timing]:
    """Time each rival, the median over rounds in which they take turns, so that a noisy spell hits all.

    Rivals too slow to fit `rounds` into the budget, in seconds and for all together, get fewer, at least three, spread
    over the rounds of the others. `measure` gives the seconds of one call.

    Examples:
        >>> from fastweights.timing import medians
        >>> times = medians({"nothing": lambda: None, "something": lambda: sum(range(100_000))}, rounds=5)
        >>> times["nothing"].milliseconds < times["something"].milliseconds
        True
    """
    warm = {name: _warm_up(call, budget / (10 * len(rivals)), measure) for name, call in rivals.items()}
    planned = plan(warm, rounds, budget)
    most = max(planned.values())
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(most):
        for name, call in rivals.items():
            share = planned[name]
            if (turn + 1) * share // most > turn * share // most:
                times[name].append(measure(call))
    return {name: Timing(1e3 * statistics.median(seconds), len(seconds)) for name, seconds in times.items()}


def plan(seconds: Mapping[str, float], rounds: int, budget: float) -> dict[str, int]:
    """Return the rounds of each rival by the time of one call; what the fast ones leave over goes to the slow ones.

    Examples:
        >>> plan({"fast": 0.1, "slow": 2.0}, rounds=30, budget=23)
        {'fast': 30, 'slow': 10}
    """
    planned: dict[str, int] = {}
    left = budget
    for index, name in enumerate(sorted(seconds, key=lambda name: seconds[name])):
        share = left / (len(seconds) - index)
        # Rounded first: a share that is as good as ten calls is ten calls.
        fitting = math.floor(round(min(share / max(seconds[name], 1e-9), rounds), 6))
        planned[name] = min(rounds, max(LEAST_ROUNDS, fitting))
        left -= planned[name] * seconds[name]
    return planned


def _warm_up(call: Call, budget: float, measure: Callable[[Call], float]) -> float:
    """Call three times, or once where that takes long, and return the seconds of the last call."""
    spent = 0.0
    seconds = 0.0
    for _ in range(WARM_UP):
        seconds = measure(call)
        spent += seconds
        if spent > budget:
            break
    return seconds
