"""What a pass costs against the length of the sequences and the number of units."""

from typing import TYPE_CHECKING

from fastweights.bench.associative import cases, results
from fastweights.bench.associative.results import Setting
from fastweights.bench.published import Row, best
from fastweights.report.figures import COLOURS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HIDDEN_SIZE, STEPS = 100, 19  # what each panel holds fixed, or the nearest that was measured
# Colour and line style both tell the curves apart. "Eager" is the better of the two forms.
CURVES = (
    ("fastweights", (cases.OURS,), COLOURS[0], "-"),
    ("torch.nn.LSTM", (cases.LSTM,), COLOURS[1], "--"),
    ("better eager form", cases.EAGER, COLOURS[2], ":"),
)


def cost(rows: list[Row]) -> "Figure":
    """Milliseconds against T and against H, from the newest rows: training, float32, one thread.

    Raises:
        ValueError: no such rows are there.
    """
    from matplotlib.figure import Figure

    measured = results.times(results.chosen(results.newest(rows), Setting()))
    if not measured:
        raise ValueError("there are no timings of training in float32 on one thread to draw")
    size = min({size for _, size in measured}, key=lambda size: abs(size - HIDDEN_SIZE))
    steps = min({steps for steps, _ in measured}, key=lambda steps: abs(steps - STEPS))
    figure = Figure(figsize=(6.8, 3.4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    for axes, label, title, along in (
        (left, "steps T", f"H = {size}", {t: of_size for (t, h), of_size in measured.items() if h == size}),
        (right, "hidden units H", f"T = {steps}", {h: of_size for (t, h), of_size in measured.items() if t == steps}),
    ):
        _style(axes, label, title, sorted(along))
        for name, rivals, colour, line_style in CURVES:
            points = {at: value for at in along if (value := best(along[at], rivals)) is not None}
            style = {"color": colour, "linestyle": line_style, "linewidth": 2, "marker": "o", "markersize": 4}
            axes.plot(list(points), list(points.values()), label=name, **style)
    left.set_ylabel("milliseconds", color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK)
    return figure


def _style(axes: "Axes", label: str, title: str, marks: list[int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    # What was measured, not powers of ten: 19 is close to 24 and would lie on it.
    apart = [mark for mark, after in zip(marks, [*marks[1:], None], strict=True) if after is None or after > 1.4 * mark]
    axes.xaxis.set_major_locator(FixedLocator(apart))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(label, color=INK)
    axes.set_title(title, fontsize=11, color=INK)
