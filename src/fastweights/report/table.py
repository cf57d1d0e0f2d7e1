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
# What the sentence under the table says of a column, where the column is there.
_NOTES = {
    "ours": "Ours: the mean over the seeds ± their sample standard deviation.",
    "best seed on validation": (
        "Best seed on validation: the score of the one seed with the lowest validation error, of equals the lowest "
        "loss, because the paper's numbers are of selected models."
    ),
    "floor": "Floor: the score of a model that ignores the query.",
}
_OF_THE_PAPER = ("paper", "best seed on validation", "floor")  # left out where a paper has figures alone
NOTHING = "-"


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
    """The lines of the table as text, "-" where there is nothing to show.

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
    """The table in Markdown, with a sentence under it that says what its columns mean.

    Examples:
        >>> from pathlib import Path
        >>> rows = [Row("LSTM", 50, "test error, %", (2.0,), 1.85)]
        >>> run = Run(Path("."), "ba2016/associative-retrieval", "quick", rows, members=[])
        >>> print(markdown_table(run).splitlines()[2])
        | LSTM | 50 | test error, % | 1.85 | 2.00 (1 seed) | - | - |
    """
    return f"{to_markdown(block(run))}\n\n{note(run)}\n"


def console_table(run: Run) -> "rich.table.Table":
    """The table for a terminal, its caption saying what the columns mean."""
    from rich.text import Text

    whole = block(run)
    rows = [(textwrap.fill(model, 15, break_long_words=False), *others) for model, *others in whole.rows]
    table = to_console(replace(whole, rows=rows), "metric")
    table.title, table.caption = Text(f"{run.experiment}, preset {run.preset}"), note(run)
    return table


def print_blocks(blocks: Sequence[Paragraph | Table]) -> None:
    """Print paragraphs and tables to the terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for part in blocks:
        if isinstance(part, Table):
            console.print(to_console(part, part.header[0]))
        else:
            console.print(Text(part.text), soft_wrap=True)  # a path stays whole
        console.print()


def to_console(block: Table, gives_way: str) -> "rich.table.Table":
    """A table for a terminal: where a row is too wide one column gives way, because a number must not be broken."""
    import rich.box
    import rich.table
    import rich.text

    table = rich.table.Table(
        caption_justify="left", box=rich.box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False
    )
    for name in block.header:
        heading = textwrap.fill(name, 10) if name in block.right else name  # long headings stand in several lines
        table.add_column(heading, justify="right" if name in block.right else "left", no_wrap=name != gives_way)
    for row in block.rows:
        table.add_row(*map(rich.text.Text, row))  # rich would read square brackets in a string as markup
    return table


def block(run: Run) -> Table:
    """The table as a part of a report."""
    rows = table_rows(run)
    bare = bool(run.rows) and all(row.paper is None and row.floor is None for row in run.rows)
    kept = [index for index, name in enumerate(COLUMNS) if not (bare and name in _OF_THE_PAPER)]
    header = tuple(COLUMNS[index] for index in kept)
    shown = [tuple(row[index] for index in kept) for row in rows]
    return Table("Paper, ours and floor", header, shown, tuple(name for name in RIGHT if name in header))


def note(run: Run) -> str:
    """What the columns of the table mean."""
    return " ".join(words for name, words in _NOTES.items() if name in block(run).header)


def mean_and_spread(values: Sequence[float], decimals: int) -> str:
    """The mean and, of two values and more, their sample standard deviation, as text.

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
    """As the papers print them: accuracies of 0 to 1 and bits in four, per cent in two; steps and classes are whole."""
    if row.metric.startswith(("steps", "classes")):
        return 0
    return 4 if "%" not in row.metric and any(word in row.metric for word in ("accuracy", "bits")) else 2


def _best_on_validation(run: Run, row: Row) -> float | None:
    key = metric_key(row.metric)
    scores = [
        (_rank(member), score)
        for member in run.members
        if (member.model, member.hidden_size) == (row.model, row.hidden_size)
        and member.result is not None
        and member.result.get("validation_error") is not None
        and (score := member.result.get(key)) is not None
    ]
    return min(scores)[1] if scores else None


def _rank(member: Member) -> tuple[float, float, int]:
    """Lowest first; of seeds with the same error, often zero, the lower loss decides, then the lower seed."""
    result = member.result or {}
    error, loss = result.get("validation_error"), result.get("validation_loss")
    return (math.inf if error is None else error, math.inf if loss is None else loss, member.seed or 0)
