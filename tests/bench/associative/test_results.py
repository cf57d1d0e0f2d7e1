import csv
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from fastweights.bench.associative import cases, results
from fastweights.bench.associative.figures import cost
from fastweights.bench.associative.results import Setting
from fastweights.bench.associative.run import COLUMNS, MEMORY_COLUMNS
from fastweights.bench.published import Row, read
from fastweights.report.figures import svg

PUBLISHED = Path(__file__).parents[3] / "benchmarks"


def row(rival: str, milliseconds: float | None, steps: int = 19, size: int = 100, **more: Any) -> Row:
    found: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "threads": 1,
        "batch": 128,
        "steps": steps,
        "input_size": 100,
        "hidden_size": size,
        "precision": "float32",
        "mode": "training",
        "rival": rival,
        "milliseconds": "" if milliseconds is None else milliseconds,
    }
    return {name: str(value) for name, value in (found | more).items()}


@pytest.fixture
def grid() -> list[Row]:
    """Every size and setting, the attention form skipped where T is long."""
    rows = []
    for case in cases.FULL.cases():
        for threads in (2, 1):
            how: dict[str, Any] = {"precision": case.precision, "mode": case.mode, "threads": threads}
            at = case.steps, case.hidden_size
            work = case.steps * case.hidden_size * threads
            rows += [row(cases.OURS, work / 100, *at, **how), row(cases.LSTM, work / 50, *at, **how)]
            rows += [row(cases.MATRIX, work / 10, *at, **how)]
            long = case.steps == 2000
            rows += [row(cases.ATTENTION, None if long else work / 20, *at, **how, skipped="too slow" * long)]
    return rows


def test_the_published_files_have_the_columns_that_are_written():
    for name, columns in (("associative", COLUMNS), ("associative_memory", MEMORY_COLUMNS)):
        path = PUBLISHED / f"{name}.csv"
        if path.exists() or name == "associative":
            with path.open() as file:
                assert next(csv.reader(file)) == columns
            for found in read(path):
                assert found["precision"] in cases.PRECISIONS
                assert found["mode"] in cases.MODES
                assert found["rival"] in (cases.OURS, *cases.EAGER, cases.LSTM, *cases.COMPILED)


def test_the_newest_of_several_timings_counts():
    old = row(cases.OURS, 9, commit="old")
    rows = [old, row(cases.OURS, 1), row(cases.LSTM, 2), row(cases.OURS, 3, date="2026-01-03")]
    assert [(found["rival"], found["milliseconds"]) for found in results.newest(rows)] == [
        (cases.OURS, "3"),
        (cases.LSTM, "2"),
    ]


def test_the_table_of_the_readme(grid):
    # Timings of other sizes that came later do not empty it.
    later = [row(cases.OURS, 1, 2000, 20, commit="later"), row(cases.LSTM, 1, commit="later", mode="inference")]
    table = results.speed_table(grid + later)
    assert "Abacus machine (2026-01-02" in table
    assert [line.split(" | ")[:3] for line in table.splitlines()[4:]] == [
        [f"| {threads}", str(steps), str(size)] for threads in (1, 2) for steps in (11, 19) for size in (50, 100)
    ]
    assert table.splitlines()[4] == "| 1 | 11 | 50 | 5.50 | 11.00 | 27.50 | 0.50 | 5.0 times |"
    assert "torch.compile" not in table


def test_what_was_compiled_is_a_column(grid):
    compiled = [row(cases.COMPILED_MATRIX, 55.5), row(cases.COMPILED_STEP, 44.25), row(cases.COMPILED_ATTENTION, None)]
    lines = results.speed_table(grid + compiled).splitlines()
    assert "| best `torch.compile` |" in lines[2]
    assert lines[7] == "| 1 | 19 | 100 | 19.00 | 38.00 | 95.00 | 44.25 | 0.50 | 5.0 times |"
    assert lines[4] == "| 1 | 11 | 50 | 5.50 | 11.00 | 27.50 | - | 0.50 | 5.0 times |"
    assert {line.count("|") for line in lines[2:]} == {10}
    assert "| 44.25 |" in results.grid_tables(grid + compiled)


def test_the_grid_has_a_table_for_each_setting(grid):
    text = results.grid_tables(grid)
    titles = re.findall(r"\*\*(.*)\*\*", text)
    assert titles[:3] == ["training, float32, 1 thread", "training, float32, 2 threads", "inference, float32, 1 thread"]
    assert len(titles) == 8
    assert len(re.findall(r"^\| \d", text, re.MULTILINE)) == 8 * 20
    assert "| 2000 | 100 | 2,000 | 4,000 | - | 20,000 | - | 0.50 | 10.0 times |" in text
    assert text.count("Not measured: eager attention form at T=2000, H=20: too slow; ") == 8


def test_memory_is_a_table():
    rows = [row(cases.OURS, None, mebibytes=9.1), row(cases.LSTM, None, mebibytes=15.7)]
    rows += [row(cases.MATRIX, None, mebibytes=1117.4), row(cases.ATTENTION, None, mebibytes="", skipped="too large")]
    text = results.memory_table(rows)
    assert "| 19 | 100 | 9.1 | 15.7 | - | 1,117 |" in text
    assert "Not measured: eager attention form at T=19, H=100: too large." in text


def test_the_figure_is_what_the_rows_say(grid):
    figure = cost(grid)
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("H = 100", "T = 19")
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    curves = {line.get_label(): numpy.asarray(line.get_xydata()).tolist() for line in left.lines}
    assert list(curves) == ["fastweights", "torch.nn.LSTM", "better eager form"]
    assert curves["fastweights"] == [[steps, float(steps)] for steps in cases.FULL.steps]
    # The better of the two where both were measured, else the one that was.
    assert curves["better eager form"] == [[11, 55], [19, 95], [24, 120], [200, 1000], [2000, 20000]]
    assert numpy.asarray(right.lines[0].get_xdata()).tolist() == [20, 50, 100, 200]


def test_the_figure_takes_the_nearest_size_that_was_measured():
    rows = [row(rival, 5, steps, size) for rival in (cases.OURS, cases.LSTM) for steps in (4, 9) for size in (6, 60)]
    figure = cost(rows)
    assert [axes.get_title() for axes in figure.axes] == ["H = 60", "T = 9"]
    assert figure.axes[0].lines[2].get_xydata().tolist() == []  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="no timings of training in float32 on one thread"):
        cost([row(cases.OURS, 1, threads=2)])


def test_the_figure_is_the_same_every_time(grid):
    first, second = svg(cost(grid)), svg(cost(grid))
    assert first == second
    assert "<metadata" not in first


def test_settings_are_in_the_order_of_interest():
    rows = [row(cases.OURS, 1, precision=p, mode=m) for p in ("bfloat16", "float32") for m in ("inference", "training")]
    assert [(setting.precision, setting.mode) for setting in results.settings(rows)] == [
        ("float32", "training"),
        ("float32", "inference"),
        ("bfloat16", "training"),
        ("bfloat16", "inference"),
    ]
    assert str(Setting(2)) == "training, float32, 2 threads"
