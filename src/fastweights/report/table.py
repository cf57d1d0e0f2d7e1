"""The table of a run: the paper's score, ours over the seeds, and the floor."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastweights.report.blocks import Table, to_markdown
from fastweights.report.runs import Member, Row, Run, metric_key, number

if TYPE_CHECKING:
    import rich.table

COLUMNS = ("model", "hidden units", "metric", "paper", "ours", "best seed on validation", "floor")
RIGHT = ("hidden units", "paper", "ours", "best seed on validation", "floor")
NOTE = (
    "Ours: the mean over the seeds ± their sample standard deviation. "
    "Best seed on validation: the score of the one seed with the lowest validation error, of equals the lowest loss, "
    "because the paper's numbers are of selected models. "
    "Floor: the score of a model that ignores the query."
)
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
            paper=_score(row.paper),
            ours=_ours(row.ours),
            best_on_validation=_score(_best_on_validation(run, row)),
            floor=_score(row.floor),
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
    return f"{to_markdown(block(run))}\n\n{NOTE}\n"


def console_table(run: Run) -> "rich.table.Table":
    """The table for a terminal, its caption saying what the columns mean."""
    import rich.box
    import rich.table
    import rich.text

    # Everything goes in as Text: rich would read square brackets in a model's name as markup.
    table = rich.table.Table(
        title=rich.text.Text(f"{run.experiment}, preset {run.preset}"),
        caption=NOTE,
        caption_justify="left",
        box=rich.box.SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in COLUMNS:
        # Long headings stand in several lines, and where a row is still too wide the metric gives way: a number must
        # not be broken.
        heading = textwrap.fill(name, 10) if name in RIGHT else name
        table.add_column(heading, justify="right" if name in RIGHT else "left", no_wrap=name != "metric")
    for row in table_rows(run):
        table.add_row(*map(rich.text.Text, row))
    return table


def block(run: Run) -> Table:
    """The table as a part of a report."""
    return Table("Paper, ours and floor", COLUMNS, [tuple(row) for row in table_rows(run)], RIGHT)


def mean_and_spread(values: Sequence[float], decimals: int) -> str:
    """The mean and, of two values and more, their sample standard deviation, as text.

    Examples:
        >>> mean_and_spread([1.0, 2.0], 2)
        '1.50 ± 0.71'
    """
    mean = f"{statistics.fmean(values):.{decimals}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{decimals}f}"


def _ours(values: tuple[float, ...]) -> str:
    if not values:
        return NOTHING
    return f"{mean_and_spread(values, 2)} ({len(values)} seed{'s' if len(values) > 1 else ''})"


def _score(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _best_on_validation(run: Run, row: Row) -> float | None:
    key = metric_key(row.metric)
    scores = [
        (_rank(member), score)
        for member in run.members
        if (member.model, member.hidden_size) == (row.model, row.hidden_size)
        and member.result is not None
        and number(member.result.get("validation_error")) is not None
        and (score := number(member.result.get(key))) is not None
    ]
    return min(scores)[1] if scores else None


def _rank(member: Member) -> tuple[float, float, int]:
    """Lowest first; of seeds with the same error, often zero, the lower loss decides, then the lower seed."""
    result = member.result or {}
    error, loss = number(result.get("validation_error")), number(result.get("validation_loss"))
    return (math.inf if error is None else error, math.inf if loss is None else loss, member.seed or 0)
