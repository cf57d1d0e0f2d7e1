import csv
import os
from typing import Any

import pytest
import torch

from fastweights import cli
from fastweights.bench.associative import cases, memory
from fastweights.bench.associative.cases import FULL, QUICK, Selection
from fastweights.bench.associative.problem import Problem
from fastweights.bench.associative.run import COLUMNS, MEMORY_COLUMNS, run
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN
from fastweights.ops.autocast import lstm_takes_bfloat16

PRECISIONS = cases.PRECISIONS if lstm_takes_bfloat16("cpu") else ("float32",)
TINY = Selection(threads=(1, 2), steps=(4,), hidden_sizes=(6, 9), rounds=2, batch=5, input_size=7)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def selected(monkeypatch, *words):
    """What the command line asks to be run, and where to."""
    given: list[Any] = []
    monkeypatch.setattr("fastweights.bench.associative.run.run", lambda *arguments: given.extend(arguments))
    assert cli.main(["bench", "associative", *words]) == 0
    return given


def test_every_rival_is_timed_at_every_size(tmp_path, capsys):
    before = torch.get_num_threads()
    run(TINY, tmp_path / "a.csv")
    assert torch.get_num_threads() == before
    rows = read(tmp_path / "a.csv")
    assert list(rows[0]) == COLUMNS
    assert {(row["threads"], row["hidden_size"], row["rival"]) for row in rows} == {
        (threads, size, rival)
        for threads in ("1", "2")
        for size in ("6", "9")
        for rival in ("fastweights", "eager attention form", "eager matrix form", "torch.nn.LSTM")
    }
    for row in rows:
        lstm = next(
            other
            for other in rows
            if other["rival"] == "torch.nn.LSTM"
            and (other["threads"], other["hidden_size"]) == (row["threads"], row["hidden_size"])
        )
        ratio = float(row["milliseconds"]) / float(lstm["milliseconds"])
        assert float(row["ratio_to_lstm"]) == pytest.approx(ratio, rel=1e-2)
        assert row["processor"]
        assert (row["rounds"], row["batch"], row["input_size"], row["skipped"]) == ("2", "5", "7", "")
    printed = capsys.readouterr().out.splitlines()
    assert "ours/LSTM" in printed[0]
    assert len(printed) == 1 + 4 + 1


def test_every_precision_and_mode_is_timed(tmp_path):
    every = Selection((1,), (3,), (6,), precisions=PRECISIONS, modes=cases.MODES, rounds=1, batch=4, input_size=5)
    run(every, tmp_path / "a.csv")
    rows = read(tmp_path / "a.csv")
    assert len({(row["precision"], row["mode"], row["rival"]) for row in rows}) == len(rows) == len(PRECISIONS) * 2 * 4


def test_bfloat16_is_refused_where_the_lstm_does_not_run_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.bench.associative.run.lstm_takes_bfloat16", lambda device: False)
    with pytest.raises(FastWeightsError, match="LSTM does not run in bfloat16 on this processor: time float32"):
        run(Selection((1,), (4,), (6,), cases.PRECISIONS, rounds=1), tmp_path / "a.csv")


@pytest.mark.parametrize("precision", cases.PRECISIONS)
@pytest.mark.parametrize("mode", cases.MODES)
def test_all_rivals_that_compute_the_recurrence_agree(precision, mode):
    problem = Problem(cases.Case(5, 6, precision, mode, batch=4, input_size=7))
    forwards = problem.forwards() | {cases.COMPILED_STEP: problem.stepwise(problem.matrix_step)}
    del forwards[cases.LSTM]
    with torch.no_grad(), problem.autocast():
        ours, *others = [forward(problem.x).float() for forward in forwards.values()]
    assert len(others) == 3
    for other in others:
        tolerance = 0.1 if precision == "bfloat16" else 1e-5
        torch.testing.assert_close(other, ours, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize(("precision", "error"), [("float32", 1.0001), ("bfloat16", 1.2), ("float32", float("nan"))])
def test_nothing_is_timed_or_written_while_parity_is_red(tmp_path, monkeypatch, capsys, mode, precision, error):
    exact: Any = FastWeightsRNN.forward

    def wrong(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else y * error), state

    monkeypatch.setattr(FastWeightsRNN, "forward", wrong)
    selection = Selection((1,), (4,), (6,), precisions=(precision,), modes=(mode,), rounds=1, batch=5)
    red = f"parity is red, so nothing is timed: the outputs at T=4, H=6, {precision}, {mode} differ"
    with pytest.raises(FastWeightsError, match=red):
        run(selection, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""


def test_a_wrong_gradient_alone_is_red_too(tmp_path, monkeypatch):
    exact: Any = FastWeightsRNN.forward

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * 1.0001

    def wrong(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else Wrong.apply(y)), state

    monkeypatch.setattr(FastWeightsRNN, "forward", wrong)
    with pytest.raises(FastWeightsError, match="the gradient of x at T=4, H=6"):
        run(TINY, tmp_path / "a.csv")


def test_other_columns_are_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.bench.associative.run.require_parity", lambda problem: pytest.fail("timed"))
    path = tmp_path / "a.csv"
    path.write_text(",".join(name for name in COLUMNS if name not in ("precision", "mode", "skipped")) + "\n")
    before = path.read_bytes()
    with pytest.raises(FastWeightsError, match="has other columns"):
        run(TINY, path)
    assert path.read_bytes() == before
    (tmp_path / "b_memory.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match=r"b_memory\.csv has other columns"):
        run(Selection(memory=True), tmp_path / "b.csv")


def test_what_is_skipped_is_recorded_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.bench.machine.machine_memory", lambda: 1000)
    run(Selection((1,), (4,), (6,), rounds=1, batch=5), tmp_path / "a.csv")
    rows = {row["rival"]: row for row in read(tmp_path / "a.csv")}
    for name in cases.EAGER:
        assert rows[name]["skipped"] == "needs about 0 GiB, more than half of the machine's 0"
        assert (rows[name]["milliseconds"], rows[name]["ratio_to_lstm"], rows[name]["rounds"]) == ("", "", "0")
    assert rows[cases.OURS]["rounds"] == "1"


def test_memory_goes_to_a_file_beside_the_timings(tmp_path, monkeypatch):
    peaks = {cases.OURS: 3 * 2**20, cases.ATTENTION: 5 * 2**20, cases.MATRIX: "needs about 9 GiB", cases.LSTM: 2**19}
    monkeypatch.setattr(memory, "peak", lambda case, rival, threads: peaks[rival])
    selection = Selection((2, 1), (4,), (6,), PRECISIONS, cases.MODES, rounds=1, batch=5, memory=True)
    run(selection, tmp_path / "a.csv")
    rows = read(tmp_path / "a_memory.csv")
    assert list(rows[0]) == MEMORY_COLUMNS
    assert [(row["rival"], row["mebibytes"], row["skipped"]) for row in rows] == [
        ("fastweights", "3.0", ""),
        ("eager attention form", "5.0", ""),
        ("eager matrix form", "", "needs about 9 GiB"),
        ("torch.nn.LSTM", "0.5", ""),
    ]
    assert {(row["threads"], row["precision"], row["mode"]) for row in rows} == {("1", "float32", "training")}


def test_options_choose_what_is_timed(monkeypatch):
    default, path = selected(monkeypatch)
    assert (default, path.name) == (QUICK, "associative.csv")
    assert selected(monkeypatch, "--full")[0] == FULL
    words = "--threads 1 --rounds 7 --steps 5 2000 --hidden-sizes 20 --precision bfloat16 --mode training inference"
    given, path = selected(monkeypatch, *words.split(), "--compile", "--memory", "--output", "b.csv")
    assert given == Selection(
        (1,), (5, 2000), (20,), ("bfloat16",), ("training", "inference"), rounds=7, compile=True, memory=True
    )
    assert os.fspath(path) == "b.csv"
    assert selected(monkeypatch, "--batch", "3")[0].batch == 3
    narrowed, _ = selected(monkeypatch, "--full", "--no-compile", "--no-memory", "--steps", "11")
    assert (narrowed.compile, narrowed.memory, narrowed.steps) == (False, False, (11,))
    assert (narrowed.hidden_sizes, narrowed.modes) == (FULL.hidden_sizes, FULL.modes)
