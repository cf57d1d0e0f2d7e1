from typing import Any

import pytest
import torch

from fastweights.bench.associative.cases import Case
from fastweights.bench.associative.parity import require_parity
from fastweights.bench.associative.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN


class Bend(torch.autograd.Function):
    """Its argument, and a gradient that is off in some examples."""

    @staticmethod
    def forward(ctx, y, examples):
        ctx.examples = examples
        return y.clone()

    @staticmethod
    def backward(ctx, *grads):
        gradient = grads[0].clone()
        gradient[:, ctx.examples] *= 1.1
        return gradient, None


def bent(monkeypatch: pytest.MonkeyPatch, examples: list[int], *, outputs: bool = False) -> Problem:
    """A problem whose layer errs in some examples; the first inputs of examples 3, 7 and 13 are next to nothing."""
    exact: Any = FastWeightsRNN.forward

    def forward(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        if self.impl != "reference":
            y = Bend.apply(y, examples)
            if outputs:
                y = y.index_fill(1, torch.tensor(examples), 0.0)
        return y, state

    monkeypatch.setattr(FastWeightsRNN, "forward", forward)
    problem = Problem(Case(4, 6, batch=20, input_size=5))
    problem.x[0, [3, 7, 13]] *= 1e-9  # so that all units stand at the rectifier's edge
    return problem


@pytest.mark.parametrize("examples", [[], [13], [3, 13]])
def test_an_example_in_ten_may_lie_on_the_other_side_of_an_edge(monkeypatch, caplog, examples):
    caplog.set_level("INFO")
    require_parity(bent(monkeypatch, examples))
    assert caplog.messages == [
        f"parity: {len(examples)} of 20 examples have a unit at the rectifier's edge" for _ in examples[:1]
    ]


@pytest.mark.parametrize(("examples", "reason"), [([3, 7, 13], "more than one in ten"), ([12], "not at an edge")])
def test_no_other_gradient_may_be_wrong(monkeypatch, examples, reason):
    with pytest.raises(FastWeightsError, match="the gradient of x at T=4, H=6, float32, training differ from"):
        require_parity(bent(monkeypatch, examples))


def test_outputs_are_never_left_out(monkeypatch):
    with pytest.raises(FastWeightsError, match="the outputs at T=4, H=6, float32, training differ from"):
        require_parity(bent(monkeypatch, [13], outputs=True))


def test_what_the_examples_share_has_to_be_right(monkeypatch):
    exact: Any = FastWeightsRNN.forward

    def forward(self, x, *arguments, **options):
        weight = self.weight_ih
        y, state = exact(self, x, *arguments, **options)
        return y if self.impl == "reference" else y + (weight - weight.detach()).sum(), state

    monkeypatch.setattr(FastWeightsRNN, "forward", forward)
    with pytest.raises(FastWeightsError, match="the gradient of weight_ih at"):
        require_parity(Problem(Case(4, 6, batch=20, input_size=5)))
