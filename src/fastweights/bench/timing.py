"""Median times of rivals that take turns, and the CSV they go to."""

import csv
import datetime
import io
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastweights.errors import FastWeightsError

WARM_UP = 3


def medians(rivals: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each rival, the median over rounds in which they take turns, so that a noisy spell hits all.

    Examples:
        >>> from fastweights.bench.timing import medians
        >>> times = medians({"nothing": lambda: None, "something": lambda: sum(range(100_000))}, rounds=5)
        >>> times["nothing"] < times["something"]
        True
    """
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(WARM_UP + rounds):
        for name, call in rivals.items():
            began = time.perf_counter()
            call()
            if turn >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(taken) for name, taken in times.items()}


def append_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file with a header, which is written where the file is new.

    Raises:
        FastWeightsError: the file has other columns, or cannot be written; it is left as it is.
    """
    columns = list(rows[0])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = path.read_text().splitlines()[:1] if path.exists() else []
        if header and header[0].split(",") != columns:
            raise FastWeightsError(f"{path} has other columns ({header[0]}); choose another --output")
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        if not header:
            writer.writeheader()
        writer.writerows(rows)
        with path.open("a") as file:
            file.write(text.getvalue())
    except UnicodeDecodeError:
        raise FastWeightsError(f"{path} is no CSV file of ours; choose another --output") from None
    except OSError as error:
        raise FastWeightsError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def today() -> str:
    """The date of a measurement, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
