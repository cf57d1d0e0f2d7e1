"""A figure counts only while parity is green."""

import logging
import math
import statistics

import torch
from torch import Tensor

from fastweights.bench import parity
from fastweights.bench.associative.cases import Case as AssociativeCase
from fastweights.bench.associative.parity import require_parity as require_associative_parity
from fastweights.bench.associative.problem import Problem as AssociativeProblem
from fastweights.bench.gated import models
from fastweights.bench.gated.cases import Case
from fastweights.bench.gated.problem import Problem
from fastweights.errors import FastWeightsError
from fastweights.nn import GatedFastWeightsRNN, GatedFastWeightsState

logger = logging.getLogger(__name__)

DRAWS = 5
_STATE = GatedFastWeightsState._fields


def require_parity(problem: Problem) -> None:
    """The layer's error against float64 is at most 1e-5, or three times that of eager float32.

    Of the outputs, of the state after the last step, and in training of the gradient of x, of every parameter and of
    the state that it began with, which is not zero here. The layer runs on the whole batch, just as it is timed. Where
    the float64 reference would not fit, it runs on some examples, and the gradient that goes into the layer is zero
    for all others, so that the gradients of the parameters are comparable too.

    Over many steps the gradient hangs on few examples, whose rounding grows by chance: the error of eager float32 is
    five times as large for one x as for another that differs by rounding. So where one x is red, the median errors
    over five such x decide, the layer's and eager's.

    Raises:
        FastWeightsError: it is not.
    """
    found = [_errors(problem, 0)]
    if not _red(found):
        return
    found += [_errors(problem, draw) for draw in range(1, DRAWS)]
    if red := _red(found):
        name, error, eager = red
        raise FastWeightsError(
            f"parity is red, so nothing is timed: {name} at {problem.case} differ from the float64 reference by "
            f"{error:.1e}, eager float32 by {eager:.1e}"
        )
    logger.info("parity: %s: red for one x, green by the medians over %d that differ by rounding", problem.case, DRAWS)


_Errors = dict[str, tuple[float, float]]  # of each tensor, the layer's error and eager's


def _red(found: list[_Errors]) -> tuple[str, float, float] | None:
    """What differs too much, and the two medians; None where nothing does."""
    for name in found[0]:
        error, eager = (_median([errors[name][which] for errors in found]) for which in (0, 1))
        if not error <= parity.allowed(eager):  # a NaN is red
            return name, error, eager
    return None


def _median(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def _errors(problem: Problem, draw: int) -> _Errors:
    """For x as it is (0), or moved by no more than rounding."""
    case, layer = problem.case, problem.layer
    some = parity.examples(case.batch, 4 * 8 * case.steps * case.matrix_numbers)
    double = GatedFastWeightsRNN(
        case.input_size, case.hidden_size, slow_inner_size=case.inner_size, impl="reference", dtype=torch.float64
    )
    double.load_state_dict(layer.state_dict())
    inputs, grads = _inputs(problem), _grads(problem)
    if draw:
        generator = torch.Generator().manual_seed(draw)
        inputs[0] = inputs[0] + 1e-6 * inputs[0].std() * torch.randn(inputs[0].shape, generator=generator)
    few, few_grads = [tensor[some] for tensor in inputs], [tensor[some] for tensor in grads]
    sparse = [torch.zeros_like(tensor).index_copy(0, some, tensor[some]) for tensor in grads]
    exact = _tensors(double, _double(few), _double(few_grads), case.mode)
    eager = _tensors(problem.plain, few, few_grads, case.mode)
    ours = _tensors(layer, inputs, sparse, case.mode)
    shared = {_gradient(name) for name, _ in layer.named_parameters()}
    ours = {name: value if name in shared else value[some] for name, value in ours.items()}
    return {
        name: (parity.distance(ours[name], true), parity.distance(eager[name], true)) for name, true in exact.items()
    }


def _inputs(problem: Problem) -> list[Tensor]:
    """x and a state, the batch first."""
    generator = torch.Generator().manual_seed(1)
    shapes = problem.layer._state_shapes((problem.case.batch,)).values()
    state = [torch.tanh(torch.randn(shape, generator=generator)) for shape in shapes]  # within -1 and 1, as they stay
    return [problem.x.transpose(0, 1), *state]


def _grads(problem: Problem) -> list[Tensor]:
    """What is to come from the outputs and from the last state, the batch first."""
    generator = torch.Generator().manual_seed(2)
    shapes = problem.layer._state_shapes((problem.case.batch,)).values()
    state = [torch.randn(shape, generator=generator) for shape in shapes]
    return [problem.grad[..., : problem.case.hidden_size].transpose(0, 1), *state]


def _double(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def _gradient(name: str) -> str:
    return f"the gradient of {name}"


def _tensors(layer: GatedFastWeightsRNN, inputs: list[Tensor], grads: list[Tensor], mode: str) -> dict[str, Tensor]:
    """The outputs, the last state, and in training the gradient of every input; the batch first, where there is one."""
    names = ["the outputs", *(f"the last {name}" for name in _STATE)]
    training = mode == "training"
    x, *state = (tensor.clone().requires_grad_(training) for tensor in inputs)
    with torch.inference_mode(not training):
        y, after = layer(x.transpose(0, 1).contiguous(), GatedFastWeightsState(*state))
    assert isinstance(y, Tensor)
    results = [y.transpose(0, 1), *after]
    found = {name: tensor.detach() for name, tensor in zip(names, results, strict=True)}
    if not training:
        return found
    initial = (f"the initial {name}" for name in _STATE)
    told = {"x": x, **dict(zip(initial, state, strict=True)), **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(results, list(told.values()), grads)
    return found | {_gradient(name): tensor for name, tensor in zip(told, gradients, strict=True)}


def require_parity_of_models(case: Case) -> None:
    """The only other kernel among the models is that of AttentionFW.

    Raises:
        FastWeightsError: it differs from its reference.
    """
    size = models.ATTENTION_SIZE
    require_associative_parity(
        AssociativeProblem(AssociativeCase(case.steps, size, batch=case.batch, input_size=models.CHARACTERS))
    )
