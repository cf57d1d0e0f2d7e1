"""A figure counts only while parity is green."""

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

_STATE = GatedFastWeightsState._fields


def require_parity(problem: Problem) -> None:
    """The layer's error against float64 is at most 1e-5, or three times that of eager float32.

    Of the outputs, of the state after the last step, and in training of the gradient of x, of every parameter and of
    the state that it began with, which is not zero here. The layer runs on the whole batch, just as it is timed. Where
    the float64 reference would not fit, it runs on some examples, and the gradient that goes into the layer is zero
    for all others, so that the gradients of the parameters are comparable too.

    Raises:
        FastWeightsError: it is not.
    """
    case, layer = problem.case, problem.layer
    some = parity.examples(case.batch, 4 * 8 * case.steps * case.matrix_numbers)
    double = GatedFastWeightsRNN(
        case.input_size, case.hidden_size, slow_inner_size=case.inner_size, impl="reference", dtype=torch.float64
    )
    double.load_state_dict(layer.state_dict())
    inputs, grads = _inputs(problem), _grads(problem)
    few, few_grads = [tensor[some] for tensor in inputs], [tensor[some] for tensor in grads]
    sparse = [torch.zeros_like(tensor).index_copy(0, some, tensor[some]) for tensor in grads]
    exact = _tensors(double, _double(few), _double(few_grads), case.mode)
    eager = _tensors(problem.plain, few, few_grads, case.mode)
    ours = _tensors(layer, inputs, sparse, case.mode)
    shared = {_gradient(name) for name, _ in layer.named_parameters()}
    for name, true in exact.items():
        value = ours[name] if name in shared else ours[name][some]
        error, most = parity.distance(value, true), parity.allowed(eager[name], true)
        if not error <= most:  # a NaN is red
            raise FastWeightsError(
                f"parity is red, so nothing is timed: {name} at {case} differ from the float64 reference by "
                f"{error:.1e}, eager float32 by {parity.distance(eager[name], true):.1e}"
            )


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
