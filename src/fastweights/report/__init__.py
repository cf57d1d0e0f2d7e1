"""Tables, figures and the page of a run, from what the run wrote; only a model card needs torch."""

from fastweights.report.card import model_card
from fastweights.report.figures import learning_curves
from fastweights.report.page import first_figure, write_page
from fastweights.report.pivot import pivot_blocks
from fastweights.report.table import (
    TableRow,
    console_table,
    markdown_table,
    print_blocks,
    remarks,
    table_rows,
)

__all__ = [
    "TableRow",
    "console_table",
    "first_figure",
    "learning_curves",
    "markdown_table",
    "model_card",
    "pivot_blocks",
    "print_blocks",
    "remarks",
    "table_rows",
    "write_page",
]
