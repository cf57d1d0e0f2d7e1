"""Images on which the kernel is compared with torch; as a program: all of them, for one instruction set."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.conv_block import leaky_max_pool

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((2, 64, 28, 28), (3, 32, 7, 5), (1, 5, 4, 3), (2, 1, 1, 1), (2, 33, 1, 6), (0, 3, 4, 4), (5, 16, 2, 2))


def images(dtype: torch.dtype) -> Iterator[Tensor]:
    """Plain, with ties, and with numbers that are none or have no end; in either memory format."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        plain = torch.randn(shape, generator=generator).to(dtype)
        tied = plain.round()
        strange = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.nan, plain)
        strange = torch.where(torch.rand(shape, generator=generator) < 0.1, -torch.inf, strange)
        strange = torch.where(torch.rand(shape, generator=generator) < 0.1, torch.inf, strange)
        for found in (plain, tied, strange):
            yield found
            yield found.to(memory_format=torch.channels_last)


def with_gradient(found: Tensor, impl: str, slope: float) -> tuple[Tensor, Tensor]:
    own = found.clone(memory_format=torch.preserve_format).requires_grad_()
    pooled = leaky_max_pool(own, slope, impl=impl)
    generator = torch.Generator().manual_seed(1)
    pooled.backward(torch.randn(pooled.shape, generator=generator).to(pooled.dtype))
    assert own.grad is not None
    return pooled.detach(), own.grad


def require_parity(dtype: torch.dtype, slope: float) -> None:
    """Require equal bits: of a maximum, and of one product rounded once, there is one right answer on any processor."""
    for found in images(dtype):
        ours, theirs = (with_gradient(found, impl, slope) for impl in ("cpu", "reference"))
        without = leaky_max_pool(found, slope, impl="cpu")  # where nobody differentiates
        for one, other in zip((*ours, without), (*theirs, theirs[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    for each in DTYPES:
        require_parity(each, 0.2)
    print(_native.STATUS)
