"""What the C++ kernels of the gated recurrence lay out by themselves: steps whose products are taken at once, rows that
follow one another in memory, and the paddings between them."""

import pytest
import torch
from torch import Tensor

from fastweights import nn
from fastweights.ops.gated import gated

from ..parity import needs_kernel
from ..triton_here import poisoned
from .cases import Case
from .test_kernel import check, run

pytestmark = needs_kernel

RAGGED = Case(5, 9, 11, ragged=True)


def test_parity_at_the_papers_sizes() -> None:
    # In 32 steps some sequence of 90 amplifies rounding ten thousandfold.
    check(Case(40, 8, 190, 15, 40, 100), "cpu", draws=4)  # each of 190 sequences


@pytest.mark.parametrize("case", [RAGGED, Case(5, 9, 30, starts=True), Case(4, 150, 2, ragged=True)], ids=str)
def test_parity_where_sequences_share_a_product_or_take_several(case: Case) -> None:
    check(case, "cpu", draws=1, dtypes=(torch.float64,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", range(2, 10))
def test_nan_stays_in_its_sequence_forwards_and_backwards(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    layer = nn.GatedFastWeightsRNN(3, size, dtype=dtype)

    def results(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y, state = layer(x)
        (given,) = torch.autograd.grad(sum((tensor[..., [0, 2], :]).sum() for tensor in (y, state.hidden)), x)
        return [y[:, [0, 2]], given[:, [0, 2]], *(tensor[[0, 2]] for tensor in state)]

    x = torch.randn(6, 3, 3, dtype=dtype)
    healthy = results(x)
    x[:, 1] = torch.nan
    for mine, expected in zip(results(x), healthy, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("size", range(2, 10))
def test_gradients_of_long_sequences_are_finite(size: int) -> None:
    torch.manual_seed(1)
    layer = nn.GatedFastWeightsRNN(1, size)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)  # gates that shut, and updates that are negative throughout
    y, _ = layer(torch.randn(2500, 2, 1))
    (y * torch.randn_like(y)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("case", [RAGGED, Case(3, 7, 4, ragged=True), Case(40, 5, 6, ragged=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:Deterministic behavior")
def test_results_do_not_depend_on_what_memory_held(case: Case, dtype: torch.dtype) -> None:
    clean = run(case, dtype, "cpu")
    with poisoned():
        for name, value in run(case, dtype, "cpu").items():
            assert torch.equal(value, clean[name]), name


def inputs_of(case: Case) -> list[Tensor]:
    return [torch.from_numpy(array) for array in case.inputs().values()]


def loss(*tensors: Tensor) -> Tensor:
    total = torch.zeros(())
    for value in gated(*(*tensors,), impl="cpu"):
        total = total + (value * torch.linspace(-1, 1, value.shape[-1])).sum()
    return total


def test_gradients_under_vmap_over_inputs_and_over_weights() -> None:
    """What vmap stacks lies in memory step by step, where the kernel's own sequences are whole."""
    tensors = inputs_of(Case(5, 4, 3))
    several = [torch.stack([tensor, tensor.flip(0) * 0.5]) for tensor in tensors]
    for mapped in ([0], [1, 2, 3, 4], list(range(len(tensors)))):
        given = [several[index] if index in mapped else tensor for index, tensor in enumerate(tensors)]
        dims = tuple(0 if index in mapped else None for index in range(len(tensors)))
        positions = tuple(range(len(tensors)))
        found = torch.func.vmap(torch.func.grad(loss, positions), in_dims=dims)(*given)
        for example in range(2):
            own = [tensor[example] if index in mapped else tensor for index, tensor in enumerate(given)]
            for mine, expected in zip(found, torch.func.grad(loss, positions)(*own), strict=True):
                torch.testing.assert_close(mine[example], expected, rtol=1e-12, atol=1e-12)


def test_gradients_where_saved_tensors_come_back_in_another_layout() -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs_of(Case(5, 4, 3))]
    expected = torch.autograd.grad(loss(*tensors), tensors)

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(copied, copied):
        value = loss(*tensors)
        for mine, true in zip(torch.autograd.grad(value, tensors), expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)
