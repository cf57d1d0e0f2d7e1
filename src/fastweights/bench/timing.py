"""Median times of rivals that take turns, and the CSV they go to."""

import csv
import datetime
import io
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.errors import FastWeightsError

WARM_UP = 3
LEAST_ROUNDS = 3


class Timing(NamedTuple):
    """The median over some rounds."""

    milliseconds: float
    rounds: int


def medians(rivals: Mapping[str, Callable[[], object]], rounds: int, budget: float = math.inf) -> dict[str, Timing]:
    """Time each rival, the median over rounds in which they take turns, so that a noisy spell hits all.

    Rivals too slow to fit `rounds` into the budget, in seconds and for all together, get fewer, at least three, spread
    over the rounds of the others.

    Examples:
        >>> from fastweights.bench.timing import medians
        >>> times = medians({"nothing": lambda: None, "something": lambda: sum(range(100_000))}, rounds=5)
        >>> times["nothing"].milliseconds < times["something"].milliseconds
        True
    """
    warm = {name: _warm_up(call, budget / (10 * len(rivals))) for name, call in rivals.items()}
    planned = plan(warm, rounds, budget)
    most = max(planned.values())
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(most):
        for name, call in rivals.items():
            share = planned[name]
            if (turn + 1) * share // most > turn * share // most:
                times[name].append(_seconds(call))
    return {name: Timing(1e3 * statistics.median(taken), len(taken)) for name, taken in times.items()}


def beside_torch(
    path: Path,
    machine: dict[str, Any],
    case: dict[str, Any],
    rivals: Mapping[str, Callable[[], object]],
    rounds: int,
) -> None:
    """Append and print what the rivals take, and how many times what the one named torch takes."""
    times = medians(rivals, rounds)
    rows = []
    for rival, (taken, counted) in times.items():
        ratio = taken / times["torch"].milliseconds
        measured = {"rival": rival, "milliseconds": round(taken, 3), "ratio_to_torch": round(ratio, 3)}
        rows.append(machine | case | measured | {"rounds": counted})
        print(*case.values(), *measured.values())
    append_csv(path, rows)


def each(times: Mapping[str, Timing], counts: Mapping[str, int]) -> dict[str, Timing]:
    """Of one of the so many that a rival does in a call.

    Examples:
        >>> each({"ours": Timing(20.0, 5)}, {"ours": 10})["ours"].milliseconds
        2.0
    """
    return {name: Timing(milliseconds / counts[name], rounds) for name, (milliseconds, rounds) in times.items()}


def plan(seconds: Mapping[str, float], rounds: int, budget: float) -> dict[str, int]:
    """How many rounds each rival gets by the time of one call; what the fast ones leave over goes to the slow ones.

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


def _warm_up(call: Callable[[], object], budget: float) -> float:
    """Seconds of the last of the first calls: three, or one where that is long."""
    spent = 0.0
    taken = 0.0
    for _ in range(WARM_UP):
        taken = _seconds(call)
        spent += taken
        if spent > budget:
            break
    return taken


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def check_csv(path: Path, columns: list[str]) -> bool:
    """Whether the file has a header yet; to be asked before an hour of timing, too.

    Raises:
        FastWeightsError: the file has other columns, or cannot be read.
    """
    try:
        header = path.read_text().splitlines()[:1] if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not header:
            path.unlink()  # nothing to keep yet
    except UnicodeDecodeError:
        raise FastWeightsError(f"{path} is no CSV file of ours; choose another --output") from None
    except OSError as error:
        raise FastWeightsError(f"cannot write {path}: {error.strerror}; choose another --output") from error
    if header and header[0].split(",") != columns:
        raise FastWeightsError(f"{path} has other columns ({header[0]}); choose another --output")
    return bool(header)


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file with a header, which is written where the file is new.

    Raises:
        FastWeightsError: the file has other columns, or cannot be written; it is left as it is.
    """
    columns = list(rows[0])
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if not check_csv(path, columns):
        writer.writeheader()
    writer.writerows(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text.getvalue())
    except OSError as error:
        raise FastWeightsError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def today() -> str:
    """The date of a measurement, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
