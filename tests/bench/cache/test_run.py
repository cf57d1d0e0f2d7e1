import csv
import os
from typing import Any

import pytest
import torch

from fastweights import cli
from fastweights.bench.cache import cases
from fastweights.bench.cache.cases import FULL, POSITIONS, QUICK, RIVALS, Case, Selection
from fastweights.bench.cache.parity import require_parity
from fastweights.bench.cache.problem import SHARE, THETA, Problem
from fastweights.bench.cache.run import COLUMNS, run
from fastweights.errors import FastWeightsError
from fastweights.memory import NeuralCache

SMALL = Case(30, classes=50, hidden_size=8)


class Tiny(Selection):
    def cases(self):
        return [SMALL, Case(20, classes=50, hidden_size=8)]


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_both_score_by_the_equation():
    problem = Problem(SMALL)
    count = POSITIONS[cases.LOOP]
    expected = []
    for t in range(30, 30 + count):
        weights = (THETA * (problem.h[t - 30 : t].double() @ problem.h[t].double())).exp()
        cached = float(weights[problem.targets[t - 30 : t] == problem.targets[t]].sum() / weights.sum())
        model = float(problem.logits[t - 30].double().softmax(0)[problem.targets[t]])
        expected.append(-torch.tensor((1 - SHARE) * model + SHARE * cached).log())
    for losses in (problem.ours(), problem.loop()):
        torch.testing.assert_close(losses(count), torch.stack(expected), rtol=1e-5, atol=1e-5)
    require_parity(problem)


def test_every_call_scores_with_a_full_cache():
    ours = Problem(SMALL).ours()
    assert len(ours().isfinite()) == POSITIONS[cases.OURS]
    assert len(ours.cache) == 30
    assert ours().shape == (POSITIONS[cases.OURS],)


@pytest.mark.parametrize("error", [1.0001, float("nan")])
def test_a_wrong_loss_is_red(monkeypatch, error):
    exact = NeuralCache.log_prob
    monkeypatch.setattr(NeuralCache, "log_prob", lambda self, *told: exact(self, *told) * error)
    with pytest.raises(FastWeightsError, match="nothing is timed: the loss at window=30, V=50, d=8 differs from the"):
        require_parity(Problem(SMALL))


def test_both_are_timed(tmp_path, capsys):
    before = torch.get_num_threads()
    run(Tiny(rounds=2), tmp_path / "a.csv")
    run(Tiny(threads=(1,), rounds=2), tmp_path / "a.csv")  # is appended
    assert torch.get_num_threads() == before
    rows = read(tmp_path / "a.csv")
    assert list(rows[0]) == COLUMNS
    cells = [(window, threads, rival) for window in ("30", "20") for threads in "12" for rival in RIVALS]
    cells += [(window, "1", rival) for window in ("30", "20") for rival in RIVALS]
    assert [(row["window"], row["threads"], row["rival"]) for row in rows] == cells
    assert {row["ratio_to_loop"] for row in rows if row["rival"] == cases.LOOP} == {"1.0"}
    assert {(row["rival"], row["positions"]) for row in rows} == {(rival, str(n)) for rival, n in POSITIONS.items()}
    printed = capsys.readouterr().out.splitlines()
    assert "loop/ours" in printed[0]
    assert len(printed) == (1 + 4 + 1) + (1 + 2 + 1)


def test_nothing_is_printed_or_written_while_parity_is_red(tmp_path, monkeypatch, capsys):
    exact = NeuralCache.log_prob
    monkeypatch.setattr(NeuralCache, "log_prob", lambda self, *told: exact(self, *told) * (1 + (self.capacity == 20)))
    # The first case is green: it is not timed before the second is looked at.
    with pytest.raises(FastWeightsError, match="the loss at window=20"):
        run(Tiny(rounds=2), tmp_path / "a.csv")
    assert not (tmp_path / "a.csv").exists()
    assert capsys.readouterr().out == ""


def test_other_columns_are_refused_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.bench.cache.run.require_parity", lambda problem: pytest.fail("looked at"))
    (tmp_path / "a.csv").write_text("name,age\n")
    with pytest.raises(FastWeightsError, match="has other columns"):
        run(Tiny(), tmp_path / "a.csv")


def test_options_choose_what_is_timed(monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr("fastweights.bench.cache.run.run", lambda *told: given.append(told))
    for words in ("", "--full", "--threads 1 --rounds 4 --output b.csv"):
        assert cli.main(["bench", "cache", *words.split()]) == 0
    assert [one for one, _ in given] == [QUICK, FULL, Selection((1,), rounds=4)]
    assert [os.fspath(path) for _, path in given] == ["benchmarks/cache.csv"] * 2 + ["b.csv"]
    assert [case.window for case in FULL.cases()] == [500, 2000, 8000]


def test_a_users_mistake_is_one_line(capsys):
    assert cli.main(["bench", "cache", "--steps", "3"]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert "`bench cache` has no steps; leave out --steps" in told.err
