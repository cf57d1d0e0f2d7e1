"""Made-up rows of the CSV files."""

from typing import Any

from fastweights.bench.published import Row


def make_row(columns: list[str], rival: str, value: float | None, **cells: Any) -> Row:
    """A row of either file of a subject with such columns: what was measured of a rival, as a time and as a peak."""
    row: dict[str, Any] = dict.fromkeys(columns, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "threads": 1,
        "rival": rival,
        "milliseconds": "" if value is None else value,
        "mebibytes": "" if value is None else value,
        "skipped": "",
    }
    return {name: str(cell) for name, cell in (row | cells).items()}
