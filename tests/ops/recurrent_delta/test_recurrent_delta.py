"""The recurrent delta rule: a loop in NumPy, parity of the kernel, and the laws of a compiled function."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops.recurrent_delta import recurrent_delta, recurrent_delta_step
from fastweights.ops.recurrent_delta.reference import Inputs

from ..parity import error, needs_kernel, negated_view
from .cases import RESULTS, Case, StepCase, call, draw_grads, loop, run
from .parity import CASES, STEP_CASES, require_parity, require_step_parity

SMALL = Case(3, 4, 2, batch=2, ragged=True, restarted=True, taps=3)
IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_kernel)]


def tensors_of(case: Case) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in case.inputs().items()}


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    require_parity(case, draws=8)


@needs_kernel
@pytest.mark.parametrize("drive", [-20.0, -8.0, 0.0, 8.0])
def test_the_gradient_of_a_decay_is_exact_however_much_it_takes_away(drive: float) -> None:
    # A memory that has lost all but what was just written has a gradient of its decay as small: the difference of two
    # products with the whole memory would drown it.
    case = Case(50, 12, 3)
    inputs = case.inputs()
    decays = slice(4 * case.size, 4 * case.size + case.heads)
    inputs["drive"][..., decays] += drive

    def gradient(dtype: torch.dtype, impl: str) -> Tensor:
        tensors = {name: torch.from_numpy(array).to(dtype) for name, array in inputs.items()}
        tensors["drive"].requires_grad_()
        results = call(case, tensors, impl)
        return torch.autograd.grad(results, [tensors["drive"]], draw_grads(results))[0][..., decays]

    expected = gradient(torch.float64, "reference")
    assert torch.linalg.norm(gradient(torch.float32, "cpu") - expected) < 3e-5 * torch.linalg.norm(expected)
    assert torch.linalg.norm(gradient(torch.float64, "cpu") - expected) < 1e-12 * torch.linalg.norm(expected)


@needs_kernel
def test_the_gradient_of_a_decay_is_exact_where_a_key_comes_again_and_again() -> None:
    # With one number a head every key is 1 or -1, and a write at a high rate takes away nearly all there was: the steps
    # before it have a gradient that is smaller with each write behind them.
    case = Case(33, 6, 6)
    inputs = case.inputs()
    decays = slice(4 * case.size, 4 * case.size + case.heads)
    inputs["weight"] *= 0
    inputs["drive"][..., decays] += 6
    inputs["drive"][..., decays.stop :] += 2

    def gradient(dtype: torch.dtype, impl: str) -> Tensor:
        tensors = {name: torch.from_numpy(array).to(dtype) for name, array in inputs.items()}
        tensors["drive"].requires_grad_()
        *_, memory = call(case, tensors, impl)
        (found,) = torch.autograd.grad([memory], [tensors["drive"]], draw_grads((memory,)))
        return found[..., decays].double()

    expected = gradient(torch.float64, "reference")
    errors, sizes = (
        torch.linalg.norm(each, dim=(1, 2)) for each in (gradient(torch.float32, "cpu") - expected, expected)
    )
    assert (errors < 1e-3 * sizes).all()
    errors = torch.linalg.norm(gradient(torch.float64, "cpu") - expected, dim=(1, 2))
    assert (errors < 1e-11 * sizes).all()


@needs_kernel
@pytest.mark.parametrize("where", ["start", "end"])
def test_what_is_not_finite_before_a_start_or_the_end_spoils_its_own_tap_alone(where: str) -> None:
    case = Case(12, 6, 2, batch=2, taps=4)
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in case.inputs().items()}
    last_of_segment = 6
    with torch.no_grad():
        tensors["drive"][last_of_segment, 0, 4 * case.size + case.heads] = torch.inf  # of a rate, which is 1 then
    starts, lengths = torch.zeros(12, 2, dtype=torch.bool), torch.tensor([12, 12])
    if where == "start":
        starts[last_of_segment + 1, 0] = True
    else:
        lengths[0] = last_of_segment + 1
    result = recurrent_delta(**tensors, starts=starts, lengths=lengths, impl="cpu")
    (of_taps,) = torch.autograd.grad([result.outputs], [tensors["taps"]], [torch.ones_like(result.outputs)])
    assert torch.argwhere(~of_taps.isfinite()).tolist() == [[4 * case.size + case.heads, case.taps - 1]]


@needs_kernel
@pytest.mark.parametrize("case", STEP_CASES, ids=str)
def test_parity_of_a_step(case: StepCase) -> None:
    require_step_parity(case, draws=8)


@needs_kernel
def test_a_step_gives_no_part_of_its_state_twice_and_leaves_what_it_was_given() -> None:
    inputs = StepCase(5, 6, 2, 3, 3).inputs(torch.float32)
    before = [tensor.clone() for tensor in inputs if tensor is not None]
    result = recurrent_delta_step(inputs)
    assert result is not None
    places = {tensor.untyped_storage().data_ptr() for tensor in (*inputs, *result) if tensor is not None}
    assert len(places) == len(inputs) + len(result)  # all eleven and four are given
    assert all(torch.equal(tensor, was) for tensor, was in zip(inputs, before, strict=True) if tensor is not None)


def test_a_step_that_the_kernel_cannot_take_is_none() -> None:
    case = StepCase(5, 6, 2, 3, 3)
    inputs = case.inputs(torch.float32)
    assert recurrent_delta_step(inputs._replace(weight_ih=inputs.weight_ih.requires_grad_())) is None
    assert recurrent_delta_step(case.inputs(torch.bfloat16)) is None
    wide = StepCase(1000, 1000, 1, 1, 0).inputs(torch.float32)  # of so many products, matrices are the faster ones
    assert recurrent_delta_step(wide) is None
    assert recurrent_delta_step(StepCase(5, 6, 2, 3, 3).inputs(torch.float32)._replace(x=inputs.x.to("meta"))) is None


@needs_kernel
def test_a_step_without_biases_adds_none() -> None:
    inputs = StepCase(5, 6, 2, 3, 3).inputs(torch.float64)
    zeros = {name: torch.zeros_like(getattr(inputs, name)) for name in ("bias_ih", "taps_bias")}
    found = recurrent_delta_step(inputs._replace(bias_ih=None, taps_bias=None))
    expected = recurrent_delta_step(inputs._replace(**zeros))
    assert found is not None
    assert expected is not None
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


@needs_kernel
def test_a_step_refuses_what_does_not_fit() -> None:
    inputs = StepCase(5, 6, 2, 3, 3).inputs(torch.float32)
    refused: list[tuple[Any, str, dict[str, Any]]] = [
        (TypeError, "gain must be a tensor, got None", {"gain": None}),
        (TypeError, "memory is torch.float64 on cpu, x is torch.float32 on cpu", {"memory": inputs.memory.double()}),
        (ValueError, r"x must be \[B,D\], hidden \[B,H\]", {"x": inputs.x[0]}),
        (ValueError, r"taps must be \[4H\+2N,C\] with a step at least, got \[28, 0\]", {"taps": torch.zeros(28, 0)}),
        (ValueError, r"taps must have shape \(28, 3\), got \(6, 3\)", {"taps": torch.zeros(6, 3)}),
        (ValueError, r"last must have shape \(3, 2, 28\), got \(3, 1, 28\)", {"last": torch.zeros(3, 1, 28)}),
        (ValueError, r"taps need last, \[B,C-1,4H\+2N\]", {"last": None}),
        (ValueError, "taps_bias belongs to a convolution: give its taps too", {"taps": None}),
        (ValueError, r"weight_ih must have shape \(28, 5\)", {"weight_ih": inputs.weight_ih[1:]}),
        (ValueError, "the heads of memory must divide the 6 units", {"memory": torch.zeros(3, 4, 2, 2)}),
    ]
    for kind, message, wrong in refused:
        with pytest.raises(kind, match=message):
            recurrent_delta_step(inputs._replace(**wrong))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [Case(20), Case(9, 12, 1, batch=2, ragged=True, restarted=True, taps=4)], ids=str)
def test_a_loop_in_numpy_gives_the_same(case: Case, impl: str) -> None:
    arrays = case.inputs()
    found = run(case, torch.float64, impl)
    results = tuple(found[name] for name in RESULTS if name in found)
    for result, truth in zip(results, loop(case, arrays), strict=True):
        assert error(result, torch.from_numpy(truth)) < 1e-12
    grads = [grad.numpy() for grad in draw_grads(results)]
    for name, array in arrays.items():
        direction = np.random.default_rng(6).normal(size=array.shape)
        moved = loop(case, {**arrays, name: array + 1e-30j * direction})
        slope = sum((grad * result.imag).sum() for grad, result in zip(grads, moved, strict=True)) / 1e-30
        gradient = found[f"gradient of {name}"].numpy()
        off = abs((gradient * direction).sum() - slope)
        assert off < 1e-12 * np.linalg.norm(gradient) * np.linalg.norm(direction), name


@needs_kernel
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_gradients_against_differences(impl: str) -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors_of(SMALL).items()}

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return call(SMALL, dict(zip(tensors, values, strict=True)), impl)

    assert torch.autograd.gradcheck(function, list(tensors.values()))
    assert torch.autograd.gradgradcheck(function, list(tensors.values()))


@needs_kernel
def test_numbers_that_are_lazily_negated_are_those_that_they_show() -> None:
    case = Case(9)

    def results(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tensors = {name: view(tensor).requires_grad_() for name, tensor in tensors_of(case).items()}
        found = call(case, tensors, "cpu")
        gradients = torch.autograd.grad(found, list(tensors.values()), list(map(view, draw_grads(found))))
        return [*found, *gradients, *call(case, {name: tensor.detach() for name, tensor in tensors.items()}, "cpu")]

    for mine, theirs in zip(results(negated_view), results(lambda tensor: tensor), strict=True):
        assert torch.equal(mine, theirs)


@needs_kernel
def test_operators() -> None:
    forward, backward = torch.ops.fastweights.recurrent_delta, torch.ops.fastweights.recurrent_delta_backward
    for case in (SMALL, Case(18, 5, 1)):  # with a convolution, and without
        inputs = Inputs(**tensors_of(case))
        torch.library.opcheck(forward.default, (*inputs, False))
        # A trace has places that nobody writes or reads, so its numbers cannot be compared.
        torch.library.opcheck(forward.default, (*inputs, True), test_utils=("test_schema", "test_faketensor"))
        outputs, memory, trace = forward(*inputs, True)
        for grad_memory in (None, torch.ones_like(memory)):
            grads = (torch.ones_like(outputs), grad_memory, outputs, trace)
            torch.library.opcheck(backward.default, (*grads, *inputs, [True] * 9))


@needs_kernel
def test_any_number_of_threads_gives_the_same_bits() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 3, 7):  # teams of 3 and 4 sequences, of 2 and 3, and of one
            torch.set_num_threads(count)
            results.append(run(Case(40, 12, 3, batch=7, ragged=True, taps=4), torch.float32, "cpu"))
    finally:
        torch.set_num_threads(before)
    # The weight's gradient is PyTorch's product of two matrices, which BLAS may split among its threads.
    weights = [result.pop("gradient of weight") for result in results]
    torch.testing.assert_close(weights[1:], weights[:1] * 2)
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_state_that_is_not_finite_before_a_start_leaves_the_gradients_of_the_taps(impl: str) -> None:
    tensors: dict[str, Any] = tensors_of(Case(5, taps=4))
    tensors["last"][1] = torch.nan
    tensors["taps"].requires_grad_()
    starts = torch.zeros(5, 3, dtype=torch.bool)
    starts[0] = True
    recurrent_delta(**tensors, starts=starts, impl=impl).outputs.sum().backward()
    assert tensors["taps"].grad.isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_stands_past_a_length_is_not_read_and_spoils_no_gradient(impl: str, value: float) -> None:
    lengths = torch.tensor([3, 6, 0])
    found = []
    for filling in (0.0, value):
        tensors: dict[str, Any] = tensors_of(Case(6, restarted=False, taps=4))
        for row, length in enumerate(lengths.tolist()):
            tensors["drive"][length:, row] = filling
        for tensor in tensors.values():
            tensor.requires_grad_()
        result = recurrent_delta(**tensors, lengths=lengths, impl=impl)
        (result.outputs.sum() + result.hidden.sum() + result.memory.sum()).backward()
        found.append(
            [*(part.detach() for part in result if part is not None), *(tensor.grad for tensor in tensors.values())]
        )
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", [0, 7])
def test_nothing_crosses_a_start(impl: str, first: int) -> None:
    case = Case(20, restarted=False, taps=4)
    tensors: dict[str, Any] = {name: tensor.requires_grad_() for name, tensor in tensors_of(case).items()}
    starts = torch.zeros(20, 3, dtype=torch.bool)
    starts[first] = True
    spoiled = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    spoiled["drive"][:first] = torch.nan
    spoiled["memory"][:] = spoiled["last"][:] = torch.nan
    for tensor in spoiled.values():
        tensor.requires_grad_()
    clean, dirty = (recurrent_delta(**each, starts=starts, impl=impl) for each in (tensors, spoiled))
    assert torch.equal(clean.outputs[first:], dirty.outputs[first:])
    assert torch.equal(clean.memory, dirty.memory)
    gradient = torch.autograd.grad(clean.outputs[first:].sum() + clean.memory.sum(), tensors["drive"])[0]
    assert not gradient[:first].any()
    assert gradient[first:].any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_key_of_nothing_writes_nothing(impl: str) -> None:
    tensors = tensors_of(Case(2, 4, 1, batch=1))
    tensors["drive"][..., 4:12] = 0
    tensors["weight"][4:12] = 0
    tensors["drive"][..., 16:] = tensors["weight"][16:] = 0  # half of the memory is kept
    tensors["drive"].requires_grad_()
    result = recurrent_delta(**tensors, impl=impl)
    torch.testing.assert_close(result.memory, tensors["memory"] / 4)
    (gradient,) = torch.autograd.grad(result.outputs.sum() + result.memory.sum(), tensors["drive"])
    assert gradient.isfinite().all()


@needs_kernel
def test_it_compiles() -> None:
    tensors: dict[str, Any] = tensors_of(Case(9))
    compiled = torch.compile(recurrent_delta, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**tensors), recurrent_delta(**tensors))


def test_bad_input_is_refused() -> None:
    good: dict[str, Any] = tensors_of(Case(3))  # T 3, B 3, H 6, N 2
    for kind, message, wrong in [
        (ValueError, r"drive must be \[T,B,4H\+2N\] with at least one step", {"drive": good["drive"][:0]}),
        (ValueError, r"drive must have shape \(3, 3, 28\), got \(3, 3, 27\)", {"drive": good["drive"][..., 1:]}),
        (ValueError, r"weight must have shape \(28, 6\), got \(28, 5\)", {"weight": good["weight"][:, 1:]}),
        (ValueError, r"memory must have shape \(3, 2, 3, 3\), got \(3, 2, 3, 2\)", {"memory": good["memory"][..., 1:]}),
        (
            ValueError,
            "the heads of memory must divide the 6 units of hidden, got 4",
            {"memory": torch.zeros(3, 4, 2, 2)},
        ),
        (TypeError, r"gain is torch.float32 on cpu, drive is torch.float64 on cpu", {"gain": good["gain"].float()}),
        (ValueError, "impl must be one of auto, reference", {"impl": "triton"}),
    ]:
        for impl in ("reference", "auto"):
            with pytest.raises(kind, match=message):
                recurrent_delta(**{**good, "impl": impl, **wrong})
    for name in ("weight", "gain", "bias"):  # as a layer norm without a gain would give
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got None"):
            recurrent_delta(**{**good, name: None})
    with pytest.raises(ValueError, match="last belongs to a convolution: give its taps too, or leave it out"):
        recurrent_delta(**good, last=torch.zeros(3, 3, 28))
    for impl in ("reference", "auto"):
        with pytest.raises(ValueError, match=r"starts must have shape \(3, 3\), got \(3, 2\)"):
            recurrent_delta(**good, starts=torch.zeros(3, 2, dtype=torch.bool), impl=impl)
        with pytest.raises(ValueError, match=r"lengths must have shape \(3,\), got \(2,\)"):
            recurrent_delta(**good, lengths=torch.tensor([1, 2]), impl=impl)
    with pytest.raises(ValueError, match="lengths must lie between 0 and 3, got 1 to 4"):
        recurrent_delta(**good, lengths=torch.tensor([1, 4, 2]))
    with pytest.raises(KernelError, match="impl='cpu' was asked for, but the cpu kernel takes float32 and float64"):
        recurrent_delta(**{name: tensor.bfloat16() for name, tensor in good.items()}, impl="cpu")
