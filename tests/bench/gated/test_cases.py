import pytest
import torch
from torch import nn

from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import FULL, GROWTH, QUICK, Case, Selection
from fastweights.bench.gated.problem import Problem
from fastweights.bench.gated.rivals import rivals
from fastweights.nn import GatedFastWeightsRNN


@pytest.mark.parametrize("case", [Case(), Case(hidden_size=7, input_size=3, inner_size=11)])
def test_a_case_counts_the_parameters_and_the_fast_matrices_of_our_layer(case):
    layer = GatedFastWeightsRNN(case.input_size, case.hidden_size, slow_inner_size=case.inner_size)
    assert case.parameters == sum(parameter.numel() for parameter in layer.parameters())
    _, state = layer(torch.zeros(1, 1, case.input_size))
    assert case.matrix_numbers == state.fast_1.numel() + state.fast_2.numel()


def test_the_lstm_has_about_as_many_parameters():
    assert Case().lstm_size == 100  # the paper's
    for size in FULL.hidden_sizes:
        case = Case(hidden_size=size)
        lstm = sum(parameter.numel() for parameter in nn.LSTM(15, case.lstm_size).parameters())
        assert lstm == pytest.approx(case.parameters, rel=0.1)
    assert Case(hidden_size=1, inner_size=1).lstm_size == 10


def test_what_plain_pytorch_keeps():
    case = Case()
    assert cases.kept_bytes(cases.EAGER, case) == 4 * 4 * 256 * 32 * 40 * 97
    assert cases.kept_bytes(cases.EAGER, Case(mode="inference")) == cases.kept_bytes(cases.EAGER, case) / 32
    assert cases.kept_bytes(cases.OURS, case) == cases.kept_bytes(cases.LSTM, case) == 0


def test_what_half_of_the_memory_cannot_hold_is_left_out(monkeypatch):
    monkeypatch.setattr("fastweights.bench.machine.machine_memory", lambda: 2**30)
    assert cases.too_large(cases.EAGER, Case()) is None
    reason = "needs about 2 GiB, more than half of the machine's 1"
    assert cases.too_large(cases.EAGER, Case(steps=128)) == reason
    monkeypatch.setattr("fastweights.bench.machine.machine_memory", lambda: 1000)
    calls, skipped = rivals(Problem(Case(3, 4, batch=2)), Selection())
    assert set(calls) == {cases.OURS, cases.LSTM}
    assert set(skipped) == {cases.EAGER, *cases.COMPILED}


def test_which_cases_are_compiled():
    assert QUICK.compiles(Case()) == list(cases.COMPILED)
    assert QUICK.compiles(Case(33)) == [cases.COMPILED_CELL]  # the loop would be unrolled
    assert Selection(compile=False).compiles(Case()) == []


def test_whole_models_are_of_the_papers_sizes():
    assert QUICK.models() == [Case()]
    assert [(case.steps, case.mode) for case in FULL.models()] == [(32, "training"), (128, "training")]
    assert Selection(hidden_sizes=(20,)).models() == Selection(modes=("inference",)).models() == []


def test_which_peaks_are_measured():
    for told in (QUICK, FULL, Selection(batch=3)):
        assert [(case.steps, case.hidden_size) for case in told.memory_cases()] == list(GROWTH)
    asked = Selection(steps=(5, 6), hidden_sizes=(7,), batch=3, modes=("inference",))
    assert asked.memory_cases() == [Case(5, 7, batch=3), Case(6, 7, batch=3)]
