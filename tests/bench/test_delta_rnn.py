"""The bench of the layer whose hidden state writes by the delta rule: what it compares before it times, its tables."""

from typing import Any

import pytest
import torch
from torch import nn

from fastweights.bench import delta_rnn
from fastweights.bench.delta_rnn import (
    EAGER,
    LSTM,
    NO_CONVOLUTION,
    OURS,
    DeltaRnnCase,
    DeltaRnnProblem,
    require_parity,
)
from fastweights.bench.process import can_measure_peak, measure_peak
from fastweights.errors import FastWeightsError
from fastweights.nn import DeltaFastWeightsRNN
from tests.bench.helpers import Bend, make_row

SMALL = DeltaRnnCase(5, 12, batch=3, heads=3)


@pytest.mark.parametrize("heads", delta_rnn.HEADS)
def test_an_lstm_of_as_many_units_has_about_as_many_parameters(heads):
    for size in delta_rnn.FULL.hidden_sizes:
        case = DeltaRnnCase(hidden_size=size, heads=heads)
        layer = DeltaFastWeightsRNN(size, size, heads)
        assert case.parameters(OURS) == case.parameters(EAGER) == sum(each.numel() for each in layer.parameters())
        assert case.parameters(LSTM) == sum(each.numel() for each in nn.LSTM(size, size).parameters())
        assert case.parameters(LSTM) == pytest.approx(case.parameters(OURS), rel=0.07)
        assert case.parameters(NO_CONVOLUTION) == case.parameters(OURS) - 5 * (4 * size + 2 * heads)


def test_heads_divide_the_units():
    cases = delta_rnn.DeltaRnnSelection(hidden_sizes=(50, 64, 512)).cases()
    assert {(case.hidden_size, case.heads) for case in cases} == {
        (50, 1), (64, 1), (64, 4), (512, 1), (512, 4), (512, 16),
    }  # fmt: skip


@pytest.mark.parametrize("mode", delta_rnn.MODES)
@pytest.mark.parametrize("case", [SMALL, DeltaRnnCase(70, 6, batch=2)], ids=str)
def test_the_kernel_is_green(case, mode):
    batch, steps = (1, 1) if mode == delta_rnn.STEP else (case.batch, case.steps)
    require_parity(DeltaRnnCase(steps, case.hidden_size, mode, batch, case.heads))


def bend(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let a change into what the kernel makes of x, and not into what plain PyTorch does."""
    exact: Any = DeltaFastWeightsRNN.forward

    def forward(self, x, state=None, **options):
        if self.impl == "reference":
            return exact(self, x, state, **options)
        return change(lambda x: exact(self, x, state, **options), self, x)

    monkeypatch.setattr(DeltaFastWeightsRNN, "forward", forward)


@pytest.mark.parametrize("factor", [1.0001, torch.nan])
@pytest.mark.parametrize("field", ["hidden", "memory"])
def test_a_state_that_errs_is_not_timed(monkeypatch, field, factor):
    def wrong(run, layer, x):
        y, state = run(x)
        return y, state._replace(**{field: getattr(state, field) * factor})

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=f"nothing is timed: the last {field}.* at T=5, H=12, 3 heads, training"):
        require_parity(SMALL)


def test_a_layer_without_a_convolution_that_errs_is_not_timed(monkeypatch):
    def wrong(run, layer, x):
        y, state = run(x)
        return (y * 1.0001 if layer.convolution_weight is None else y), state

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match="nothing is timed: the outputs without a convolution at T=5, H=12"):
        require_parity(SMALL)


def test_gradients_that_err_are_not_timed(monkeypatch):
    bend(monkeypatch, lambda run, layer, x: run(Bend.apply(x)))
    with pytest.raises(FastWeightsError, match="nothing is timed: the gradients of x at T=5"):
        require_parity(SMALL)

    def wrong(run, layer, x):
        y, state = run(x)
        return y + (layer.bias - layer.bias.detach()).sum(), state

    monkeypatch.undo()
    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match="nothing is timed: the gradients of bias at T=5"):
        require_parity(SMALL)


def test_a_layer_that_ignores_its_state_is_not_timed(monkeypatch):
    exact: Any = DeltaFastWeightsRNN.forward
    monkeypatch.setattr(
        DeltaFastWeightsRNN,
        "forward",
        lambda self, x, state=None, **options: exact(self, x, state if self.impl == "reference" else None, **options),
    )
    with pytest.raises(FastWeightsError, match="nothing is timed: the outputs at T=1, H=12, 3 heads, step"):
        require_parity(DeltaRnnCase(1, 12, delta_rnn.STEP, 1, 3))


@pytest.mark.parametrize("rival", delta_rnn.RIVALS)
def test_a_stream_goes_on_from_the_step_before(rival):
    problem = DeltaRnnProblem(DeltaRnnCase(1, 8, delta_rnn.STEP, batch=1))
    given, returned = [], []
    problem.layers[rival].register_forward_pre_hook(lambda _, inputs: given.append(inputs[1]))
    problem.layers[rival].register_forward_hook(lambda _, inputs, outputs: returned.append(outputs[1]))
    problem.call(rival)()
    assert (len(given), given[0]) == (delta_rnn.STREAMED, None)
    assert all(before is after for before, after in zip(returned, given[1:], strict=False))


@pytest.mark.parametrize("rival", delta_rnn.RIVALS)
def test_a_pass_leaves_the_problem_as_it_was(rival):
    problem = DeltaRnnProblem(SMALL)
    x, grad = problem.x.clone(), problem.grad.clone()
    problem.call(rival)()
    assert torch.equal(problem.x, x)
    assert torch.equal(problem.grad, grad)
    assert all(each.grad is None for each in (problem.x, *problem.layers[rival].parameters()))


def test_plain_pytorch_is_left_out_where_it_takes_minutes_or_too_much_memory(monkeypatch):
    assert delta_rnn.explain_absence(DeltaRnnCase(), EAGER) is None
    assert delta_rnn.explain_absence(DeltaRnnCase(2000), EAGER) == "takes minutes at more than 256 steps"
    assert delta_rnn.explain_absence(DeltaRnnCase(2000), OURS) is None
    assert delta_rnn.count_kept_bytes(DeltaRnnCase(heads=4), EAGER) == 4 * 4 * 128 * 256 * 4 * 16**2
    monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda: 1000)
    calls, skipped = delta_rnn.rivals(SMALL, delta_rnn.QUICK)
    assert (set(calls), set(skipped)) == ({OURS, NO_CONVOLUTION, LSTM}, {EAGER})


@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell its peak of memory")
@pytest.mark.parametrize("heads", delta_rnn.HEADS)
def test_eager_keeps_the_memories_of_every_step(heads):
    case = DeltaRnnCase(32, 32 * heads, batch=32, heads=heads)
    eager = measure_peak(case, EAGER, 1)
    assert isinstance(eager, int)
    assert delta_rnn.count_kept_bytes(case, EAGER) / 2 < eager < 2 * delta_rnn.count_kept_bytes(case, EAGER)  # 16 MiB


def row(rival: str, value: float | None, **more: Any) -> dict[str, str]:
    sizes = {"batch": 128, "steps": 256, "input_size": 64, "hidden_size": 64, "heads": 1, "mode": "training"}
    how = {"parameters": 33_000, "tokens": 1, "kernel": "in use (x86-64-v4)"}
    return make_row([*delta_rnn.COLUMNS, "kernel"], rival, value, **sizes | how | more)


def test_times_are_a_table_with_both_sets_of_instructions():
    step = {"steps": 1, "mode": "step", "batch": 1, "tokens": 50}
    rows = [row(OURS, 9, commit="old"), row(OURS, 9), row(OURS, 150), row(LSTM, 60), row(EAGER, 1200)]
    rows += [row(NO_CONVOLUTION, 120)]
    rows += [row(OURS, 0.06, **step), row(LSTM, 0.06, **step)]
    rows += [row(OURS, 180, kernel="in use (x86-64-v3)"), row(LSTM, 90, kernel="in use (x86-64-v3)")]
    rows += [row(OURS, 5, steps=2000), row(EAGER, None, steps=2000, skipped="is slow")]
    text = delta_rnn.times_table(rows)
    assert "or of a streamed step of one. AVX-512: Abacus, PyTorch 2.13.0, commit abc" in text
    assert text.splitlines()[4:] == [
        "| training | 1 | 256 | 64 | 1 head | AVX-512 | 150.0 | 120.0 | 60.0 | 1,200 | 2.50 | 2.00 | 8.0 times |",
        "| training | 1 | 256 | 64 | 1 head | AVX2 | 180.0 | - | 90.0 | - | 2.00 | - | - |",
        "| training | 1 | 2000 | 64 | 1 head | AVX-512 | 5.0 | - | - | - | - | - | - |",
        "| step | 1 | 1 | 64 | 1 head | AVX-512 | 0.060 | - | 0.060 | - | 1.00 | - | - |",
        "",
        "Not measured: eager at T=2000, H=64, heads=1: is slow.",
    ]


def test_peaks_are_a_table():
    lines = delta_rnn.peaks_table([row(OURS, 40), row(LSTM, 60), row(EAGER, 4000)]).splitlines()
    assert lines[-1] == "| 256 | 64 | 1 head | 40 | - | 60 | 4,000 |"
