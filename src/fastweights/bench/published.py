"""Tables for the documentation, from the CSV files that benches append to and the columns that each bench shows."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]
Cell = Callable[[Mapping[str, Any], Mapping[str, float]], str]  # from a row of the case and the times of its rivals
Column = tuple[str, str | Cell]  # a heading, and a column of the file or a cell
Columns = Sequence[Column]
NOTHING = "-"
MEASURED = ("date", "kernel", "milliseconds", "mebibytes", "rounds", "skipped", "agreement")  # the rest is the case
SEQUENCES = {"T": "steps", "H": "hidden_size"}


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def last_measured(rows: list[Row]) -> list[Row]:
    """Return the rows of the commit and machine measured last; of several of one rival and case, the last."""
    same = [row for row in rows if all(row[name] == rows[-1][name] for name in ("commit", "processor", "torch"))]
    names = [name for name in (rows[-1] if rows else ()) if name not in MEASURED and not name.startswith("ratio_to_")]
    return list({tuple(row[name] for name in names): row for row in same}.values())


# As the makers of processors call them.
_INSTRUCTIONS = {"x86-64-v4": "AVX-512", "x86-64-v3": "AVX2"}


def last_of_each(rows: list[Row], column: str | None = None, values: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Return the rows that were measured last with each set of instructions, by its name, the widest first.

    The rows have that name as their kernel. With `column`, each of its values has the rows that were measured last of
    it: in the order of `values`, then any others.
    """
    named: dict[str, list[Row]] = {name: [] for name in _INSTRUCTIONS.values()}
    for row in rows:
        name = next((name for level, name in _INSTRUCTIONS.items() if level in row["kernel"]), row["kernel"])
        named.setdefault(name, []).append(row | {"kernel": name})
    return {name: last_of_every(of_level, column, values) for name, of_level in named.items() if of_level}


def last_of_every(rows: list[Row], column: str | None, values: Sequence[str] = ()) -> list[Row]:
    """Return the rows that were measured last, of each value of a column where there is one."""
    if column is None:
        return last_measured(rows)
    found = dict.fromkeys((*values, *(row[column] for row in rows)))
    return [row for value in found for row in last_measured([row for row in rows if row[column] == value])]


def places(levels: Mapping[str, list[Row]], column: str | None = None) -> str:
    """Return where the rows of each set of instructions were measured."""
    return "; ".join(f"{name}: {places_of(rows, column)}" for name, rows in levels.items())


def places_of(rows: list[Row], column: str | None) -> str:
    """Return where rows were measured: where there are several places, with the values of a column that each has."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        found.setdefault(place(row), {})[row[column] if column else ""] = None
    if column is None or len(found) == 1:
        return "; ".join(found)
    return "; ".join(f"{where} ({', '.join(values)})" for where, values in found.items())


def show(*rivals: str, digits: int = 2) -> Cell:
    """Return a table's cell: the shortest time of these rivals."""
    return lambda _, values: number(best(values, rivals), digits)


def show_ratio(rivals: str | tuple[str, ...], base: str | tuple[str, ...], digits: int = 2, unit: str = "") -> Cell:
    """Return a table's cell: the shortest time of `rivals` over the shortest time of `base`."""

    def cell(_: Mapping[str, Any], values: Mapping[str, float]) -> str:
        over, under = best(values, rivals), best(values, base)
        return NOTHING if over is None or under is None else f"{number(over / under, digits)}{unit}"

    return cell


def best(values: Mapping[str, float], names: str | tuple[str, ...]) -> float | None:
    """Return the lowest of some rivals, None where none of them was measured."""
    names = (names,) if isinstance(names, str) else names
    return min((values[name] for name in names if name in values), default=None)


def number(value: float | None, digits: int = 2) -> str:
    """Return a number as it stands in a table.

    Examples:
        >>> number(None), number(3.14159), number(31415.9)
        ('-', '3.14', '31,416')
    """
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}"


def group(
    rows: Iterable[Row], names: Sequence[str], words: Sequence[str] | None = ()
) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of each case: by their numbers, and by words in the order of `words`; None: as they come."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in names), []).append(row)
    if words is None:
        return cases
    return dict(sorted(cases.items(), key=lambda item: [int(x) if x.isdecimal() else words.index(x) for x in item[0]]))


def measured(rows: Iterable[Row], value: str = "milliseconds") -> dict[str, float]:
    """Return the measured number of each rival."""
    return {row["rival"]: float(row[value]) for row in rows if row[value]}


def table(rows: Iterable[Row], columns: Columns, value: str = "milliseconds", words: Sequence[str] | None = ()) -> str:
    """Return a Markdown table with a line for each case; the columns of the file tell the cases apart."""
    names = [column for _, column in columns if isinstance(column, str)]
    lines = []
    for of_case in group(rows, names, words).values():
        row, values = of_case[0], measured(of_case, value)
        lines.append([row[column] if isinstance(column, str) else column(row, values) for _, column in columns])
    return markdown([heading for heading, _ in columns], lines)


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    """Return a table of numbers, which stand on the right."""
    rule = ["--:"] * len(headings)
    head = [f"| {' | '.join(headings)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in lines)]) + "\n"


def heading(last: Row, what: str) -> str:
    """Return the sentence over tables of recurrences: what they hold, and where it was measured."""
    return f"{what}; {last['batch']} sequences of {last['input_size']} features; {place(last)}.\n"


def place(last: Row) -> str:
    """Return the machine, and what ran on it when."""
    return f"{last['processor']}, PyTorch {last['torch']}, commit {last['commit']}, {last['date']}"


def left_out(rows: Iterable[Row], sizes: Mapping[str, str] = SEQUENCES) -> str:
    """Return the sentence under a table: what was not measured, and why.

    `sizes` are the columns that tell the cases apart, by symbol.
    """
    reasons: dict[str, None] = {}  # each once
    for row in rows:
        if row["skipped"]:
            where = ", ".join(f"{symbol}={row[column]}" for symbol, column in sizes.items())
            reasons[f"{row['rival']} at {where}: {row['skipped']}"] = None
    return f"\nNot measured: {'; '.join(reasons)}.\n" if reasons else ""
