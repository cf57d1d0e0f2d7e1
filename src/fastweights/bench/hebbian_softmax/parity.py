"""A figure counts only while parity is green."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.bench import parity
from fastweights.bench.hebbian_softmax.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import HebbianSoftmax

Tensors = dict[str, Tensor]
LIMIT = 3
_ROWS = 128  # that are computed in float64 at once


def require_parity(problem: Problem) -> None:
    """The head's loss and gradients are those of a plain softmax, and what it smooths is algorithm 1.

    The error against float64 is at most 1e-5, or three times that of the plain loss in float32; smoothed weights are
    compared with a loop over the classes, some of which are new and some past the limit.

    Raises:
        FastWeightsError: they are not.
    """
    _require_gradients(problem)
    _require_smoothing(problem)


def _require_gradients(problem: Problem) -> None:
    h, target = problem.activations[0], problem.labels[0]
    exact = _exact(problem.weight.double(), h.double(), target)
    head = problem.head()
    errors = _errors(_results(head, head.loss, h, target), exact)
    if any(not error <= parity.allowed(0) for error in errors.values()):
        plain = _errors(_results(head, lambda h, target: F.cross_entropy(head(h), target), h, target), exact)
    else:
        plain = dict.fromkeys(errors, 0.0)
    for name, error in errors.items():
        if not error <= parity.allowed(plain[name]):  # a NaN is red
            raise FastWeightsError(
                f"parity is red, so nothing is timed: {name} at {problem.case} differs from that of float64 by "
                f"{error:.1e}, the plain loss's in float32 by {plain[name]:.1e}"
            )


def _results(head: HebbianSoftmax, loss: Callable[[Tensor, Tensor], Tensor], h: Tensor, target: Tensor) -> Tensors:
    h = h.clone().requires_grad_()
    value = loss(h, target)
    of_h, of_weight = torch.autograd.grad(value, [h, head.weight])
    return _named(value.detach(), of_h, of_weight)


def _named(loss: Tensor, of_h: Tensor, of_weight: Tensor) -> Tensors:
    return {"the loss": loss, "the gradient of h": of_h, "the gradient of the weight": of_weight}


def _exact(weight: Tensor, h: Tensor, target: Tensor) -> Tensors:
    """The loss and its gradients by hand, a few activations at once: all of the logits in float64 may not fit."""
    loss, of_h, of_weight = torch.zeros((), dtype=h.dtype), torch.empty_like(h), torch.zeros_like(weight)
    for rows in torch.split(torch.arange(len(h)), _ROWS):
        logits = h[rows] @ weight.T
        own = torch.arange(len(rows)), target[rows]
        total = logits.logsumexp(1, keepdim=True)
        loss += (total.squeeze(1) - logits[own]).sum() / len(h)
        pull = logits.sub_(total).exp_()
        pull[own] -= 1
        pull /= len(h)
        of_h[rows] = pull @ weight
        of_weight.addmm_(pull.T, h[rows])
    return _named(loss, of_h, of_weight)


def _errors(found: Tensors, exact: Tensors) -> dict[str, float]:
    return {name: parity.distance(found[name], true) for name, true in exact.items()}


def _require_smoothing(problem: Problem) -> None:
    head = problem.head(LIMIT)
    head.counts.copy_(torch.arange(len(head.counts)) % (LIMIT + 2))
    h, target = problem.activations[0], problem.labels[0]
    weight, counts = problem.weight.clone(), head.counts.clone()
    expected = algorithm_1(weight, counts, h, target, head.gamma, LIMIT)
    head.loss(h, target)
    head.memorize()
    rows = torch.tensor(list(expected))
    error = parity.distance(head.weight.detach()[rows], torch.stack(list(expected.values())))
    weight[rows] = head.weight.detach()[rows]
    if not error <= parity.allowed(0):
        raise FastWeightsError(
            f"parity is red, so nothing is timed: the smoothed weights at {problem.case} differ from algorithm 1 by "
            f"{error:.1e}"
        )
    if not torch.equal(weight, head.weight) or not torch.equal(counts, head.counts):
        raise FastWeightsError(
            f"parity is red, so nothing is timed: weights at {problem.case} changed of classes that were not in the "
            "batch, or a class was counted wrongly"
        )


def algorithm_1(
    weight: Tensor, counts: Tensor, h: Tensor, target: Tensor, gamma: float, limit: int
) -> dict[int, Tensor]:
    """The smoothed weights of every class in the batch, class by class in float64; its `counts` are brought up to date.

    Within a norm of 10, as the head has it.
    """
    smoothed = {}
    for index in sorted(set(target.tolist())):
        own = h[target == index].double()
        seen = int(counts[index])
        mean = own.sum(0) / len(own)
        mean *= min(1.0, 10 / math.sqrt(float(mean.square().sum())))
        rate = 0.0 if seen >= limit else max(1.0 if seen == 0 else 1 / seen, gamma)
        smoothed[index] = rate * mean + (1 - rate) * weight[index].double()
        counts[index] += len(own)
    return smoothed
