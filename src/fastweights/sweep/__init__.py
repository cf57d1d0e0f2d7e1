"""Searches over the settings of any experiment: grid, random and TPE, resumable, shared by several workers."""

from fastweights.sweep.outcome import TrialRow, command, console_table, figure, write
from fastweights.sweep.plan import Plan
from fastweights.sweep.search import run
from fastweights.sweep.space import Choices, Range, Space, applied, grid, parse

__all__ = [
    "Choices",
    "Plan",
    "Range",
    "Space",
    "TrialRow",
    "applied",
    "command",
    "console_table",
    "figure",
    "grid",
    "parse",
    "run",
    "write",
]
