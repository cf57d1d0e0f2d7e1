"""Tables with a row for each model and a column for each metric, as the papers set scores over tasks and times."""

import math
import statistics
from collections.abc import Sequence

from fastweights.report.blocks import Paragraph, Table
from fastweights.report.table import NOTHING, mean_and_spread
from fastweights.runs import Member, Row, Run, metric_key

_UNIT = "ms a task"
# Columns beside the cells, and the names of what they are the means of.
_BESIDE = {"parameters": "parameters", "state": "state_size", "ms": "milliseconds"}


def pivot_blocks(run: Run) -> list[Table | Paragraph]:
    """Return what a run measured, a row for each model and a column for each metric.

    Used for runs whose members report a confidence interval beside their scores, whose metrics are times, such as
    "training: ms a task", or whose rows have a `cell` among their settings. Empty for other runs.
    """
    return _scores(run) or _times(run) or _cells(run)


def _scores(run: Run) -> list[Table | Paragraph]:
    """Set the scores of a run over tasks.

    Beside the mean over the tasks stands its 95 % confidence interval, of all tasks of all seeds together, then the
    standard deviation of the seeds where there are several, and the paper's number in parentheses. The last columns
    are the tasks that a seed of the model saw and the minutes that it took, of all the networks that it needs.
    """
    metrics = list(dict.fromkeys(row.metric for row in run.rows))
    results = [member.result or {} for member in run.members]
    if not any(interval_key(metric) in result for metric in metrics for result in results):
        return []
    models = list(dict.fromkeys(row.model for row in run.rows))
    cells = dict.fromkeys(((model, metric) for model in models for metric in metrics), NOTHING)
    for row in run.rows:
        if row.ours:
            paper = "" if row.paper is None else f" ({row.paper:g})"
            cells[row.model, row.metric] = f"{_score(_finished(run, row.model), row.metric, row.ours)}{paper}"
    # "5-way 1-shot test accuracy, %" stands under "5-way 1-shot".
    titles = [metric.partition(",")[0].rpartition(" ")[0].removesuffix(" test") for metric in metrics]
    header = (*titles, "tasks", "minutes")
    lines = [(model, *(cells[model, metric] for metric in metrics), *_cost(run, model)) for model in models]
    seeds = max(len(row.ours) for row in run.rows)
    note = "Per cent ± the 95 % confidence interval over the tasks"
    if set(models) - {member.model for member in run.members}:
        note += " (none for models that were not trained)"
    note += f", then ± the sample standard deviation over {seeds} seeds" if seeds > 1 else ", of one seed"
    note += "; in parentheses the paper's." if any(row.paper is not None for row in run.rows) else "."
    return [Table("Accuracy", ("model", *header), lines, right=header), Paragraph(note, note=True)]


def _times(run: Run) -> list[Table | Paragraph]:
    """Set milliseconds a task, and how many times those of the first model they are."""
    times = {(row.model, *row.metric.split(": ")): row.ours[0] for row in run.rows if ": " in row.metric and row.ours}
    kinds = tuple(dict.fromkeys(kind for _, kind, unit in times if unit == _UNIT))
    if not kinds:
        return []
    models = list(dict.fromkeys(model for model, *_ in times))
    lines = []
    for model in models:
        pairs = [(times.get((model, kind, _UNIT)), times.get((model, kind, f"times {models[0]}"))) for kind in kinds]
        cells = (NOTHING if time is None or ratio is None else f"{time:.1f} ({ratio:.2f})" for time, ratio in pairs)
        lines.append((model, *cells))
    note = f"Milliseconds a task, and in parentheses how many times those of {models[0]}; medians in one process."
    return [Table("Times", ("model", *kinds), lines, right=kinds), Paragraph(note, note=True)]


def _cells(run: Run) -> list[Table | Paragraph]:
    """Set the scores of models in the cells of a bench, the best score of the most cells first.

    The last columns are means over the cells.
    """
    inside = [row for row in run.rows if "cell" in row.settings and row.ours]
    if not inside:
        return []
    cells = list(dict.fromkeys(row.settings["cell"] for row in inside))
    found = {(row.model, row.settings["cell"]): row for row in inside}
    scores = {row.model: row.ours for row in run.rows if row.metric.startswith("score") and row.ours}
    models = list(dict.fromkeys(row.model for row in inside))
    counts = {model: sum((model, cell) in found for cell in cells) for model in models}
    models.sort(key=lambda model: (counts[model], statistics.fmean(scores.get(model, (0.0,)))), reverse=True)
    lines = []
    for model in models:
        rows = [found[model, cell] for cell in cells if (model, cell) in found]
        shown = [
            mean_and_spread(row.ours, 3) if row else NOTHING for row in (found.get((model, cell)) for cell in cells)
        ]
        whole = mean_and_spread(scores[model], 3) if model in scores else NOTHING
        lines.append((model, whole, *shown, *(_mean(run, rows, name) for name in _BESIDE.values())))
    floors = {row.settings["cell"]: NOTHING if row.floor is None else f"{row.floor:.3f}" for row in inside}
    lines.append(("floor", "0.000", *(floors[cell] for cell in cells), *[""] * len(_BESIDE)))
    header = ("score", *cells, *_BESIDE)
    seeds = max(len(row.ours) for row in inside)
    spread = f"mean ± sample standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    partly = "; of a layer that has not been through all cells, over its own" * (min(counts.values()) < len(cells))
    note = (
        "Score: the mean over the cells of (accuracy - floor) / (1 - floor), not below 0, at each layer's best "
        f"learning rate on validation; {spread}{partly}. Parameters, numbers in the state and milliseconds of a "
        "training pass are means over the cells. Floor: a model that does not remember."
    )
    return [Table("Cells", ("layer", *header), lines, right=header), Paragraph(note, note=True)]


def _mean(run: Run, rows: Sequence[Row], name: str) -> str:
    """Return the mean over rows of what their members have, as text; that a layer does not say how much is "-"."""
    results = [member.result for row in rows for member in run.members_of(row) if member.result]
    values = [result.get(name) for result in results]
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):,.0f}" if known and len(known) == len(values) else NOTHING


def _finished(run: Run, model: str) -> list[Member]:
    return [member for member in run.members if member.model == model and member.result]


def interval_key(metric: str) -> str:
    """Return the key of the confidence interval that stands beside a score: `a_interval` beside `a_accuracy`."""
    return f"{metric_key(metric).rpartition('_')[0]}_interval"


def _score(members: list[Member], metric: str, ours: tuple[float, ...]) -> str:
    results = [member.result or {} for member in members]
    intervals = [result[interval_key(metric)] for result in results if interval_key(metric) in result]
    words = f"{statistics.fmean(ours):.2f}"
    if intervals:
        words += f" ± {math.hypot(*intervals) / len(intervals):.2f}"
    return words + (f" ± {statistics.stdev(ours):.2f}" if len(ours) > 1 else "")


def _cost(run: Run, model: str) -> tuple[str, str]:
    """Return the tasks trained on and the minutes, of one seed."""
    members = _finished(run, model)
    if not members:
        return NOTHING, NOTHING
    seeds = len({member.seed for member in members})
    tasks, seconds = (sum((member.result or {})[name] for member in members) for name in ("tasks", "seconds"))
    minutes = seconds / seeds / 60
    return f"{tasks / seeds:,.0f}", f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.1f}"
