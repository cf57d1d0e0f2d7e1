"""Searches over the settings of any experiment: grid, random and TPE, resumable, shared by several workers."""

from fastweights.sweep.outcome import TrialRow, command, console_table, figure, write
from fastweights.sweep.plan import Choices, Plan, Range, Space, metrics_of, parse
from fastweights.sweep.search import run

__all__ = [
    "Choices",
    "Plan",
    "Range",
    "Space",
    "TrialRow",
    "command",
    "console_table",
    "figure",
    "metrics_of",
    "parse",
    "run",
    "write",
]
