import shutil
from typing import Any

import pytest
import torch
from torch import nn

from fastweights.bench import gated
from fastweights.bench.gated import (
    COMPILED,
    EAGER,
    LSTM,
    MODELS,
    MODES,
    OURS,
    GatedCase,
    GatedProblem,
    GatedSelection,
    require_parity,
    rivals,
)
from fastweights.bench.parity import distance
from fastweights.bench.process import can_measure_peak, measure_peak
from fastweights.bench.published import Row
from fastweights.bench.run import explain_lack_of_memory
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN, GatedFastWeightsRNN, GatedFastWeightsState
from tests.bench.helpers import Bend, make_row

SMALL = GatedCase(4, 6, batch=5, input_size=3, inner_size=7)


@pytest.mark.parametrize("case", [GatedCase(), GatedCase(hidden_size=7, input_size=3, inner_size=11)])
def test_a_case_counts_the_parameters_and_the_state_of_our_layer(case):
    layer = GatedFastWeightsRNN(case.input_size, case.hidden_size, slow_inner_size=case.inner_size)
    assert case.parameters(OURS) == sum(parameter.numel() for parameter in layer.parameters())
    _, state = layer(torch.zeros(1, 1, case.input_size))
    assert case.state_shapes == [leaf.shape[1:] for leaf in state]
    assert case.matrix_numbers == state.fast_1.numel() + state.fast_2.numel()


def test_the_lstm_has_about_as_many_parameters():
    assert (GatedCase().units(OURS), GatedCase().parameters(OURS)) == (40, 45_394)
    assert (GatedCase().units(LSTM), GatedCase().parameters(LSTM)) == (100, 46_800)  # the paper's units
    for size in gated.FULL.hidden_sizes:
        case = GatedCase(hidden_size=size)
        lstm = sum(parameter.numel() for parameter in nn.LSTM(15, case.lstm_size).parameters())
        assert lstm == case.parameters(LSTM)
        assert lstm == pytest.approx(case.parameters(OURS), rel=0.1)
    assert GatedCase(hidden_size=1, inner_size=1).lstm_size == 10


def test_what_plain_pytorch_keeps():
    case = GatedCase()
    assert gated.count_kept_bytes(case, EAGER) == 4 * 4 * 256 * 32 * 40 * 97
    assert gated.count_kept_bytes(GatedCase(mode="inference"), EAGER) == gated.count_kept_bytes(case, EAGER) / 32
    assert gated.count_kept_bytes(case, OURS) == gated.count_kept_bytes(case, LSTM) == 0


def test_what_half_of_the_memory_cannot_hold_is_left_out(monkeypatch):
    monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda: 2**30)
    assert explain_lack_of_memory(gated.count_kept_bytes(GatedCase(), EAGER)) is None
    assert (
        explain_lack_of_memory(gated.count_kept_bytes(GatedCase(steps=128), EAGER))
        == "needs about 2 GiB, more than half of the machine's 1"
    )
    monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda: 1000)
    calls, skipped = rivals(GatedCase(3, 4, batch=2), GatedSelection())
    assert set(calls) == {OURS, gated.STARTS, LSTM}
    assert list(skipped) == [EAGER, *COMPILED]


def test_which_cases_are_compiled():
    assert gated.QUICK.compiles(GatedCase()) == list(COMPILED)
    assert gated.QUICK.compiles(GatedCase(33)) == [gated.COMPILED_CELL]  # the loop would be unrolled
    assert GatedSelection(compile=False).compiles(GatedCase()) == []


def whole(selection):
    return [(case.steps, case.mode) for case in selection.cases() if case.part == "model"]


def test_whole_models_are_of_the_papers_sizes():
    assert gated.QUICK.cases() == [GatedCase(), GatedCase(part="model")]
    assert whole(gated.FULL) == [(32, "training"), (128, "training")]
    assert whole(GatedSelection(hidden_sizes=(20,))) == whole(GatedSelection(modes=("inference",))) == []


def test_which_peaks_are_measured():
    for selection in (gated.QUICK, gated.FULL, GatedSelection(batch=3)):
        assert [(case.steps, case.hidden_size) for case in selection.memory_cases()] == list(gated.GROWTH)
    asked = GatedSelection(steps=(5, 6), hidden_sizes=(7,), batch=3, modes=("inference",))
    assert asked.memory_cases() == [GatedCase(5, 7, batch=3), GatedCase(6, 7, batch=3)]


@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell its peak of memory")
def test_eager_keeps_the_matrices_of_every_step():
    case = GatedCase(steps=16, hidden_size=24, batch=64)
    eager = measure_peak(case, EAGER, 1)
    assert isinstance(eager, int)
    assert gated.count_kept_bytes(case, EAGER) <= eager < 2 * gated.count_kept_bytes(case, EAGER)  # 24 MiB


def test_the_models_are_about_as_large_as_one_another():
    models = gated.make_models()
    assert sorted(models) == sorted(MODELS) == sorted(gated.PAPER_MINUTES)
    assert models[OURS].size == 46_234  # the paper's
    assert all(45_000 < model.size < 51_000 for model in models.values())
    case = GatedCase(part="model")
    assert {name: (case.units(name), case.parameters(name)) for name in MODELS} == {
        name: (model.units, model.size) for name, model in models.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_step_trains_and_carries_the_state_on(name):
    model = gated.make_models()[name]
    states = []
    model.register_forward_pre_hook(lambda _, arguments: states.append(arguments[1]))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = gated.make_training_step(model, GatedCase(4, batch=3))
    for _ in range(3):
        step()
    assert states[0] is None
    leaves = [states[2].hidden, states[2].memory] if name == gated.ATTENTION else list(states[2])
    assert not any(leaf.requires_grad for leaf in leaves)
    assert any(leaf.abs().sum() > 0 for leaf in leaves)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)


def test_all_rivals_that_compute_the_recurrence_agree():
    problem = GatedProblem(GatedCase(5, 6, batch=4))
    forwards = problem.forwards() | {gated.COMPILED_CELL: problem.loop(problem.cell)}
    del forwards[LSTM], forwards[gated.STARTS]
    with torch.no_grad():
        ours, *others = [forward(problem.x) for forward in forwards.values()]
    assert len(others) == 2
    for other in others:  # as a whole: layer norm spreads what a single number of eager's is off too
        assert distance(ours, other.double()) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_rivals_are_timed():
    case = GatedCase(3, 6, "inference", batch=4)
    calls, skipped = rivals(case, GatedSelection())
    assert skipped == {}
    assert list(calls) == [OURS, gated.STARTS, EAGER, LSTM, *COMPILED]
    for call in calls.values():
        call()
    problem = GatedProblem(case)
    with torch.no_grad():
        exact = problem.layer(problem.x)[0]
        for name in COMPILED:
            assert distance(problem.compiled(name)(problem.x), exact.double()) < 1e-5


def bend(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Lets a change at the outputs, the state and the layer's inputs into the kernel's results, not the reference's."""
    exact: Any = GatedFastWeightsRNN.forward

    def forward(self, x, state=None, **options):
        if self.impl == "reference":
            return exact(self, x, state, **options)
        return change(lambda *arguments: exact(self, *arguments, **options), self, x, state)

    monkeypatch.setattr(GatedFastWeightsRNN, "forward", forward)


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_is_green(mode):
    require_parity(GatedCase(4, 6, mode, batch=5, input_size=3, inner_size=7))


def test_some_examples_speak_for_all_where_the_reference_does_not_fit(monkeypatch):
    monkeypatch.setattr("fastweights.bench.parity.MOST_BYTES", 1)
    require_parity(SMALL)

    def wrong(run, layer, x, state):
        y, after = run(x, state)
        return y * torch.tensor([1, 1, 1, 1, 1.0001]).view(1, 5, 1), after

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match="red, so nothing is timed: the outputs at T=4, H=6, training differ"):
        require_parity(SMALL)


@pytest.mark.parametrize("error", [1.0001, float("nan")])
@pytest.mark.parametrize("field", GatedFastWeightsState._fields)
def test_the_state_at_the_end_has_to_be_right(monkeypatch, field, error):
    def wrong(run, layer, x, state):
        y, after = run(x, state)
        return y, after._replace(**{field: getattr(after, field) * error})

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=f"the last {field} at T=4"):
        require_parity(SMALL)


@pytest.mark.parametrize("name", ["x", *(f"the initial {field}" for field in GatedFastWeightsState._fields)])
def test_the_gradient_of_every_input_has_to_be_right(monkeypatch, name):
    def wrong(run, layer, x, state):
        if name == "x":
            return run(Bend.apply(x), state)
        field = name.rpartition(" ")[2]
        return run(x, state._replace(**{field: Bend.apply(getattr(state, field))}))

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=f"the gradient of {name} at T=4"):
        require_parity(SMALL)


def test_the_gradient_of_every_parameter_has_to_be_right(monkeypatch):
    def wrong(run, layer, x, state):
        y, after = run(x, state)
        weight = layer.slow_out.weight
        return y + (weight - weight.detach()).sum(), after

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=r"the gradient of slow_out\.weight at T=4"):
        require_parity(SMALL)


def test_the_other_kernel_of_table_2_has_to_be_right_too(monkeypatch):
    case = GatedCase(2, batch=3, part="model")
    require_parity(case)
    exact: Any = FastWeightsRNN.forward

    def wrong(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else y * 1.0001), state

    monkeypatch.setattr(FastWeightsRNN, "forward", wrong)
    with pytest.raises(FastWeightsError, match="the outputs at T=2, H=207"):
        require_parity(case)


def test_the_luck_of_one_rounding_is_not_red_but_that_of_most_is(monkeypatch, caplog):
    caplog.set_level("INFO")
    exact: Any = gated._measure_errors

    def lucky(problem, draw):
        errors = exact(problem, draw)
        return errors | {"the gradient of x": (4e-5, 1e-5 if draw in unlucky else 4e-5)}

    monkeypatch.setattr(gated, "_measure_errors", lucky)
    unlucky = [0, 3]
    require_parity(SMALL)
    assert caplog.messages == [
        "parity: T=4, H=6, training: red for one x, green by the medians over 5 that differ by rounding"
    ]
    unlucky = [0, 1, 3]
    with pytest.raises(
        FastWeightsError, match=r"the gradient of x at T=4, H=6, .* by 4\.0e-05, eager float32 by 1\.0e-05"
    ):
        require_parity(SMALL)


def row(rival: str, value: float | None, **more: Any) -> Row:
    sizes = {"batch": 256, "steps": 32, "input_size": 15, "hidden_size": 40, "units": 100 if rival == LSTM else 40}
    how = {"precision": "float32", "mode": "training", "part": "layer", "parameters": 45_000}
    return make_row(gated.COLUMNS, rival, value, **sizes | how | more)


def test_layers_are_a_table():
    rows = [row(OURS, 9, commit="old"), row(OURS, 2), row(LSTM, 4), row(EAGER, 10)]
    rows += [row(gated.COMPILED_LOOP, 5), row(gated.COMPILED_CELL, None, skipped="compiling failed: no g++")]
    rows += [row(name, 1, threads=2) for name in (OURS, LSTM)]
    rows += [row(name, 1, mode="inference") for name in (LSTM, OURS)]
    rows += [row(OURS, 1, part="model", commit="later")]  # of another part: it empties nothing
    text = gated.layers_table(rows)
    assert "256 sequences of 15 features; Abacus" in text
    assert "Units of the LSTM: 100 for H = 40.\n" in text
    assert text.splitlines()[5:8] == [
        "| training | 1 | 32 | 40 | 2.00 | 4.00 | 10.00 | 5.00 | 0.50 | 5.0 times | 2.5 times |",
        "| training | 2 | 32 | 40 | 1.00 | 1.00 | - | - | 1.00 | - | - |",
        "| inference | 1 | 32 | 40 | 1.00 | 1.00 | - | - | 1.00 | - | - |",
    ]
    assert "Not measured: compiled cell at T=32, H=40: compiling failed: no g++." in text


def test_models_are_ratios_beside_the_papers():
    rows = [
        row(name, value * threads, part="model", threads=threads)
        for threads in (2, 1)
        for name, value in zip(MODELS, (40, 20, 30, 10), strict=True)
    ]
    lines = gated.models_table(rows).splitlines()
    assert "T = 32, 1 thread: ms" in lines[2]
    assert lines[4:] == [
        "| AttentionFW | 40 | 45,000 | 22 | 1.6 | 40.00 | 2.00 | 80.00 | 2.00 |",
        "| torch.nn.LSTM | 100 | 45,000 | 14 | 1.0 | 20.00 | 1.00 | 40.00 | 1.00 |",
        "| HyperLSTM | 40 | 45,000 | 20 | 1.4 | 30.00 | 1.50 | 60.00 | 1.50 |",
        "| fastweights | 40 | 45,000 | 25 | 1.8 | 10.00 | 0.50 | 20.00 | 0.50 |",
    ]


def test_memory_is_a_table_with_the_matrices_in_flight():
    rows = [row(OURS, 57.6), row(LSTM, 40), row(EAGER, 576)]
    rows += [row(OURS, 20, hidden_size=20), row(EAGER, None, hidden_size=20, skipped="too large")]
    lines = gated.peaks_table(rows).splitlines()
    assert lines[4:6] == [
        "| 32 | 20 | 20.0 | 2.2 | 17.8 | - | - | - |",
        "| 32 | 40 | 57.6 | 7.6 | 50.0 | 576.0 | 40.0 | 0.100 |",  # 2 * 256 * 40 * 97 numbers of four bytes
    ]
    assert lines[-1] == "Not measured: eager at T=32, H=20: too large."
