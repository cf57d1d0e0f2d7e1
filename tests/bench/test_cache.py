from typing import Any

import pytest
import torch

from fastweights.bench.cache import (
    COLUMNS,
    FULL,
    LOOP,
    OURS,
    POSITIONS,
    SHARE,
    THETA,
    Case,
    Loop,
    Ours,
    Problem,
    require_parity,
    times_table,
)
from fastweights.bench.published import Row
from fastweights.errors import FastWeightsError
from fastweights.memory import NeuralCache
from tests.bench.rows import make_row

SMALL = Case(30, classes=50, hidden_size=8)


def test_both_score_by_the_equation():
    problem = Problem(SMALL)
    count = POSITIONS[LOOP]
    expected = []
    for t in range(30, 30 + count):
        weights = (THETA * (problem.h[t - 30 : t].double() @ problem.h[t].double())).exp()
        cached = float(weights[problem.targets[t - 30 : t] == problem.targets[t]].sum() / weights.sum())
        model = float(problem.logits[t - 30].double().softmax(0)[problem.targets[t]])
        expected.append(-torch.tensor((1 - SHARE) * model + SHARE * cached).log())
    for losses in (Ours(problem), Loop(problem)):
        torch.testing.assert_close(losses(count), torch.stack(expected), rtol=1e-5, atol=1e-5)
    require_parity(SMALL)


def test_every_call_scores_with_a_full_cache():
    ours = Ours(Problem(SMALL))
    assert len(ours().isfinite()) == POSITIONS[OURS]
    assert len(ours.cache) == 30
    assert ours().shape == (POSITIONS[OURS],)


@pytest.mark.parametrize("error", [1.0001, float("nan")])
def test_a_wrong_loss_is_red(monkeypatch, error):
    exact = NeuralCache.log_prob
    monkeypatch.setattr(NeuralCache, "log_prob", lambda self, *arguments: exact(self, *arguments) * error)
    with pytest.raises(FastWeightsError, match="nothing is timed: the loss at window=30, V=50, d=8 differs from the"):
        require_parity(SMALL)


def test_a_time_is_of_one_position():
    assert {rival: SMALL.positions(rival) for rival in POSITIONS} == POSITIONS
    assert [case.window for case in FULL.cases()] == [500, 2000, 8000]


def row(rival: str, value: float, **more: Any) -> Row:
    sizes = {"window": 2000, "classes": 10_000, "hidden_size": 400}
    return make_row(COLUMNS, rival, value, **sizes | more)


def test_positions_are_a_table():
    rows = [row(OURS, 9, commit="old")]
    rows += [row(OURS, 0.02345, threads=2), row(LOOP, 40, threads=2)]
    rows += [row(OURS, 0.05), row(LOOP, 50)]
    text = times_table(rows)
    assert "float32; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:] == [
        "| 1 | 2000 | 10000 | 400 | 0.0500 | 50.0 | 1,000 |",
        "| 2 | 2000 | 10000 | 400 | 0.0234 | 40.0 | 1,706 |",
    ]
