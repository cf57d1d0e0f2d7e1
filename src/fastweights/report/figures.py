"""The figures of a run, drawn with matplotlib's objects: no global state, no window."""

import io
import itertools
import statistics
from typing import TYPE_CHECKING

from fastweights.report.runs import Member, Run, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, which stay apart for the colour-blind, those that are too pale on white last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", ":", "-.")
# Of text, axes and the floor: the page puts the reader's own text colour in its place.
INK = "#1f2328"
PANELS_A_ROW = 3

Curve = dict[int, float]


def learning_curves(run: Run) -> "Figure":
    """Figure 3 of Ba et al. (2016): test log likelihood against epochs, one colour a model, one panel a hidden size.

    Thin lines are seeds, the thick line their mean over the epochs that all of them have; dashed, the floor.

    Examples:
        >>> from pathlib import Path
        >>> epochs = [{"epoch": 1, "test_loss": 2.3}, {"epoch": 2, "test_loss": 1.5}]
        >>> member = Member("lstm-50-seed1", {"model": "LSTM"}, {}, epochs, result=None)
        >>> figure = learning_curves(Run(Path("."), "ba2016/associative-retrieval", "quick", [], [member]))
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [-2.3, -1.5]
    """
    from matplotlib.figure import Figure

    members = [member for member in run.members if log_likelihoods(member)]
    sizes = sorted({member.hidden_size for member in members}, key=lambda size: (size is None, size or 0))
    if not sizes:
        figure = Figure(figsize=(4.8, 1.0), facecolor="white")
        figure.text(0.5, 0.5, "no epoch has finished yet", ha="center", va="center", color=INK)
        return figure
    columns = min(len(sizes), PANELS_A_ROW)
    rows = -(-len(sizes) // columns)
    width = 4.8 if columns == 1 else 0.6 + 2.9 * columns
    figure = Figure(figsize=(width, 0.7 + 2.7 * rows), layout="constrained", facecolor="white")
    styles = dict(zip(run.models, itertools.product(LINE_STYLES, COLOURS), strict=False))
    handles: dict[str, Line2D] = {}
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for index, axes in enumerate(panels.flat):
        if index >= len(sizes):
            axes.remove()
            continue
        _style(axes, left=index % columns == 0, bottom=index + columns >= len(sizes))
        if sizes[index] is not None:
            axes.set_title(f"{sizes[index]} hidden units", fontsize=11, color=INK)
        for model in run.models:
            seeds = [member for member in members if (member.model, member.hidden_size) == (model, sizes[index])]
            if seeds:
                line_style, colour = styles.get(model, (LINE_STYLES[0], INK))
                handles[model] = _draw(axes, [log_likelihoods(member) for member in seeds], model, line_style, colour)
        if run.floor_log_likelihood is not None:
            floor = axes.axhline(run.floor_log_likelihood, color=INK, linestyle="--", linewidth=1.2, label="floor")
            handles["floor: ignores the query"] = floor
    if handles:
        legend = figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(len(handles), 1 + columns),
            frameon=False,
            labelcolor=INK,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)  # A dollar in a model's name is a dollar.
    return figure


def svg(figure: "Figure", *, transparent: bool = False) -> str:
    """The figure as SVG, the same bytes every time; transparent, to lie on a page of any colour."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "fastweights", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata=nothing, facecolor="none" if transparent else "white")
    return buffer.getvalue()


def log_likelihoods(member: Member) -> Curve:
    """The test log likelihood, in nats, after each epoch on which the member was tested."""
    losses = {record["epoch"]: number(record.get("test_loss")) for record in member.epochs}
    return {epoch: -loss for epoch, loss in losses.items() if loss is not None}


def _draw(axes: "Axes", curves: list[Curve], model: str, line_style: str, colour: str) -> "Line2D":
    if len(curves) > 1:
        for curve in curves:
            axes.plot(list(curve), list(curve.values()), linestyle=line_style, color=colour, linewidth=0.8, alpha=0.5)
    # Past the shortest seed a mean would jump as seeds drop out of it, so it ends there.
    shared = [epoch for epoch in curves[0] if all(epoch in curve for curve in curves)]
    mean = [statistics.fmean(curve[epoch] for curve in curves) for epoch in shared]
    marker = "o" if len(shared) == 1 else None  # A line of one point would not be seen.
    (line,) = axes.plot(shared, mean, linestyle=line_style, color=colour, linewidth=2.2, marker=marker, label=model)
    return line


def _style(axes: "Axes", *, left: bool, bottom: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelbottom=bottom)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if left:
        axes.set_ylabel("test log likelihood (nats)", color=INK)
    if bottom:
        axes.set_xlabel("epochs", color=INK)
