"""The parts of the report of a run, in order."""

import json
import shlex
from collections.abc import Iterable, Mapping

from fastweights.report import table
from fastweights.report.blocks import Block, Command, Heading, Paragraph, Picture, Table
from fastweights.report.figures import panels_of
from fastweights.report.pivot import pivot_blocks
from fastweights.report.table import NOTHING, mean_and_spread
from fastweights.runs import Member, Record, Run

FIGURE = "learning_curves.svg"
BARS = "bars.svg"
LINES = "lines.svg"
PASSAGES = "passages.svg"


def contents(run: Run, pictures: Mapping[str, str]) -> list[Block]:
    """Return the parts of the report, the title first; the pictures are SVG by the names of their files."""
    beside = ", beside the paper's numbers" if any(row.paper is not None for row in run.rows) else ""
    preset = f"fastweights reproduce {shlex.quote(run.experiment)} --preset {shlex.quote(run.preset)}"
    return [
        Heading(run.experiment, level=1),
        Paragraph(f"The results of one run of {run.experiment} with the preset {run.preset}{beside}."),
        *([Paragraph(words)] if (words := table.remarks(run)) else []),
        Heading("Results"),
        *_results(run),
        *by_distance(run.members),
        *([_bars(run, pictures[BARS])] if BARS in pictures else []),
        *([_lines(run, pictures[LINES])] if LINES in pictures else []),
        *by_frequency(run.members),
        *fitted(run.members),
        *([_passages(pictures[PASSAGES])] if PASSAGES in pictures else []),
        *_figure(run, pictures[FIGURE]),
        Heading("Run it again"),
        Command(run.command or preset),
        Heading("Cost of a run"),
        *_cost(run),
        *_settings(run.members),
        *_environment(run.members),
    ]


def _results(run: Run) -> list[Block]:
    if not run.rows:
        return [Paragraph("No model has finished yet.")]
    return [*pivot_blocks(run), table.block(run), Paragraph(table.note(run), note=True)]


def _figure(run: Run, svg: str) -> list[Block]:
    panels = panels_of(run)
    if not panels:
        return []
    if run.curves:
        shown = "The scores of the models on validation during training."
    else:
        shown = "Test log likelihood after every epoch, higher is better."
    spread = any(panel.spread for panel in panels)
    seeds = "Bands reach two standard deviations of the seeds up and down" if spread else "Thin lines are seeds"
    floor = " The dashed line is a model that ignores its input." * any(panel.floor is not None for panel in panels)
    caption = (
        f"{shown} {seeds}; the thick line is their mean, up to the last step that all of them have reached.{floor}"
    )
    return [Picture("Learning curves", svg, FIGURE, caption)]


def by_distance(members: list[Member]) -> list[Block]:
    """Return the accuracy by how long ago the answer was stored, a row for each finished member that was scored so."""
    rows: list[tuple[str, ...]] = []
    spans: list[str] = []
    for member in members:
        bins = (member.result or {}).get("test_by_distance")
        if isinstance(bins, list) and bins:
            spans = max(spans, [f"{first} to {last}" for first, last, *_ in bins], key=len)
            rows.append((_name(member), *(f"{accuracy:.3f}" for _, _, accuracy, _ in bins)))
    if not rows:
        return []
    padded = [(*row, *[NOTHING] * (1 + len(spans) - len(row))) for row in rows]
    words = "Partial accuracy on test by the number of characters between the stored value and the query for it:"
    return [Paragraph(words), Table("Accuracy by distance", ("model", *spans), padded, right=tuple(spans))]


def by_frequency(members: list[Member]) -> list[Paragraph | Table]:
    """Return the scores on test by how often words occur in training, a table for each finished member that has them.

    The first line of a member's `test_by_frequency` names the columns; the others are names and a number for each.
    """
    blocks: list[Paragraph | Table] = []
    for member in members:
        lines = (member.result or {}).get("test_by_frequency")
        if isinstance(lines, dict) and lines:
            (first, columns), *others = lines.items()
            rows = [(name, *map(_number, numbers)) for name, numbers in others]
            words = f"{_name(member)}: perplexity on test by how often the words occur in training:"
            header = (first, *map(str, columns))
            blocks += [Paragraph(words), Table("Perplexity by frequency", header, rows, right=header[1:])]
    return blocks


def _bars(run: Run, svg: str) -> Picture:
    scale = " The axis is logarithmic." * any(panel.log for panel in run.bars)
    return Picture("Bars", svg, BARS, f"{'; '.join(panel.title for panel in run.bars)}.{scale}")


def _lines(run: Run, svg: str) -> Picture:
    panels = "; ".join(f"{panel.title}: {panel.label} against {panel.against}" for panel in run.lines)
    floor = " The dashed line is a model that ignores its input." * any(panel.floor is not None for panel in run.lines)
    return Picture("Lines", svg, LINES, f"{panels}.{floor}")


def _passages(svg: str) -> Picture:
    caption = (
        "A passage of the test whose gain is that of the whole test. Green: the memories made the word likelier; "
        "orange: less likely; full colour is a factor of 16."
    )
    return Picture("A passage of the test", svg, PASSAGES, caption)


def fitted(members: list[Member]) -> list[Paragraph | Table]:
    """Return what was fitted on validation, a line for each row of the finished members that have it."""
    lines: list[tuple[str, ...]] = [
        (f"{_name(member)}: {row}", ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
        for member in members
        for row, values in ((member.result or {}).get("fitted") or {}).items()
    ]
    return [Paragraph("Chosen and fitted on validation:"), Table("Fitted", ("row", "values"), lines)] if lines else []


def _name(member: Member) -> str:
    return member.model if member.seed is None else f"{member.model} (seed {member.seed})"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _cost(run: Run) -> list[Block]:
    groups: dict[tuple[str, int | None], list[Member]] = {}
    for member in run.members:
        groups.setdefault((member.model, member.hidden_size), []).append(member)
    if not groups:
        return [Paragraph("No run has begun yet.")]
    counted = any("steps" in (member.result or {}) for member in run.members)  # older results have no steps
    steps = ("steps",) if counted else ()
    header = ("model", "hidden units", "parameters", "seconds a run", "epochs to best", *steps, "finished")
    rows: list[tuple[str, ...]] = []
    for (model, hidden_size), members in groups.items():
        results = [member.result for member in members if member.result is not None]
        seconds = [value for member in members if member.result is not None for value in _seconds(member)]
        rows.append(
            (
                model,
                NOTHING if hidden_size is None else str(hidden_size),
                ", ".join(dict.fromkeys(f"{count:,.0f}" for count in _numbers(results, "parameters"))) or NOTHING,
                mean_and_spread(seconds, 1) if seconds else NOTHING,
                ", ".join(f"{epoch:.0f}" for epoch in _numbers(results, "epoch")) or NOTHING,
                *([", ".join(f"{steps:,.0f}" for steps in _numbers(results, "steps")) or NOTHING] if counted else []),
                f"{len(results)} of {len(members)}",
            )
        )
    return [Table("Cost of a run", header, rows, right=header[1:]), *_unfinished(run.members)]


def _unfinished(members: list[Member]) -> list[Block]:
    rows: list[tuple[str, ...]] = []
    for member in members:
        if member.result is None:
            last = member.epochs[-1] if member.epochs else {}
            error = last.get("validation_error")
            seconds = "".join(f"{value:.1f}" for value in _seconds(member)) or NOTHING
            rows.append((member.name, str(last.get("epoch", 0)), seconds, NOTHING if error is None else f"{error:.2f}"))
    if not rows:
        return [Paragraph("Every run has finished.")]
    header = ("unfinished run", "epochs so far", "seconds so far", "validation error, %")
    words = "The runs below have not finished; the same command goes on where they stopped."
    return [Paragraph(words), Table("Unfinished runs", header, rows, right=header[1:])]


def _settings(members: list[Member]) -> list[Block]:
    shared, differing = _split([member.settings for member in members])
    blocks: list[Block] = [Heading("Settings")] if members else []
    columns = [key for key in differing if key != "seed"]
    if differing:
        # Runs that differ by their seed alone share a line.
        seeds: dict[tuple[str, ...], list[str]] = {}
        for member in members:
            line = tuple(_value(member.settings, key) for key in columns)
            seeds.setdefault(line, []).append(_value(member.settings, "seed"))
        header, rows = tuple(columns), list(seeds)
        if "seed" in differing:
            header, rows = (*header, "seed"), [(*line, ", ".join(values)) for line, values in seeds.items()]
        blocks += [
            Paragraph("Settings that differ between the members of the run:"),
            Table("Settings that differ", header, rows),
        ]
    return blocks + _shared("Settings that all members share:", "setting", shared)


def _environment(members: list[Member]) -> list[Block]:
    shared, differing = _split([member.environment for member in members])
    blocks: list[Block] = [Heading("Environment")] if shared or differing else []
    blocks += _shared("The environment that all members share:", "name", shared)
    if differing:
        names: dict[tuple[str, ...], list[str]] = {}
        for member in members:
            line = tuple(_value(member.environment, key) for key in differing)
            names.setdefault(line, []).append(member.name)
        rows = [(*line, ", ".join(values)) for line, values in names.items()]
        blocks += [Paragraph("Environments that differ:"), Table("Environments", (*differing, "members"), rows)]
    return blocks


def _shared(words: str, header: str, values: dict[str, str]) -> list[Block]:
    if not values:
        return []
    return [Paragraph(words), Table(words.rstrip(":"), (header, "value"), list(values.items()))]


def _split(records: list[Record]) -> tuple[dict[str, str], list[str]]:
    """Return the values that all records share, and the keys in which they differ, in the order of the records."""
    keys = dict.fromkeys(key for record in records for key in record)
    values = {key: {_value(record, key) for record in records} for key in keys}
    shared = {key: next(iter(texts)) for key, texts in values.items() if len(texts) == 1}
    return shared, [key for key in keys if key not in shared]


def _value(record: Record, key: str) -> str:
    value = record.get(key, NOTHING)
    if isinstance(value, dict):  # such as the kernels
        return "; ".join(f"{name}: {_value(value, name)}" for name in value)
    return value if isinstance(value, str) else json.dumps(value)


def _numbers(records: Iterable[Record], key: str) -> list[float]:
    return [value for record in records if (value := record.get(key)) is not None]


def _seconds(member: Member) -> list[float]:
    """Return the training time so far, one number or none; the result may be of an epoch long before the last."""
    return sorted(_numbers([*member.epochs, member.result or {}], "seconds"))[-1:]
