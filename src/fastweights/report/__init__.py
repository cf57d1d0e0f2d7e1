"""Tables, figures and the page of a run, from what the run wrote; nothing here needs torch."""

from fastweights.report import few_shot
from fastweights.report.figures import learning_curves
from fastweights.report.page import write_page
from fastweights.report.results import Score, write_result
from fastweights.report.runs import Curve, Member, Row, Run, load_run
from fastweights.report.table import TableRow, console_table, markdown_table, print_blocks, table_rows

__all__ = [
    "Curve",
    "Member",
    "Row",
    "Run",
    "Score",
    "TableRow",
    "console_table",
    "few_shot",
    "learning_curves",
    "load_run",
    "markdown_table",
    "print_blocks",
    "table_rows",
    "write_page",
    "write_result",
]
