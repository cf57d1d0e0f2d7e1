"""The C++ kernel of the pooling: parity with torch, derivatives of every order, and the laws of a compiled function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastweights.errors import KernelError
from fastweights.ops.conv_block import cpu, leaky_max_pool

from ..parity import needs_kernel
from . import parity


@needs_kernel
@pytest.mark.parametrize("slope", [0.2, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("dtype", parity.DTYPES, ids=str)
def test_parity(dtype: torch.dtype, slope: float) -> None:
    parity.require_parity(dtype, slope)


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


def within(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor amid numbers that are none, or codes that are none; channels side by side."""
    filler = torch.nan if tensor.is_floating_point() else 255
    whole = torch.full((tensor.numel() + 128,), filler, dtype=tensor.dtype)
    count, channels, height, width = tensor.shape
    inner = whole[64:-64].view(count, height, width, channels).permute(0, 3, 1, 2)
    return whole, inner.copy_(tensor)


@needs_kernel
def test_reads_and_writes_nothing_beside_the_tensors() -> None:
    images = torch.randn(2, 5, 3, 3)
    pooled, codes = cpu.pool(images, 0.2)
    gradients = cpu.spread(pooled, codes, 3, 3, 0.2)
    wholes, inner = zip(
        *(within(tensor) for tensor in (images, torch.zeros_like(pooled), torch.zeros_like(codes))), strict=True
    )
    cpu._call("pooling", "forward", images, 5, 0.2, *inner)
    assert torch.equal(inner[1], pooled)
    assert torch.equal(inner[2], codes)
    cpu._call("pooling", "spread", images, 5, 0.2, inner[1], inner[2], inner[0])
    assert torch.equal(inner[0], gradients)
    for whole in wholes:
        beside = torch.cat([whole[:64], whole[-64:]])
        assert (beside.isnan() if beside.is_floating_point() else beside == 255).all()


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


def many() -> Tensor:
    """Enough of them for the kernel."""
    return torch.randn(4, 32, 40, 40).to(memory_format=torch.channels_last)


@needs_kernel
@pytest.mark.parametrize(
    ("images", "calls"),
    [
        (many(), 1),
        (many().bfloat16(), 1),
        (many().half(), 0),
        (many()[:1], 0),
        (many().contiguous(), 0),
    ],
    ids=["many", "bfloat16", "half", "few", "channels apart"],
)
def test_the_kernel_is_taken_for_many_numbers_with_channels_side_by_side(
    images: Tensor, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    call = cpu._call
    monkeypatch.setattr(cpu, "_call", lambda *arguments: asked.append(call(*arguments)))
    found = leaky_max_pool(images)
    assert len(asked) == calls
    assert torch.equal(found, reference(images))
    assert found.stride() == reference(images).stride()


@needs_kernel
def test_a_dtype_that_it_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"takes bfloat16, float32 and float64, got torch\.float16"):
        kernel(many().half())


@needs_kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "traced",
    [
        lambda images: torch.compile(kernel, backend="eager", fullgraph=True)(images),
        lambda images: make_fx(kernel)(images)(images),
        lambda images: torch.func.linearize(kernel, images)[0],
        lambda images: torch.jit.trace(kernel, images)(images),
    ],
    ids=["compile", "make_fx", "linearize", "jit.trace"],
)
def test_a_trace_gives_what_the_call_gives(traced: Callable[[Tensor], Tensor]) -> None:
    images = many()
    assert torch.equal(traced(images), reference(images))


@needs_kernel
def test_results_lie_where_the_images_lie() -> None:
    images = many().requires_grad_()
    with torch.device("meta"):
        pooled = kernel(images)
        (gradient,) = torch.autograd.grad(pooled.sum(), images)
    assert pooled.device == gradient.device == images.device
    assert torch.equal(pooled, reference(images))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert kernel(images).shape == (4, 32, 20, 20)


@needs_kernel
def test_the_operators_are_as_they_say() -> None:
    pooled, codes = cpu.pool(many(), 0.2)
    operators = torch.ops.fastweights
    calls: tuple[Any, ...] = (
        (operators.pool.default, (many(), 0.2)),
        (operators.pool_spread.default, (pooled, codes, 40, 40, 0.2)),
    )
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


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
