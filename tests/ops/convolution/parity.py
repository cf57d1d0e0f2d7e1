"""Images on which the kernel is compared with torch; as a program: all of them, for one instruction set."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.conv_block import conv_leaky_max_pool

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
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


def given(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, weight and bias, in either memory format."""
    generator = torch.Generator().manual_seed(0)
    for count, inputs, height, width, channels in SHAPES:
        images = torch.randn(count, inputs, height, width, generator=generator).to(dtype)
        weight = torch.randn(channels, inputs, 3, 3, generator=generator).to(dtype)
        bias = torch.randn(channels, generator=generator).to(dtype)
        yield images, weight, bias
        yield images.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last), bias


def with_gradients(
    tensors: tuple[Tensor, Tensor, Tensor], impl: str, slope: float, *, images: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What they give, and the gradients of weight and bias, and of the images where asked."""
    given, weight, bias = (tensor.clone().requires_grad_(place > 0 or images) for place, tensor in enumerate(tensors))
    found = conv_leaky_max_pool(given, weight, bias, slope, impl=impl)
    by = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    return found.detach(), torch.autograd.grad(found, (given, weight, bias)[not images :], by)


def require_parity(dtype: torch.dtype, slope: float) -> None:
    # A sum's rounding can choose another maximum of two that are as good as equal: then a gradient goes another way,
    # and gradients are compared as a whole.
    allowed, each = {torch.bfloat16: (2e-2, 2e-2), torch.float32: (2e-5, 1e-5), _EXACT: (1e-12, 1e-13)}[dtype]
    for tensors in given(dtype):
        images, weight, bias = (tensor.to(_EXACT) for tensor in tensors)
        expected, gradients = with_gradients((images, weight, bias), "reference", slope)
        ours, found = with_gradients(tensors, "cpu", slope)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.to(_EXACT), expected, rtol=each, atol=each * 10)
        for mine, right in zip(found, gradients, strict=True):
            assert mine.dtype == dtype
            assert mine.shape == right.shape
            error = float((mine - right).norm() / right.norm()) if len(tensors[0]) else float(mine.abs().sum())
            assert error <= allowed, f"{tuple(tensors[0].shape)} in {dtype}: a gradient is off by {error:.1e}"


if __name__ == "__main__":
    for each in DTYPES:
        require_parity(each, 0.2)
    print(_native.STATUS)
