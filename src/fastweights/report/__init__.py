"""Tables, figures and the page of a run, from what the run wrote; nothing here needs torch."""

from fastweights.report import few_shot
from fastweights.report.figures import learning_curves
from fastweights.report.page import write_page
from fastweights.report.table import TableRow, console_table, markdown_table, print_blocks, table_rows

__all__ = [
    "TableRow",
    "console_table",
    "few_shot",
    "learning_curves",
    "markdown_table",
    "print_blocks",
    "table_rows",
    "write_page",
]
