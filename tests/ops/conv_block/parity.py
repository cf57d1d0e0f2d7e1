"""Images on which the kernels are compared with torch; as a program: all of them, for one instruction set."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops import _native
from fastweights.ops.conv_block import conv_leaky_max_pool, leaky_max_pool

from ..parity import DRAWS, check_parity, error

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
POOLING_SHAPES = (
    (2, 64, 28, 28),
    (3, 32, 7, 5),
    (1, 5, 4, 3),
    (2, 1, 1, 1),
    (2, 33, 1, 6),
    (0, 3, 4, 4),
    (5, 16, 2, 2),
)
# Images, their channels and sides, and channels of the result: odd and even sides, one pixel, blocks that are not full.
SHAPES = (
    (2, 1, 28, 28, 64),
    (3, 3, 21, 10, 32),
    (2, 3, 7, 5, 20),
    (4, 4, 4, 3, 5),
    (1, 1, 1, 1, 1),
    (0, 3, 4, 4, 8),
    (2, 8, 9, 6, 16),
)
_EXACT = torch.float64
_CLEAR = 1e-4  # ten times what the rounding of a sum in float32 can be off


def given(dtype: torch.dtype, draw: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, weight and bias, in either memory format."""
    generator = torch.Generator().manual_seed(draw)
    for count, inputs, height, width, channels in SHAPES:
        images = torch.randn(count, inputs, height, width, generator=generator).to(dtype)
        weight = torch.randn(channels, inputs, 3, 3, generator=generator).to(dtype)
        bias = torch.randn(channels, generator=generator).to(dtype)
        yield images, weight, bias
        yield images.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last), bias


def with_gradients(
    tensors: tuple[Tensor, Tensor, Tensor], impl: str, slope: float, *, images: bool = False, only: float | Tensor = 1.0
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the outputs, and the gradients of weight and bias, and of the images where asked."""
    # `only` keeps the gradients of some outputs.
    given, weight, bias = (tensor.clone().requires_grad_(place > 0 or images) for place, tensor in enumerate(tensors))
    found = conv_leaky_max_pool(given, weight, bias, slope, impl=impl)
    by = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) * only
    return found.detach(), torch.autograd.grad(found, (given, weight, bias)[not images :], by.to(found.dtype))


def settled(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return 1 where a maximum is clear of the other three numbers and of zero, else 0.

    Of two that are as good as equal a sum's rounding may choose either, and the gradient goes another way.
    """
    sums = F.conv2d(images, weight, bias, padding=1)
    sums = F.pad(sums, (0, sums.shape[3] % 2, 0, sums.shape[2] % 2), value=-torch.inf)
    windows = sums.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).transpose(3, 4).flatten(4)
    first, second = windows.topk(2).values.unbind(-1)
    clear: Tensor = (first - second > _CLEAR) & (first.abs() > _CLEAR)
    return clear.to(images.dtype)


def results(impl: str, draw: int, dtype: torch.dtype, slope: float, inputs: torch.dtype) -> dict[str, Tensor]:
    """Return outputs and gradients for the images of a draw in the dtype `inputs`, computed in `dtype`."""
    named = {}
    for number, tensors in enumerate(given(inputs, draw)):
        clear = settled(*(tensor.to(_EXACT) for tensor in tensors))
        images, weight, bias = (tensor.to(dtype) for tensor in tensors)
        pooled, gradients = with_gradients((images, weight, bias), impl, slope, only=clear)
        for name, tensor in zip(
            ("outputs", "gradient of weight", "gradient of bias"), (pooled, *gradients), strict=True
        ):
            assert tensor.dtype == dtype
            named[f"{name} of {tuple(images.shape)}, {number}"] = tensor
    return named


def require_parity(slope: float, draws: int = DRAWS) -> None:
    def run(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return results(impl, draw, dtype, slope, torch.float32)

    check_parity(run, ("cpu",), draws=draws)
    half = torch.bfloat16
    exact = results("reference", 0, _EXACT, slope, half)
    for name, tensor in results("cpu", 0, half, slope, half).items():
        assert error(tensor, exact[name]) <= 1e-2, name  # bfloat16 has eight bits


def images_to_pool(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield images plain, with ties, and with numbers that are none or have no end; in either memory format."""
    generator = torch.Generator().manual_seed(0)
    for shape in POOLING_SHAPES:
        plain = torch.randn(shape, generator=generator).to(dtype)
        tied = plain.round()
        strange = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.nan, plain)
        strange = torch.where(torch.rand(shape, generator=generator) < 0.1, -torch.inf, strange)
        strange = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.inf, strange)
        for found in (plain, tied, strange):
            yield found
            yield found.to(memory_format=torch.channels_last)


def pool_with_gradient(found: Tensor, impl: str, slope: float) -> tuple[Tensor, Tensor]:
    own = found.clone(memory_format=torch.preserve_format).requires_grad_()
    pooled = leaky_max_pool(own, slope, impl=impl)
    generator = torch.Generator().manual_seed(1)
    pooled.backward(torch.randn(pooled.shape, generator=generator).to(pooled.dtype))
    assert own.grad is not None
    return pooled.detach(), own.grad


def require_parity_of_pooling(dtype: torch.dtype, slope: float) -> None:
    """Require equal bits: of a maximum, and of one product rounded once, there is one right answer on any processor."""
    for found in images_to_pool(dtype):
        ours, theirs = (pool_with_gradient(found, impl, slope) for impl in ("cpu", "reference"))
        without = leaky_max_pool(found, slope, impl="cpu")  # where nobody differentiates
        for one, other in zip((*ours, without), (*theirs, theirs[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    require_parity(0.2, draws=1)
    for each in DTYPES:
        require_parity_of_pooling(each, 0.2)
    print(_native.STATUS)
