"""A figure counts only while parity is green."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.bench.associative.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import FastWeightsRNN
from fastweights.ops.associative import reference

# Half a unit in the last place of bfloat16, which the outputs under autocast are rounded to.
LEAST = {"float32": 1e-5, "bfloat16": 2.0**-8}
MOST_BYTES = 2**30  # that the float64 reference may keep


def require_parity(problem: Problem) -> None:
    """The layer's error against float64 is at most 1e-5 (bfloat16: 2^-8), or three times that of the eager reference.

    The layer runs on the whole batch, just as it is timed. Long sequences in float64 would not fit: there the reference
    runs on some examples of the batch, and the gradient that goes into the layer is zero for all others, so that the
    gradients of the parameters are comparable too.

    A unit that float64 puts within rounding of the rectifier's edge may fall on its other side in float32, and its
    example then has another gradient, of equal right. Up to one example in ten is left out for it.

    Raises:
        FastWeightsError: it is not.
    """
    some = examples(problem)
    found = _compare(problem, some)
    if found.red and 0 < len(found.apart) <= len(some) / 10:
        found = _compare(problem, some[~torch.isin(torch.arange(len(some)), found.apart)])
    if found.red:
        raise FastWeightsError(f"parity is red, so nothing is timed: {found.red}")


class _Comparison(NamedTuple):
    red: str  # what differs by how much, empty where nothing does
    apart: Tensor  # examples whose gradient of x differs by more than rounding


def _compare(problem: Problem, some: Tensor) -> _Comparison:
    case, layer = problem.case, problem.layer
    double = FastWeightsRNN(case.input_size, case.hidden_size, decay=0.9, impl="reference", dtype=torch.float64)
    double.load_state_dict(layer.state_dict())
    x, grad = problem.x[:, some], problem.grad[:, some]
    exact = _tensors(problem, lambda x: double(x)[0], double, x.double(), grad.double())
    plain = _tensors(problem, lambda x: problem.eager(x, reference.recurrence), layer, x, grad)
    sparse = torch.zeros_like(problem.grad)
    sparse[:, some] = grad
    ours = _tensors(problem, lambda x: layer(x)[0], layer, problem.x, sparse)
    apart = torch.empty(0, dtype=torch.int64)
    red = ""
    for name, true in exact.items():
        per_example = name in ("the outputs", "the gradient of x")
        of_all = ours[name][:, some] if per_example else ours[name]
        error, allowed = (float((value.double() - true).norm() / true.norm()) for value in (of_all, plain[name]))
        most = max(LEAST[case.precision], 3 * allowed)
        if name == "the gradient of x":
            errors = (of_all.double() - true).norm(dim=(0, 2)) / true.norm(dim=(0, 2))
            apart = (~(errors <= most)).nonzero().squeeze(1)
        if not error <= most and not red:  # a NaN is red
            red = (
                f"{name} at {case} differ from the float64 reference by {error:.1e}, eager {case.precision} by "
                f"{allowed:.1e}"
            )
    return _Comparison(red, apart)


def examples(problem: Problem) -> Tensor:
    """The examples that the float64 reference is run on: all, or as many as fit, spread over the batch."""
    case = problem.case
    form = case.steps / 2 if case.steps <= 2 * case.hidden_size else case.hidden_size  # as `recurrence` chooses
    fitting = int(MOST_BYTES / (8 * case.steps * case.hidden_size * form))
    return torch.linspace(0, case.batch - 1, min(case.batch, max(2, fitting))).round().long()


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
