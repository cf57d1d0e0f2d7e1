"""The outcome of a search: the table of its best trials, the command that repeats the best, and two files."""

import collections
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fastweights import reproduce
from fastweights.errors import RunError
from fastweights.files import encode_json, remove_parts, write_files
from fastweights.report.figures import COLOURS, INK, PANELS_A_ROW, svg
from fastweights.sweep.plan import Plan, Range, Value

if TYPE_CHECKING:
    import rich.table
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna.trial import FrozenTrial

BEST = 10
_TICKS = 4  # labels that a panel has room for
_STATES = {"COMPLETE": "finished", "PRUNED": "failed", "RUNNING": "running", "WAITING": "waiting"}


@dataclass(frozen=True)
class TrialRow:
    """A trial of a search; "lost" is one that was interrupted or whose worker died: another trial repeats it."""

    number: int
    state: str
    value: float | None
    test_score: float | None
    params: dict[str, Value]
    folder: str | None
    seconds: float | None
    worker: str | None = None
    reason: str | None = None


def list_rows(plan: Plan, trials: "list[FrozenTrial]") -> list[TrialRow]:
    """Return the trials as plain values, in the order of their numbers."""
    return [
        TrialRow(
            number=trial.number,
            state=_STATES.get(trial.state.name, "lost"),
            value=trial.value if trial.state.name == "COMPLETE" else None,
            test_score=trial.user_attrs.get("test_score"),
            params={name: trial.params[name] for name in plan.space if name in trial.params},
            # A worker may have died before it had drawn all values.
            folder=plan.folder(trial.params).relative_to(plan.output).as_posix()
            if trial.params.keys() == plan.space.keys()
            else None,
            seconds=trial.duration.total_seconds() if trial.duration else None,
            worker=trial.user_attrs.get("worker"),
            reason=trial.user_attrs.get("reason"),
        )
        for trial in trials
    ]


def sort_finished(plan: Plan, rows: list[TrialRow]) -> list[TrialRow]:
    """Return the finished trials, the best first."""
    sign = 1 if plan.direction == "minimize" else -1
    finished = [row for row in rows if row.state == "finished"]
    return sorted(finished, key=lambda row: (sign * (row.value or 0.0), row.number))


def command(plan: Plan, rows: list[TrialRow]) -> str | None:
    """Return the command that repeats the best trial as a run of its own, None where no trial has finished.

    Examples:
        >>> from pathlib import Path
        >>> from fastweights import reproduce
        >>> from fastweights.sweep import Plan, TrialRow, command, parse
        >>> settings = reproduce.load("ba2016/associative-retrieval").Settings()
        >>> space = parse(type(settings), ["decay=0.8,0.9"])
        >>> plan = Plan("ba2016/associative-retrieval", settings, space, Path("mine"))
        >>> command(plan, [TrialRow(0, "finished", 3.5, None, {"decay": 0.8}, None, None)])
        'fastweights reproduce ba2016/associative-retrieval --decay 0.8'
    """
    finished = sort_finished(plan, rows)
    if not finished:
        return None
    default = reproduce.load(plan.experiment).PRESETS[plan.preset]
    return reproduce.command(plan.experiment, plan.preset, default, plan.with_values(finished[0].params))


def describe(params: dict[str, Value]) -> str:
    """Return the values of a trial in a line."""
    return ", ".join(f"{name} {_text(value)}" for name, value in params.items())


def console_table(plan: Plan, rows: list[TrialRow]) -> "rich.table.Table":
    """Return the ten best trials for a terminal, with the number of trials in each state."""
    import rich.box
    import rich.table
    from rich.text import Text

    counts = collections.Counter(row.state for row in rows)
    states = ", ".join(f"{counts[state]} {state}" for state in (*_STATES.values(), "lost") if counts[state])
    table = rich.table.Table(
        title=Text(f"{plan.experiment}: {plan.sampler} search, the best {min(BEST, counts['finished'])} trials"),
        caption=Text(f"Trials: {states or 'none'}. The test score is shown only: nothing is chosen by it."),
        caption_justify="left",
        box=rich.box.SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in ("trial", plan.metric.replace("_", "\n", 1), "test\n(not used)", *plan.space):
        table.add_column(Text(heading), justify="right", overflow="fold")
    for row in sort_finished(plan, rows)[:BEST]:
        scores = [_text(row.value), "-" if row.test_score is None else _text(row.test_score)]
        settings = [_text(value) for value in row.params.values()]
        table.add_row(*map(Text, [str(row.number), *scores, *settings]))
    return table


def write(plan: Plan, rows: list[TrialRow], *, picture: bool = False) -> None:
    """Write `sweep.json`, and with `picture` `sweep.svg` too.

    Raises:
        RunError: the disk refuses.
    """
    record = {
        "experiment": plan.experiment,
        "sampler": plan.sampler,
        "sampler_seed": plan.sampler_seed,
        "metric": plan.metric,
        "direction": plan.direction,
        "search": {name: str(dimension) for name, dimension in plan.space.items()},
        "command": command(plan, rows),
        "trials": [asdict(row) for row in rows],
    }
    files = {plan.output / "sweep.json": encode_json(record)}
    if picture:
        files[plan.output / "sweep.svg"] = svg(figure(plan, rows)).encode()
    try:
        write_files(files)
        remove_parts(plan.output, seconds=3600)  # of killed workers: another may be writing younger ones
    except OSError as error:
        raise RunError(
            f"cannot write into {plan.output}: {error.strerror}; make room and run the same command again"
        ) from error


def figure(plan: Plan, rows: list[TrialRow]) -> "Figure":
    """Draw the value of every finished trial against each searched setting, the best in another colour."""
    from matplotlib.figure import Figure

    finished = sort_finished(plan, rows)
    columns = min(len(plan.space), PANELS_A_ROW)
    lines = -(-len(plan.space) // columns)
    whole = Figure(figsize=(0.6 + 2.9 * columns, 0.4 + 2.5 * lines), layout="constrained", facecolor="white")
    panels = whole.subplots(lines, columns, sharey=True, squeeze=False)
    for axes, name in zip(panels.flat, plan.space, strict=False):
        _draw_panel(axes, plan, name, finished)
    for axes in panels[:, 0]:
        axes.set_ylabel(plan.metric, color=INK, parse_math=False)
    for axes in panels.flat[len(plan.space) :]:
        axes.remove()
    return whole


def _draw_panel(axes: "Axes", plan: Plan, name: str, finished: list[TrialRow]) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    dimension = plan.space[name]
    values = [row.params[name] for row in finished]
    if isinstance(dimension, Range):
        places = [value for value in values if isinstance(value, int | float)]
        if dimension.log:
            axes.set_xscale("log")
            axes.set_xlim(dimension.low / 1.1, dimension.high * 1.1)
            axes.set_xticks(_log_ticks(dimension.low, dimension.high))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif isinstance(dimension.low, int):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        places = [dimension.values.index(value) for value in values]
        axes.set_xticks(range(len(dimension.values)), [_text(value) for value in dimension.values], parse_math=False)
        axes.set_xlim(-0.5, len(dimension.values) - 0.5)
    scores = [row.value or 0.0 for row in finished]
    axes.scatter(places[1:], scores[1:], s=18, color=COLOURS[0], alpha=0.7)
    axes.scatter(places[:1], scores[:1], s=36, color=COLOURS[1])
    axes.set_xlabel(name, color=INK, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(which="both", colors=INK)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return two to four numbers whose labels have room beside one another on a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in (1, 2, 5), (1,):
        ticks = [tick for power in powers for digit in digits if low <= (tick := float(f"{digit}e{power}")) <= high]
        if len(ticks) <= _TICKS:
            break
    return ticks[:: -(-len(ticks) // _TICKS)] if len(ticks) > 1 else [low, high]


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
