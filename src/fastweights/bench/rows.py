"""The rows of a CSV file, from what was measured."""

from collections.abc import Callable, Mapping
from typing import Any

from fastweights.bench.timing import Timing

TIMING = ["milliseconds", "ratio_to_lstm", "rounds", "skipped"]
MEMORY = ["mebibytes", "skipped"]

Row = dict[str, Any]


def timings(of: Callable[[str], Row], times: Mapping[str, Timing], skipped: Mapping[str, str], lstm: str) -> list[Row]:
    """A row for each rival: what `of` says of it, then the columns `TIMING`; `lstm` names the rival of the ratios."""
    base = times[lstm].milliseconds
    timed = [
        of(rival)
        | {
            "milliseconds": round(milliseconds, 4),
            "ratio_to_lstm": round(milliseconds / base, 4),
            "rounds": rounds,
            "skipped": "",
        }
        for rival, (milliseconds, rounds) in times.items()
    ]
    nothing = {"milliseconds": "", "ratio_to_lstm": "", "rounds": 0}
    return timed + [of(rival) | nothing | {"skipped": why} for rival, why in skipped.items()]


def peaks(of: Callable[[str], Row], measured: Mapping[str, int | str]) -> list[Row]:
    """A row for each rival: what `of` says of it, then the columns `MEMORY`, from bytes or why there are none."""
    return [
        of(rival)
        | {
            "mebibytes": round(peak / 2**20, 1) if isinstance(peak, int) else "",
            "skipped": "" if isinstance(peak, int) else peak,
        }
        for rival, peak in measured.items()
    ]
