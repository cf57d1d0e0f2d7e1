"""Tables, figures and the page of a run, from what the run wrote; nothing here needs torch."""

from fastweights.report.figures import learning_curves
from fastweights.report.page import write_page
from fastweights.report.pivot import narrow_blocks, pivot_blocks
from fastweights.report.table import (
    TableRow,
    console_table,
    describe_changes,
    markdown_table,
    print_blocks,
    table_rows,
)

__all__ = [
    "TableRow",
    "console_table",
    "describe_changes",
    "learning_curves",
    "markdown_table",
    "narrow_blocks",
    "pivot_blocks",
    "print_blocks",
    "table_rows",
    "write_page",
]
