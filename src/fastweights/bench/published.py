"""The CSV files that timings were appended to, and tables of them in Markdown. Nothing here needs torch."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Row = dict[str, str]
Key = tuple[str, ...]
NOTHING = "-"


def read(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def last_measured(rows: list[Row], names: Iterable[str]) -> list[Row]:
    """The rows of the commit and machine that were measured last; of several that have all `names` alike, the last."""
    same = [row for row in rows if all(row[name] == rows[-1][name] for name in ("commit", "processor", "torch"))]
    return list({tuple(row[name] for name in names): row for row in same}.values())


def values(
    rows: Iterable[Row], names: Sequence[str], value: str = "milliseconds", words: Sequence[str] = ()
) -> dict[Key, dict[str, float]]:
    """What was measured of each rival in each case: by their numbers, and by words in the order of `words`."""
    found: dict[Key, dict[str, float]] = {}
    for row in rows:
        of_case = found.setdefault(tuple(row[name] for name in names), {})
        if row[value]:
            of_case[row["rival"]] = float(row[value])

    def order(key: Key) -> list[int]:
        return [int(cell) if cell.isdecimal() else words.index(cell) for cell in key]

    return {key: found[key] for key in sorted(found, key=order)}


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
    """Of tables of recurrences: what they hold, and where it was measured."""
    return f"{what}; {last['batch']} sequences of {last['input_size']} features; {measured_at(last)}.\n"


def measured_at(last: Row) -> str:
    """The machine, and what ran on it when."""
    return f"{last['processor']}, PyTorch {last['torch']}, commit {last['commit']}, {last['date']}"


SEQUENCES = {"T": "steps", "H": "hidden_size"}


def left_out(rows: Iterable[Row], sizes: Mapping[str, str] = SEQUENCES) -> str:
    """Under a table: what was not measured, and why; `sizes` are the columns that tell the cases apart, by symbol."""
    reasons = []
    for row in rows:
        if row["skipped"]:
            where = ", ".join(f"{symbol}={row[column]}" for symbol, column in sizes.items())
            reasons.append(f"{row['rival']} at {where}: {row['skipped']}")
    return f"\nNot measured: {'; '.join(reasons)}.\n" if reasons else ""
