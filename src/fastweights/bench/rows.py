"""The rows of a CSV file, from what was measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastweights.bench.timing import Timing, append_csv

MEMORY = ["mebibytes", "skipped"]

Row = dict[str, Any]


def timing_columns(base: str) -> list[str]:
    """The columns of a time, whose ratio is to a rival that the file calls `base`.

    Examples:
        >>> timing_columns("lstm")
        ['milliseconds', 'ratio_to_lstm', 'rounds', 'skipped']
    """
    return ["milliseconds", f"ratio_to_{base}", "rounds", "skipped"]


def timings(
    of: Callable[[str], Row],
    times: Mapping[str, Timing],
    skipped: Mapping[str, str],
    rival: str,
    base: str = "lstm",
) -> list[Row]:
    """A row for each rival: what `of` says of it, then its time; `rival` is that of the ratios, called `base` there."""
    ratio = f"ratio_to_{base}"
    timed = [
        of(name)
        | {
            "milliseconds": _rounded(milliseconds),
            ratio: _rounded(milliseconds / times[rival].milliseconds),
            "rounds": rounds,
            "skipped": "",
        }
        for name, (milliseconds, rounds) in times.items()
    ]
    nothing = {"milliseconds": "", ratio: "", "rounds": 0}
    return timed + [of(name) | nothing | {"skipped": why} for name, why in skipped.items()]


def _rounded(value: float) -> float:
    """To four decimals, and four digits of what is less than one."""
    return round(value, 4) if value >= 1 else float(f"{value:.4g}")


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


def append_peaks(output: Path, case: object, of: Callable[[str], Row], measured: Mapping[str, int | str]) -> None:
    """Append the rows of one case's peaks to a CSV file, and print them."""
    found = peaks(of, measured)
    append_csv(output, found)
    shown = (f"{row['rival']} {row['mebibytes'] or row['skipped']}" for row in found)
    print(f"peak memory in MiB, {case}: {', '.join(shown)}", flush=True)
