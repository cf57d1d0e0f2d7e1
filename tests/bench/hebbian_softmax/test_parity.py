import pytest
import torch

from fastweights.bench.hebbian_softmax import problem as problems
from fastweights.bench.hebbian_softmax.cases import Case
from fastweights.bench.hebbian_softmax.parity import require_parity
from fastweights.bench.hebbian_softmax.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import HebbianSoftmax
from fastweights.nn.hebbian_softmax import loss

SMALL = Case(40, 6, batch=30)


@pytest.mark.parametrize("largest", [1, 2**25])
def test_the_head_is_green(monkeypatch, largest):
    monkeypatch.setattr(loss, "LARGEST_LOGITS", largest)
    monkeypatch.setattr(loss, "ROWS_AT_ONCE", 7)
    require_parity(Problem(SMALL))
    monkeypatch.setattr(problems, "SCALE", 8.0)  # means beyond the norm of 10
    require_parity(Problem(SMALL))


class Bend(torch.autograd.Function):
    """Its argument, and a gradient that is off."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 1.0001


@pytest.mark.parametrize("error", [1.0001, float("nan")])
def test_a_wrong_loss_is_red(monkeypatch, error):
    exact = HebbianSoftmax.loss
    monkeypatch.setattr(HebbianSoftmax, "loss", lambda self, h, target: exact(self, h, target) * error)
    with pytest.raises(FastWeightsError, match="red, so nothing is timed: the loss at V=40, d=6 differs"):
        require_parity(Problem(SMALL))


def test_a_wrong_gradient_is_red(monkeypatch):
    exact = HebbianSoftmax.loss
    monkeypatch.setattr(HebbianSoftmax, "loss", lambda self, h, target: exact(self, Bend.apply(h), target))
    with pytest.raises(FastWeightsError, match="the gradient of h at"):
        require_parity(Problem(SMALL))

    def wrong(self, h, target):
        off = (self.weight - self.weight.detach()).sum()
        return exact(self, h, target) + 1e-3 * off

    monkeypatch.setattr(HebbianSoftmax, "loss", wrong)
    with pytest.raises(FastWeightsError, match="the gradient of the weight at"):
        require_parity(Problem(SMALL))


@pytest.mark.parametrize(
    ("weights", "counts", "message"),
    [
        ("present", None, "the smoothed weights at V=40, d=6 differ from algorithm 1"),
        ("absent", None, "changed of classes that were not in the batch"),
        (None, "present", "a class was counted wrongly"),
    ],
)
def test_wrong_smoothing_is_red(monkeypatch, weights, counts, message):
    problem = Problem(SMALL)
    present = torch.zeros(SMALL.classes, dtype=torch.bool).index_fill_(0, problem.labels[0], True)
    rows = {"present": present, "absent": ~present, None: torch.zeros_like(present)}
    exact = HebbianSoftmax.memorize

    @torch.no_grad()
    def wrong(self):
        exact(self)
        self.weight[rows[weights]] *= 1.001
        self.counts[rows[counts]] += 1

    monkeypatch.setattr(HebbianSoftmax, "memorize", wrong)
    with pytest.raises(FastWeightsError, match=message):
        require_parity(problem)
