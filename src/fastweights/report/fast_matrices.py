"""The figure of one example: what is read, what is written into the fast matrices, and what they still hold."""

import textwrap
from typing import TYPE_CHECKING, Any

import numpy

from fastweights.report._example_panels import (
    FAINT,
    KEY,
    OF_FAST_1,
    OF_FAST_2,
    VALUE,
    draw_answer,
    draw_characters,
    draw_recall,
    draw_trace,
    draw_write,
    name_row,
)
from fastweights.report.figures import INK
from fastweights.report.trajectory import Array, Trajectory, moments, orders, scale_limit, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAP = "RdBu_r"

# Inches.
LEFT, RIGHT, TOP = 1.55, 1.7, 0.3
LINE = 0.165
ROW = 0.21
GAP = 0.12


def fast_matrices(example: Trajectory) -> "Figure":
    """The characters over time; under them what each step writes, what is still known, and the matrices themselves.

    Examples:
        >>> import numpy
        >>> from fastweights.report.fast_matrices import fast_matrices
        >>> from fastweights.report.trajectory import Trajectory
        >>> tokens = ("Q(ab)c.", "S(cd,e),", "S(gh,a),", "Q(cd)e.")
        >>> steps = sum(map(len, tokens)) + 1
        >>> fast_1, fast_2 = numpy.ones((steps, 4, 8)), numpy.ones((steps, 4, 5))
        >>> recall, answer = numpy.full((2, 4), 0.125), numpy.full(8, 0.125)
        >>> example = Trajectory(tokens, 1, fast_1, fast_2, fast_1, fast_2, recall, answer, "a state of zeros")
        >>> figure = fast_matrices(example)
        >>> [len(axes.images) for axes in figure.axes].count(1)  # four matrices at four moments
        16
    """
    from matplotlib.figure import Figure

    length, stored = sum(map(len, example.tokens)), len(example.recall)
    step = min(max(7.4 / length, 0.12), 0.17)
    side = 7 * step - 0.08  # of the wider matrix: under the shortest token
    tall = side * example.fast_1.shape[1] / example.fast_1.shape[2]
    caption = textwrap.wrap(_caption(example), int((LEFT + length * step + RIGHT - 0.4) / 0.0625))
    heights = {"characters": 0.5, "write 1": 0.42, "write 2": 0.42, "trace": 0.55, "recall": ROW * stored}
    heights |= {"labels": 0.12} | dict.fromkeys(("fast 1", "trace 1", "fast 2", "trace 2"), tall)
    width = LEFT + length * step + RIGHT
    height = TOP + sum(heights.values()) + GAP * len(heights) + LINE * len(caption) + 0.2
    figure = Figure(figsize=(width, height), facecolor="white")

    def place(left: float, above: float, wide: float, high: float) -> "Axes":
        axes = figure.add_axes((left / width, 1 - (above + high) / height, wide / width, high / height))
        axes.set_facecolor("none")
        axes.tick_params(colors=INK, labelsize=7.5, length=2, width=0.6)
        axes.spines[:].set_visible(False)
        return axes

    above, tops = TOP, {}
    for name, high in heights.items():
        tops[name] = above
        above += high + GAP
    over_time = {}
    for name in ("characters", "write 1", "write 2", "trace", "recall"):
        over_time[name] = place(LEFT, tops[name], length * step, heights[name])
        over_time[name].set_xlim(0, length)
        over_time[name].set_xticks([])
    draw_characters(over_time["characters"], example)
    draw_write(over_time["write 1"], example.fast_1, OF_FAST_1, "written into $F_1$")
    draw_write(over_time["write 2"], example.fast_2, OF_FAST_2, "written into $F_2$")
    draw_trace(over_time["trace"], example)
    draw_recall(over_time["recall"], example)
    draw_answer(place(LEFT + length * step + 0.65, tops["write 1"], RIGHT - 0.9, 1.6), example)
    _draw_legend(figure)

    limit = scale_limit(example)
    order_1, columns_1, order_2, columns_2 = orders(example)
    shown = {
        "fast 1": example.fast_1[:, order_1][:, :, columns_1],
        "trace 1": example.trace_1[:, order_1][:, :, columns_1],
        "fast 2": example.fast_2[:, order_2][:, :, columns_2],
        "trace 2": example.trace_2[:, order_2][:, :, columns_2],
    }
    value = value_of(example.tokens[-1])
    names = {"fast 1": "$F_1$", "trace 1": f"in $F_1$ because\nthe value was {value}"}
    names |= {"fast 2": "$F_2$", "trace 2": f"in $F_2$ because\nthe value was {value}"}
    columns = moments(example)
    for name, matrices in shown.items():
        wide = tall * matrices.shape[2] / matrices.shape[1]
        for index, (start, moment) in enumerate(zip(example.starts, columns, strict=True)):
            middle = LEFT + step * (start + len(example.tokens[index]) / 2)
            axes = place(middle - wide / 2, tops[name], wide, tall)
            image = axes.imshow(matrices[moment], cmap=MAP, norm=_norm(limit), interpolation="none", aspect="auto")
            axes.set_xticks([])
            axes.set_yticks([])
            if name == "fast 1":
                axes.set_title(_title(example, index), fontsize=7.5, color=INK, pad=3)
        name_row(figure, names[name], tops[name] + tall / 2)
    _draw_scale(place(LEFT + length * step + 0.65, tops["fast 1"], 0.12, tops["fast 2"] - tops["fast 1"]), image, limit)
    figure.text(
        0.2 / width,
        (0.1 + LINE * len(caption)) / height,
        "\n".join(caption),
        va="top",
        color=INK,
        fontsize=8,
        linespacing=1.35,
    )
    return figure


def _draw_legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=KEY, alpha=FAINT, linewidth=0, label="key"),
        Patch(color=VALUE, alpha=FAINT, linewidth=0, label="value"),
        Patch(color=KEY, linewidth=0, label="key that is asked for"),
        Patch(color=VALUE, linewidth=0, label="its value: the answer"),
    ]
    place = (LEFT / figure.get_figwidth(), 1 - 0.05 / figure.get_figheight())
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=place,
        ncols=4,
        frameon=False,
        labelcolor=INK,
        fontsize=8,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.1,
        columnspacing=1.5,
    )


def _draw_scale(axes: "Axes", image: Any, limit: float) -> None:
    bar = axes.figure.colorbar(image, cax=axes)
    bar.outline.set_visible(False)
    ticks = [sign * part * limit for sign, part in ((-1, 1), (-1, 0.05), (0, 0), (1, 0.05), (1, 1))]
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(colors=INK, labelsize=7.5, length=2, width=0.6)


def _title(example: Trajectory, index: int) -> str:
    if index == len(example.tokens) - 1:
        return "at the “)”"
    return "before" if index < example.before else "after the token"


def _norm(limit: float) -> Any:
    """A scale of cube roots: the weak entries of the second matrix are seen beside the strong ones of the first."""
    from matplotlib.colors import FuncNorm

    def forward(values: Array) -> Array:
        roots: Array = numpy.cbrt(values)
        return roots

    def backward(values: Array) -> Array:
        cubes: Array = values**3
        return cubes

    return FuncNorm((forward, backward), vmin=-limit, vmax=limit)


def _caption(example: Trajectory) -> str:
    value = value_of(example.tokens[-1])
    return (
        "Gated fast weights read storage tokens S(key,value), and a query Q(key). The state at the beginning is "
        f"{example.origin}. Written: the norm of what a step changes. Trace: how far the matrix is, in norm, from its "
        f"mean over the seven other values that could have stood in the place of {value}; below, that difference "
        "itself. Asked for: the chance of the right answer to each key if it were asked for right after the token "
        "above; framed where it is stored, before that a guess. All matrices have one scale, of cube roots; their "
        "units are ordered by likeness, and the columns of the first are the hidden units, the features of the "
        "character, and the bias."
    )
