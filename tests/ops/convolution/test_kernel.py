"""The C++ kernel of the convolution: parity with torch, derivatives of every order, and when it is taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fastweights.errors import KernelError
from fastweights.ops.conv_block import conv_leaky_max_pool, cpu

from ..associative.parity import needs_kernel
from . import parity


@needs_kernel
@pytest.mark.parametrize("slope", [0.2, 0.0, 1.0])
@pytest.mark.parametrize("dtype", parity.DTYPES, ids=str)
def test_parity(dtype: torch.dtype, slope: float) -> None:
    parity.require_parity(dtype, slope)


@needs_kernel
def test_the_gradient_of_the_images_too() -> None:
    for tensors in parity.given(torch.float64):
        ours, theirs = (parity.with_gradients(tensors, impl, 0.2, images=True)[1] for impl in ("cpu", "reference"))
        for mine, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@needs_kernel
def test_numbers_that_are_none_come_out_where_torchs_do() -> None:
    images, weight, bias = (torch.randn(2, 3, 9, 8), torch.randn(20, 3, 3, 3), torch.randn(20))
    images[0, 1, 4, 4], images[1, 0, 0, 7] = torch.nan, torch.inf
    ours, theirs = (parity.with_gradients((images, weight, bias), impl, 0.2) for impl in ("cpu", "reference"))
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert ours[0].isnan().any()


@needs_kernel
def test_as_many_threads_as_torch_has_give_the_same() -> None:
    (tensors, *_) = parity.given(torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = parity.with_gradients(tensors, "cpu", 0.2)
        torch.set_num_threads(3)
        three = parity.with_gradients(tensors, "cpu", 0.2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(one, three, rtol=0, atol=0)


@needs_kernel
def test_reads_and_writes_nothing_beside_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is given lies amid numbers that are none; it must come out as without, and they must stay."""
    images, weight, bias = torch.randn(2, 3, 5, 7), torch.randn(20, 3, 3, 3), torch.randn(20)
    pooled, codes = cpu.convolve(images, weight, bias, 0.2)
    taps = cpu.sum_taps(pooled, codes, images, 0.2)
    wholes: list[Tensor] = []
    call = cpu._call

    def amid(*arguments: Any) -> None:
        moved: list[tuple[Any, Any]] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                filler = torch.nan if argument.is_floating_point() else 255
                wholes.append(torch.full((argument.numel() + 128,), filler, dtype=argument.dtype))
                inner = wholes[-1][64:-64].as_strided(argument.shape, argument.stride(), 64)
                moved.append((inner.copy_(argument), argument))
            else:
                moved.append((argument, None))
        call(*(inner for inner, _ in moved))
        for inner, original in moved:
            if original is not None:
                original.copy_(inner)

    monkeypatch.setattr(cpu, "_call", amid)
    again = *cpu.convolve(images, weight, bias, 0.2), cpu.sum_taps(pooled, codes, images, 0.2)
    torch.testing.assert_close(again, (pooled, codes, taps), rtol=0, atol=0)
    assert len(wholes) == 10  # the images twice a call, for their shape too
    for whole in wholes:
        beside = torch.cat([whole[:64], whole[-64:]])
        assert (beside.isnan() if beside.is_floating_point() else beside == 255).all()


def kernel(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv_leaky_max_pool(images, weight, bias, impl="cpu")


def reference(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv_leaky_max_pool(images, weight, bias, impl="reference")


def few() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in ((2, 2, 5, 4), (3, 2, 3, 3), (3,)))  # type: ignore[return-value]


@needs_kernel
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_derivatives_of_the_first_and_second_order_against_differences() -> None:
    tensors = tuple(tensor.requires_grad_() for tensor in few())
    assert torch.autograd.gradcheck(kernel, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *each: kernel(*(tensor**3 for tensor in each)), tensors)


Function = Callable[..., Tensor]


def of_weights(f: Function) -> Function:
    """The gradient of the weights, as MAML takes it."""
    return torch.func.grad(lambda weight, images, bias: f(images, weight, bias).sin().sum())


@needs_kernel
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, i, w, b: of_weights(f)(w, i, b),
        lambda f, i, w, b: torch.func.grad(lambda w: of_weights(f)(w, i, b).sin().sum())(w),
        lambda f, i, w, b: torch.func.vmap(f, (0, None, None))(torch.stack([i, 2 * i]), w, b),
        lambda f, i, w, b: torch.func.vmap(f, (None, 1, None))(i, torch.stack([w, 2 * w], 1), b),
        lambda f, i, w, b: torch.func.vmap(of_weights(f), (0, 0, 0))(*(torch.stack([x, 2 * x]) for x in (w, i, b))),
        lambda f, i, w, b: torch.func.jacfwd(lambda w: f(i, w, b))(w),
        lambda f, i, w, b: torch.func.jacrev(lambda b: f(i, w, b))(b),
    ],
    ids=["grad", "grad of grad", "vmap of images", "vmap of weights", "vmap of grad", "jacfwd", "jacrev"],
)
def test_under_torch_func_as_the_reference(transformed: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(transformed(kernel, *few()), transformed(reference, *few()))


def many(count: int = 20, inputs: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Enough of them for the kernel."""
    torch.manual_seed(0)
    images, weight = torch.randn(count, inputs, 20, 20, dtype=dtype), torch.randn(32, inputs, 3, 3, dtype=dtype)
    return images, weight.to(memory_format=torch.channels_last), torch.randn(32, dtype=dtype)


@needs_kernel
@pytest.mark.parametrize(
    ("tensors", "calls"),
    [
        (many(), 1),
        (many(dtype=torch.bfloat16), 1),
        (many(dtype=torch.half), 0),
        (many(count=1), 0),
        (many(inputs=9), 0),
        ((many()[0], many()[1].contiguous(), many()[2]), 0),
        ((many()[0].requires_grad_(), *many()[1:]), 0),
    ],
    ids=["many", "bfloat16", "half", "few", "many channels", "channels apart", "images that learn"],
)
def test_the_kernel_is_taken_for_many_images_of_few_channels(
    tensors: tuple[Tensor, Tensor, Tensor], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    call = cpu._call

    def count(kernel: str, *arguments: Any) -> None:
        asked.append(kernel)
        call(kernel, *arguments)

    monkeypatch.setattr(cpu, "_call", count)
    found = conv_leaky_max_pool(*tensors)
    assert asked.count("convolution") == calls
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, reference(*tensors), rtol=tolerance, atol=tolerance)
    assert found.stride() == reference(*tensors).stride()


@needs_kernel
def test_autocast_decides_what_is_computed_in() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = kernel(*many()), reference(*many())
    assert found.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(found, theirs, rtol=3e-2, atol=3e-2)


@needs_kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "traced",
    [
        lambda *tensors: torch.compile(kernel, backend="eager", fullgraph=True)(*tensors),
        lambda *tensors: make_fx(kernel)(*tensors)(*tensors),
        lambda *tensors: torch.jit.trace(kernel, tensors)(*tensors),
    ],
    ids=["compile", "make_fx", "jit.trace"],
)
def test_a_trace_gives_what_the_call_gives(traced: Callable[..., Tensor]) -> None:
    assert torch.equal(traced(*many()), kernel(*many()))


@needs_kernel
def test_the_operators_are_as_they_say() -> None:
    images, weight, bias = many()
    pooled, codes = cpu.convolve(images, weight, bias, 0.2)
    operators = torch.ops.fastweights
    calls: tuple[Any, ...] = (
        (operators.convolve_and_pool.default, (images, weight, bias, 0.2)),
        (operators.convolution_taps.default, (pooled, codes, images, 0.2)),
    )
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("images", "weight", "bias", "options", "message"),
    [
        ((2, 3, 4), (8, 3, 3, 3), 8, {}, r"images must be \[N,I,H,W\], .* and weight \[C,I,3,3\]; got \[2, 3, 4\] and"),
        ((2, 3, 0, 4), (8, 3, 3, 3), 8, {}, r"none of I, H and W zero, and .* got \[2, 3, 0, 4\] and \[8, 3, 3, 3\]"),
        ((2, 3, 4, 4), (8, 1, 3, 3), 8, {}, r"got \[2, 3, 4, 4\] and \[8, 1, 3, 3\]"),
        ((2, 3, 4, 4), (8, 3, 5, 5), 8, {}, r"weight \[C,I,3,3\]; got \[2, 3, 4, 4\] and \[8, 3, 5, 5\]"),
        ((2, 3, 4, 4), (8, 3, 3, 3), 7, {}, r"bias must have a number for each of C channels; got \[7\] for 8"),
        ((2, 3, 4, 4), (8, 3, 3, 3), 8, {"slope": -1.0}, "slope must be at least 0, so that .*; got -1.0"),
        ((2, 3, 4, 4), (8, 3, 3, 3), 8, {"impl": "gpu"}, "impl must be one of auto, reference, cpu, got 'gpu'"),
    ],
)
def test_bad_input(images: Any, weight: Any, bias: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conv_leaky_max_pool(torch.zeros(images), torch.zeros(weight), torch.zeros(bias), **options)


@needs_kernel
def test_what_it_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"takes bfloat16, float32 and float64, got torch\.float16"):
        kernel(*many(dtype=torch.half))
    images, weight, bias = many()
    with pytest.raises(KernelError, match=r"weights are torch\.float64 on cpu, images torch\.float32 on cpu"):
        kernel(images, weight.double(), bias)
