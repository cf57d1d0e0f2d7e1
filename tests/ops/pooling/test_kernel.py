"""The C++ kernel of the pooling: parity with torch, derivatives of every order, and the laws of a compiled function."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops import _library
from fastweights.ops.pooling import cpu, leaky_max_pool

from ..associative.parity import needs_kernel
from . import parity

ROOT = Path(__file__).parents[3]


@needs_kernel
@pytest.mark.parametrize("slope", [0.2, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("dtype", parity.DTYPES, ids=str)
def test_parity(dtype: torch.dtype, slope: float) -> None:
    parity.require_parity(dtype, slope)


@needs_kernel
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has more than one copy")
@pytest.mark.parametrize(("level", "poison"), [("baseline", "128"), ("x86-64-v3", "255"), ("x86-64-v4", "128")])
def test_every_instruction_set_with_poisoned_memory(level: str, poison: str) -> None:
    # glibc fills what free takes with one byte and what malloc gives with its complement.
    environment = {**os.environ, "MALLOC_PERTURB_": poison, "FASTWEIGHTS_CPU_LEVEL": level}
    command = [sys.executable, "-m", "tests.ops.pooling.parity"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    levels = ["baseline", "x86-64-v3", "x86-64-v4"]
    assert done.stdout.strip() == min(level, str(_library.STATUS), key=levels.index)


@needs_kernel
def test_as_many_threads_as_torch_has_give_the_same() -> None:
    (images, *_) = parity.images(torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = parity.with_gradient(images, "cpu", 0.2)
        torch.set_num_threads(3)
        three = parity.with_gradient(images, "cpu", 0.2)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(one, three, strict=True))


@needs_kernel
def test_reads_and_writes_nothing_beside_the_tensors() -> None:
    shape, around = (2, 5, 3, 3), 64
    pooled_shape = (2, 5, 2, 2)

    def within(of: tuple[int, ...], dtype: torch.dtype, filler: float) -> tuple[Tensor, Tensor]:
        whole = torch.full((torch.Size(of).numel() + 2 * around,), filler, dtype=dtype)
        count, channels, height, width = of
        inner = whole[around:-around].view(count, height, width, channels).permute(0, 3, 1, 2)
        return whole, inner

    (images_whole, images), (pooled_whole, pooled) = (
        within(shape, torch.float32, 7),
        within(pooled_shape, torch.float32, 7),
    )
    codes_whole, codes = within(pooled_shape, torch.uint8, 7)
    images.copy_(torch.randn(shape))
    cpu._call("forward", torch.Size(shape), 0.2, images, pooled, codes)
    cpu._call("spread", torch.Size(shape), 0.2, pooled, codes, images)
    cpu._call("gather", torch.Size(shape), 0.2, images, codes, pooled)
    for whole in (images_whole, pooled_whole, codes_whole):
        assert (whole[:around] == 7).all()
        assert (whole[-around:] == 7).all()


def reference(images: Tensor) -> Tensor:
    return leaky_max_pool(images, impl="reference")


def kernel(images: Tensor) -> Tensor:
    return leaky_max_pool(images, impl="cpu")


@needs_kernel
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_derivatives_of_the_first_and_second_order_against_differences() -> None:
    images = torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kernel, (images,), check_forward_ad=True)

    def cubed(images: Tensor) -> Tensor:
        return kernel(images**3)

    assert torch.autograd.gradgradcheck(cubed, (images,))


@needs_kernel
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (lambda f: torch.func.grad(lambda x: f(x).sin().sum()), (2, 2, 3, 4)),
        (
            lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y**2).sin().sum())(x).sin().sum()),
            (2, 2, 3, 4),
        ),
        (lambda f: torch.func.vmap(f, in_dims=1), (2, 3, 2, 3, 4)),
        (lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum())), (3, 2, 2, 3, 4)),
        (lambda f: torch.func.vmap(torch.func.vmap(f)), (3, 2, 2, 2, 3, 4)),
        (lambda f: torch.func.hessian(lambda x: f(x.view(1, 2, 3, 4)).sin().sum()), (24,)),
    ],
    ids=["grad", "grad of grad", "vmap", "vmap of grad", "vmap of vmap", "hessian"],
)
def test_under_torch_func_as_the_reference(transform: Any, shape: tuple[int, ...]) -> None:
    images = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(transform(kernel)(images), transform(reference)(images))


@needs_kernel
def test_what_cannot_be_traced_or_taken_goes_to_the_reference() -> None:
    images = torch.randn(2, 3, 5, 4)
    assert torch.equal(torch.compile(leaky_max_pool, backend="eager", fullgraph=True)(images), reference(images))
    assert torch.equal(leaky_max_pool(images.half()), reference(images.half()))
    with pytest.raises(KernelError, match=r"takes bfloat16, float32 and float64, got torch\.float16"):
        kernel(images.half())


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (torch.zeros(2, 3, 4), {}, r"images must be \[N,C,H,W\], none of C, H and W zero; got \[2, 3, 4\]"),
        (torch.zeros(2, 3, 0, 4), {}, r"none of C, H and W zero; got \[2, 3, 0, 4\]"),
        (torch.zeros(2, 3, 4, 4), {"slope": -0.1}, "slope must be at least 0, so that a maximum stays one; got -0.1"),
        (torch.zeros(2, 3, 4, 4), {"slope": float("nan")}, "slope must be at least 0, so that .* got nan"),
        (torch.zeros(2, 3, 4, 4), {"impl": "triton"}, "impl must be one of auto, reference, cpu, got 'triton'"),
    ],
)
def test_bad_input(images: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leaky_max_pool(images, **options)
