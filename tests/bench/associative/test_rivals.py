import shutil

import pytest
import torch

from fastweights.bench.alone import AloneError
from fastweights.bench.associative import cases, rivals
from fastweights.bench.associative.cases import FULL, Case, Selection
from fastweights.bench.associative.compiled import compiled, forward
from fastweights.bench.associative.parity import examples
from fastweights.bench.associative.problem import Problem
from fastweights.bench.machine import machine_memory

GIB = 2**30


def test_what_the_eager_forms_keep():
    case = Case(steps=2000, hidden_size=100)
    assert cases.kept_bytes(cases.MATRIX, case) == 4 * 2000 * 128 * 100**2
    assert cases.kept_bytes(cases.ATTENTION, case) == 4 * 128 * (2000 * 2001 // 2) * 100
    inference = Case(steps=2000, hidden_size=100, mode="inference")
    for name in cases.EAGER:
        assert cases.kept_bytes(name, inference) < cases.kept_bytes(name, case) / 100
    assert cases.kept_bytes(cases.OURS, case) == cases.kept_bytes(cases.LSTM, case) == 0


def test_what_half_of_the_memory_cannot_hold_is_left_out():
    case = Case(steps=2000, hidden_size=100)  # the matrix form keeps 9.5 GiB
    assert cases.too_large(cases.MATRIX, case, memory=20 * GIB) is None
    reason = cases.too_large(cases.MATRIX, case, memory=18 * GIB)
    assert reason == "needs about 10 GiB, more than half of the machine's 18"
    assert cases.too_large(cases.OURS, case, memory=1) is None
    assert machine_memory() > GIB / 4


def test_an_eager_form_that_would_be_slow_is_left_out(monkeypatch):
    ran = []
    real = Problem.timed

    def timed(self, forward, steps=None):
        ran.append(steps)
        return real(self, forward, steps)

    monkeypatch.setattr(Problem, "timed", timed)
    problem = Problem(Case(120, 3, batch=2, input_size=2))
    monkeypatch.setattr(rivals, "MOST_SECONDS", 0.0)
    calls, skipped = rivals.rivals(problem, Selection())
    assert set(calls) == {cases.OURS, cases.LSTM}
    assert set(skipped) == set(cases.EAGER)
    assert skipped[cases.MATRIX].startswith("would take about ")
    assert ran.count(30) == 2  # a quarter of the steps told
    short, _ = rivals.rivals(Problem(Case(8, 3, batch=2, input_size=2)), Selection())
    assert set(cases.EAGER) <= set(short)  # too short to be worth foretelling
    monkeypatch.setattr(rivals, "MOST_SECONDS", 1e9)
    assert rivals.too_slow(cases.ATTENTION, problem) is None


def test_which_cases_are_compiled():
    assert not Selection().compiles(Case(11, 50))
    assert Selection(compile=True).compiles(Case(24, 50, "bfloat16"))
    assert not Selection(compile=True).compiles(Case(25, 50))
    assert {case.precision for case in FULL.cases() if FULL.compiles(case)} == {"float32"}
    assert {case.steps for case in FULL.cases() if FULL.compiles(case)} == {11, 19, 24}
    assert len(FULL.cases()) == 5 * 4 * 2 * 2


def test_what_cannot_be_compiled_is_left_out_with_the_reason(monkeypatch):
    tried = []

    def alone(module, told, limit):
        tried.append((told["rival"], told["case"]["steps"], told["threads"], limit))
        raise AloneError("failed: no g++")

    monkeypatch.setattr("fastweights.bench.alone.alone", alone)
    problem = Problem(Case(3, 4, batch=2, input_size=2))
    calls, skipped = rivals.rivals(problem, Selection(compile=True, compile_limit=7))
    assert list(calls) == [cases.OURS, *cases.EAGER, cases.LSTM]
    assert skipped == dict.fromkeys(cases.COMPILED, "compiling failed: no g++")
    assert tried == [(name, 3, torch.get_num_threads(), 7) for name in cases.COMPILED]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("mode", cases.MODES)
def test_compiled_rivals_are_timed(mode):
    problem = Problem(Case(3, 6, mode=mode, batch=4, input_size=5))
    calls, skipped = rivals.rivals(problem, Selection(compile=True))
    assert skipped == {}
    assert list(calls) == [cases.OURS, *cases.EAGER, cases.LSTM, *cases.COMPILED]
    for call in calls.values():
        call()
    with torch.no_grad():
        exact = problem.layer(problem.x)[0]
        for name in cases.COMPILED:
            torch.testing.assert_close(forward(problem, name)(problem.x), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_compilation_that_takes_too_long_is_left_out():
    problem = Problem(Case(3, 6, batch=4, input_size=5))
    found, skipped = compiled(problem, limit=0.5)
    assert (found, skipped) == ({}, dict.fromkeys(cases.COMPILED, "compiling took more than 0.5 s"))


def test_parity_of_long_sequences_is_of_examples_spread_over_the_batch():
    def of(steps, size):
        problem = Problem.__new__(Problem)  # without the gigabytes
        problem.case = Case(steps, size)
        return examples(problem).tolist()

    assert of(19, 100) == list(range(128))
    few = of(2000, 100)
    assert 2 <= len(few) < 10
    assert (few[0], few[-1]) == (0, 127)
    assert of(100_000, 200) == [0, 127]
