"""The table of a run: the paper's score, ours over the seeds, and the floor."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fastweights.report.blocks import Paragraph, Table, to_markdown
from fastweights.runs import Member, Row, Run, metric_key

if TYPE_CHECKING:
    import rich.table

COLUMNS = ("model", "hidden units", "metric", "paper", "ours", "best seed on validation", "floor")
RIGHT = ("hidden units", "paper", "ours", "best seed on validation", "floor")
# The sentences under the table, for the columns that are there.
_NOTES = {
    "ours": "Ours: the mean over the seeds ± their sample standard deviation.",
    "best seed on validation": (
        "Best seed on validation: the score of the seed with the lowest validation error, or the lowest loss where "
        "errors are equal or there are none, because the paper reports selected models."
    ),
    "floor": "Floor: the score of a model that ignores its input.",
}
_OF_THE_PAPER = ("paper", "best seed on validation", "floor")  # left out where a paper has figures alone
NOTHING = "-"
_DECIMALS = {
    "accuracy": 4,
    "bits": 4,
    "squared": 4,
    "steps": 0,
    "classes": 0,
}  # accuracies lie between 0 and 1; steps are whole numbers


class TableRow(NamedTuple):
    """A line of the table as text, in the order of the columns."""

    model: str
    hidden_units: str
    metric: str
    paper: str
    ours: str
    best_on_validation: str
    floor: str


def table_rows(run: Run) -> list[TableRow]:
    """Return the lines of the table as text, "-" where there is nothing to show.

    Examples:
        >>> from pathlib import Path
        >>> rows = [Row("LSTM", 50, "test error, %", (2.0, 1.0))]
        >>> run = Run(Path("."), "ba2016/associative-retrieval", "quick", rows, members=[])
        >>> table_rows(run)[0].ours
        '1.50 ± 0.71 (2 seeds)'
    """
    return [
        TableRow(
            model=row.model,
            hidden_units=NOTHING if row.hidden_size is None else str(row.hidden_size),
            metric=row.metric,
            paper=_score(row, row.paper),
            ours=_ours(row),
            best_on_validation=_score(row, _best_on_validation(run, row)),
            floor=_score(row, row.floor),
        )
        for row in run.rows
    ]


def markdown_table(run: Run) -> str:
    """Return the table in Markdown, with a sentence under it that says what its columns mean.

    Examples:
        >>> from pathlib import Path
        >>> rows = [Row("LSTM", 50, "test error, %", (2.0,), 1.85)]
        >>> run = Run(Path("."), "ba2016/associative-retrieval", "quick", rows, members=[])
        >>> print(markdown_table(run).splitlines()[2])
        | LSTM | 50 | test error, % | 1.85 | 2.00 (1 seed) | - | - |
    """
    return f"{to_markdown(block(run))}\n\n{' '.join(filter(None, (remarks(run), note(run))))}\n"


def console_table(run: Run, width: int | None = None) -> "rich.table.Table":
    """Return the table for a terminal, with a caption that says what the columns mean.

    Where a row does not fit into `width` the numbers stand one below another.
    """
    from rich.text import Text

    table_block = block(run)
    rows = [(textwrap.fill(model, 15, break_long_words=False), *others) for model, *others in table_block.rows]
    table = to_console(replace(table_block, rows=rows), "metric", width)
    table.title = Text(f"{run.experiment}, preset {run.preset}")
    table.caption = Text("\n".join(filter(None, (remarks(run), note(run)))))
    return table


def print_blocks(blocks: Sequence[Paragraph | Table]) -> None:
    """Print paragraphs and tables to the terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for part in blocks:
        if isinstance(part, Table):
            console.print(to_console(part, part.header[0], console.width))
        else:
            console.print(Text(part.text), soft_wrap=True)  # a path stays whole
        console.print()


def to_console(block: Table, gives_way: str, width: int | None = None) -> "rich.table.Table":
    """Return a table for a terminal; where a row is too wide the column `gives_way` is wrapped, never a number.

    Where that is not enough for `width` each row becomes as many lines as it has numbers.
    """
    import rich.box
    import rich.table
    from rich.text import Text

    table = rich.table.Table(
        caption_justify="left", box=rich.box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False
    )
    # Long headings stand in several lines.
    headings = [textwrap.fill(name, 10) if name in block.right else name for name in block.header]
    columns = zip(block.header, headings, *block.rows, strict=True)
    least = sum(1 + max(map(_longest_word if name == gives_way else _longest_line, cells)) for name, *cells in columns)
    if width is not None and least > width + 1:  # there is no gap after the last column
        table.show_header = False
        table.add_column()
        table.add_column(overflow="fold")
        for row in block.rows:
            for name, cell in zip(block.header, row, strict=True):
                table.add_row(Text(name), Text(cell))
            table.add_section()
        return table
    for name, heading in zip(block.header, headings, strict=True):
        table.add_column(heading, justify="right" if name in block.right else "left", no_wrap=name != gives_way)
    for row in block.rows:
        table.add_row(*map(Text, row))  # rich would read square brackets in a string as markup
    return table


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _longest_line(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def block(run: Run) -> Table:
    """Return the table as a part of a report."""
    rows = table_rows(run)
    bare = bool(run.rows) and all(row.paper is None and row.floor is None for row in run.rows)
    kept = [index for index, name in enumerate(COLUMNS) if not (bare and name in _OF_THE_PAPER)]
    header = tuple(COLUMNS[index] for index in kept)
    shown = [tuple(row[index] for index in kept) for row in rows]
    return Table("Paper, ours and floor", header, shown, tuple(name for name in RIGHT if name in header))


def note(run: Run) -> str:
    """Return the sentences that say what the columns of the table mean."""
    return " ".join(words for name, words in _NOTES.items() if name in block(run).header)


def remarks(run: Run) -> str:
    """Return what a reader of the table must know: which settings are not the preset's, and which results are lost.

    Examples:
        >>> from pathlib import Path
        >>> rows = [Row("LSTM", 50, "test error, %", (2.0,), 1.85)]
        >>> members = [Member("lstm-50-seed1", {"model": "LSTM"}, {}, [], {"test_error": 2.0})]
        >>> changes = {"lstm-50-seed1": {"epochs": [2, 30]}}
        >>> remarks(Run(Path("."), "ba2016/associative-retrieval", "quick", rows, members, changes=changes))
        "Changed from the preset quick: epochs 2 (30). These rows are not the preset's comparison with the paper."
    """
    return " ".join([*_describe_changes(run), *_describe_losses(run)])


def _describe_changes(run: Run) -> list[str]:
    models: dict[str, dict[str, None]] = {}  # the models with each change
    for member in run.members:
        for name, (value, usual) in run.changes.get(member.name, {}).items():
            models.setdefault(f"{name} {_setting(value)} ({_setting(usual)})", {})[member.model] = None
    if not models:
        return []
    changes: dict[tuple[str, ...], list[str]] = {}  # the changes of each group of models
    for change, concerned in models.items():
        changes.setdefault(tuple(concerned), []).append(change)
    whole = {member.model for member in run.members}
    parts = [
        ("" if set(concerned) == whole else f"for {' and '.join(concerned)} ") + ", ".join(words)
        for concerned, words in changes.items()
    ]
    sentences = [f"Changed from the preset {run.preset}: {'; '.join(parts)}."]
    changed = dict.fromkeys(model for concerned in changes for model in concerned)
    if any(row.paper is not None for row in run.rows):
        rows = "These rows" if set(changed) == whole else f"The rows of {' and '.join(changed)}"
        sentences.append(f"{rows} are not the preset's comparison with the paper.")
    return sentences


def _describe_losses(run: Run) -> list[str]:
    """Name the members whose metrics.jsonl was cut after result.json was written: the table has a score more."""
    lost: dict[str, None] = {}
    for row in run.rows:
        members = run.members_of(row)
        unfinished = [member.name for member in members if member.result is None]
        if len(row.ours) > len(members) - len(unfinished):
            lost |= dict.fromkeys(unfinished)
    return [
        f"{name} has lost its result: its metrics.jsonl was cut, and what is shown of it is what result.json has; put "
        "the file back from a copy, or train it again."
        for name in lost
    ]


def _setting(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def mean_and_spread(values: Sequence[float], decimals: int) -> str:
    """Return the mean and, of two values and more, their sample standard deviation, as text.

    Examples:
        >>> mean_and_spread([1.0, 2.0], 2)
        '1.50 ± 0.71'
    """
    mean = f"{statistics.fmean(values):.{decimals}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{decimals}f}"


def _ours(row: Row) -> str:
    if not row.ours:
        return NOTHING
    count = len(row.ours)
    return f"{mean_and_spread(row.ours, _decimals(row))} ({count} seed{'s' if count > 1 else ''})"


def _score(row: Row, value: float | None) -> str:
    return NOTHING if value is None else f"{value:.{_decimals(row)}f}"


def _decimals(row: Row) -> int:
    """Return as many decimals as the papers print: two, also of what is in per cent, but for some quantities."""
    quantity, _, unit = row.metric.partition(", ")
    return 2 if unit == "%" else next((_DECIMALS[word] for word in quantity.split() if word in _DECIMALS), 2)


def _best_on_validation(run: Run, row: Row) -> float | None:
    key = metric_key(row.metric)
    members = [
        (_rank(member), member.result[key])
        for member in run.members_of(row)
        if member.result
        and member.result.get(key) in row.ours  # else the row covers only a part of the member's score
        and {"validation_error", "validation_loss"} & member.result.keys()
    ]
    return min(members)[1] if members else None


def _rank(member: Member) -> tuple[float, float, int]:
    """Rank seeds, the best lowest: the lower error, of equals or without any the lower loss, then the lower seed."""
    result = member.result or {}
    return (result.get("validation_error", 0.0), result.get("validation_loss", math.inf), member.seed or 0)
