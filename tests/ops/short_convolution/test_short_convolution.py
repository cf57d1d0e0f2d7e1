"""The short convolution: its reference against a loop in NumPy and torch's own, its kernel against the reference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.short_convolution.reference import ShortInputs

from ..parity import error, needs_kernel, negated_view
from .cases import Case, call, draw_grad, loop, run
from .parity import CASES, require_parity

IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_kernel)]


def tensors_of(case: Case) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in case.inputs().items()}


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    require_parity(case, draws=8)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case", [Case(9), Case(70, 3, 2, batch=1), Case(9, plain=True), Case(9, silu=False), Case(3, taps=6)], ids=str
)
def test_a_loop_in_numpy_gives_the_same(case: Case, impl: str) -> None:
    arrays, starts = case.inputs(), case.starts()
    found = run(case, torch.float64, impl)
    assert error(found["outputs"], torch.from_numpy(loop(arrays, starts, case.silu))) < 1e-12
    grad = draw_grad(found["outputs"]).numpy()
    for name, array in arrays.items():
        direction = np.random.default_rng(6).normal(size=array.shape)
        moved = loop({**arrays, name: array + 1e-30j * direction}, starts, case.silu)
        gradient = found[f"gradient of {name}"].numpy()
        off = abs((gradient * direction).sum() - (grad * moved.imag).sum() / 1e-30)
        assert off < 1e-12 * np.linalg.norm(gradient) * np.linalg.norm(direction) + 1e-13, name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("taps", [1, 4, 9])
def test_torchs_grouped_convolution_gives_the_same(taps: int, impl: str) -> None:
    x, weight, bias = torch.randn(2, 70, 6), torch.randn(6, taps), torch.randn(6)
    expected = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=taps - 1, groups=6)[:, :, :70]
    torch.testing.assert_close(short_convolution(x, weight, bias, impl=impl), expected.transpose(1, 2))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_pieces_are_the_whole(impl: str) -> None:
    x, weight = torch.randn(2, 150, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    whole = short_convolution(x, weight, activation="silu", impl=impl)
    first = short_convolution(x[:, :67], weight, activation="silu", impl=impl)
    second = short_convolution(x[:, 67:], weight, last=x[:, 63:67], activation="silu", impl=impl)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", [[5], [1, 1, 70, 2], [0, 9, 0, 0, 130, 0]], ids=str)
def test_packed_sequences_are_separate_ones(lengths: list[int], impl: str) -> None:
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    x = torch.randn(1, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64)
    packed = short_convolution(x, weight, cu_seqlens=bounds, activation="silu", impl=impl)
    separate = [short_convolution(part, weight, activation="silu", impl=impl) for part in x.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(separate, 1), rtol=0, atol=1e-13)
    grad = torch.randn_like(packed)
    mine, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (packed, torch.cat(separate, 1)))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_bounds_of_packed_sequences_that_are_none_are_refused() -> None:
    x, weight = torch.randn(1, 9, 2), torch.randn(2, 4)
    for bounds, words in [
        ([0, 4], r"cu_seqlens must ascend from 0 to the number of steps, 9 here, got \[0, 4\]"),
        ([0, 6, 4, 9], r"must ascend from 0 to the number of steps, 9 here, got \[0, 6, 4, 9\]"),
        ([9], "cu_seqlens must hold the start of each packed sequence"),
    ]:
        with pytest.raises(ValueError, match=words):
            short_convolution(x, weight, cu_seqlens=torch.tensor(bounds))
    whole: Any = torch.tensor([0, 9])
    with pytest.raises(ValueError, match="packed into one row, B = 1, got a batch of 2"):
        short_convolution(torch.randn(2, 9, 2), weight, cu_seqlens=whole)
    with pytest.raises(ValueError, match="give no starts and no last beside them"):
        short_convolution(x, weight, cu_seqlens=whole, last=torch.zeros(1, 3, 2))
    with pytest.raises(TypeError, match=r"cu_seqlens must be a tensor, got a list: torch.tensor\(\[0, 9\]\)"):
        short_convolution(x, weight, cu_seqlens=whole.tolist())
    with pytest.raises(TypeError, match=r"cu_seqlens must be int64 or int32 on cpu, got torch\.float32"):
        short_convolution(x, weight, cu_seqlens=whole.float())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("silu", [True, False])
def test_nan_before_a_start_stays_there(silu: bool, impl: str) -> None:
    case = Case(130, 6, 4, batch=1, silu=silu)
    tensors: dict[str, Any] = tensors_of(case)
    starts = torch.zeros(1, 130, dtype=torch.bool)
    starts[0, [0, 64, 66]] = True
    tensors["last"][:] = torch.nan
    tensors["x"][0, 63] = tensors["x"][0, 65] = torch.nan
    for tensor in tensors.values():
        tensor.requires_grad_()
    y = short_convolution(**tensors, starts=starts, activation=case.activation, impl=impl)
    clean = [step for step in range(130) if step not in (63, 65)]
    assert y[0, clean].isfinite().all()
    grad = torch.zeros_like(y)
    grad[0, 66:] = 1
    gradients = torch.autograd.grad(y, list(tensors.values()), grad, materialize_grads=True)
    if impl == "cpu" and not silu:  # the reference multiplies what is not finite by zeros
        assert all(gradient.isfinite().all() for gradient in gradients[:1])
    assert gradients[0][0, 66:].isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_numbers_come_to_nothing(dtype: torch.dtype, impl: str) -> None:
    for low in (-1e30, torch.finfo(dtype).min):
        x = torch.full((1, 1, 3), low, dtype=dtype, requires_grad=True)
        y = short_convolution(x, torch.ones(3, 1, dtype=dtype), activation="silu", impl=impl)
        assert not y.any()
        assert not torch.autograd.grad(y.sum(), x)[0].any()


@needs_kernel
@pytest.mark.parametrize("plain", [False, True])
def test_gradients_against_differences(plain: bool) -> None:
    case = Case(4, 2, 3, plain=plain)
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors_of(case).items()}
    for impl in ("reference", "cpu"):

        def function(*values: Tensor, impl: str = impl) -> Tensor:
            return call(case, dict(zip(tensors, values, strict=True)), impl)

        assert torch.autograd.gradcheck(function, list(tensors.values()))
        assert torch.autograd.gradgradcheck(function, list(tensors.values()))


@needs_kernel
def test_rows_that_are_parts_of_longer_ones_and_turned_or_negated_numbers() -> None:
    case = Case(70, 6)
    tensors = tensors_of(case)
    expected = run(case, torch.float64, "cpu")
    wide = torch.randn(2, 70, 20, dtype=torch.float64)
    wide[:, :, 3:9] = tensors["x"]
    turned = tensors["x"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for x in (wide[:, :, 3:9], turned, negated_view(tensors["x"])):
        given = {**tensors, "x": x, "weight": negated_view(tensors["weight"])}
        inputs = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
        y = call(case, inputs, "cpu")
        assert torch.equal(y, expected["outputs"])
        gradients = torch.autograd.grad(y, list(inputs.values()), draw_grad(y))
        for name, gradient in zip(inputs, gradients, strict=True):
            assert torch.equal(gradient, expected[f"gradient of {name}"]), name


@needs_kernel
def test_operators() -> None:
    tensors = tensors_of(Case(3, 2))
    starts = torch.tensor([[False, True, False], [True, False, False]])
    forward, backward = torch.ops.fastweights.short_convolution, torch.ops.fastweights.short_convolution_backward
    whole = ShortInputs(tensors["x"], tensors["weight"], tensors["bias"], tensors["last"], starts)
    for each in (whole, whole._replace(bias=None, last=None, starts=None)):
        for silu in (False, True):
            torch.library.opcheck(forward.default, (*each, silu, True))
            grad = torch.ones_like(each.x)
            torch.library.opcheck(backward.default, (grad, *each, silu, [True] * (len(each) - 1)))


@needs_kernel
def test_any_number_of_threads_gives_the_same_bits() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(Case(200, 70, batch=3), torch.float32, "cpu"))
    finally:
        torch.set_num_threads(before)
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results[1:]), name


@needs_kernel
def test_it_compiles_maps_and_takes_half_precision() -> None:
    tensors: dict[str, Any] = {name: tensor.bfloat16() for name, tensor in tensors_of(Case(9)).items()}
    y = short_convolution(**tensors, activation="silu")
    assert y.dtype == torch.bfloat16
    exact: dict[str, Any] = {name: tensor.double() for name, tensor in tensors.items()}
    torch.testing.assert_close(y, short_convolution(**exact, activation="silu").bfloat16())
    compiled = torch.compile(short_convolution, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**tensors, activation="silu"), y)
    x, weight = torch.randn(3, 2, 9, 5), torch.randn(5, 4)
    mapped = torch.vmap(lambda each: short_convolution(each, weight, impl="cpu"))(x)
    torch.testing.assert_close(mapped, torch.stack([short_convolution(each, weight) for each in x]))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_steps_and_no_sequences(impl: str) -> None:
    weight, last = torch.randn(5, 4, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    for x in (torch.randn(2, 0, 5, requires_grad=True), torch.randn(0, 3, 5, requires_grad=True)):
        y = short_convolution(x, weight, last=last[: len(x)], impl=impl)
        assert y.shape == x.shape
        assert not torch.autograd.grad(y.sum(), weight)[0].any()


def test_bad_input_is_refused() -> None:
    good: dict[str, Any] = tensors_of(Case(3, 2))  # B 2, C 2, W 4, T 3
    for wrong, words in [
        ({"x": good["x"][0]}, r"x must be \[B,T,C\] and weight \[C,W\].*got \[3, 2\] and \[2, 4\]"),
        ({"weight": good["weight"][:1]}, r"got \[2, 3, 2\] and \[1, 4\]"),
        ({"weight": good["weight"][:, :0]}, r"got \[2, 3, 2\] and \[2, 0\]"),
        ({"bias": torch.ones(3)}, r"bias must be \[C\], \[2\] here, got \[3\]"),
        ({"last": good["last"][:, :2]}, r"last must be \[B,W-1,C\], \[2, 3, 2\] here, got \[2, 2, 2\]"),
        ({"starts": torch.ones(3, dtype=torch.bool)}, r"starts must be \[B,T\], \[2, 3\] here, got \[3\]"),
        ({"activation": "relu"}, "activation must be 'silu' or None, got 'relu'"),
        ({"impl": "gpu"}, "impl must be one of"),
    ]:
        with pytest.raises(ValueError, match=words):
            short_convolution(**good | wrong)
    for wrong, words in [
        ({"x": good["x"].int()}, r"x must be of real numbers on cpu, got torch\.int32"),
        ({"weight": 1.0}, "weight must be a tensor, got a float"),
        ({"starts": torch.ones(2, 3)}, r"starts must be bool on cpu, got torch\.float32"),
    ]:
        with pytest.raises(TypeError, match=words):
            short_convolution(**good | wrong)
