"""The Triton kernels: parity with the reference in both forms, in the interpreter and (marked `gpu`) on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops.associative import Constants, Inputs, associative_with_memory, reference
from fastweights.ops.associative import triton as kernel

from ..parity import check_parity
from ..triton_here import child, poisoned, skip_unless_available
from . import parity
from .parity import INPUTS, Case, Tensors, assert_same_bits, gradient_of_outputs, named

# The interpreter takes about 40 ms for a step of one sequence, forwards and backwards: a few small cases, and of those
# the default tests have the ones with most parts.
in_detail = pytest.mark.slow
CASES = [
    pytest.param(Case(1, 6, 2, 1, "relu", "norm"), marks=in_detail),
    pytest.param(Case(1, 5, 1, 3, "tanh", "plain", memory=False, lengths=False), marks=in_detail),
    Case(3, 7, 2, 2, "tanh", "norm-initial"),
    Case(3, 7, 3, 1, "relu", "plain", memory=False),
    Case(3, 7, 3, 2, starts=True, control=True),
    pytest.param(Case(3, 9, 4, 1, "tanh", "plain", lengths=False, starts=True), marks=in_detail),
    pytest.param(Case(3, 7, 2, 1, "relu", "norm-initial", memory=False, control=True), marks=in_detail),
    pytest.param(Case(260, 3, 1, 1, "tanh", "plain", lengths=False, starts=True), marks=in_detail),
    pytest.param(Case(20, 5, 3, 2, "relu", "norm", lengths=False), marks=in_detail),
    pytest.param(Case(33, 5, 3, 1, "relu", "norm-initial", memory=False), marks=in_detail),
    pytest.param(Case(100, 4, 2, 1, "relu", "norm"), marks=in_detail),
    pytest.param(Case(260, 2, 1, 1, "tanh", "plain", lengths=False), marks=in_detail),
]
LARGE = [
    *parity.FEW,
    *parity.STARTS,
    Case(64, 75, 8, 1, "relu", "norm", memory=False, lengths=False),
    Case(100, 111, 5, 1, "relu", "norm"),
    Case(200, 50, 5, 3, "tanh", "norm-initial"),
    Case(256, 20, 2, 1, "relu", "plain"),
]
FEW = [Case(3, 5, 2, 2, "tanh", "norm-initial"), Case(3, 5, 3, 1, "relu", "plain", memory=False)]


@pytest.fixture(params=kernel.FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either form; the matrix form in chunks of three steps, so that short sequences have several."""

    def chunk_length(steps: int, size: int, form: str) -> int:
        return steps if form == "attention" else min(steps, 3)

    monkeypatch.setattr(kernel, "chunk_length", chunk_length)
    return str(request.param)


def positional(case: Case, inputs: Tensors, dtype: torch.dtype, device: str, form: str) -> tuple[Any, ...]:
    tensors, constants = parity.positional(case, inputs, dtype)
    placed = Inputs._make(None if tensor is None else tensor.to(device) for tensor in tensors)
    return placed, constants, form


def run(
    case: Case, inputs: Tensors, dtype: torch.dtype, device: str, form: str, grad_outputs: Tensor | None = None
) -> dict[str, Tensor]:
    """Outputs, and every gradient by the name of its input."""
    arguments = positional(case, inputs, dtype, device, form)
    grad_outputs = gradient_of_outputs(case) if grad_outputs is None else grad_outputs
    outputs = kernel.forward(*arguments)
    gradients = kernel.backward(grad_outputs.to(device, dtype), outputs, *arguments)
    return {name: tensor.cpu() for name, tensor in named(outputs, gradients).items()}


def check(case: Case, device: str, form: str) -> None:
    def results(implementation: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = case.inputs(draw)
        if implementation == "reference":
            return parity.eager(case, inputs, dtype)
        return run(case, inputs, dtype, device, implementation)

    # One draw takes the interpreter as long as 32 take a GPU.
    draws = 1 if device == "cpu" else parity.draws(case)
    check_parity(results, (form,), draws=draws, floor=parity.floor(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case, device: str, form: str) -> None:
    check(case, device, form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", kernel.FORMS)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_parity_of_larger_cases(case: Case, form: str) -> None:
    skip_unless_available("cuda")
    check(case, "cuda", form)


@in_detail
def test_more_steps_than_a_block_has_rows(device: str) -> None:
    check(Case(3, 33, 1, 1, "tanh", memory=False, lengths=False), device, "attention")


def test_chunks_of_their_own_length(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SHORTEST_CHUNK", 4)
    check(Case(5, 13, 1, norm="plain", lengths=False), device, "matrix")


@pytest.mark.parametrize("size", [1, 20, 64, 200])
def test_matrices_between_chunks_take_no_more_than_the_outputs(size: int) -> None:
    for steps in (1, 63, 64, 65, 2000):
        assert kernel.chunk_length(steps, size, "attention") == steps
        chunks = -(-steps // kernel.chunk_length(steps, size, "matrix"))
        assert (chunks - 1) * size**2 <= steps * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_accurate_near_zero_and_far_from_it(device: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1e-30, -1e-8, 1e-3, 0.3, -0.624, 0.626, 2, -9, 30, -1e4, 1e30, torch.inf], dtype=dtype)
    drive = x.view(1, 1, -1).to(device)
    zeros = torch.zeros(x.numel(), x.numel(), dtype=dtype, device=device)
    constants = Constants(1.0, 0.0, 1, "tanh")
    inputs = Inputs(drive, zeros, None, None, zeros[:1])
    outputs = kernel.forward(inputs, constants, "attention")
    torch.testing.assert_close(outputs.view(-1).cpu(), x.tanh(), rtol=8 * torch.finfo(dtype).eps, atol=0)


@in_detail
@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.filterwarnings("ignore:Deterministic behavior")  # cuBLAS wants a variable of the environment for that
def test_results_do_not_depend_on_what_memory_held(case: Case, device: str, form: str) -> None:
    inputs = case.inputs()
    clean = run(case, inputs, torch.float32, device, form)
    assert all(tensor.isfinite().all() for tensor in clean.values())
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert_same_bits(run(case, inputs, torch.float32, device, form), clean)


@in_detail
def test_padding_reaches_nothing(device: str, form: str) -> None:
    case = Case(3, 5, 4, 2)
    inputs = {**case.inputs(), "lengths": torch.tensor([0, 5, 3, 4])}
    expected = run(case, inputs, torch.float32, device, form)
    past = torch.arange(case.steps).unsqueeze(1) >= inputs["lengths"]
    inputs["drive"] = inputs["drive"].masked_fill(past.unsqueeze(2), torch.nan)
    grad_outputs = gradient_of_outputs(case).masked_fill(past.unsqueeze(2), torch.nan)
    actual = run(case, inputs, torch.float32, device, form, grad_outputs)
    assert_same_bits(actual, expected)
    assert (actual["outputs"][past] == 0).all()
    assert (actual["drive"][past] == 0).all()
    assert (actual["hidden"][0] == 0).all()
    assert (actual["memory"][0] == 0).all()


@in_detail
def test_lengths_out_of_range_count_as_none_and_all(device: str, form: str) -> None:
    case = Case(3, 4, 2)
    inputs = case.inputs()
    expected = run(case, {**inputs, "lengths": torch.tensor([0, 4])}, torch.float32, device, form)
    assert_same_bits(
        run(case, {**inputs, "lengths": torch.tensor([-(2**40), 2**40])}, torch.float32, device, form), expected
    )


@in_detail
@pytest.mark.parametrize("sick", ["drive", "hidden", "memory"])
def test_nan_stays_in_its_sequence(sick: str, device: str, form: str) -> None:
    case, patient = Case(3, 4, 3, 1, "relu", "norm", lengths=False), 1
    inputs = case.inputs()
    healthy = run(case, inputs, torch.float32, device, form)
    inputs[sick] = inputs[sick].clone()
    inputs[sick].select(1 if sick == "drive" else 0, patient)[..., -1] = torch.nan
    results = run(case, inputs, torch.float32, device, form)
    others = torch.arange(case.batch) != patient
    for name, batch_axis in {"outputs": 1, "drive": 1, "hidden": 0, "memory": 0}.items():
        kept, expected = (r[name].movedim(batch_axis, 0)[others] for r in (results, healthy))
        assert torch.equal(kept, expected), name
        assert results[name].movedim(batch_axis, 0)[patient].isnan().any(), name
    assert results["outputs"][-1, patient].isnan().any()


@in_detail
def test_inputs_of_any_strides(device: str, form: str) -> None:
    case = Case(3, 4, 2, lengths=False)
    inputs = case.inputs()
    strided: Tensors = {
        name: tensor if tensor is None else tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
        for name, tensor in inputs.items()
    }
    assert not strided["drive"].is_contiguous()
    expected = run(case, inputs, torch.float32, device, form)
    assert_same_bits(run(case, strided, torch.float32, device, form), expected)


@pytest.mark.parametrize("case", [Case(3, 4, 0), Case(0, 4, 2)], ids=str)
def test_nothing_to_do(case: Case, form: str, device: str) -> None:
    inputs = Case(max(case.size, 1), case.steps, max(case.batch, 1), lengths=False).inputs()
    drive, weight_hh, gain, bias, hidden, memory = (inputs[name] for name in INPUTS[:6])
    b, h = case.batch, case.size
    empty = (drive[:, :b, :h], weight_hh[:h, :h], gain[:h], bias[:h], hidden[:b, :h], memory[:b, :h, :h])
    arguments = (Inputs(*(tensor.to(device) for tensor in empty)), case.constants, form)
    outputs = kernel.forward(*arguments)
    assert outputs.shape == (case.steps, b, h)
    for gradient, tensor in zip(kernel.backward(outputs, outputs, *arguments)[:6], empty, strict=True):
        assert gradient is not None
        assert torch.equal(gradient.cpu(), torch.zeros_like(tensor))


def test_results_share_no_memory(device: str, form: str) -> None:
    case = Case(3, 4, 2, lengths=False)
    arguments = positional(case, case.inputs(), torch.float32, device, form)
    outputs = kernel.forward(*arguments)
    tensors: list[Any] = [outputs, *kernel.backward(torch.ones_like(outputs), outputs, *arguments)[:6]]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in [*tensors, *arguments[0][:6]]}
    assert len(pointers) == 13


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"drive": torch.zeros(4, 2, 3).half()}, KernelError, "float32 and float64, got torch.float16"),
    "axes": ({"drive": torch.zeros(4, 3)}, ValueError, r"drive must be \[T,B,H\], got shape \(4, 3\)"),
    "weights": ({"weight_hh": torch.zeros(3, 4)}, ValueError, r"weight_hh must have shape \(3, 3\), got \(3, 4\)"),
    "memory": ({"memory": torch.zeros(1, 3, 3)}, ValueError, r"memory must have shape \(2, 3, 3\), got \(1, 3, 3\)"),
    "mixed": ({"hidden": torch.zeros(2, 3).double()}, TypeError, "hidden is torch.float64 on cpu, drive is"),
    "half a norm": ({"norm_bias": None}, ValueError, "come together"),
    "lengths": ({"lengths": torch.ones(2).int()}, TypeError, "lengths must be int64 on cpu, got torch.int32"),
    "few lengths": ({"lengths": torch.ones(1).long()}, ValueError, r"lengths must have shape \(2,\), got \(1,\)"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused(bad: str) -> None:
    skip_unless_available("cpu")
    case, (changes, kind, message) = Case(3, 4, 2), BAD[bad]
    inputs = {**case.inputs(), **changes}
    arguments = (Inputs(**inputs), case.constants, "matrix")
    with pytest.raises(kind, match=message):
        kernel.forward(*arguments)
    with pytest.raises(kind, match=message):
        kernel.backward(torch.zeros(4, 2, 3), torch.zeros(4, 2, 3), *arguments)


def test_bad_choices_are_refused() -> None:
    skip_unless_available("cpu")
    case = Case(3, 4, 2)
    inputs = parity.positional(case, case.inputs())
    unknown: Any = (*inputs, "auto")
    with pytest.raises(ValueError, match="form must be one of attention, matrix, got 'auto'"):
        kernel.forward(*unknown)
    arguments: Any = (*inputs, "matrix")
    with pytest.raises(ValueError, match=r"grad_outputs must have shape \(4, 2, 3\), got \(4, 2, 4\)"):
        kernel.backward(torch.zeros(4, 2, 4), torch.zeros(4, 2, 3), *arguments)
    many = inputs[0]._replace(drive=torch.zeros(1).expand(2**20, 2, 3), lengths=None)
    with pytest.raises(ValueError, match=r"below 2\^31 in the triton kernel, got 1048576 x 10000"):
        kernel.forward(many, replace(case.constants, inner_steps=10_000), "matrix")


def test_the_operation_takes_it(device: str, form: str) -> None:
    """Outputs, final memory and every gradient through PyTorch, as a user calls it."""
    case = Case(5, 7, 3, 2)
    inputs = case.inputs()
    names = [name for name in INPUTS if inputs[name] is not None]
    results = []
    for impl in ("triton", "reference"):
        given = {name: inputs[name].double().to(device).requires_grad_() for name in names}
        lengths: Any = inputs["lengths"].to(device)
        outputs, memory = associative_with_memory(
            **given, lengths=lengths, constants=case.constants, impl=impl, form=form
        )
        loss = (outputs * gradient_of_outputs(case).to(device)).sum() + memory.square().sum()
        results.append([outputs, memory, *torch.autograd.grad(loss, list(given.values()))])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_imports_without_triton() -> None:
    source = "import sys; sys.modules['triton'] = None; import fastweights.ops.associative.triton"
    done = child("-c", source)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    # The interpreter takes much that the compiler refuses; the compiler needs no GPU.
    skip_unless_available("cpu")
    done = child("-m", "tests.ops.associative.compile_triton", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_both_forms_are_the_references(device: str, form: str) -> None:
    # The truth above is whichever form of the reference is cheaper; the two agree with each other and with the kernel.
    case = Case(3, 5, 2)
    inputs = case.inputs()
    arguments = parity.positional(case, inputs, torch.float64)
    outputs = kernel.forward(*positional(case, inputs, torch.float64, device, form)).cpu()
    for expected in (reference.attention_form(*arguments), reference.matrix_form(*arguments)):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-14)
