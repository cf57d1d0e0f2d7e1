"""What the operation and its kernel take: tensors of every kind, refusals, and the choice of the implementation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops import _native
from fastweights.ops.associative import Constants, Inputs, associative, associative_with_memory, cpu, reference

from ..parity import error, needs_kernel, negated_view
from . import parity
from .parity import Case, assert_same_bits, named

SMALL = Case(4, 3, 2)


@needs_kernel
@pytest.mark.parametrize("kind", ["transposed", "strided", "negated", "imaginary"])
@pytest.mark.parametrize("name", [*parity.INPUTS, "outputs", "grad_outputs"])
def test_views(name: str, kind: str, form: str) -> None:
    def view(tensor: Tensor) -> Tensor:
        """A view that holds the same numbers in another way."""
        if kind == "transposed":
            return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        if kind == "strided":
            return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]
        if kind == "negated":
            return negated_view(tensor)
        return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag

    case = Case(20, 9, 5, 2, starts=True, control=True)
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32, form)
    all_inputs = {**inputs, "outputs": expected["outputs"], "grad_outputs": parity.gradient_of_outputs(case)}
    changed = view(all_inputs[name])
    assert torch.equal(changed, all_inputs[name])
    assert changed.is_neg() == (kind in ("negated", "imaginary"))
    all_inputs[name] = changed
    arguments = parity.positional(case, all_inputs)
    gradients = cpu.backward(all_inputs["grad_outputs"], all_inputs["outputs"], *(*arguments, form))
    assert_same_bits(named(cpu.forward(*(*arguments, form, False))[0], gradients), expected)


@needs_kernel
def test_expanded_inputs(form: str) -> None:
    case = Case(20, 9, 33, 2)
    inputs = case.inputs()
    expanded = {
        **inputs,
        "drive": inputs["drive"][:, :1].expand(-1, 33, -1),
        "hidden": inputs["hidden"][:1].expand(33, -1),
        "memory": inputs["memory"][:1].expand(33, -1, -1),
        "lengths": torch.tensor([7]).expand(33),
        "norm_weight": torch.ones(1).expand(20),
        "norm_bias": torch.zeros(1).expand(20),
        "weight_hh": torch.full((1, 1), 0.01).expand(20, 20),
        "strengths": torch.rand(9, 1).expand(9, 33),
        "starts": (torch.arange(9) == 4).unsqueeze(1).expand(9, 33),
    }
    plain = {name: None if tensor is None else tensor.contiguous() for name, tensor in expanded.items()}
    assert_same_bits(
        parity.kernel(case, expanded, torch.float32, form), parity.kernel(case, plain, torch.float32, form)
    )


@needs_kernel
@pytest.mark.parametrize("lengths", [False, True])
def test_empty_batch(lengths: bool, form: str) -> None:
    case = Case(5, 4, 0, lengths=False)
    inputs = {**case.inputs(), "lengths": torch.zeros(0, dtype=torch.int64) if lengths else None}
    results = parity.kernel(case, inputs, torch.float32, form)
    assert results["outputs"].shape == (4, 0, 5)
    for name in ("weight_hh", "norm_weight", "norm_bias"):
        assert torch.equal(results[name], torch.zeros_like(inputs[name])), name


@needs_kernel
def test_default_device_elsewhere(form: str) -> None:
    case = Case(5, 4, 2)
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32, form)
    grad_outputs = parity.gradient_of_outputs(case)
    with torch.device("meta"):
        arguments = parity.positional(case, inputs)
        outputs = cpu.forward(*(*arguments, form, False))[0]
        gradients = cpu.backward(grad_outputs, outputs, *(*arguments, form))
    assert_same_bits(named(outputs, gradients), expected)


def arguments_with(**others: Any) -> tuple[Any, ...]:
    return parity.positional(SMALL, {**SMALL.inputs(), **others})


@needs_kernel
@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ({"drive": torch.zeros(3, 4)}, ValueError, r"drive must be \[T,B,H\], got shape \(3, 4\)"),
        ({"weight_hh": torch.zeros(3, 4)}, ValueError, r"weight_hh must have shape \(4, 4\), got \(3, 4\)"),
        ({"norm_weight": torch.zeros(3)}, ValueError, r"norm_weight must have shape \(4,\), got \(3,\)"),
        ({"norm_bias": torch.zeros(1, 4)}, ValueError, r"norm_bias must have shape \(4,\), got \(1, 4\)"),
        ({"norm_weight": None}, ValueError, r"norm_weight and norm_bias come together: give both, or neither"),
        ({"norm_bias": None}, ValueError, r"norm_weight and norm_bias come together: give both, or neither"),
        ({"hidden": torch.zeros(1, 4)}, ValueError, r"hidden must have shape \(2, 4\), got \(1, 4\)"),
        ({"memory": torch.zeros(4, 4)}, ValueError, r"memory must have shape \(2, 4, 4\), got \(4, 4\)"),
        ({"lengths": torch.ones(3).long()}, ValueError, r"lengths must have shape \(2,\), got \(3,\)"),
        ({"lengths": torch.tensor([0, 4])}, ValueError, r"lengths must lie between 0 and 3, got 0 to 4"),
        ({"lengths": torch.tensor([-1, 3])}, ValueError, r"lengths must lie between 0 and 3, got -1 to 3"),
        ({"lengths": torch.ones(2).int()}, TypeError, r"lengths must be int64 on cpu, got torch.int32 on cpu"),
        ({"strengths": torch.ones(2, 3)}, ValueError, r"strengths must have shape \(3, 2\), got \(2, 3\)"),
        ({"starts": torch.ones(2, 3).bool()}, ValueError, r"starts must have shape \(3, 2\), got \(2, 3\)"),
        ({"clears": torch.ones(3, 2)}, TypeError, r"clears must be torch.bool on cpu, got torch.float32 on cpu"),
        (
            {"lengths": torch.ones(2, device="meta").long()},
            TypeError,
            r"lengths must be int64 on cpu, got torch.int64 on meta",
        ),
        (
            {"drive": torch.zeros(3, 2, 4, device="meta")},
            KernelError,
            r"the cpu kernel needs tensors on the cpu, got meta",
        ),
        (
            {"hidden": torch.zeros(2, 4, device="meta")},
            TypeError,
            r"hidden is torch.float32 on meta, drive is torch.float32 on cpu",
        ),
    ],
)
def test_refuses_inputs(others: dict[str, Any], error: type[Exception], message: str, form: str) -> None:
    arguments = arguments_with(**others)
    with pytest.raises(error, match=message):
        cpu.forward(*(*arguments, form, False))
    with pytest.raises(error, match=message):
        cpu.backward(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), *(*arguments, form))


@needs_kernel
def test_refuses_other_dtypes() -> None:
    with pytest.raises(KernelError, match=r"the cpu kernel takes float32 and float64, got torch.bfloat16"):
        cpu.forward(*(*parity.positional(SMALL, SMALL.inputs(), torch.bfloat16), "attention", False))
    inputs, constants = arguments_with()
    message = r"weight_hh is torch.float32 on cpu, drive is torch.float64 on cpu"
    with pytest.raises(TypeError, match=message):
        cpu.forward(inputs._replace(drive=inputs.drive.double()), constants, "attention")


@needs_kernel
@pytest.mark.parametrize("name", ["outputs", "grad_outputs"])
def test_backward_refuses_what_does_not_fit(name: str) -> None:
    right, short, double = torch.zeros(3, 2, 4), torch.zeros(2, 2, 4), torch.zeros(3, 2, 4).double()

    def run(wrong: Tensor) -> None:
        given = (right, wrong) if name == "outputs" else (wrong, right)
        cpu.backward(*given, *(*arguments_with(), "attention"))

    run(right)
    with pytest.raises(ValueError, match=rf"{name} must have shape \(3, 2, 4\), got \(2, 2, 4\)"):
        run(short)
    with pytest.raises(TypeError, match=rf"{name} is torch.float64 on cpu, drive is torch.float32 on cpu"):
        run(double)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", ["norm_weight", "norm_bias"])
def test_half_a_layer_norm(name: str, impl: str) -> None:
    inputs = {**SMALL.inputs(), name: None}
    with pytest.raises(ValueError, match="norm_weight and norm_bias come together: give both, or neither"):
        associative(**inputs, constants=SMALL.constants, impl=impl)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"decay": -0.1}, "decay must lie between 0 and 1, got -0.1"),
        ({"decay": 1.1}, "decay must lie between 0 and 1, got 1.1"),
        ({"decay": math.nan}, "decay must lie between 0 and 1, got nan"),
        ({"rate": -0.5}, "rate must be finite and not negative, got -0.5"),
        ({"rate": math.inf}, "rate must be finite and not negative, got inf"),
        ({"inner_steps": 0}, "inner_steps must be a whole number from 1 to 10,000, got 0"),
        ({"inner_steps": 10_001}, "inner_steps must be a whole number from 1 to 10,000, got 10001"),
        ({"inner_steps": True}, "inner_steps must be a whole number from 1 to 10,000, got True"),
        ({"nonlinearity": "gelu"}, "nonlinearity must be one of relu, tanh, got 'gelu'"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": -1e-5}, "eps must be positive"),
    ],
)
def test_constants_out_of_range(constants: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Constants(**{"decay": 0.9, "rate": 0.5, **constants})


@needs_kernel
@pytest.mark.parametrize("name", ["weight_hh", "hidden"])
def test_a_tensor_that_is_missing_is_refused(name: str) -> None:
    inputs: dict[str, Any] = {"drive": torch.randn(7, 2, 5), "weight_hh": torch.eye(5), "hidden": torch.zeros(2, 5)}
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got None"):
        associative(**{**inputs, name: None}, constants=Constants(decay=0.9, rate=0.1))


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_method_2_has_no_kernel(impl: str) -> None:
    inputs = torch.randn(7, 2, 5), torch.eye(5), torch.zeros(2, 5)
    with pytest.raises(KernelError, match=f"impl='{impl}' was asked for, but hold_input=False is in plain PyTorch"):
        associative(*inputs, constants=Constants(decay=0.9, rate=0.1, hold_input=False), impl=impl)
    with pytest.raises(ValueError, match=r"impl must be one of .*, got 'gpu'"):
        associative(*inputs, constants=Constants(decay=0.9, rate=0.1, hold_input=False), impl="gpu")


def call(impl: str, dtype: torch.dtype = torch.float32) -> Tensor:
    inputs, constants = parity.positional(SMALL, SMALL.inputs(), dtype)
    return associative(**inputs._asdict(), constants=constants, impl=impl)


def test_library_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call("reference")
    monkeypatch.setattr(_native, "LIBRARY", None)
    monkeypatch.setattr(_native, "MISSING", "libfastweights.so was not built: no compiler")
    with pytest.raises(KernelError, match=r"impl='cpu' was asked for, but libfastweights.so was not built: no comp"):
        call("cpu")
    assert torch.equal(call("auto"), expected)


@needs_kernel
def test_auto_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call("cpu")
    assert error(expected, call("reference").double()) < 1e-6
    monkeypatch.delattr(reference, "recurrence")
    assert torch.equal(call("auto"), expected)


def test_cpu_cannot_take_half_precision() -> None:
    with pytest.raises(
        KernelError, match=r"impl='cpu' was asked for, but the cpu kernel takes float32 and float64, go"
    ):
        call("cpu", torch.bfloat16)
    assert torch.equal(call("auto", torch.bfloat16), call("reference", torch.bfloat16))


def test_triton_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match=r"impl='triton' was asked for, but the triton kernel needs tensors on a GPU"):
        call("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("chunks", "steps", "keep_memory", "expected"),
    [
        (1, 19, False, "attention"),
        (4, 19, True, "attention"),
        (4, 112, False, "attention"),
        (4, 113, False, "matrix"),
        (0.5, 22, False, "attention"),
        (0.5, 23, False, "matrix"),
        (4, 1, True, "matrix"),
        (4, 1, False, "attention"),
        (0, 5, False, "attention"),
    ],
)
def test_the_form_follows_the_length_and_how_full_the_chunks_are(
    monkeypatch: pytest.MonkeyPatch, chunks: float, steps: int, keep_memory: bool, expected: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(_native, "REGISTER_BYTES", 64)
    lanes = 128 // dtype.itemsize
    assert cpu.choose_form(torch.empty(steps, int(chunks * lanes), 40, dtype=dtype), keep_memory) == expected
    assert cpu.choose_form(torch.empty(steps, 1, 7, dtype=dtype), keep_memory) == "matrix"
    assert cpu.choose_form(torch.empty(150, lanes, 24, dtype=dtype), keep_memory) == "attention"
    assert cpu.choose_form(torch.empty(151, lanes, 24, dtype=dtype), keep_memory) == "matrix"


def test_unknown_form() -> None:
    inputs, constants = parity.positional(SMALL, SMALL.inputs())
    with pytest.raises(ValueError, match="form must be one of auto, attention, matrix, got 'dense'"):
        associative(**inputs._asdict(), constants=constants, form="dense")


def test_unknown_impl() -> None:
    with pytest.raises(ValueError, match="impl must be one of auto, reference, cpu, triton, got 'cuda'"):
        call("cuda")


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("shape", [(0, 1, 3), (1, 3)])
def test_no_steps(shape: tuple[int, ...], impl: str) -> None:
    with pytest.raises(ValueError, match=rf"drive must be \[T,B,H\] with at least one step, got shape \({shape[0]}, "):
        associative(torch.zeros(shape), torch.eye(3), torch.zeros(1, 3), constants=Constants(0.9, 0.5), impl=impl)


@pytest.mark.parametrize("form", [reference.matrix_form, reference.attention_form])
def test_padding_reaches_no_gradient_of_the_reference(form: Any) -> None:
    inputs = SMALL.inputs()
    inputs["lengths"] = torch.tensor([1, 3])
    results = []
    for padding in (0.0, math.nan):
        drive = inputs["drive"].clone()
        drive[1:, 0] = padding
        inputs["strengths"] = torch.tensor([[1.0, 1.0], [padding, 1.0], [padding, 1.0]])
        given = [tensor.requires_grad_() for tensor in (drive, *(inputs[name] for name in parity.INPUTS[1:]))]
        outputs = form(Inputs._make((*given, *(inputs[name] for name in parity.FIXED))), SMALL.constants)
        results.append(named(outputs.detach(), list(torch.autograd.grad(outputs.sum(), given))))
    assert_same_bits(*results)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("drive", torch.zeros(3, 2, 0), ValueError, r"drive must have at least one unit, got shape \(3, 2, 0\)"),
        ("weight_hh", torch.zeros(4, 3), ValueError, r"weight_hh must have shape \(4, 4\), got \(4, 3\)"),
        ("hidden", torch.zeros(2, 4).double(), TypeError, "hidden is torch.float64 on cpu, drive is torch.float32"),
        ("weight_hh", torch.zeros(4, 4, device="meta"), TypeError, "weight_hh is torch.float32 on meta, drive is"),
        ("lengths", torch.tensor([1, 2]).int(), TypeError, "lengths must be int64 on cpu, got torch.int32 on cpu"),
    ],
)
def test_every_implementation_refuses_what_does_not_fit(
    impl: str, name: str, value: Tensor, error: type[Exception], message: str
) -> None:
    inputs, constants = parity.positional(SMALL, SMALL.inputs())
    with pytest.raises(error, match=message):
        associative(**{**inputs._asdict(), "lengths": None, name: value}, constants=constants, impl=impl)


def test_the_reference_takes_lengths_out_of_range_as_none_and_all_of_the_steps(form: str) -> None:
    case = Case(4, 3, 2, memory=True)
    results = []
    for lengths in ([-2, 9], [0, 3]):
        inputs = case.inputs() | {"lengths": torch.tensor(lengths)}
        results.append(associative_with_memory(**inputs, constants=case.constants, impl="reference", form=form))
    assert all(torch.equal(beyond, within) for beyond, within in zip(*results, strict=True))


@needs_kernel
def test_a_trace_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    exact = cpu.count_trace
    monkeypatch.setattr(cpu, "count_trace", lambda *arguments: exact(*arguments) - 1)
    with pytest.raises(KernelError, match="the associative kernel failed"):
        cpu.forward(*(*parity.positional(SMALL, SMALL.inputs()), form, False, True))
