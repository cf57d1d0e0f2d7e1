"""The figure of an example shows what was given."""

import dataclasses
import itertools
import subprocess
import sys

import numpy
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from fastweights.report.figures import svg
from fastweights.reproduce.schlag2017.fast_matrices import (
    KEY,
    VALUE,
    Trajectory,
    draw_fast_matrices,
    key_of,
    moments,
    orders,
    scale_limit,
    value_of,
)

TOKENS = ("Q(hf)d.", "S(ab,c),", "S(cde,f),", "S(ab,h),", "Q(ab)h.")


def example(tokens: tuple[str, ...] = TOKENS, before: int = 1) -> Trajectory:
    generator = numpy.random.default_rng(0)
    steps, stored = sum(map(len, tokens)) + 1, len(tokens) - 1 - before
    return Trajectory(
        tokens,
        before,
        fast_1=generator.uniform(-1, 1, (steps, 4, 8)),
        fast_2=generator.uniform(-1, 1, (steps, 4, 5)),
        trace_1=generator.uniform(-1, 1, (steps, 4, 8)),
        trace_2=generator.uniform(-1, 1, (steps, 4, 5)),
        recall=generator.uniform(0, 1, (stored, len(tokens))),
        answer=numpy.array([0.1, 0, 0, 0, 0, 0, 0.05, 0.8]),
        origin="made up",
    )


def rectangles(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_keys_and_values_of_tokens():
    assert [(key_of(token), value_of(token)) for token in TOKENS] == [
        ("hf", "d"),
        ("ab", "c"),
        ("cde", "f"),
        ("ab", "h"),
        ("ab", "h"),
    ]


def test_the_query_asks_for_what_was_stored_last_and_is_answered_at_its_bracket():
    given = example()
    assert given.asked == 3
    assert "".join(TOKENS)[given.at_query] == ")"
    assert moments(given) == [7, 15, 24, 32, given.at_query]


def test_every_character_stands_at_its_step_and_keys_and_values_are_marked():
    axes = draw_fast_matrices(example()).axes[0]
    texts = [text for text in axes.texts if len(text.get_text()) == 1]
    assert "".join(text.get_text() for text in texts) == "".join(TOKENS)
    assert [text.get_position()[0] for text in texts] == [step + 0.5 for step in range(len(texts))]
    marked = {patch.get_x(): to_hex(patch.get_facecolor()).upper() for patch in rectangles(axes)}
    assert [step for step, colour in marked.items() if colour == KEY] == [9, 10, 17, 18, 19, 26, 27, 34, 35]
    assert [step for step, colour in marked.items() if colour == VALUE] == [12, 21, 29, 37]
    solid = [patch.get_x() for patch in rectangles(axes) if patch.get_alpha() == 1]
    assert solid == [26, 27, 29, 34, 35, 37]


@pytest.mark.parametrize(("row", "name"), [(1, "fast_1"), (2, "fast_2")])
def test_the_bars_are_the_norms_of_what_each_step_changes(row, name):
    given = example()
    fast = getattr(given, name)
    heights = [bar.get_height() for bar in rectangles(draw_fast_matrices(given).axes[row])]
    assert heights == pytest.approx([numpy.linalg.norm(after - now) for now, after in itertools.pairwise(fast)])


def test_the_traces_are_norms_over_their_largest():
    given = example()
    for line, trace in zip(draw_fast_matrices(given).axes[3].lines, (given.trace_1, given.trace_2), strict=True):
        norms = numpy.linalg.norm(trace, axis=(1, 2))
        assert line.get_ydata() == pytest.approx(norms / norms.max())


def test_the_chances_of_every_key_after_every_token():
    given = example()
    texts = [text.get_text() for text in draw_fast_matrices(given).axes[4].texts]
    labels = ["asked for ab: c?", "asked for cde: f?", "asked for ab: h?"]
    rows = [texts[start : start + 6] for start in range(0, 18, 6)]
    assert [row[0] for row in rows] == labels
    assert [row[1:] for row in rows] == [[f"{100 * chance:.0f} %" for chance in chances] for chances in given.recall]


def test_the_answer():
    axes = next(axes for axes in draw_fast_matrices(example()).axes if axes.get_title().startswith("answer"))
    assert axes.get_title() == "answer at the “)”:\n80 % for h"
    assert [bar.get_width() for bar in rectangles(axes)] == pytest.approx([0.1, 0, 0, 0, 0, 0, 0.05, 0.8, 0.05])


def test_the_matrices_are_those_of_their_moments_on_one_scale():
    given = example()
    images = [axes.images[0] for axes in draw_fast_matrices(given).axes if axes.images]
    assert len(images) == 20
    rows_1, columns_1, rows_2, columns_2 = orders(given)
    for index, moment in enumerate(moments(given)):
        expected = (given.fast_1, given.trace_1, given.fast_2, given.trace_2)
        shown = [numpy.asarray(images[index + 5 * row].get_array()) for row in range(4)]
        for array, matrices, rows, columns in zip(
            shown, expected, (rows_1, rows_1, rows_2, rows_2), (columns_1, columns_1, columns_2, columns_2), strict=True
        ):
            assert numpy.array_equal(array, matrices[moment][rows][:, columns])
    limits = {(image.norm.vmin, image.norm.vmax) for image in images}
    assert limits == {(-scale_limit(given), scale_limit(given))}


def test_the_order_keeps_hidden_units_features_and_bias_apart():
    rows_1, columns_1, rows_2, columns_2 = orders(example())
    assert sorted(rows_1) == sorted(rows_2) == [0, 1, 2, 3]
    assert columns_1[:4].tolist() == rows_2.tolist()
    assert sorted(columns_1[4:7]) == [4, 5, 6]
    assert columns_1[7] == 7
    assert columns_2.tolist() == [*rows_1, 4]


def test_an_example_with_nothing_before_it_and_ten_tokens_that_hold_nothing():
    tokens = (*(f"S({key},b)," for key in ("aa", "bbbb", "ccc", "dd", "ee", "ff", "gg", "hh", "ab", "ba")), "Q(ba)b.")
    given = example(tokens, before=0)
    nothing = dataclasses.replace(
        given,
        fast_1=0 * given.fast_1,
        fast_2=0 * given.fast_2,
        trace_1=0 * given.trace_1,
        trace_2=0 * given.trace_2,
        recall=0 * given.recall,
    )
    for part in (given, nothing):
        titles = [axes.get_title() for axes in draw_fast_matrices(part).axes if axes.images and axes.get_title()]
        assert titles == ["after the token"] * 10 + ["at the “)”"]


def test_the_same_bytes_every_time_and_the_origin_is_told():
    first, second = (draw_fast_matrices(example()) for _ in range(2))
    assert svg(first) == svg(second)
    assert "made up" in " ".join(first.texts[-1].get_text().split())


def test_torch_is_not_needed_and_no_window():
    code = (
        "import sys; from fastweights.reproduce.schlag2017 import fast_matrices; "
        "print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
