"""The CSV files that timings were appended to, and tables of them in Markdown. Nothing here needs torch."""

import csv
from collections.abc import Iterable
from pathlib import Path

Row = dict[str, str]
NOTHING = "-"


def read(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def last_measured(rows: list[Row], names: Iterable[str]) -> list[Row]:
    """The rows of the commit and machine that were measured last; of several that have all `names` alike, the last."""
    same = [row for row in rows if all(row[name] == rows[-1][name] for name in ("commit", "processor", "torch"))]
    return list({tuple(row[name] for name in names): row for row in same}.values())


def best(of_size: dict[str, float], names: tuple[str, ...]) -> float | None:
    """The lowest of some rivals, None where none of them was measured."""
    return min((of_size[name] for name in names if name in of_size), default=None)


def number(value: float | None, digits: int = 2) -> str:
    """As it stands in a table.

    Examples:
        >>> number(None), number(3.14159), number(31415.9)
        ('-', '3.14', '31,416')
    """
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}"


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    """A table of numbers, which stand on the right."""
    rule = ["--:"] * len(headings)
    head = [f"| {' | '.join(headings)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in lines)]) + "\n"


def heading(last: Row, what: str) -> str:
    """Of tables: what they hold, and where it was measured."""
    return (
        f"{what}; {last['batch']} sequences of {last['input_size']} features; {last['processor']}, PyTorch "
        f"{last['torch']}, commit {last['commit']}, {last['date']}.\n"
    )


def left_out(rows: Iterable[Row]) -> str:
    """Under a table: what was not measured, and why."""
    reasons = [
        f"{row['rival']} at T={row['steps']}, H={row['hidden_size']}: {row['skipped']}"
        for row in rows
        if row["skipped"]
    ]
    return f"\nNot measured: {'; '.join(reasons)}.\n" if reasons else ""
