"""The LSTM with its backward pass written out: parity with the reference, and the laws of an operator."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops.lstm import LayerNorms, lstm
from fastweights.ops.lstm.reference import LSTMInputs

from ..parity import check_parity
from .cases import INPUTS, Case, draw_slopes

CASES = [
    Case(1, 1, 1, 1),
    Case(3, 40, 5, 2, ragged=True),
    Case(20, 7, 33, 50, masked=True),
    Case(63, 33, 2, 1, masked=True, starts=True),
    Case(17, 50, 5, starts=True),
    Case(40, 9, 20, 15, masked=True, ragged=True, starts=True),
    Case(100, 30, 16, 20),  # enough products for packed weights
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    def run(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = [torch.from_numpy(array).to(dtype).requires_grad_() for array in case.inputs(draw).values()]
        result = case.run(tuple(tensors), impl)
        gradients = torch.autograd.grad(result, tensors, draw_slopes(result))
        named = dict(zip((f"gradient of {name}" for name in INPUTS), gradients, strict=True))
        return {name: value.detach() for name, value in {**result._asdict(), **named}.items()}

    check_parity(run, ("eager",), draws=8 if case.size > 50 else 32)


SMALL = [Case(2, 3, 2, 2), Case(2, 4, 3, 2, masked=True, ragged=True, starts=True)]


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("impl", ["reference", "eager"])
def test_gradients_and_gradients_of_gradients_against_differences(case: Case, impl: str) -> None:
    tensors = [torch.from_numpy(array).requires_grad_() for array in case.inputs().values()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(case.run(tensors, impl))

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_an_empty_batch_gives_gradients_of_zero() -> None:
    tensors = [torch.from_numpy(array).requires_grad_() for array in Case(2, 3, 0).inputs().values()]
    gradients = torch.autograd.grad(lstm(*tensors).outputs.sum(), tensors[1:4])
    assert all(torch.equal(each, torch.zeros_like(each)) for each in gradients)


@pytest.mark.parametrize("results", [("outputs",), ("hidden",), ("cell",), ("outputs", "cell")], ids="-".join)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_gradients_of_some_results_for_some_inputs(case: Case, results: tuple[str, ...]) -> None:
    gradients = []
    for impl in ("reference", "eager"):
        tensors = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
        wanted = [tensors[name].requires_grad_() for name in ("weight_hh", "cell")]
        result = case.run(tuple(tensors.values()), impl)
        total = sum((getattr(result, name).square().sum() for name in results), torch.zeros(()))
        gradients.append(torch.autograd.grad(total, wanted))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_operators(case: Case) -> None:
    tensors = [torch.from_numpy(array) for array in case.inputs().values()]
    given = LSTMInputs(*tensors, **case.options(torch.float64))
    operators: Any = torch.ops.fastweights
    torch.library.opcheck(operators.lstm.default, (*given, True))
    outputs, hidden, cell, *kept = operators.lstm(*given, True)
    slopes = list(map(torch.ones_like, (outputs, hidden, cell)))
    for grads, wanted in (
        (slopes, [True] * 6),
        ([None, None, slopes[2]], [True] * 6),
        ([slopes[0], None, None], [False, True, True, True, False, False]),
    ):
        torch.library.opcheck(operators.lstm_backward.default, (*grads, outputs, *kept, *given, wanted))


def test_what_stands_past_a_length_reaches_no_gradient() -> None:
    case = Case(3, 5, 3, ragged=True)
    results = []
    for padding in (0.0, torch.nan):
        tensors = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
        for sequence, length in enumerate(case.lengths() or []):
            tensors["x"][length:, sequence] = padding
        for tensor in tensors.values():
            tensor.requires_grad_()
        result = case.run(tuple(tensors.values()), "eager")
        results.append([*result, *torch.autograd.grad(result, list(tensors.values()), draw_slopes(result))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_a_start_past_a_length_leaves_the_state() -> None:
    inputs = [torch.from_numpy(array) for array in Case(3, 4, 2).inputs().values()]
    lengths, starts = torch.tensor([2, 0]), torch.zeros(4, 2, dtype=torch.bool)
    starts[2] = True
    for impl in ("reference", "eager"):
        marked, plain = (lstm(*inputs, lengths=lengths, starts=given, impl=impl) for given in (starts, None))
        torch.testing.assert_close(marked, plain, rtol=1e-12, atol=1e-12)


def test_the_inputs_may_lie_in_memory_in_any_way() -> None:
    case = Case(6, 20, 16, masked=True)
    tensors = [torch.from_numpy(array).float() for array in case.inputs().values()]
    expected = case.run(tuple(tensors), "eager")
    apart = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in tensors]
    expanded = [*apart[:4], *(tensor[:1].expand_as(tensor) for tensor in tensors[4:])]
    torch.testing.assert_close(case.run(tuple(apart), "eager"), expected)
    laid_out = tuple(tensor.contiguous() for tensor in expanded)
    torch.testing.assert_close(case.run(tuple(expanded), "eager"), case.run(laid_out, "eager"))


def test_under_autocast_the_state_and_the_gradients_keep_their_dtype() -> None:
    case = Case(16, 9, 8, masked=True, starts=True)
    tensors = [torch.from_numpy(array).float().requires_grad_() for array in case.inputs().values()]
    exact = case.run(tuple(tensors), "eager")
    for impl in ("reference", "eager"):
        with torch.autocast("cpu", torch.bfloat16):
            result = case.run(tuple(tensors), impl)
        assert {value.dtype for value in result} == {torch.float32}
        assert (result.outputs - exact.outputs).norm() < 0.03 * exact.outputs.norm()  # bfloat16 keeps 8 bits
        gradients = torch.autograd.grad(result, tensors, draw_slopes(result))
        assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_what_does_not_fit_is_refused() -> None:
    case = Case(4, 3, 2)
    given = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
    norms = LayerNorms(*[(torch.ones(16).double(), torch.zeros(16).double())] * 3)
    for wrong, error, message in (
        ({"x": given["x"][:0]}, ValueError, r"x must be \[T,B,D\] with at least one step, got shape \(0, 2, 3\)"),
        ({"x": given["x"].float()}, TypeError, r"x is torch.float32 on cpu, weight_hh is torch.float64 on cpu"),
        ({"cell": given["cell"][:1]}, ValueError, r"cell must have shape \(2, 4\), got \(1, 4\)"),
        ({"weight_ih": given["weight_ih"][:, :2]}, ValueError, r"weight_ih must have shape \(16, 3\), got \(16, 2\)"),
        ({"mask": torch.ones(2, 3).double()}, ValueError, r"mask must have shape \(2, 4\), got \(2, 3\)"),
        ({"mask": torch.ones(2, 4).double().requires_grad_()}, ValueError, r"mask has no gradient.*mask\.detach\(\)"),
        ({"norms": norms}, ValueError, r"norms\.of_cell\[0\] must have shape \(4,\), got \(16,\)"),
        ({"lengths": torch.tensor([1, 2, 3])}, ValueError, r"lengths must have shape \(2,\), got \(3,\)"),
        ({"starts": torch.ones(3, 2)}, TypeError, r"starts must be torch.bool on cpu, got torch.float32 on cpu"),
        ({"starts": torch.ones(2, 3).bool()}, ValueError, r"starts must have shape \(3, 2\), got \(2, 3\)"),
        ({"impl": "cpu"}, ValueError, "impl must be one of auto, reference, eager, got 'cpu'"),
        ({"norms": norms, "impl": "eager"}, KernelError, "impl='eager' was asked for, but it has no layer norm"),
    ):
        with pytest.raises(error, match=message):
            lstm(**(given | wrong))
