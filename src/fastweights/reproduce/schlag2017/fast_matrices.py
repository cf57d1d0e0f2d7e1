"""The picture of one example that gated fast weights read: what is read, what is written, and what the matrices hold.

Numbers in, figure out: torch is not needed here, and no window is opened.
"""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy

from fastweights.report.figures import COLOURS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = numpy.ndarray[Any, numpy.dtype[Any]]

KEY, VALUE, OF_FAST_2, OF_FAST_1 = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[4]
FAINT = 0.35
MAP = "RdBu_r"

# Inches.
LEFT, RIGHT, TOP = 1.55, 1.7, 0.3
LINE = 0.165
ROW = 0.21
GAP = 0.12


@dataclass(frozen=True)
class Trajectory:
    """One example of gated fast weights over time, T characters in all.

    Examples:
        >>> import numpy
        >>> from fastweights.reproduce.schlag2017.fast_matrices import Trajectory
        >>> tokens = ("Q(ab)c.", "S(cd,e),", "S(gh,a),", "Q(cd)e.")
        >>> steps = sum(map(len, tokens)) + 1
        >>> fast_1, fast_2 = numpy.zeros((steps, 4, 8)), numpy.zeros((steps, 4, 5))
        >>> recall, answer = numpy.full((2, 4), 0.125), numpy.full(8, 0.125)
        >>> example = Trajectory(tokens, 1, fast_1, fast_2, fast_1, fast_2, recall, answer, "a state of zeros")
        >>> example.asked, example.starts, example.at_query
        (1, [0, 7, 15, 23], 27)
    """

    tokens: tuple[str, ...]  # every `S(key,value),` and, last, `Q(key)value.`
    before: int  # 0 or 1: number of tokens that belong to the example before
    fast_1: Array  # [T+1,H,H+D+1]: the matrix before each character is read, and after the last
    fast_2: Array  # [T+1,H,H+1]
    trace_1: Array  # [T+1,H,H+D+1]: fast_1, less its mean over the other values that the key asked for could have had
    trace_2: Array  # [T+1,H,H+1]
    recall: Array  # [storage tokens, tokens]: chance of its value as the answer, were it asked for after a token
    answer: Array  # [8]: the chance of a to h at the ")" of the query
    origin: str  # source of the state at the beginning, in words

    @property
    def starts(self) -> list[int]:
        """The step at which each token begins."""
        return [sum(map(len, self.tokens[:index])) for index in range(len(self.tokens))]

    @property
    def asked(self) -> int:
        """The index of the token that last stored the key that is asked for."""
        key = key_of(self.tokens[-1])
        stored = range(self.before, len(self.tokens) - 1)
        return max(index for index in stored if key_of(self.tokens[index]) == key)

    @property
    def at_query(self) -> int:
        """The step that reads the ")" of the query, with whose matrices it is answered."""
        return self.starts[-1] + self.tokens[-1].index(")")


def draw_fast_matrices(example: Trajectory) -> "Figure":
    """Draw the characters over time; under them what each step writes, what is still known, and the matrices.

    Examples:
        >>> import numpy
        >>> from fastweights.reproduce.schlag2017.fast_matrices import Trajectory, draw_fast_matrices
        >>> tokens = ("Q(ab)c.", "S(cd,e),", "S(gh,a),", "Q(cd)e.")
        >>> steps = sum(map(len, tokens)) + 1
        >>> fast_1, fast_2 = numpy.ones((steps, 4, 8)), numpy.ones((steps, 4, 5))
        >>> recall, answer = numpy.full((2, 4), 0.125), numpy.full(8, 0.125)
        >>> example = Trajectory(tokens, 1, fast_1, fast_2, fast_1, fast_2, recall, answer, "a state of zeros")
        >>> figure = draw_fast_matrices(example)
        >>> [len(axes.images) for axes in figure.axes].count(1)  # four matrices at four moments
        16
    """
    from matplotlib.figure import Figure

    length, stored = sum(map(len, example.tokens)), len(example.recall)
    step = min(max(7.4 / length, 0.12), 0.17)
    side = 7 * step - 0.08  # side of the wider matrix: it fits under the shortest token
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
    _draw_characters(over_time["characters"], example)
    _draw_write(over_time["write 1"], example.fast_1, OF_FAST_1, "written into $F_1$")
    _draw_write(over_time["write 2"], example.fast_2, OF_FAST_2, "written into $F_2$")
    _draw_trace(over_time["trace"], example)
    _draw_recall(over_time["recall"], example)
    _draw_answer(place(LEFT + length * step + 0.65, tops["write 1"], RIGHT - 0.9, 1.6), example)
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
        _name_row(figure, names[name], tops[name] + tall / 2)
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


def _draw_characters(axes: "Axes", example: Trajectory) -> None:
    from matplotlib.patches import FancyArrowPatch, Rectangle

    axes.set_ylim(0, 1.9)
    axes.set_yticks([])
    _name_axes(axes, "read, a character\na step", 0.25)
    query = len(example.tokens) - 1
    for index, (start, token) in enumerate(zip(example.starts, example.tokens, strict=True)):
        of_query, known = token[0] == "Q", index in (example.asked, query)
        value = start + len(token) - (2 if of_query else 3)
        for place, character in enumerate(token, start):
            in_key = start + 2 <= place < start + 2 + len(key_of(token))
            colour = KEY if in_key else VALUE if place == value else None
            if index < example.before:
                colour = None
            if colour:
                axes.add_patch(Rectangle((place, 0), 1, 1, color=colour, alpha=1 if known else FAINT, linewidth=0))
            axes.text(
                place + 0.5,
                0.44,
                character,
                ha="center",
                va="center",
                family="DejaVu Sans Mono",
                fontsize=9.5,
                color="white" if colour and known else INK,
                weight="bold" if colour and known else "normal",
                alpha=0.45 if index < example.before else 1,
            )
    stored = example.starts[example.asked] + len(example.tokens[example.asked]) - 2.5
    arrow = FancyArrowPatch(
        (stored, 1.08),
        (example.at_query + 1.5, 1.08),
        connectionstyle=f"arc3,rad={-0.9 / max(6.0, example.at_query - stored):.4f}",
        arrowstyle="-|>",
        mutation_scale=8,
        color=VALUE,
        linewidth=1.2,
    )
    arrow.set_clip_on(False)
    axes.add_patch(arrow)


def _draw_write(axes: "Axes", fast: Array, colour: str, name: str) -> None:
    strength = norms(numpy.diff(fast, axis=0))
    axes.bar(numpy.arange(len(strength)) + 0.5, strength, width=0.8, color=colour)
    most = float(strength.max()) or 1.0
    axes.set_ylim(0, most)
    axes.set_yticks([0, most], ["0", f"{most:.1f}"])
    _name_axes(axes, name)


def _draw_trace(axes: "Axes", example: Trajectory) -> None:
    times = numpy.arange(len(example.trace_1))
    for trace, colour, name in ((example.trace_1, OF_FAST_1, "$F_1$"), (example.trace_2, OF_FAST_2, "$F_2$")):
        left = norms(trace)
        left = left / (float(left.max()) or 1.0)
        axes.plot(times, left, color=colour, linewidth=1.8)
        axes.text(times[-1] + 0.6, left[-1], name, color=colour, va="center", fontsize=8.5)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 1], ["0", "most"])
    _name_axes(axes, f"trace of the\nvalue {value_of(example.tokens[-1])}")


def _draw_recall(axes: "Axes", example: Trajectory) -> None:
    from matplotlib.patches import Rectangle

    rows = len(example.recall)
    axes.set_ylim(rows, 0)
    axes.set_yticks([])
    for row, chances in enumerate(example.recall):
        own = example.before + row
        token = example.tokens[own]
        weight = "bold" if own == example.asked else "normal"
        label = f"asked for {key_of(token)}: {value_of(token)}?"
        axes.text(-0.6, row + 0.5, label, ha="right", va="center", fontsize=7.5, color=INK, weight=weight)
        for column, chance in enumerate(chances):
            start, length = example.starts[column], len(example.tokens[column])
            corner, wide, high = (start + 0.15, row + 0.07), length - 0.3, 0.86
            axes.add_patch(Rectangle(corner, wide, high, color=VALUE, alpha=0.8 * float(chance), linewidth=0))
            if column == own:
                axes.add_patch(Rectangle(corner, wide, high, fill=False, edgecolor=INK, linewidth=1))
            axes.text(
                start + length / 2,
                row + 0.52,
                f"{100 * float(chance):.0f} %",
                ha="center",
                va="center",
                fontsize=7,
                color=INK,
            )


def _draw_answer(axes: "Axes", example: Trajectory) -> None:
    right = value_of(example.tokens[-1])
    letters = [*"abcdefgh", "else"]
    chances = [*map(float, example.answer), max(0.0, 1 - float(example.answer.sum()))]
    axes.barh(letters, chances, color=[VALUE if letter == right else INK for letter in letters], height=0.75)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(letters) - 0.5, -0.5)
    axes.set_xticks([0, 1], ["0", "1"])
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"answer at the “)”:\n{100 * chances[letters.index(right)]:.0f} % for {right}", fontsize=8, color=INK, pad=4
    )


def _name_axes(axes: "Axes", words: str, at: float = 0.5) -> None:
    place, figure = axes.get_position(), cast("Figure", axes.figure)
    _name_row(figure, words, figure.get_size_inches()[1] * (1 - place.y0 - at * place.height))


def _name_row(figure: "Figure", words: str, above: float) -> None:
    """Write a row's name at the left edge, so many inches from the top."""
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - above / height, words, va="center", color=INK, fontsize=8)


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
    """Return a scale of cube roots: it shows weak entries of the second matrix beside strong ones of the first."""
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


def key_of(token: str) -> str:
    """Return the key of a storage or query token.

    Examples:
        >>> key_of("S(hgb,c),"), key_of("Q(ceaf)e.")
        ('hgb', 'ceaf')
    """
    return token[2 : token.index("," if token[0] == "S" else ")")]


def value_of(token: str) -> str:
    """Return the value of a storage token, or the answer of a query token.

    Examples:
        >>> value_of("S(hgb,c),"), value_of("Q(ceaf)e.")
        ('c', 'e')
    """
    return token[-3 if token[0] == "S" else -2]


def moments(example: Trajectory) -> list[int]:
    """Return the step of each column's matrices: the one after its token, for the query the one that answers it."""
    ends = [start + len(token) for start, token in zip(example.starts, example.tokens, strict=True)]
    return [*ends[:-1], example.at_query]


def norms(matrices: Array) -> Array:
    """Return the norm of each matrix: [T,n,m] -> [T]."""
    lengths: Array = numpy.sqrt((matrices.astype(numpy.float64) ** 2).sum((1, 2)))
    return lengths


def scale_limit(example: Trajectory) -> float:
    """Return the end of the scale that all matrices share: few entries lie beyond it."""
    shown = moments(example)
    entries = numpy.abs(numpy.concatenate([example.fast_1[shown].ravel(), example.fast_2[shown].ravel()]))
    return float(numpy.quantile(entries, 0.99)) or 1.0


def orders(example: Trajectory) -> tuple[Array, Array, Array, Array]:
    """Return an order of the rows and columns of both matrices that puts like units side by side."""
    size = example.fast_2.shape[1]
    features = example.fast_1.shape[2] - size - 1
    inner, hidden = _order_alike(example.fast_1), _order_alike(example.fast_2)
    inputs = _order_alike(example.fast_1[:, :, size : size + features].transpose(0, 2, 1))
    columns_1 = numpy.concatenate([hidden, size + inputs, [size + features]])
    return inner, columns_1, hidden, numpy.concatenate([inner, [size]])


def _order_alike(matrices: Array) -> Array:
    """Order the rows by their part in the direction that they share most over time."""
    rows = matrices.transpose(1, 0, 2).reshape(matrices.shape[1], -1).astype(numpy.float64)
    direction = numpy.linalg.eigh(rows @ rows.T)[1][:, -1]
    direction = direction * numpy.sign(direction[numpy.abs(direction).argmax()])
    return numpy.argsort(direction, kind="stable")
