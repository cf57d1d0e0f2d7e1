import csv
import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastweights import cli
from fastweights.bench import parity
from fastweights.bench.alone import AloneError
from fastweights.bench.gated import cases, memory
from fastweights.bench.gated.cases import FULL, QUICK, Case, Selection
from fastweights.bench.gated.compiled import forward
from fastweights.bench.gated.problem import Problem
from fastweights.bench.gated.rivals import rivals
from fastweights.bench.gated.run import COLUMNS, MEMORY_COLUMNS, run
from fastweights.bench.memory import available
from fastweights.errors import FastWeightsError
from fastweights.nn import GatedFastWeightsRNN

TINY = Selection(threads=(1, 2), steps=(4,), hidden_sizes=(6, 40), rounds=2, batch=5, compile=False)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def selected(monkeypatch, *words):
    """What the command line asks to be run, and where to."""
    given: list[Any] = []
    monkeypatch.setattr("fastweights.bench.gated.run.run", lambda *arguments: given.extend(arguments))
    assert cli.main(["bench", "gated", *words]) == 0
    return given


def test_every_layer_and_model_is_timed(tmp_path, capsys):
    before = torch.get_num_threads()
    run(TINY, tmp_path / "a.csv")
    assert torch.get_num_threads() == before
    rows = read(tmp_path / "a.csv")
    assert list(rows[0]) == COLUMNS
    layers = {(threads, size, rival) for threads in "12" for size in ("6", "40") for rival in memory.RIVALS}
    assert {(r["threads"], r["hidden_size"], r["rival"]) for r in rows if r["part"] == "layer"} == layers
    whole = {(threads, "40", rival) for threads in "12" for rival in cases.MODELS}
    assert {(r["threads"], r["hidden_size"], r["rival"]) for r in rows if r["part"] == "model"} == whole
    assert len(rows) == len(layers) + len(whole)
    assert {row["ratio_to_lstm"] for row in rows if row["rival"] == cases.LSTM} == {"1.0"}
    assert {(row["rounds"], row["batch"], row["precision"], row["skipped"]) for row in rows} == {
        ("2", "5", "float32", "")
    }
    sizes = {(r["units"], r["parameters"]) for r in rows if r["part"] == "layer" and r["hidden_size"] == "40"}
    assert sizes == {("40", "45394"), ("100", "46800")}
    printed = capsys.readouterr().out.splitlines()
    assert "compiled/ours" in printed[0]
    assert len(printed) == 1 + 4 + 1 + 8 + 1
    assert printed[8].split()[2:4] == ["HyperLSTM", "49,744"]
    assert printed[8].endswith(" 1.4")


def test_a_second_run_is_appended(tmp_path):
    once = replace(TINY, threads=(1,), hidden_sizes=(6,))
    run(once, tmp_path / "a.csv")
    run(replace(once, modes=("inference",)), tmp_path / "a.csv")
    assert [row["mode"] for row in read(tmp_path / "a.csv")] == ["training"] * 3 + ["inference"] * 3


@pytest.mark.parametrize("mode", cases.MODES)
def test_nothing_is_printed_or_written_while_parity_is_red(tmp_path, monkeypatch, capsys, mode):
    exact: Any = GatedFastWeightsRNN.forward

    def wrong(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" or x.shape[0] == 4 else y * 1.0001), state

    monkeypatch.setattr(GatedFastWeightsRNN, "forward", wrong)
    selection = Selection((1,), (4, 5), (6,), (mode,), rounds=1, batch=5, compile=False)
    # The first case is green: it is not timed before the second is looked at.
    with pytest.raises(FastWeightsError, match=f"nothing is timed: the outputs at T=5, H=6, {mode} differ"):
        run(selection, tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""


def test_other_columns_are_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.bench.gated.run.require_parity", lambda problem: pytest.fail("timed"))
    path = tmp_path / "a.csv"
    path.write_text("name,age\n")
    with pytest.raises(FastWeightsError, match="has other columns"):
        run(TINY, path)
    assert path.read_text() == "name,age\n"
    (tmp_path / "b_memory.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match=r"b_memory\.csv has other columns"):
        run(Selection(memory=True), tmp_path / "b.csv")


def test_memory_goes_to_a_file_beside_the_timings(tmp_path, monkeypatch, capsys):
    peaks = {cases.OURS: 3 * 2**20, cases.EAGER: "needs about 9 GiB", cases.LSTM: 2**19}
    monkeypatch.setattr(memory, "peak", lambda case, rival, threads: peaks[rival])
    selection = Selection((2, 1), (4,), (6,), cases.MODES, rounds=1, batch=5, compile=False, memory=True)
    run(selection, tmp_path / "a.csv")
    rows = read(tmp_path / "a_memory.csv")
    assert list(rows[0]) == MEMORY_COLUMNS
    assert [(row["rival"], row["mebibytes"], row["skipped"]) for row in rows] == [
        ("fastweights", "3.0", ""),
        ("eager", "", "needs about 9 GiB"),
        ("torch.nn.LSTM", "0.5", ""),
    ]
    assert {(row["threads"], row["mode"]) for row in rows} == {("1", "training")}
    assert "T=4, H=6, training: fastweights 3.0, eager needs about 9 GiB, torch.nn.LSTM 0.5" in capsys.readouterr().out


@pytest.mark.skipif(not available(), reason="this system does not tell its peak of memory")
def test_eager_keeps_the_matrices_of_every_step():
    case = Case(steps=16, hidden_size=24, batch=64)
    eager = memory.peak(case, cases.EAGER)
    assert isinstance(eager, int)
    assert cases.kept_bytes(cases.EAGER, case) <= eager < 2 * cases.kept_bytes(cases.EAGER, case)  # 24 MiB


def test_what_cannot_be_compiled_is_left_out_with_the_reason(monkeypatch):
    tried = []

    def alone(module, told, limit):
        tried.append((module, told["rival"], told["case"]["steps"], told["threads"], limit))
        raise AloneError("failed: no g++")

    monkeypatch.setattr("fastweights.bench.alone.alone", alone)
    calls, skipped = rivals(Problem(Case(3, 4, batch=2)), Selection(compile_limit=7))
    assert list(calls) == [cases.OURS, cases.EAGER, cases.LSTM]
    assert skipped == dict.fromkeys(cases.COMPILED, "compiling failed: no g++")
    module = "fastweights.bench.gated.compiled"
    assert tried == [(module, name, 3, torch.get_num_threads(), 7) for name in cases.COMPILED]


def test_all_rivals_that_compute_the_recurrence_agree():
    problem = Problem(Case(5, 6, batch=4))
    forwards = problem.forwards() | {cases.COMPILED_CELL: problem.loop(problem.cell)}
    del forwards[cases.LSTM]
    with torch.no_grad():
        ours, *others = [forward(problem.x) for forward in forwards.values()]
    assert len(others) == 2
    for other in others:  # as a whole: layer norm spreads what a single number of eager's is off too
        assert parity.distance(ours, other.double()) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("mode", cases.MODES)
def test_compiled_rivals_are_timed(mode):
    problem = Problem(Case(3, 6, mode, batch=4))
    calls, skipped = rivals(problem, Selection())
    assert skipped == {}
    assert list(calls) == [cases.OURS, cases.EAGER, cases.LSTM, *cases.COMPILED]
    for call in calls.values():
        call()
    with torch.no_grad():
        exact = problem.layer(problem.x)[0]
        for name in cases.COMPILED:
            assert parity.distance(forward(problem, name)(problem.x), exact.double()) < 1e-5


def test_options_choose_what_is_timed(monkeypatch):
    default, path = selected(monkeypatch)
    assert (default, os.fspath(path)) == (QUICK, "benchmarks/gated.csv")
    assert selected(monkeypatch, "--full")[0] == FULL
    words = "--threads 1 --rounds 7 --steps 5 9 --hidden-sizes 20 --batch 3 --mode training inference --no-compile"
    given, path = selected(monkeypatch, *words.split(), "--memory", "--output", "b.csv")
    assert given == Selection(
        (1,), (5, 9), (20,), ("training", "inference"), rounds=7, compile=False, memory=True, batch=3
    )
    assert os.fspath(path) == "b.csv"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision", "bfloat16"), "`bench gated` times float32 alone; leave out --precision"),
        (("--steps", "0"), "'0' is not a whole number from 1 to 100000"),
        (("--batch", "many"), "'many' is not a whole number from 1 to 100000"),
        (("--mode", "sleep"), "invalid choice: 'sleep'"),
        (("--output", "/"), "--output / is a folder; give the name of a CSV file in it"),
        (("--inner-sizes", "3"), "unknown argument --inner-sizes"),
    ],
)
def test_a_users_mistake_is_one_line(capsys, words, message):
    assert cli.main(["bench", "gated", *words]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err
