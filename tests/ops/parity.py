"""Parity of a kernel with its reference: one bound for all kernels (DESIGN.md).

In float64 a kernel is within 1e-12 of the reference. In float32 a single error says little, because the rounding of one
draw depends on the processor and on the libraries that PyTorch calls: a kernel's errors over many draws are compared
with those of the reference in float32, which is eager PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor

from fastweights.ops import _native

needs_kernel = pytest.mark.skipif(_native.MISSING is not None, reason=str(_native.MISSING))

DRAWS = 32
DOUBLE, SINGLE = 1e-12, 1e-5  # of the norm

BOTH = (torch.float32, torch.float64)
Run = Callable[[str, int, torch.dtype], dict[str, Tensor]]


def error(result: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference over the norm of the truth, or over `floor` where that is larger."""
    difference = (result.double() - truth).norm().item()
    scale = max(truth.norm().item(), floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


def negated_view(tensor: Tensor) -> Tensor:
    """Return a view of numbers that lie in memory with the other sign, as the imaginary part of a conjugate is."""
    return torch._neg_view(-tensor)


def check_parity(
    run: Run,
    kernels: Sequence[str],
    *,
    draws: int = DRAWS,
    floor: float = 0.0,
    dtypes: Sequence[torch.dtype] = BOTH,
) -> None:
    """Compare the results of kernels with those of the reference.

    Args:
        run: gives named results of an implementation (one of `kernels`, or "reference") for the inputs of the draw of
            that number, in a dtype.
        kernels: the names by which `run` knows them.
        draws: fewer than 32 where a draw is dear. In float64 the first alone is compared.
        floor: the norm by which errors are divided at least, for results that are zero but for rounding.
        dtypes: those that the kernels take.
    """
    eager: dict[str, list[float]] = {}
    found: dict[tuple[str, str], list[float]] = {}
    for draw in range(draws):
        truth = run("reference", draw, torch.float64)
        for name, tensor in run("reference", draw, torch.float32).items():
            assert truth[name].isfinite().all(), name
            eager.setdefault(name, []).append(error(tensor, truth[name], floor))
        for kernel in kernels:
            for dtype in dtypes if draw == 0 else {torch.float32} & {*dtypes}:
                results = run(kernel, draw, dtype)
                assert results.keys() == truth.keys()
                for name, tensor in results.items():
                    assert tensor.dtype == dtype, name
                    off = error(tensor, truth[name], floor)
                    if dtype is torch.float32:
                        found.setdefault((kernel, name), []).append(off)
                    else:
                        assert off <= DOUBLE, f"{kernel}: {name} in float64 is off by {off:.1e}"
    for (kernel, name), errors in found.items():
        # A long recurrence multiplies some draws' rounding by a hundred, and the mean of 32 is then known to a third at
        # best: what is held to the bound is the mean less its standard error.
        uncertainty = stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else 0.0
        for what, off, allowed in (
            ("on average", mean(errors) - uncertainty, 2 * mean(eager[name])),
            ("at worst", max(errors), 10 * max(eager[name])),
        ):
            allowed = max(allowed, SINGLE)
            assert off <= allowed, f"{kernel}: {name} in float32 is off by {off:.1e} {what}, more than {allowed:.1e}"
