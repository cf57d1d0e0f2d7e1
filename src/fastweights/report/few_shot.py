"""The few-shot tables of Munkhdalai & Trischler 2018 as the paper sets them: a row for each model, a column a task."""

import math
import statistics

from fastweights.report.blocks import Paragraph, Table
from fastweights.report.table import NOTHING
from fastweights.runs import Run

_SUFFIX = " accuracy, %"
_UNIT = "ms a task"


def blocks(run: Run) -> list[Table | Paragraph]:
    """What a run of few-shot tasks measured, as the paper sets it; empty for a run of another kind."""
    return matrix(run) or times(run)


def listed(run: Run) -> list[Table | Paragraph]:
    """The same a number a line, for a terminal, which is narrower than a page."""
    found: list[Table | Paragraph] = []
    for block in blocks(run):
        if isinstance(block, Table):
            cells: list[tuple[str, ...]] = [
                (model if place == 0 else "", *cell)
                for model, *row in block.rows
                for place, cell in enumerate(zip(block.header[1:], row, strict=True))
            ]
            block = Table(block.label, ("model", "of", "measured"), cells, right=("measured",))
        found.append(block)
    return found


def matrix(run: Run) -> list[Table | Paragraph]:
    """The accuracies of a run, and what they are; empty for a run of another kind.

    Beside the mean over the tasks stands its 95 % confidence interval, of all tasks of all runs together, then the
    standard deviation of the runs where there are several, and the paper's number in parentheses. The last columns are
    what a run of the model saw and took, of all the networks that it needs.
    """
    rows = [row for row in run.rows if row.metric.endswith(_SUFFIX)]
    if not rows or not run.experiment.startswith("munkhdalai2018/"):
        return []
    kinds = list(dict.fromkeys(row.metric for row in rows))
    models = list(dict.fromkeys(row.model for row in rows))
    cells = dict.fromkeys(((model, kind) for model in models for kind in kinds), NOTHING)
    for row in rows:
        if row.ours:
            paper = "" if row.paper is None else f" ({row.paper:g})"
            cells[row.model, row.metric] = f"{_score(run, row.model, row.metric, row.ours)}{paper}"
    heads = tuple(kind.removesuffix(_SUFFIX).removesuffix(" test") for kind in kinds)
    heads += ("tasks", "minutes")
    lines = [(model, *(cells[model, kind] for kind in kinds), *_cost(run, model)) for model in models]
    runs = max(len(row.ours) for row in rows)
    told = "Per cent ± the 95 % confidence interval over the tasks"
    if set(models) - {member.model for member in run.members}:
        told += " (not of what is untrained)"
    told += f", then ± the sample standard deviation of {runs} runs" if runs > 1 else ", of one run"
    told += "; in parentheses the paper's." if any(row.paper is not None for row in rows) else "."
    return [Table("Accuracy", ("model", *heads), lines, right=heads), Paragraph(told, note=True)]


def times(run: Run) -> list[Table | Paragraph]:
    """The times of a run, a row for each model, and what they are; empty for a run of another kind."""
    found = {(row.model, *row.metric.split(": ")): row.ours[0] for row in run.rows if ": " in row.metric and row.ours}
    kinds = tuple(dict.fromkeys(kind for _, kind, unit in found if unit == _UNIT))
    if not kinds:
        return []
    first = next(model for model, *_ in found)
    lines = []
    for model in dict.fromkeys(model for model, *_ in found):
        cells = [(found.get((model, kind, _UNIT)), found.get((model, kind, f"times {first}"))) for kind in kinds]
        shown = (NOTHING if time is None or ratio is None else f"{time:.1f} ({ratio:.2f})" for time, ratio in cells)
        lines.append((model, *shown))
    told = f"Milliseconds a task, and in parentheses how many times those of {first}; medians in one process."
    return [Table("Times", ("model", *kinds), lines, right=kinds), Paragraph(told, note=True)]


def _cost(run: Run, model: str) -> tuple[str, str]:
    """Tasks trained on and minutes, of one seed."""
    own = [member for member in run.members if member.model == model and member.result]
    if not own:
        return NOTHING, NOTHING
    seeds = len({member.settings["seed"] for member in own})
    tasks, seconds = (sum(member.result[name] for member in own if member.result) for name in ("tasks", "seconds"))
    minutes = seconds / seeds / 60
    return f"{tasks / seeds:,.0f}", f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.1f}"


def _score(run: Run, model: str, metric: str, ours: tuple[float, ...]) -> str:
    key = metric.split(",")[0].replace(" ", "_")
    results = [member.result for member in run.members if member.model == model and key in (member.result or {})]
    interval = f"{key.removesuffix('_accuracy')}_interval"
    intervals = [result[interval] for result in results if result is not None]
    words = f"{statistics.fmean(ours):.2f}"
    if intervals:
        words += f" ± {math.hypot(*intervals) / len(intervals):.2f}"
    return words + (f" ± {statistics.stdev(ours):.2f}" if len(ours) > 1 else "")
