from typing import Any

import torch

from fastweights.bench import cache
from fastweights.bench.cache import LOOP, OURS, POSITIONS, CacheCase, CacheProblem, require_parity
from fastweights.bench.published import Row
from tests.bench.helpers import make_row

SMALL = CacheCase(30, classes=50, hidden_size=8)


def test_both_score_by_the_equation():
    problem = CacheProblem(SMALL)
    count = POSITIONS[LOOP]
    expected = []
    for t in range(30, 30 + count):
        weights = (cache.THETA * (problem.h[t - 30 : t].double() @ problem.h[t].double())).exp()
        cached = float(weights[problem.targets[t - 30 : t] == problem.targets[t]].sum() / weights.sum())
        model = float(problem.logits[t - 30].double().softmax(0)[problem.targets[t]])
        expected.append(-torch.tensor((1 - cache.SHARE) * model + cache.SHARE * cached).log())
    for losses in (cache.Ours(problem), cache.Loop(problem)):
        torch.testing.assert_close(losses(count), torch.stack(expected), rtol=1e-5, atol=1e-5)
    require_parity(SMALL)


def test_every_call_scores_with_a_full_cache():
    ours = cache.Ours(CacheProblem(SMALL))
    assert len(ours().isfinite()) == POSITIONS[OURS]
    assert len(ours.cache) == 30
    assert ours().shape == (POSITIONS[OURS],)


def test_a_time_is_of_one_position():
    assert {rival: SMALL.positions(rival) for rival in POSITIONS} == POSITIONS
    assert [case.window for case in cache.FULL.cases()] == [500, 2000, 8000]


def row(rival: str, value: float, **more: Any) -> Row:
    sizes = {"window": 2000, "classes": 10_000, "hidden_size": 400}
    return make_row(cache.COLUMNS, rival, value, **sizes | more)


def test_positions_are_a_table():
    rows = [row(OURS, 9, commit="old")]
    rows += [row(OURS, 0.02345, threads=2), row(LOOP, 40, threads=2)]
    rows += [row(OURS, 0.05), row(LOOP, 50)]
    text = cache.times_table(rows)
    assert "float32; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:] == [
        "| 1 | 2000 | 10000 | 400 | 0.0500 | 50.0 | 1,000 |",
        "| 2 | 2000 | 10000 | 400 | 0.0234 | 40.0 | 1,706 |",
    ]
