"""The C++ kernels of the block: parity with torch, derivatives of every order, and when they are taken."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastweights.errors import KernelError
from fastweights.ops.conv_block import conv_leaky_max_pool, cpu, leaky_max_pool, run_blocks

from ..parity import needs_kernel, negated_view
from . import parity

Function = Callable[..., Tensor]


def convolve(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv_leaky_max_pool(images, weight, bias, impl="cpu")


def convolve_in_torch(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv_leaky_max_pool(images, weight, bias, impl="reference")


def pool(images: Tensor) -> Tensor:
    return leaky_max_pool(images, impl="cpu")


def pool_in_torch(images: Tensor) -> Tensor:
    return leaky_max_pool(images, impl="reference")


def few() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in ((2, 2, 5, 4), (3, 2, 3, 3), (3,)))  # type: ignore[return-value]


def many(count: int = 20, inputs: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return enough of them for the kernel."""
    torch.manual_seed(0)
    images, weight = torch.randn(count, inputs, 20, 20, dtype=dtype), torch.randn(32, inputs, 3, 3, dtype=dtype)
    return images, weight.to(memory_format=torch.channels_last), torch.randn(32, dtype=dtype)


def many_to_pool() -> Tensor:
    """Return enough of them for the kernel."""
    return torch.randn(4, 32, 40, 40).to(memory_format=torch.channels_last)


class Block(NamedTuple):
    kernel: Function
    reference: Function
    few: Callable[[], tuple[Tensor, ...]]
    many: Callable[[], tuple[Tensor, ...]]


CONVOLUTION = Block(convolve, convolve_in_torch, few, many)
POOLING = Block(pool, pool_in_torch, lambda: few()[:1], lambda: (many_to_pool(),))
each_block = pytest.mark.parametrize("block", [CONVOLUTION, POOLING], ids=["convolution", "pooling"])


@needs_kernel
@pytest.mark.parametrize(("slope", "draws"), [(0.2, 32), (0.0, 2), (1.0, 2)])
def test_parity(slope: float, draws: int) -> None:
    parity.require_parity(slope, draws)  # a slope changes no sum


@needs_kernel
@pytest.mark.parametrize("slope", [0.2, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("dtype", parity.DTYPES, ids=str)
def test_parity_of_pooling(dtype: torch.dtype, slope: float) -> None:
    parity.require_parity_of_pooling(dtype, slope)


@needs_kernel
def test_the_gradient_of_the_images_too() -> None:
    for tensors in parity.given(torch.float64):
        ours, theirs = (parity.with_gradients(tensors, impl, 0.2, images=True)[1] for impl in ("cpu", "reference"))
        for mine, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


@needs_kernel
@each_block
def test_numbers_that_are_lazily_negated_are_those_that_they_show(block: Block) -> None:
    def results(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tensors = [view(tensor).requires_grad_() for tensor in block.few()]
        found = block.kernel(*tensors)
        weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
        gradients = torch.autograd.grad(found, tensors, view(weights))
        return [found, *gradients, block.kernel(*(tensor.detach() for tensor in tensors))]

    for mine, theirs in zip(results(negated_view), results(lambda tensor: tensor), strict=True):
        assert torch.equal(mine, theirs)


@needs_kernel
def test_numbers_that_are_none_come_out_where_torchs_do() -> None:
    images, weight, bias = (torch.randn(2, 3, 9, 8), torch.randn(20, 3, 3, 3), torch.randn(20))
    images[0, 1, 4, 4], images[1, 0, 0, 7] = torch.nan, torch.inf
    ours, theirs = (parity.with_gradients((images, weight, bias), impl, 0.2) for impl in ("cpu", "reference"))
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert ours[0].isnan().any()


@needs_kernel
@each_block
def test_as_many_threads_as_torch_has_give_the_same(block: Block) -> None:
    def run(threads: int) -> tuple[Tensor, ...]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        tensors = tuple(tensor.requires_grad_() for tensor in block.many())
        result = block.kernel(*tensors)
        # The gradient of the convolution's images is torch's own.
        return result.detach(), *torch.autograd.grad(result.sin().sum(), tensors[-2:])

    before = torch.get_num_threads()
    try:
        one, three = run(1), run(3)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(one, three, strict=True))


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


def within(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tensor amid numbers that are none, or codes that are none; channels side by side."""
    filler = torch.nan if tensor.is_floating_point() else 255
    whole = torch.full((tensor.numel() + 128,), filler, dtype=tensor.dtype)
    count, channels, height, width = tensor.shape
    inner = whole[64:-64].view(count, height, width, channels).permute(0, 3, 1, 2)
    return whole, inner.copy_(tensor)


@needs_kernel
def test_pooling_reads_and_writes_nothing_beside_the_tensors() -> None:
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


@needs_kernel
@each_block
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_derivatives_of_the_first_and_second_order_against_differences(block: Block) -> None:
    tensors = tuple(tensor.requires_grad_() for tensor in block.few())
    assert torch.autograd.gradcheck(block.kernel, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *each: block.kernel(*(tensor**3 for tensor in each)), tensors)


def of_weights(f: Function) -> Function:
    """Return the gradient of the weights, as MAML takes it."""
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
    torch.testing.assert_close(transformed(convolve, *few()), transformed(convolve_in_torch, *few()))


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
def test_pooling_under_torch_func_as_the_reference(transform: Any, shape: tuple[int, ...]) -> None:
    images = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(transform(pool)(images), transform(pool_in_torch)(images))


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the kernels that are called from now on."""
    asked: list[str] = []
    call = cpu._call

    def count(kernel: str, *arguments: Any) -> None:
        asked.append(kernel)
        call(kernel, *arguments)

    monkeypatch.setattr(cpu, "_call", count)
    return asked


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
    asked = count_calls(monkeypatch)
    found = conv_leaky_max_pool(*tensors)
    assert asked.count("convolution") == calls
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, convolve_in_torch(*tensors), rtol=tolerance, atol=tolerance)
    assert found.stride() == convolve_in_torch(*tensors).stride()


@needs_kernel
@pytest.mark.parametrize(
    ("images", "calls"),
    [
        (many_to_pool(), 1),
        (many_to_pool().bfloat16(), 1),
        (many_to_pool().half(), 0),
        (many_to_pool()[:1], 0),
        (many_to_pool().contiguous(), 0),
    ],
    ids=["many", "bfloat16", "half", "few", "channels apart"],
)
def test_the_kernel_is_taken_for_many_numbers_with_channels_side_by_side(
    images: Tensor, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count_calls(monkeypatch)
    found = leaky_max_pool(images)
    assert len(asked) == calls
    assert torch.equal(found, pool_in_torch(images))
    assert found.stride() == pool_in_torch(images).stride()


@needs_kernel
def test_autocast_decides_what_is_computed_in() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = convolve(*many()), convolve_in_torch(*many())
    assert found.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(found, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("half", [False, True])
def test_a_run_of_blocks_is_one_after_another_and_sums_gradients_in_the_weights_precision(half: bool) -> None:
    torch.manual_seed(0)
    shapes = (32, 1, 3, 3), (32,), (16, 32, 3, 3), (16,)
    images, tensors = torch.randn(20, 1, 9, 8), [torch.randn(shape, requires_grad=True) for shape in shapes]
    dtype = torch.bfloat16 if half else torch.float32

    def run_each(images: Tensor) -> Tensor:
        for weight, bias in (tensors[:2], tensors[2:]):
            images = convolve_in_torch(*(tensor.to(dtype) for tensor in (images, weight, bias)))
        return images

    def run_all(images: Tensor) -> Tensor:
        return run_blocks(images, [(tensors[0], tensors[1]), (tensors[2], tensors[3])])

    def differentiate(run: Function) -> tuple[Tensor, ...]:
        results = torch.stack([run(images), run(2 * images)])
        return results, *torch.autograd.grad(results.float().sin().sum(), tensors)

    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        ours = differentiate(run_all)
    for mine, right in zip(ours, differentiate(run_each), strict=True):
        assert torch.equal(mine, right)


@needs_kernel
@each_block
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    "traced",
    [
        lambda kernel, *tensors: torch.compile(kernel, backend="eager", fullgraph=True)(*tensors),
        lambda kernel, *tensors: make_fx(kernel)(*tensors)(*tensors),
        lambda kernel, *tensors: torch.jit.trace(kernel, tensors)(*tensors),
        lambda kernel, *tensors: torch.func.linearize(kernel, *tensors)[0],
    ],
    ids=["compile", "make_fx", "jit.trace", "linearize"],
)
def test_a_trace_gives_what_the_call_gives(traced: Function, block: Block) -> None:
    tensors = block.many()
    assert torch.equal(traced(block.kernel, *tensors), block.kernel(*tensors))


@needs_kernel
def test_results_lie_where_the_images_lie() -> None:
    images = many_to_pool().requires_grad_()
    with torch.device("meta"):
        pooled = pool(images)
        (gradient,) = torch.autograd.grad(pooled.sum(), images)
    assert pooled.device == gradient.device == images.device
    assert torch.equal(pooled, pool_in_torch(images))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert pool(images).shape == (4, 32, 20, 20)


@needs_kernel
def test_the_operators_are_as_they_say() -> None:
    images, weight, bias = many()
    pooled, codes = cpu.convolve(images, weight, bias, 0.2)
    operators = torch.ops.fastweights
    calls: tuple[Any, ...] = (
        (operators.convolve_and_pool.default, (images, weight, bias, 0.2)),
        (operators.convolution_taps.default, (pooled, codes, images, 0.2)),
        (operators.pool.default, (many_to_pool(), 0.2)),
        (operators.pool_spread.default, (pooled, codes, 20, 20, 0.2)),
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
        ((2, 3, 4, 4), (8, 3, 3, 3), 7, {}, r"bias must have a number for each of the 8 output channels; got \[7\]"),
        ((2, 3, 4, 4), (8, 3, 3, 3), 8, {"slope": -1.0}, "slope must be at least 0, got -1.0"),
        ((2, 3, 4, 4), (8, 3, 3, 3), 8, {"impl": "gpu"}, "impl must be one of auto, reference, cpu, got 'gpu'"),
    ],
)
def test_bad_input(images: Any, weight: Any, bias: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conv_leaky_max_pool(torch.zeros(images), torch.zeros(weight), torch.zeros(bias), **options)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (torch.zeros(2, 3, 4), {}, r"images must be \[N,C,H,W\], none of C, H and W zero; got \[2, 3, 4\]"),
        (torch.zeros(2, 3, 0, 4), {}, r"none of C, H and W zero; got \[2, 3, 0, 4\]"),
        (torch.zeros(2, 3, 4, 4), {"slope": -0.1}, "slope must be at least 0, got -0.1"),
        (torch.zeros(2, 3, 4, 4), {"slope": float("nan")}, "slope must be at least 0, got nan"),
        (torch.zeros(2, 3, 4, 4), {"impl": "triton"}, "impl must be one of auto, reference, cpu, got 'triton'"),
    ],
)
def test_bad_images_to_pool(images: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leaky_max_pool(images, **options)


@needs_kernel
def test_what_it_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"takes bfloat16, float32 and float64, got torch\.float16"):
        convolve(*many(dtype=torch.half))
    images, weight, bias = many()
    with pytest.raises(KernelError, match=r"weights are torch\.float64 on cpu, images torch\.float32 on cpu"):
        convolve(images, weight.double(), bias)
    with pytest.raises(KernelError, match=r"takes bfloat16, float32 and float64, got torch\.float16"):
        pool(many_to_pool().half())
