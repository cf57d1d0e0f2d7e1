"""The C++ kernels of the gated recurrence: parity with the reference, and the laws of a compiled function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops.gated import cpu, gated
from fastweights.ops.gated.reference import FastInputs, SlowInputs

from ..parity import BOTH, DRAWS, check_parity, needs_kernel, negated_view
from .cases import INPUTS, Case

CASES = [
    *(
        Case(size, steps, batch, features, slow, inner, ragged)
        for size, steps, batch, features, slow, inner, ragged in [
            (1, 1, 1, 1, 1, 1, False),
            (3, 40, 5, 2, 4, 7, True),
            (15, 7, 33, 15, 16, 17, True),
            (16, 33, 2, 1, 15, 16, False),
            (17, 70, 3, 15, 16, 33, True),
            (40, 9, 40, 15, 40, 100, False),
            (50, 6, 2, 3, 7, 8, True),
            (100, 3, 2, 100, 10, 20, False),
        ]
    ),
    Case(17, 50, 5, 3, 4, 7, starts=True),
    Case(40, 9, 40, 15, 40, 100, ragged=True, starts=True),
]


def run(case: Case, dtype: torch.dtype, impl: str, device: str = "cpu", draw: int = 0) -> dict[str, Tensor]:
    """Return every result, and the gradient of every input, by name."""
    inputs = case.inputs(draw).items()
    tensors = {name: torch.from_numpy(array).to(device, dtype).requires_grad_() for name, array in inputs}
    lengths = None if case.lengths() is None else torch.tensor(case.lengths(), device=device)
    starts = None if case.flags() is None else torch.tensor(case.flags(), device=device)
    result = gated(*tensors.values(), lengths=lengths, starts=starts, impl=impl)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=dtype, device=device)
    for value in result:
        loss = loss + (value * torch.randn(value.shape, generator=generator).to(device, dtype)).sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()))
    named = dict(zip((f"gradient of {name}" for name in INPUTS), gradients, strict=True))
    return {name: value.detach().cpu() for name, value in {**result._asdict(), **named}.items()}


def check(
    case: Case, impl: str, *, device: str = "cpu", draws: int = DRAWS, dtypes: Sequence[torch.dtype] = BOTH
) -> None:
    def results(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, "cpu" if impl == "reference" else device, draw)

    # Of one unit the layer norm is zero, and so is most of its gradient.
    check_parity(results, (impl,), draws=draws, floor=1e-3, dtypes=dtypes)


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    check(case, "cpu")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernel
def test_the_kernels_give_the_same_bits_on_any_number_of_threads(threads: Callable[[int], None]) -> None:
    slow, fast = operands(Case(17, 9, 150, 3, 5, 11, ragged=True, starts=True), torch.float32)
    results = []
    for number in (1, 2, 3):
        threads(number)
        inners, states = cpu.slow_forward(slow)
        *outputs, trace = cpu.fast_forward(fast, True)
        of_slow = cpu.slow_backward(torch.ones_like(inners), torch.ones_like(states), inners, states, slow)
        grad_outputs, grad_1, grad_2 = map(torch.ones_like, outputs)
        of_fast = cpu.fast_backward(grad_outputs, grad_1, grad_2, outputs[0], trace, fast)
        results.append([inners, states, *outputs, *of_slow, *of_fast])
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert torch.equal(mine, theirs)


def operands(case: Case, dtype: torch.dtype) -> tuple[SlowInputs, FastInputs]:
    """Return the inputs of the slow network, and of the fast one."""
    given = {name: torch.from_numpy(array).to(dtype) for name, array in case.inputs().items()}
    lengths = None if case.lengths() is None else torch.tensor(case.lengths())
    starts = None if case.flags() is None else torch.tensor(case.flags())
    generator = torch.Generator().manual_seed(2)
    drive = torch.randn(case.steps, case.batch, case.inner_size, generator=generator).to(dtype)
    rows = given["slow_out_weight"].shape[0] - case.slow_size
    product = (
        torch.rand(case.steps, case.batch, case.inner_size, generator=generator).to(dtype) * 2 - 1,
        torch.randn(rows, case.inner_size, generator=generator).to(dtype),
        torch.randn(rows, generator=generator).to(dtype),
    )
    slow = SlowInputs(
        drive,
        given["slow_in_weight"][:, : case.slow_size],
        given["slow_out_weight"][: case.slow_size],
        given["slow_out_bias"][: case.slow_size],
        given["slow_hidden"],
        lengths,
        starts,
    )
    return slow, FastInputs(*product, given["x"], given["hidden"], given["fast_1"], given["fast_2"], lengths, starts)


@needs_kernel
@pytest.mark.parametrize("number", [0.0, 0.5])
def test_one_number_expanded_to_the_matrices_is_what_it_is_laid_out(number: float) -> None:
    _, fast = operands(Case(17, 5, 3, ragged=True), torch.float32)
    expanded = [torch.tensor(number).expand(matrix.shape) for matrix in (fast.fast_1, fast.fast_2)]
    results = []
    for matrices in (expanded, [matrix.contiguous() for matrix in expanded]):
        given = fast._replace(fast_1=matrices[0], fast_2=matrices[1])
        *outputs, trace = cpu.fast_forward(given, True)
        grad_outputs, grad_1, grad_2 = map(torch.ones_like, outputs)
        backward = (grad_outputs, grad_1, grad_2, outputs[0], trace, given)
        *of_others, of_1, of_2 = cpu.fast_backward(*backward)
        *others, none_1, none_2 = cpu.fast_backward(*backward, matrices=False)
        assert none_1.numel() == none_2.numel() == 0
        for mine, theirs in zip(others, of_others, strict=True):
            assert torch.equal(mine, theirs)
        results.append([*outputs, *of_others, of_1, of_2])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@needs_kernel
def test_without_the_trace_the_forward_pass_is_run_again() -> None:
    _, fast = operands(Case(5, 4, 3, ragged=True), torch.float32)
    *outputs, trace = cpu.fast_forward(fast, True)
    grad, grad_1, grad_2 = map(torch.ones_like, outputs)
    with_it, without = (cpu.fast_backward(grad, grad_1, grad_2, outputs[0], kept, fast) for kept in (trace, trace[:0]))
    for mine, theirs in zip(without, with_it, strict=True):
        assert torch.equal(mine, theirs)


@needs_kernel
def test_a_matrix_that_only_begins_with_zero_is_no_zero() -> None:
    _, fast = operands(Case(5, 4, 3), torch.float32)
    results = []
    for number in (0.0, 1.0):
        for matrix in (fast.fast_1, fast.fast_2):
            matrix[0, 0, 0] = number
        results.append(cpu.fast_forward(fast)[0][:, 1:])  # of the other examples
    assert torch.equal(*results)


@needs_kernel
def test_numbers_that_are_lazily_negated_are_those_that_they_show() -> None:
    slow, fast = operands(Case(5, 4, 3, ragged=True), torch.float32)

    def results(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        def seen(tensor: Any) -> Any:
            return view(tensor) if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor

        one, other = SlowInputs(*map(seen, slow)), FastInputs(*map(seen, fast))
        inners, states = cpu.slow_forward(one)
        grads = seen(torch.ones_like(inners)), seen(torch.ones_like(states))
        of_slow = cpu.slow_backward(*grads, seen(inners), seen(states), one)
        *outputs, trace = cpu.fast_forward(other, True)
        given = [seen(torch.ones_like(output)) for output in outputs]
        of_fast = cpu.fast_backward(given[0], given[1], given[2], seen(outputs[0]), seen(trace), other)
        return [inners, states, *of_slow, *outputs, *of_fast]

    for mine, theirs in zip(results(negated_view), results(lambda tensor: tensor), strict=True):
        assert torch.equal(mine, theirs)


def check_operators(ragged: bool, impl: str) -> None:
    slow, fast = operands(Case(4, 3, 2, ragged=ragged), torch.float32)
    operators: Any = torch.ops.fastweights
    torch.library.opcheck(operators.gated_slow.default, (*slow, impl, True))
    inners, states = operators.gated_slow(*slow, impl, True)
    for grads in ((torch.ones_like(inners), torch.ones_like(states)), (None, torch.ones_like(states))):
        given = (*grads, inners, states, *slow, impl, [True] * 5)
        torch.library.opcheck(operators.gated_slow_backward.default, given)
    torch.library.opcheck(operators.gated_fast.default, (*fast, impl, False))
    # A trace has places that nobody writes or reads, so its numbers cannot be compared.
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.gated_fast.default, (*fast, impl, True), test_utils=utils)
    outputs, _, _, trace = operators.gated_fast(*fast, impl, True)
    for matrices in (True, False):
        wanted = [*[True] * 5, matrices, matrices]
        given = (torch.ones_like(outputs), None, None, outputs, trace, *fast, impl, wanted)
        torch.library.opcheck(operators.gated_fast_backward.default, given)


@needs_kernel
@pytest.mark.parametrize("ragged", [False, True])
def test_operators(ragged: bool) -> None:
    check_operators(ragged, "cpu")


@needs_kernel
@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_and_gradients_of_gradients_against_differences(ragged: bool) -> None:
    case = Case(3, 3, 2, 2, 2, 2, ragged)
    tensors = [torch.from_numpy(array).requires_grad_() for array in case.inputs().values()]
    lengths = None if case.lengths() is None else torch.tensor(case.lengths())

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gated(*tensors, lengths=lengths, impl="cpu"))

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@needs_kernel
def test_what_does_not_fit_is_refused() -> None:
    slow, fast = operands(Case(4, 3, 2), torch.float32)
    with pytest.raises(ValueError, match=r"fast_1 must have shape \(2, 4, 8\), got \(2, 4, 7\)"):
        cpu.fast_forward(fast._replace(fast_1=fast.fast_1[:, :, :7]))
    with pytest.raises(TypeError, match=r"hidden is torch.float64 on cpu, x is torch.float32 on cpu"):
        cpu.fast_forward(fast._replace(hidden=fast.hidden.double()))
    with pytest.raises(ValueError, match="lengths must lie between 0 and 3, got 1 to 4"):
        cpu.slow_forward(slow._replace(lengths=torch.tensor([1, 4])))
    tensors = [torch.from_numpy(array) for array in Case(4, 3, 2).inputs().values()]
    with pytest.raises(ValueError, match="impl must be one of auto, reference, cpu, triton, got 'gpu'"):
        gated(*tensors, impl="gpu")
    with pytest.raises(KernelError, match="impl='cpu' was asked for, but the cpu kernel takes float32 and float64"):
        gated(*(tensor.bfloat16() for tensor in tensors), impl="cpu")
    with pytest.raises(ValueError, match=r"x must be \[T,B,D\] with at least one step, got shape \(0, 2, 3\)"):
        gated(tensors[0][:0], *tensors[1:])
