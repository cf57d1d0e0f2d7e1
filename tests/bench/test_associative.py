import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fastweights.bench import associative
from fastweights.bench.associative import (
    ATTENTION,
    COMPILED,
    EAGER,
    FULL,
    LSTM,
    MATRIX,
    MODES,
    OURS,
    STARTS,
    AssociativeCase,
    AssociativeProblem,
    AssociativeSelection,
    require_parity,
)
from fastweights.bench.process import can_measure_peak, measure_peak
from fastweights.bench.published import Row, last_measured, read
from fastweights.bench.run import explain_lack_of_memory, machine_memory, run
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN
from fastweights.ops.autocast import lstm_takes_bfloat16
from fastweights.report.figures import svg
from tests.bench.helpers import Bend, make_row

GIB = 2**30
SMALL = AssociativeCase(4, 6, batch=20, input_size=5)


def test_every_precision_and_mode_is_timed(tmp_path):
    precisions = associative.PRECISIONS if lstm_takes_bfloat16("cpu") else ("float32",)
    every = AssociativeSelection((1,), (3,), (6,), precisions=precisions, modes=MODES, rounds=1, batch=4, input_size=5)
    assert len(every.memory_cases()) == 1
    run(associative, every, tmp_path / "a.csv")
    rows = read(tmp_path / "a.csv")
    assert len({(row["precision"], row["mode"], row["rival"]) for row in rows}) == len(rows) == len(precisions) * 2 * 5


def test_bfloat16_is_refused_where_the_lstm_does_not_run_in_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(associative, "lstm_takes_bfloat16", lambda device: False)
    with pytest.raises(FastWeightsError, match="LSTM does not run in bfloat16 on this processor: time float32"):
        run(associative, AssociativeSelection((1,), (4,), (6,), associative.PRECISIONS, rounds=1), tmp_path / "a.csv")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("precision", associative.PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
def test_all_rivals_that_compute_the_recurrence_agree(precision, mode):
    problem = AssociativeProblem(AssociativeCase(5, 6, precision, mode, batch=4, input_size=7))
    forwards = problem.forwards() | {associative.COMPILED_STEP: problem.loop(problem.matrix_step)}
    del forwards[LSTM], forwards[STARTS]
    with torch.no_grad(), problem.autocast():
        ours, *others = [forward(problem.x).float() for forward in forwards.values()]
    assert len(others) == 3
    for other in others:
        tolerance = 0.1 if precision == "bfloat16" else 1e-5
        torch.testing.assert_close(other, ours, atol=tolerance, rtol=tolerance)


def test_what_the_eager_forms_keep():
    case = AssociativeCase(steps=2000, hidden_size=100)
    assert associative.count_kept_bytes(case, MATRIX) == 4 * 2000 * 128 * 100**2
    assert associative.count_kept_bytes(case, ATTENTION) == 4 * 128 * (2000 * 2001 // 2) * 100
    inference = AssociativeCase(steps=2000, hidden_size=100, mode="inference")
    for name in EAGER:
        assert associative.count_kept_bytes(inference, name) < associative.count_kept_bytes(case, name) / 100
    assert associative.count_kept_bytes(case, OURS) == associative.count_kept_bytes(case, LSTM) == 0


def test_what_half_of_the_memory_cannot_hold_is_left_out(monkeypatch):
    assert machine_memory() > GIB / 4
    case = AssociativeCase(steps=2000, hidden_size=100)  # the matrix form keeps 9.5 GiB
    for memory, reason in (20, None), (18, "needs about 10 GiB, more than half of the machine's 18"):
        monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda memory=memory: memory * GIB)
        assert explain_lack_of_memory(associative.count_kept_bytes(case, MATRIX)) == reason
    monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda: 1)
    assert explain_lack_of_memory(associative.count_kept_bytes(case, OURS)) is None


def test_an_eager_form_that_would_be_slow_is_left_out(monkeypatch):
    ran = []
    exact = AssociativeProblem.prepare

    def prepare(self, forward, steps=None):
        ran.append(steps)
        return exact(self, forward, steps)

    monkeypatch.setattr(AssociativeProblem, "prepare", prepare)
    case = AssociativeCase(120, 3, batch=2, input_size=2)
    monkeypatch.setattr(associative, "MOST_SECONDS", 0.0)
    calls, skipped = associative.rivals(case, AssociativeSelection())
    assert set(calls) == {OURS, STARTS, LSTM}
    assert set(skipped) == set(EAGER)
    assert skipped[MATRIX].startswith("would take about ")
    assert ran.count(30) == 2  # a quarter of the steps foretold the whole
    short, _ = associative.rivals(AssociativeCase(8, 3, batch=2, input_size=2), AssociativeSelection())
    assert set(EAGER) <= set(short)  # too short to be worth foretelling
    monkeypatch.setattr(associative, "MOST_SECONDS", 1e9)
    assert associative.explain_too_slow(AssociativeProblem(case), ATTENTION) is None


def test_which_cases_are_compiled():
    assert not AssociativeSelection().compiles(AssociativeCase(11, 50))
    assert AssociativeSelection(compile=True).compiles(AssociativeCase(24, 50, "bfloat16"))
    assert not AssociativeSelection(compile=True).compiles(AssociativeCase(25, 50))
    assert {case.precision for case in FULL.cases() if FULL.compiles(case)} == {"float32"}
    assert {case.steps for case in FULL.cases() if FULL.compiles(case)} == {11, 19, 24}
    assert len(FULL.cases()) == 5 * 4 * 2 * 2


def test_what_cannot_be_compiled_is_left_out(monkeypatch):
    asked = []

    def fail(*arguments):
        asked.append(arguments)
        return [], dict.fromkeys(COMPILED, "compiling failed: no g++")

    monkeypatch.setattr("fastweights.bench.problems.try_compilations", fail)
    case = AssociativeCase(3, 4, batch=2, input_size=2)
    calls, skipped = associative.rivals(case, AssociativeSelection(compile=True, compile_limit=7))
    assert list(calls) == [OURS, STARTS, *EAGER, LSTM]
    assert skipped == dict.fromkeys(COMPILED, "compiling failed: no g++")
    assert [(problem.case, *others) for problem, *others in asked] == [(case, list(COMPILED), 7)]


@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell its peak of memory")
@pytest.mark.slow
def test_the_matrix_form_needs_a_matrix_for_every_step():
    case = AssociativeCase(steps=30, hidden_size=64, batch=64, input_size=16)
    kept = associative.count_kept_bytes(case, MATRIX)  # 30 MiB
    eager, ours = (measure_peak(case, rival, 1) for rival in (MATRIX, OURS))
    assert isinstance(eager, int)
    assert isinstance(ours, int)
    assert kept <= eager < 2 * kept
    assert ours < eager - kept / 2
    # At the least the outputs and the gradients of drive and x.
    assert ours > 4 * 30 * 64 * (64 + 64 + 16) * 0.8


def let_err(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Lets a change of the outputs into the layer's results, not into the reference's."""
    exact: Any = FastWeightsRNN.forward

    def forward(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else change(self, y)), state

    monkeypatch.setattr(FastWeightsRNN, "forward", forward)


def bend(monkeypatch: pytest.MonkeyPatch, examples: list[int], *, outputs: bool = False) -> None:
    """Lets the layer err in some examples; the first inputs of examples 3, 7 and 13 are next to nothing."""

    def change(layer, y):
        y = Bend.apply(y, 1.1, examples)
        return y.index_fill(1, torch.tensor(examples), 0.0) if outputs else y

    class Edged(AssociativeProblem):
        def __init__(self, case):
            super().__init__(case)
            self.x[0, [3, 7, 13]] *= 1e-9  # so that all units stand at the rectifier's edge

    let_err(monkeypatch, change)
    monkeypatch.setattr(associative, "AssociativeProblem", Edged)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("precision", "error"), [("float32", 1.0001), ("bfloat16", 1.2), ("float32", float("nan"))])
def test_wrong_outputs_are_red(monkeypatch, mode, precision, error):
    let_err(monkeypatch, lambda layer, y: y * error)
    with pytest.raises(FastWeightsError, match=f"the outputs at T=4, H=6, {precision}, {mode} differ"):
        require_parity(AssociativeCase(4, 6, precision, mode, batch=5))


def test_a_wrong_gradient_alone_is_red_too(monkeypatch):
    let_err(monkeypatch, lambda layer, y: Bend.apply(y))
    with pytest.raises(FastWeightsError, match="the gradient of x at T=4, H=6"):
        require_parity(SMALL)


@pytest.mark.parametrize("examples", [[], [13], [3, 13]])
def test_an_example_in_ten_may_lie_on_the_other_side_of_an_edge(monkeypatch, caplog, examples):
    caplog.set_level("INFO")
    bend(monkeypatch, examples)
    require_parity(SMALL)
    assert caplog.messages == [
        f"parity: {len(examples)} of 20 examples have a unit at the rectifier's edge" for _ in examples[:1]
    ]


@pytest.mark.parametrize(("examples", "reason"), [([3, 7, 13], "more than one in ten"), ([12], "not at an edge")])
def test_no_other_gradient_may_be_wrong(monkeypatch, examples, reason):
    bend(monkeypatch, examples)
    with pytest.raises(FastWeightsError, match="the gradient of x at T=4, H=6, float32, training differ from"):
        require_parity(SMALL)


def test_outputs_are_never_left_out(monkeypatch):
    bend(monkeypatch, [13], outputs=True)
    with pytest.raises(FastWeightsError, match="the outputs at T=4, H=6, float32, training differ from"):
        require_parity(SMALL)


def test_what_the_examples_share_has_to_be_right(monkeypatch):
    let_err(monkeypatch, lambda layer, y: y + (layer.weight_ih - layer.weight_ih.detach()).sum())
    with pytest.raises(FastWeightsError, match="the gradient of weight_ih at"):
        require_parity(SMALL)


def test_parity_of_long_sequences_is_of_examples_spread_over_the_batch():
    assert associative.choose_parity_examples(AssociativeCase(19, 100)).tolist() == list(range(128))
    few = associative.choose_parity_examples(AssociativeCase(2000, 100)).tolist()
    assert 2 <= len(few) < 10
    assert (few[0], few[-1]) == (0, 127)
    assert associative.choose_parity_examples(AssociativeCase(100_000, 200)).tolist() == [0, 127]


def row(rival: str, value: float | None, steps: int = 19, size: int = 100, **more: Any) -> Row:
    sizes = {"batch": 128, "steps": steps, "input_size": 100, "hidden_size": size}
    return make_row(associative.COLUMNS, rival, value, **sizes | {"precision": "float32", "mode": "training"} | more)


@pytest.fixture
def grid() -> list[Row]:
    """Every size and setting, the attention form skipped where T is long."""
    rows = []
    for case in FULL.cases():
        for threads in (2, 1):
            how: dict[str, Any] = {"precision": case.precision, "mode": case.mode, "threads": threads}
            at = case.steps, case.hidden_size
            work = case.steps * case.hidden_size * threads
            rows += [row(OURS, work / 100, *at, **how), row(LSTM, work / 50, *at, **how)]
            rows += [row(MATRIX, work / 10, *at, **how)]
            long = case.steps == 2000
            rows += [row(ATTENTION, None if long else work / 20, *at, **how, skipped="too slow" * long)]
    return rows


def test_the_newest_of_several_timings_counts():
    old = row(OURS, 9, commit="old")
    rows = [old, row(OURS, 1), row(LSTM, 2), row(OURS, 3, date="2026-01-03")]
    newest = [(row["rival"], row["milliseconds"]) for row in last_measured(rows)]
    assert newest == [(OURS, "3"), (LSTM, "2")]


def test_the_short_table(grid):
    # Timings of other sizes that came later do not empty it.
    later = [row(OURS, 1, 2000, 20, commit="later"), row(LSTM, 1, commit="later", mode="inference")]
    table = associative.speed_table(grid + later)
    assert "Abacus machine (2026-01-02" in table
    assert [line.split(" | ")[:3] for line in table.splitlines()[4:]] == [
        [f"| {threads}", str(steps), str(size)] for threads in (1, 2) for steps in (11, 19) for size in (50, 100)
    ]
    assert table.splitlines()[4] == "| 1 | 11 | 50 | 5.50 | 11.00 | 27.50 | 0.50 | 5.0 times |"
    assert "torch.compile" not in table


def test_what_was_compiled_is_a_column(grid):
    compiled = [
        row(associative.COMPILED_MATRIX, 55.5),
        row(associative.COMPILED_STEP, 44.25),
        row(associative.COMPILED_ATTENTION, None),
    ]
    lines = associative.speed_table(grid + compiled).splitlines()
    assert "| best `torch.compile` |" in lines[2]
    assert lines[7] == "| 1 | 19 | 100 | 19.00 | 38.00 | 95.00 | 44.25 | 0.50 | 5.0 times |"
    assert lines[4] == "| 1 | 11 | 50 | 5.50 | 11.00 | 27.50 | - | 0.50 | 5.0 times |"
    assert {line.count("|") for line in lines[2:]} == {10}
    assert "| 44.25 |" in associative.grid_tables(grid + compiled)


def test_the_grid_has_a_table_for_each_setting(grid):
    text = associative.grid_tables(grid)
    titles = re.findall(r"\*\*(.*)\*\*", text)
    assert titles[:3] == ["training, float32, 1 thread", "training, float32, 2 threads", "inference, float32, 1 thread"]
    assert len(titles) == 8
    assert len(re.findall(r"^\| \d", text, re.MULTILINE)) == 8 * 20
    assert "| 2000 | 100 | 2,000 | 4,000 | - | 20,000 | - | 0.50 | 10.0 times |" in text
    assert text.count("Not measured: eager attention form at T=2000, H=20: too slow; ") == 8


def test_settings_are_in_the_order_of_interest():
    rows = [row(OURS, 1, precision=p, mode=m) for p in ("bfloat16", "float32") for m in ("inference", "training")]
    assert list(associative.group_by_setting(rows)) == [
        f"{mode}, {precision}, 1 thread" for precision in ("float32", "bfloat16") for mode in ("training", "inference")
    ]


def test_memory_is_a_table():
    rows = [row(OURS, 9.1), row(LSTM, 15.7), row(MATRIX, 1117.4), row(ATTENTION, None, skipped="too large")]
    text = associative.peaks_table(rows)
    assert "**training, float32, 1 thread**" in text
    assert "| 19 | 100 | 9.1 | 15.7 | - | 1,117 |" in text
    assert "Not measured: eager attention form at T=19, H=100: too large." in text


@pytest.fixture(scope="module")
def cost():
    """Draws the figure of the documentation."""
    path = Path(__file__).parents[2] / "docs" / "fill.py"
    spec = importlib.util.spec_from_file_location("fill", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cost


def test_the_figure_is_what_the_rows_say(grid, cost):
    figure = cost(grid)
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("H = 100", "T = 19")
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    curves = {line.get_label(): numpy.asarray(line.get_xydata()).tolist() for line in left.lines}
    assert list(curves) == ["fastweights", "torch.nn.LSTM", "better eager form"]
    assert curves["fastweights"] == [[steps, float(steps)] for steps in FULL.steps]
    # The better of the two where both were measured, else the one that was.
    assert curves["better eager form"] == [[11, 55], [19, 95], [24, 120], [200, 1000], [2000, 20000]]
    assert numpy.asarray(right.lines[0].get_xdata()).tolist() == [20, 50, 100, 200]


def test_the_figure_takes_the_nearest_size_that_was_measured(cost):
    rows = [row(rival, 5, steps, size) for rival in (OURS, LSTM) for steps in (4, 9) for size in (6, 60)]
    figure = cost(rows)
    assert [axes.get_title() for axes in figure.axes] == ["H = 60", "T = 9"]
    assert figure.axes[0].lines[2].get_xydata().tolist() == []
    with pytest.raises(ValueError, match="no timings of training in float32 on one thread"):
        cost([row(OURS, 1, threads=2)])


def test_the_figure_is_the_same_every_time(grid, cost):
    first, second = svg(cost(grid)), svg(cost(grid))
    assert first == second
    assert "<metadata" not in first
