"""The panels over time in the figure of one example: what is read, written, still held and answered."""

from typing import TYPE_CHECKING, cast

import numpy

from fastweights.report.figures import COLOURS, INK
from fastweights.report.trajectory import Array, Trajectory, key_of, norms, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEY, VALUE, OF_FAST_2, OF_FAST_1 = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[4]
FAINT = 0.35


def draw_characters(axes: "Axes", example: Trajectory) -> None:
    from matplotlib.patches import FancyArrowPatch, Rectangle

    axes.set_ylim(0, 1.9)
    axes.set_yticks([])
    _name_of(axes, "read, a character\na step", 0.25)
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


def draw_write(axes: "Axes", fast: Array, colour: str, name: str) -> None:
    strength = norms(numpy.diff(fast, axis=0))
    axes.bar(numpy.arange(len(strength)) + 0.5, strength, width=0.8, color=colour)
    most = float(strength.max()) or 1.0
    axes.set_ylim(0, most)
    axes.set_yticks([0, most], ["0", f"{most:.1f}"])
    _name_of(axes, name)


def draw_trace(axes: "Axes", example: Trajectory) -> None:
    times = numpy.arange(len(example.trace_1))
    for trace, colour, name in ((example.trace_1, OF_FAST_1, "$F_1$"), (example.trace_2, OF_FAST_2, "$F_2$")):
        left = norms(trace)
        left = left / (float(left.max()) or 1.0)
        axes.plot(times, left, color=colour, linewidth=1.8)
        axes.text(times[-1] + 0.6, left[-1], name, color=colour, va="center", fontsize=8.5)
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 1], ["0", "most"])
    _name_of(axes, f"trace of the\nvalue {value_of(example.tokens[-1])}")


def draw_recall(axes: "Axes", example: Trajectory) -> None:
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


def draw_answer(axes: "Axes", example: Trajectory) -> None:
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


def _name_of(axes: "Axes", words: str, at: float = 0.5) -> None:
    place, figure = axes.get_position(), cast("Figure", axes.figure)
    name_row(figure, words, figure.get_size_inches()[1] * (1 - place.y0 - at * place.height))


def name_row(figure: "Figure", words: str, above: float) -> None:
    """What a row shows, at the left edge."""
    width, height = figure.get_size_inches()
    figure.text(0.2 / width, 1 - above / height, words, va="center", color=INK, fontsize=8)
