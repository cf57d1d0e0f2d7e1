"""The figures of a run, drawn with matplotlib's objects: no global state, no window."""

import io
import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fastweights.runs import Member, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, which the colour-blind can tell apart; the ones too pale on white come last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", ":", "-.")
MARKERS = ("o", "s", "^", "D")  # of points, a line style each: a line of one point is told by them alone
# The colour of text, axes and the floor, in whose place the page puts the reader's own text colour.
INK = "#1f2328"
PANELS_A_ROW = 3
_LETTERS, _LETTER = 92, 0.067  # letters in a line of a passage, and the width of a letter in inches
_FULL = 4.0  # bits
_AXES = {"step": "steps", "level": "classes of the level", "passes": "passes over all classes"}

Points = dict[float, float]


def learning_curves(run: Run) -> "Figure":
    """Draw the scores of the models while they learnt: one colour a model, thin lines seeds, the thick line their mean.

    One panel for each of the run's curves against steps, as figure 2 of Schlag & Schmidhuber (2017); where it names
    none, test log likelihood against epochs, one panel a hidden size, as figure 3 of Ba et al. (2016). Dashed: the
    floor. The mean ends where the shortest seed does.

    Examples:
        >>> from pathlib import Path
        >>> epochs = [{"epoch": 1, "test_loss": 2.3}, {"epoch": 2, "test_loss": 1.5}]
        >>> member = Member("lstm-50-seed1", {"model": "LSTM"}, {}, epochs, result=None)
        >>> figure = learning_curves(Run(Path("."), "ba2016/associative-retrieval", "quick", [], [member]))
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [-2.3, -1.5]
    """
    from matplotlib.figure import Figure

    panels = panels_of(run)
    if not panels:
        figure = Figure(figsize=(4.8, 1.0), facecolor="white")
        figure.text(0.5, 0.5, "no epoch has finished yet", ha="center", va="center", color=INK)
        return figure
    columns = min(len(panels), PANELS_A_ROW)
    rows = -(-len(panels) // columns)
    width = 4.8 if columns == 1 else 0.6 + 2.9 * columns
    figure = Figure(figsize=(width, 0.7 + 2.7 * rows), layout="constrained", facecolor="white")
    handles: dict[str, Line2D] = {}
    alike = len({panel.label for panel in panels}) == 1  # then only the first panel of a row is labelled
    sharex = len({panel.against for panel in panels}) == 1
    grid = figure.subplots(rows, columns, sharex=sharex, sharey=alike, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.remove()
            continue
        left, bottom = index % columns == 0 or not alike, not sharex or index + columns >= len(panels)
        _draw_panel(axes, panels[index], run, handles, left=left, bottom=bottom)
    _add_legend(figure, handles, 1 + columns)
    return figure


def _add_legend(figure: "Figure", handles: "dict[str, Line2D]", most: int) -> None:
    """Put the names of the lines under a figure, in as many columns as fit, at most `most`."""
    if not handles:
        return
    # A line and its gaps take 0.6 inches, a letter a fifteenth, or a little more.
    longest = max(map(len, handles))
    fitting = int(figure.get_figwidth() / (0.6 + longest / 15))
    if not fitting:
        figure.set_figwidth(0.6 + longest / 13)
    columns = max(1, min(len(handles), most, fitting))
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, -(-len(handles) // columns) - 2))
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=INK,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # A dollar in a model's name is a dollar.


class Panel(NamedTuple):
    """One panel of the figure: the curves of each model's seeds, and how the axes are named."""

    title: str | None
    label: str
    against: str
    floor: float | None
    models: dict[str, list[Points]]
    spread: bool = False


def panels_of(run: Run) -> list[Panel]:
    """Return the panels that a run's records fill."""
    if run.curves:
        panels = [
            Panel(
                title=None,
                label=curve.label,
                against=_AXES.get(curve.against, curve.against),
                floor=curve.floor,
                models=_by_model(run, _best(run.members, curve.best), curve.against, curve.key, 1),
                spread=curve.spread,
            )
            for curve in run.curves
        ]
        return [panel for panel in panels if panel.models]
    label, against = "test log likelihood (nats)", "epochs"
    panels = []
    for size in sorted({member.hidden_size for member in run.members}, key=lambda size: (size is None, size or 0)):
        members = [member for member in run.members if member.hidden_size == size]
        models = _by_model(run, members, "epoch", "test_loss", -1)
        title = None if size is None else f"{size} hidden units"
        panels += [Panel(title, label, against, run.floor_log_likelihood, models)] if models else []
    return panels


def _best(members: list[Member], count: int | None) -> list[Member]:
    """Return so many finished seeds of each model, those with the least validation loss; None: all members."""
    if count is None:
        return members
    finished = [member for member in members if member.result]
    finished.sort(key=lambda member: (member.result or {})["validation_loss"])
    models = dict.fromkeys(member.model for member in finished)
    return [member for model in models for member in [each for each in finished if each.model == model][:count]]


def _by_model(run: Run, members: list[Member], against: str, key: str, sign: int) -> dict[str, list[Points]]:
    models: dict[str, list[Points]] = {}
    for model in run.models:
        for member in members:
            scores = [(record.get(against), record.get(key)) for record in member.epochs]
            points = {x: sign * score for x, score in scores if x is not None and score is not None}
            if member.model == model and points:
                models.setdefault(model, []).append(points)
    return models


def _draw_panel(
    axes: "Axes", panel: Panel, run: Run, handles: "dict[str, Line2D]", *, left: bool, bottom: bool
) -> None:
    _style(axes, panel, left=left, bottom=bottom)
    if panel.title is not None:
        axes.set_title(panel.title, fontsize=11, color=INK)
    styles = dict(zip(run.models, itertools.product(LINE_STYLES, COLOURS), strict=False))
    for model, seeds in panel.models.items():
        line_style, colour = styles.get(model, (LINE_STYLES[0], INK))
        handles[model] = _draw(axes, seeds, model, line_style, colour, spread=panel.spread)
    least = min((score for seeds in panel.models.values() for points in seeds for score in points.values()), default=0)
    if panel.spread and axes.get_ylim()[0] < 0 <= least:
        axes.set_ylim(bottom=0)  # a band may reach below zero, where no value lies
    if panel.floor is not None:
        floor = axes.axhline(panel.floor, color=INK, linestyle="--", linewidth=1.2, label="floor")
        handles["floor: ignores its input"] = floor


def bars(run: Run) -> "Figure | None":
    """Draw the run's bars, a panel below another; None where it has none.

    Examples:
        >>> from pathlib import Path
        >>> from fastweights.runs import Bars
        >>> panel = Bars("test", "perplexity", "occurrences in training", ("many", "few"), {"LSTM": (10.0, 900.0)})
        >>> figure = bars(Run(Path("."), "rae2018/language", "quick", [], [], bars=(panel,)))
        >>> [round(bar.get_height()) for bar in figure.axes[0].patches]
        [10, 900]
    """
    from matplotlib.figure import Figure

    if not run.bars:
        return None
    figure = Figure(figsize=(6.0, 0.3 + 2.6 * len(run.bars)), layout="constrained", facecolor="white")
    for panel, axes in zip(run.bars, figure.subplots(len(run.bars), 1, squeeze=False)[:, 0], strict=True):
        axes.set_facecolor("none")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(INK)
        axes.tick_params(colors=INK, length=0, which="both")
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        width = 0.8 / len(panel.series)
        for number, (name, heights) in enumerate(panel.series.items()):
            places = [
                (group + (number - (len(panel.series) - 1) / 2) * width, height)
                for group, height in enumerate(heights)
                if height is not None
            ]
            if places:
                axes.bar(
                    *zip(*places, strict=True), color=COLOURS[number % len(COLOURS)], width=0.92 * width, label=name
                )
        if panel.log:
            axes.set_yscale("log")
        else:
            axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xticks(range(len(panel.groups)), [name.replace(" ", "\n") for name in panel.groups], fontsize=8)
        axes.set_title(panel.title, fontsize=9, color=INK, parse_math=False)
        axes.set_ylabel(panel.label, color=INK)
        axes.set_xlabel(panel.against, color=INK)
        if len(panel.series) > 1:
            for text in axes.legend(frameon=False, labelcolor=INK, fontsize=8).get_texts():
                text.set_parse_math(False)
    return figure


def lines(run: Run) -> "Figure | None":
    """Draw the run's lines, three panels a row, with one legend; None where it has none.

    Examples:
        >>> from pathlib import Path
        >>> from fastweights.runs import Lines
        >>> panel = Lines("test", "accuracy", "numbers in the state", {"LSTM": [(256, 0.5), (512, 0.9)]}, log=True)
        >>> figure = lines(Run(Path("."), "recall/mqar", "quick", [], [], lines=(panel,)))
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [0.5, 0.9]
    """
    from matplotlib.figure import Figure

    if not run.lines:
        return None
    columns = min(len(run.lines), PANELS_A_ROW)
    rows = -(-len(run.lines) // columns)
    names = list(dict.fromkeys(name for panel in run.lines for name in panel.series))
    shapes = list(zip((*LINE_STYLES, "--"), MARKERS, strict=True))
    styles = dict(zip(names, itertools.cycle(itertools.product(shapes, COLOURS)), strict=False))
    width = 4.8 if columns == 1 else 0.6 + 2.9 * columns
    figure = Figure(figsize=(width, 0.9 + 2.7 * rows), layout="constrained", facecolor="white")
    handles: dict[str, Line2D] = {}
    for panel, axes in itertools.zip_longest(run.lines, figure.subplots(rows, columns, squeeze=False).flat):
        if panel is None:
            axes.remove()
            continue
        _style_axes(axes)
        if panel.log:
            axes.set_xscale("log")
        for name, points in panel.series.items():
            (line_style, marker), colour = styles[name]
            (handles[name],) = axes.plot(
                *zip(*points, strict=True), line_style, color=colour, marker=marker, markersize=4
            )
        if panel.log:
            _name_within_a_decade(axes)
        if panel.floor is not None:
            axes.axhline(panel.floor, color=INK, linestyle="--", linewidth=1.2)
        axes.set_title(panel.title, fontsize=9, color=INK, parse_math=False)
        axes.set_ylabel(panel.label, color=INK)
        axes.set_xlabel(panel.against, color=INK)
    _add_legend(figure, handles, 1 + columns)
    return figure


def _name_within_a_decade(axes: "Axes") -> None:
    """Name a few numbers of a logarithmic axis that is too short for powers of ten, whose other names would collide."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    least, most = axes.get_xlim()
    if most < 30 * least:
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        if most < 5 * least:  # it may hold none of 1, 2 and 5
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
            axes.xaxis.set_minor_locator(NullLocator())
        for set_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            set_formatter("{x:g}")


def passages(run: Run) -> "Figure | None":
    """Draw a passage of the test for each model that was scored so, of its first finished seed.

    Green words are likelier with the memory, orange ones less likely; the colour is full at four bits.
    """
    found: dict[tuple[str, int | None], tuple[str, Sequence[str], Sequence[float]]] = {}
    for member in run.members:
        if passage := (member.result or {}).get("passage"):
            title = member.model
            found.setdefault((title, member.hidden_size), (title, passage["words"], passage["bits"]))
    return draw_passages(list(found.values())) if found else None


def draw_passages(found: Sequence[tuple[str, Sequence[str], Sequence[float]]]) -> "Figure":
    """Draw passages, each with its title, its words, and the bits that colour each of them."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    pages = [_lay_out(words, bits) for _, words, bits in found]
    heights = [0.24 * (2 + len(lines)) for lines in pages]
    figure = Figure(figsize=(_LETTERS * _LETTER + 0.2, sum(heights)), facecolor="white")
    width, height = figure.get_size_inches()
    top = height
    for (title, _, _), lines, tall in zip(found, pages, heights, strict=True):
        figure.text(0.1 / width, (top - 0.2) / height, title, fontsize=9, color=INK, parse_math=False)
        for number, line in enumerate(lines):
            y = (top - 0.24 * (number + 2)) / height
            for place, word, bits in line:
                strength, colour = min(1.0, abs(bits) / _FULL), to_rgb(COLOURS[2] if bits > 0 else COLOURS[1])
                box = {"facecolor": (*colour, 0.6 * strength), "edgecolor": "none", "boxstyle": "square,pad=0.12"}
                x = (0.1 + place * _LETTER) / width
                figure.text(x, y, word, fontsize=8, family="DejaVu Sans Mono", color=INK, bbox=box, parse_math=False)
        top -= tall
    return figure


def _lay_out(words: Sequence[str], bits: Sequence[float]) -> list[list[tuple[int, str, float]]]:
    """Return lines of words, each with its place in letters."""
    lines: list[list[tuple[int, str, float]]] = [[]]
    place = 0
    for word, gain in zip(words, bits, strict=True):
        if place + len(word) > _LETTERS and lines[-1]:
            lines.append([])
            place = 0
        lines[-1].append((place, word, gain))
        place += len(word) + 1
    return lines


def svg(figure: "Figure", *, transparent: bool = False) -> str:
    """Return the figure as SVG, the same bytes every time; transparent, to lie on a page of any colour."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "fastweights", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata=nothing, facecolor="none" if transparent else "white")
    return buffer.getvalue()


def _draw(
    axes: "Axes", curves: list[Points], model: str, line_style: str, colour: str, *, spread: bool = False
) -> "Line2D":
    # Past the shortest seed a mean would jump as seeds drop out of it, so it ends there.
    shared = [epoch for epoch in curves[0] if all(epoch in curve for curve in curves)]
    mean = [statistics.fmean(curve[epoch] for curve in curves) for epoch in shared]
    if len(curves) > 2 and spread:  # two have no spread to speak of
        twice = [2 * statistics.stdev(curve[epoch] for curve in curves) for epoch in shared]
        low, high = zip(
            *((middle - width, middle + width) for middle, width in zip(mean, twice, strict=True)), strict=True
        )
        axes.fill_between(shared, low, high, color=colour, alpha=0.2, linewidth=0)
    elif len(curves) > 1:
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), linestyle=line_style, color=colour, linewidth=0.8, alpha=0.5)
    marker = "o" if len(shared) == 1 else None  # A line of one point would not be seen.
    (line,) = axes.plot(shared, mean, linestyle=line_style, color=colour, linewidth=2.2, marker=marker, label=model)
    return line


def _style(axes: "Axes", panel: Panel, *, left: bool, bottom: bool) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    _style_axes(axes)
    axes.tick_params(labelbottom=bottom)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k: written out, large numbers run into one another
    if left:
        axes.set_ylabel(panel.label, color=INK)
    if bottom:
        axes.set_xlabel(panel.against, color=INK)


def _style_axes(axes: "Axes") -> None:
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
