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


@pytest.mark.parametrize(("bent", "green"), [([], True), ([13], True), ([3, 13], True), ([3, 7, 13], False)])
def test_an_example_in_ten_may_lie_on_the_other_side_of_an_edge(monkeypatch, bent, green):
    exact: Any = FastWeightsRNN.forward

    def forward(self, x, *arguments, **options):
        y, state = exact(self, x, *arguments, **options)
        return (y if self.impl == "reference" else Bend.apply(y, bent)), state

    monkeypatch.setattr(FastWeightsRNN, "forward", forward)
    problem = Problem(Case(4, 6, batch=20, input_size=5))
    if green:
        require_parity(problem)
        return
    with pytest.raises(FastWeightsError, match="the gradient of x at T=4, H=6, float32, training differ from"):
        require_parity(problem)


def test_what_the_examples_share_has_to_be_right(monkeypatch):
    exact: Any = FastWeightsRNN.forward

    def forward(self, x, *arguments, **options):
        weight = self.weight_ih
        y, state = exact(self, x, *arguments, **options)
        return y if self.impl == "reference" else y + (weight - weight.detach()).sum(), state

    monkeypatch.setattr(FastWeightsRNN, "forward", forward)
    with pytest.raises(FastWeightsError, match="the gradient of weight_ih at"):
        require_parity(Problem(Case(4, 6, batch=20, input_size=5)))
