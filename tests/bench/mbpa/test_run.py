import csv
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastweights import cli
from fastweights.bench.mbpa import cases
from fastweights.bench.mbpa.cases import FULL, OUTPUTS, QUICK, Case, Selection
from fastweights.bench.mbpa.parity import require_parity
from fastweights.bench.mbpa.problem import Problem
from fastweights.bench.mbpa.run import COLUMNS, run
from fastweights.errors import FastWeightsError
from fastweights.memory import MbPA

SIZES: dict[str, Any] = {"classes": 20, "key_size": 6, "neighbours": 5, "entries": 30, "batch": 8}


@dataclass(frozen=True)
class Tiny(Selection):
    rounds: int = 2

    def cases(self):
        return [Case(1, **SIZES), Case(3, "mlp", "rmsprop", **SIZES)]


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_rivals_are_green(output, optimizer, steps):
    require_parity(Problem(Case(steps, output, optimizer, **SIZES)))


@pytest.mark.parametrize("error", [1.00001, float("nan")])
def test_wrong_outputs_are_red(monkeypatch, error):
    exact = MbPA.__call__
    monkeypatch.setattr(MbPA, "__call__", lambda self, x: exact(self, x) * error)
    with pytest.raises(FastWeightsError, match="red, so nothing is timed: fastweights at linear under sgd, T=1, V=20"):
        require_parity(Problem(Case(1, **SIZES)))


def test_every_rival_is_timed(tmp_path, capsys):
    before = torch.get_num_threads()
    run(Tiny(), tmp_path / "a.csv")
    run(Tiny(threads=(1,)), tmp_path / "a.csv")  # is appended
    assert torch.get_num_threads() == before
    rows = read(tmp_path / "a.csv")
    assert list(rows[0]) == COLUMNS
    rivals = [("linear", rival) for rival in cases.RIVALS]
    rivals += [("mlp", rival) for rival in cases.RIVALS if rival != cases.ANEW]
    expected = [(*one, threads) for threads in "12" for one in rivals[:4]]
    expected += [(*one, threads) for threads in "12" for one in rivals[4:]]
    found = [(row["output"], row["rival"], row["threads"]) for row in rows]
    assert found == expected + [(*one, "1") for one in rivals]
    assert {row["ratio_to_loop"] for row in rows if row["rival"] == cases.LOOP} == {"1.0"}
    assert {(row["rounds"], row["queries"], row["skipped"]) for row in rows} == {("2", "8", "")}
    printed = capsys.readouterr().out.splitlines()
    assert "loop/ours" in printed[0]
    assert len(printed) == (1 + 4 + 1) + (1 + 2 + 1)


def test_times_are_of_one_query():
    case = Case(1)
    assert {rival: case.queries(rival) for rival in case.rivals} == dict(
        zip(cases.RIVALS, (256, 16, 2, 2), strict=True)
    )
    small = Case(5, "mlp", "sgd", **cases.SMALL)
    assert [small.queries(rival) for rival in small.rivals] == [256, 16, 64]


def test_nothing_is_printed_or_written_while_parity_is_red(tmp_path, monkeypatch, capsys):
    exact = MbPA.__call__
    monkeypatch.setattr(MbPA, "__call__", lambda self, x: exact(self, x) * (1 + 1e-3 * (self.steps == 3)))
    # The first case is green: it is not timed before the second is looked at.
    with pytest.raises(FastWeightsError, match="fastweights at mlp under rmsprop, T=3, V=20, d=6 differs"):
        run(Tiny(), tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""


def test_other_columns_are_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.bench.mbpa.run.require_parity", lambda problem: pytest.fail("looked at"))
    (tmp_path / "a.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match="has other columns"):
        run(Tiny(), tmp_path / "a.csv")


def test_options_choose_what_is_timed(monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr("fastweights.bench.mbpa.run.run", lambda *told: given.append(told))
    for words in ("", "--full", "--threads 1 --steps 2 7 --rounds 4 --output b.csv"):
        assert cli.main(["bench", "mbpa", *words.split()]) == 0
    assert [one for one, _ in given] == [QUICK, FULL, Selection((1,), (2, 7), 4)]
    assert [os.fspath(path) for _, path in given] == ["benchmarks/mbpa.csv"] * 2 + ["b.csv"]
    assert [(case.steps, case.batch) for case in QUICK.cases()] == [
        (1, 256),
        (1, 1),
        (5, 256),
        *[(1, 256), (5, 256)] * 3,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mode", "inference"), "`bench mbpa` has a single mode; leave out --mode"),
        (("--classes", "3"), "`bench mbpa` has no choice of classes; leave out --classes"),
        (("--hidden-sizes", "3"), "`bench mbpa` has no choice of sizes; leave out --hidden-sizes"),
        (("--batch", "3"), "`bench mbpa` has no batch; leave out --batch"),
        (("--memory",), "`bench mbpa` measures no memory; leave out --memory"),
    ],
)
def test_a_users_mistake_is_one_line(capsys, words, message):
    assert cli.main(["bench", "mbpa", *words]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert message in told.err
