"""The kernel as PyTorch operators: their registration, and gradients against differences."""

from collections.abc import Callable
from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from fastweights.ops.associative import associative, associative_with_memory

from ..parity import needs_kernel
from . import parity
from .parity import Case, Tensors


@needs_kernel
@pytest.mark.parametrize("full", [True, False])
def test_operators(full: bool, form: str) -> None:
    norm = "norm" if full else "plain"
    case = Case(4, 3, 2, 2, norm=norm, memory=full, lengths=full, starts=full, control=full)
    inputs, constants = parity.positional(case, case.inputs())
    forward, backward = torch.ops.fastweights.associative, torch.ops.fastweights.associative_backward
    *numbers, _ = astuple(constants)  # a kernel knows method 1 alone
    arguments = (*inputs, *numbers, form, full, "cpu")
    torch.library.opcheck(forward.default, (*arguments, False))
    # A trace has places that nobody writes or reads, so its numbers cannot be compared.
    torch.library.opcheck(forward.default, (*arguments, True), test_utils=("test_schema", "test_faketensor"))
    outputs, memory, trace = forward(*arguments, True)
    wanted = [tensor is not None for tensor in inputs[: len(parity.INPUTS)]]
    for grad_memory in (None, torch.ones_like(memory)) if full else (None,):
        given = (parity.gradient_of_outputs(case), grad_memory, outputs, trace)
        torch.library.opcheck(backward.default, (*given, *arguments, wanted))


GRADCHECKS = [
    Case(3, 4, 2, 1, rate=0.5),
    Case(3, 4, 2, 2, "tanh", "norm-initial", rate=0.5),
    Case(3, 4, 2, 2, "tanh", "plain", rate=0.2, memory=False),
    Case(3, 4, 2, 1, "relu", "plain", rate=0.2, lengths=False),
    Case(3, 4, 2, 1, "tanh", "norm", rate=0.5, starts=True, control=True),
]


def differentiable(case: Case, form: str) -> tuple[Callable[..., tuple[Tensor, Tensor]], list[Tensor]]:
    """Outputs and final memory, as a function of the inputs that the case has."""
    inputs = case.inputs()
    names = [name for name in parity.INPUTS if inputs[name] is not None]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        given: Tensors = dict(zip(names, tensors, strict=True))
        fixed = {name: inputs[name] for name in parity.FIXED}
        return associative_with_memory(**given, **fixed, constants=case.constants, impl="cpu", form=form)

    return run, [inputs[name].double().requires_grad_() for name in names]


@needs_kernel
@pytest.mark.parametrize("case", GRADCHECKS, ids=str)
def test_gradients_against_differences(case: Case, form: str) -> None:
    run, tensors = differentiable(case, form)
    torch.autograd.gradcheck(run, tensors)


@needs_kernel
@pytest.mark.parametrize("case", GRADCHECKS, ids=str)
def test_gradients_of_gradients_against_differences(case: Case, form: str) -> None:
    run, tensors = differentiable(case, form)
    torch.autograd.gradgradcheck(run, tensors)


@needs_kernel
def test_gradients_only_where_they_are_asked_for(form: str) -> None:
    case = Case(4, 3, 2)
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32, form)
    assert not associative(**inputs, constants=case.constants, impl="cpu", form=form).requires_grad
    inputs["weight_hh"].requires_grad_()
    outputs = associative(**inputs, constants=case.constants, impl="cpu", form=form)
    outputs.backward(parity.gradient_of_outputs(case))
    assert torch.equal(inputs["weight_hh"].grad, expected["weight_hh"])
    assert all(inputs[name].grad is None for name in parity.INPUTS[2:6])


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_tensors_may_come_back_elsewhere_in_memory(dtype: torch.dtype, form: str) -> None:
    def moved(tensor: Tensor) -> Tensor:
        whole = tensor.new_empty(tensor.numel() + 1)
        return whole[1:].view(tensor.shape).copy_(tensor)

    case = Case(20, 9, 3)
    expected = parity.kernel(case, case.inputs(), dtype, form)
    inputs = {
        name: tensor if tensor is None or name == "lengths" else tensor.to(dtype)
        for name, tensor in case.inputs().items()
    }
    inputs["weight_hh"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        outputs = associative(**inputs, constants=case.constants, impl="cpu", form=form)
    outputs.backward(parity.gradient_of_outputs(case).to(dtype))
    assert torch.equal(inputs["weight_hh"].grad, expected["weight_hh"])
