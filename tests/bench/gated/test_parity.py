from typing import Any

import pytest
import torch

from fastweights.bench import parity as rule
from fastweights.bench.gated import parity
from fastweights.bench.gated.cases import MODES, Case
from fastweights.bench.gated.parity import require_parity, require_parity_of_models
from fastweights.bench.gated.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN, GatedFastWeightsRNN, GatedFastWeightsState

SMALL = Case(4, 6, batch=5, input_size=3, inner_size=7)


class Bend(torch.autograd.Function):
    """Its argument, and a gradient that is off."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 1.0001


def bend(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Lets a change at the outputs, the state and the layer's inputs into the kernel's results, not the reference's."""
    exact: Any = GatedFastWeightsRNN.forward

    def forward(self, x, state=None, **options):
        if self.impl == "reference":
            return exact(self, x, state, **options)
        return change(lambda *arguments: exact(self, *arguments, **options), x, state)

    monkeypatch.setattr(GatedFastWeightsRNN, "forward", forward)


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_is_green(mode):
    require_parity(Problem(Case(4, 6, mode, batch=5, input_size=3, inner_size=7)))


def test_some_examples_speak_for_all_where_the_reference_does_not_fit(monkeypatch):
    monkeypatch.setattr(rule, "MOST_BYTES", 1)
    require_parity(Problem(SMALL))
    assert rule.examples(5, 100).tolist() == [0, 4]

    def wrong(run, x, state):
        y, after = run(x, state)
        return y * torch.tensor([1, 1, 1, 1, 1.0001]).view(1, 5, 1), after

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match="red, so nothing is timed: the outputs at T=4, H=6, training differ"):
        require_parity(Problem(SMALL))


@pytest.mark.parametrize("error", [1.0001, float("nan")])
@pytest.mark.parametrize("field", GatedFastWeightsState._fields)
def test_the_state_at_the_end_has_to_be_right(monkeypatch, field, error):
    def wrong(run, x, state):
        y, after = run(x, state)
        return y, after._replace(**{field: getattr(after, field) * error})

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=f"the last {field} at T=4"):
        require_parity(Problem(SMALL))


@pytest.mark.parametrize("name", ["x", *(f"the initial {field}" for field in GatedFastWeightsState._fields)])
def test_the_gradient_of_every_input_has_to_be_right(monkeypatch, name):
    def wrong(run, x, state):
        if name == "x":
            return run(Bend.apply(x), state)
        field = name.rpartition(" ")[2]
        return run(x, state._replace(**{field: Bend.apply(getattr(state, field))}))

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=f"the gradient of {name} at T=4"):
        require_parity(Problem(SMALL))


def test_the_gradient_of_every_parameter_has_to_be_right(monkeypatch):
    problem = Problem(SMALL)
    weight = problem.layer.slow_out.weight

    def wrong(run, x, state):
        y, after = run(x, state)
        return y + (weight - weight.detach()).sum(), after

    bend(monkeypatch, wrong)
    with pytest.raises(FastWeightsError, match=r"the gradient of slow_out\.weight at T=4"):
        require_parity(problem)


def test_the_other_kernel_of_table_2_has_to_be_right_too(monkeypatch):
    case = Case(2, batch=3)
    require_parity_of_models(case)
    exact: Any = FastWeightsRNN.forward

    def wrong(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else y * 1.0001), state

    monkeypatch.setattr(FastWeightsRNN, "forward", wrong)
    with pytest.raises(FastWeightsError, match="the outputs at T=2, H=207"):
        require_parity_of_models(case)


def test_the_luck_of_one_rounding_is_not_red_but_that_of_most_is(monkeypatch, caplog):
    caplog.set_level("INFO")
    exact: Any = parity._errors

    def lucky(problem, draw):
        errors = exact(problem, draw)
        return errors | {"the gradient of x": (4e-5, 1e-5 if draw in unlucky else 4e-5)}

    monkeypatch.setattr(parity, "_errors", lucky)
    unlucky = [0, 3]
    require_parity(Problem(SMALL))
    assert caplog.messages == [
        "parity: T=4, H=6, training: red for one x, green by the medians over 5 that differ by rounding"
    ]
    unlucky = [0, 1, 3]
    with pytest.raises(
        FastWeightsError, match=r"the gradient of x at T=4, H=6, .* by 4\.0e-05, eager float32 by 1\.0e-05"
    ):
        require_parity(Problem(SMALL))
