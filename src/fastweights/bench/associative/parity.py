"""A figure counts only while parity is green."""

import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.bench import parity
from fastweights.bench.associative.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN
from fastweights.ops.associative import reference

logger = logging.getLogger(__name__)

_GRADIENTS = "the gradient of "


def require_parity(problem: Problem) -> None:
    """The layer's error against float64 is at most 1e-5 (bfloat16: 2^-8), or three times that of the eager reference.

    The layer runs on the whole batch, just as it is timed. Long sequences in float64 would not fit: there the reference
    runs on some examples of the batch, and the gradient that goes into the layer is zero for all others, so that the
    gradients of the parameters are comparable too.

    A unit that float64 puts within rounding of the rectifier's edge may fall on its other side in float32, and its
    example then has another gradient, of equal right. Up to one example in ten is left out for it, where the outputs
    agree and the float64 gradient itself becomes another when x moves by no more than rounding.

    Raises:
        FastWeightsError: it is not.
    """
    some = examples(problem)
    found = _compare(problem, some)
    few = found.red.startswith(_GRADIENTS) and 0 < len(found.apart) <= len(some) / 10
    if few and _at_an_edge(problem, some[found.apart], found.most):
        logger.info("parity: %d of %d examples have a unit at the rectifier's edge", len(found.apart), len(some))
        found = _compare(problem, some[~torch.isin(torch.arange(len(some)), found.apart)])
    if found.red:
        raise FastWeightsError(f"parity is red, so nothing is timed: {found.red}")


class _Comparison(NamedTuple):
    red: str  # what differs by how much, empty where nothing does
    apart: Tensor  # examples whose gradient of x differs by more than rounding
    most: float  # of an example's error in the gradient of x


def _at_an_edge(problem: Problem, chosen: Tensor, most: float) -> bool:
    """Whether each of the chosen examples has another gradient when x moves by a few units in float32's last place."""
    double = _in_double(problem)
    x, grad = problem.x[:, chosen].double(), problem.grad[:, chosen].double()

    def gradient(x: Tensor) -> Tensor:
        return _tensors(problem, lambda x: double(x)[0], double, x, grad)["the gradient of x"]

    generator = torch.Generator().manual_seed(0)
    here = gradient(x)
    found = torch.zeros(len(chosen), dtype=torch.bool)
    for _ in range(8):
        moved = gradient(x + 1e-6 * x.std() * torch.randn(x.shape, generator=generator, dtype=x.dtype))
        found |= _errors(moved, here) > max(most, 1e-4)
    return bool(found.all())


def _errors(value: Tensor, true: Tensor) -> Tensor:
    """Of every example of [T,B,D]."""
    errors: Tensor = (value.double() - true).norm(dim=(0, 2)) / true.norm(dim=(0, 2))
    return errors


def _in_double(problem: Problem) -> FastWeightsRNN:
    case = problem.case
    double = FastWeightsRNN(case.input_size, case.hidden_size, decay=0.9, impl="reference", dtype=torch.float64)
    double.load_state_dict(problem.layer.state_dict())
    return double


def _compare(problem: Problem, some: Tensor) -> _Comparison:
    case, layer = problem.case, problem.layer
    double = _in_double(problem)
    x, grad = problem.x[:, some], problem.grad[:, some]
    exact = _tensors(problem, lambda x: double(x)[0], double, x.double(), grad.double())
    plain = _tensors(problem, lambda x: problem.eager(x, reference.recurrence), layer, x, grad)
    sparse = torch.zeros_like(problem.grad)
    sparse[:, some] = grad
    ours = _tensors(problem, lambda x: layer(x)[0], layer, problem.x, sparse)
    apart = torch.empty(0, dtype=torch.int64)
    red, limit = "", 0.0
    for name, true in exact.items():
        per_example = name in ("the outputs", "the gradient of x")
        of_all = ours[name][:, some] if per_example else ours[name]
        error, eager = parity.distance(of_all, true), parity.distance(plain[name], true)
        most = parity.allowed(eager, case.precision)
        if name == "the gradient of x":
            limit = most
            apart = (~(_errors(of_all, true) <= most)).nonzero().squeeze(1)
        if not error <= most and not red:  # a NaN is red
            red = (
                f"{name} at {case} differ from the float64 reference by {error:.1e}, eager {case.precision} by "
                f"{eager:.1e}"
            )
    return _Comparison(red, apart, limit)


def examples(problem: Problem) -> Tensor:
    """The examples that the float64 reference is run on: all, or as many as fit, spread over the batch."""
    case = problem.case
    form = case.steps / 2 if case.steps <= 2 * case.hidden_size else case.hidden_size  # as `recurrence` chooses
    return parity.examples(case.batch, 8 * case.steps * case.hidden_size * form)


def _tensors(
    problem: Problem, forward: Callable[[Tensor], Tensor], layer: FastWeightsRNN, x: Tensor, grad: Tensor
) -> dict[str, Tensor]:
    """The outputs, and in training the gradient of every input."""
    # Autocast would round the float64 reference as well.
    context = contextlib.nullcontext() if x.dtype == torch.float64 else problem.autocast()
    if problem.case.mode == "inference":
        with torch.inference_mode(), context:
            return {"the outputs": forward(x)}
    x = x.detach().requires_grad_()
    with context:
        outputs = forward(x)
    inputs = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(outputs, list(inputs.values()), grad.to(outputs.dtype))
    names = (f"the gradient of {name}" for name in inputs)
    return {"the outputs": outputs.detach(), **dict(zip(names, gradients, strict=True))}
