"""The C++ kernel: parity with the reference, and all that a compiled function can get wrong."""

import ctypes
import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops import _library
from fastweights.ops.associative import Constants, associative, cpu, reference
from fastweights.ops.associative._autograd import backward_operator, forward_operator

from . import parity
from .parity import Case

needs_kernel = pytest.mark.skipif(_library.MISSING is not None, reason=str(_library.MISSING))
ROOT = Path(__file__).parents[3]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, for this test only."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def named(outputs: Tensor | None, gradients: list[Tensor | None]) -> dict[str, Tensor]:
    """Results by name, those of inputs that were left out without an entry."""
    pairs = zip(("outputs", *parity.INPUTS), (outputs, *gradients), strict=True)
    return {name: tensor for name, tensor in pairs if tensor is not None}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


# Parity


@needs_kernel
@pytest.mark.parametrize("case", parity.CASES, ids=str)
def test_parity(case: Case) -> None:
    parity.check(case)


def test_cases_cover_every_pair_of_choices() -> None:
    choices = [
        (c.steps > c.size, c.batch, c.inner_steps, c.nonlinearity, c.norm != "plain", c.memory, c.lengths)
        for c in parity.CASES
    ]
    for columns in itertools.combinations(zip(*choices, strict=True), 2):
        assert set(zip(*columns, strict=True)) == set(itertools.product(*columns))


@needs_kernel
@pytest.mark.parametrize(
    "case",
    [
        Case(50, 12, 33, rate=0.5, memory=False, lengths=False),
        Case(100, 12, 5, rate=0.5),
        Case(50, 9, 33, norm="plain"),
    ],
    ids=str,
)
def test_rounding_is_that_of_eager(case: Case) -> None:
    # One draw of rounding errors says little, and where the memory is strong it is amplified: the mean of eight does.
    ratios: dict[str, list[float]] = {}
    for seed in range(8):
        inputs = case.inputs(seed)
        truth, plain = parity.eager(case, inputs, torch.float64), parity.eager(case, inputs, torch.float32)
        for name, result in parity.kernel(case, inputs, torch.float32).items():
            ratio = parity.error(result, truth[name]) / parity.error(plain[name], truth[name])
            ratios.setdefault(name, []).append(math.log(ratio))
    means = {name: math.exp(sum(logs) / len(logs)) for name, logs in ratios.items()}
    assert max(means.values()) < 2, means


@needs_kernel
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has more than one copy")
@pytest.mark.parametrize(("level", "poison"), [("baseline", "128"), ("x86-64-v3", "255"), ("x86-64-v4", "128")])
def test_every_instruction_set_with_poisoned_scratch(level: str, poison: str) -> None:
    # glibc fills what free takes with one byte and what malloc gives with its complement.
    environment = {**os.environ, "MALLOC_PERTURB_": poison, "FASTWEIGHTS_CPU_LEVEL": level}
    command = [sys.executable, "-m", "tests.ops.associative.parity"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    levels = ["baseline", "x86-64-v3", "x86-64-v4"]
    assert done.stdout.strip() == min(level, str(_library.STATUS), key=levels.index)


# Memory


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every tensor that PyTorch allocates begins as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills with NaN what is left uninitialised
    yield
    torch.use_deterministic_algorithms(before)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", parity.FEW, ids=str)
def test_results_do_not_depend_on_what_memory_held(
    case: Case, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    inputs = case.inputs()
    clean = parity.kernel(case, inputs, dtype)
    request.getfixturevalue("poisoned")
    assert torch.empty(3).isnan().all()
    for _ in range(3):
        scratch = [torch.full((size,), torch.nan) for size in (10, 1_000, 30_000, 100_000, 1_000_000)]
        del scratch
        assert_same_bits(parity.kernel(case, inputs, dtype), clean)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", parity.FEW, ids=str)
def test_reads_and_writes_nothing_beside_the_tensors(case: Case, dtype: torch.dtype) -> None:
    """Every input lies between NaNs, and every result between guards."""
    around = 512

    def between(tensor: Tensor | None, filler: float) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if tensor is None:
            return None, None
        whole = torch.full((tensor.numel() + 2 * around,), filler, dtype=tensor.dtype)
        inner = whole[around : around + tensor.numel()].view(tensor.shape)
        return whole, inner.copy_(tensor)

    def guarded(like: Tensor | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return between(None if like is None else torch.full_like(like, torch.nan), 7.0)

    inputs = case.inputs()
    expected = parity.kernel(case, inputs, dtype)
    *given, lengths, constants = parity.positional(case, inputs, dtype)
    tensors: list[Any] = [between(tensor, torch.nan)[1] for tensor in given]
    grad_outputs = between(parity.gradient_of_outputs(case).to(dtype), torch.nan)[1]
    assert grad_outputs is not None
    everything: Any = (*tensors, between(lengths, 2**40)[1], constants)
    arguments = cpu._Arguments(*everything)
    for used, tensor in zip(arguments.tensors, tensors, strict=True):
        assert used is tensor or (used is not None and used.data_ptr() == tensor.data_ptr())

    results = [guarded(expected["outputs"]), *(guarded(tensor) for tensor in tensors)]
    (_, outputs), *gradients = results
    assert outputs is not None
    arguments.call("forward", outputs.data_ptr())
    pointers = cpu._Gradients(*(None if g is None else g.data_ptr() for _, g in gradients))
    arguments.call("backward", outputs.data_ptr(), grad_outputs.data_ptr(), ctypes.byref(pointers))

    assert_same_bits(named(outputs, [gradient for _, gradient in gradients]), expected)
    for whole, _ in results:
        if whole is not None:
            assert (whole[:around] == 7).all()
            assert (whole[-around:] == 7).all()


@needs_kernel
@pytest.mark.parametrize("case", [parity.FEW[0], parity.FEW[3]], ids=str)
def test_padding_reaches_nothing(case: Case) -> None:
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32)
    past = torch.arange(case.steps).unsqueeze(1) >= inputs["lengths"]
    assert past.any()
    poisoned = {**inputs, "drive": inputs["drive"].masked_fill(past.unsqueeze(2), torch.nan)}
    actual = parity.kernel(case, poisoned, torch.float32)
    assert_same_bits(actual, expected)
    assert (actual["outputs"][past] == 0).all()
    assert (actual["drive"][past] == 0).all()
    # Nor does the gradient of outputs that are constants.
    arguments = parity.positional(case, inputs)
    grad_outputs = parity.gradient_of_outputs(case).masked_fill(past.unsqueeze(2), torch.nan)
    gradients = cpu.backward(grad_outputs, expected["outputs"], *arguments)
    assert_same_bits(named(expected["outputs"], gradients), expected)


@needs_kernel
@pytest.mark.parametrize("sick", ["drive", "hidden", "memory"])
@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
@pytest.mark.parametrize("norm", ["norm", "plain"])
def test_nan_stays_in_its_sequence(sick: str, nonlinearity: str, norm: str) -> None:
    case, patient = Case(20, 7, 37, 2, nonlinearity, norm, lengths=False), 18
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32)
    infected = inputs[sick].clone()
    infected[(3, patient, 5) if sick == "drive" else (patient, 5)] = torch.nan
    actual = parity.kernel(case, {**inputs, sick: infected}, torch.float32)
    others = [b for b in range(case.batch) if b != patient]
    begin = 3 if sick == "drive" else 0
    broken = actual["outputs"][begin:, patient].isnan()
    assert broken[1:].all()  # the state after the next step, at the latest, has met every unit of the last
    assert broken[0].any()
    assert torch.equal(actual["outputs"][:begin], expected["outputs"][:begin])
    assert torch.equal(actual["outputs"][:, others], expected["outputs"][:, others])
    assert torch.equal(actual["drive"][:, others], expected["drive"][:, others])
    assert actual["drive"][:, patient].isnan().any()
    for name in ("hidden", "memory"):
        assert torch.equal(actual[name][others], expected[name][others]), name
        assert actual[name][patient].isnan().any(), name


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [Case(20, 9, 40, 2), Case(63, 15, 40, 1, "tanh", "norm-initial")], ids=str)
def test_an_example_has_the_same_bits_in_every_batch(case: Case, dtype: torch.dtype) -> None:
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, dtype)
    grad_outputs = parity.gradient_of_outputs(case).to(dtype)
    for chosen in ([5], [39, 20, 3], list(range(7, 40))):
        some = {name: inputs[name][chosen] for name in ("hidden", "memory", "lengths")}
        arguments = parity.positional(case, {**inputs, **some, "drive": inputs["drive"][:, chosen]}, dtype)
        outputs = cpu.forward(*arguments)
        results = named(outputs, cpu.backward(grad_outputs[:, chosen], outputs, *arguments))
        for name in ("outputs", "drive"):
            assert torch.equal(results[name], expected[name][:, chosen]), name
        for name in ("hidden", "memory"):
            assert torch.equal(results[name], expected[name][chosen]), name


# Threads and processes


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_bits_on_any_number_of_threads(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    case = Case(20, 9, 2100, 2)  # more chunks than there are groups of sums
    inputs = case.inputs()
    threads(1)
    expected = parity.kernel(case, inputs, dtype)
    for number in (2, 3, 2, 1):
        threads(number)
        assert_same_bits(parity.kernel(case, inputs, dtype), expected)


@needs_kernel
def test_python_threads_at_the_same_time(threads: Callable[[int], None]) -> None:
    threads(2)
    cases = [Case(20, 9, 130, 2), Case(33, 6, 200, 1, "tanh"), Case(50, 12, 100, norm="plain", memory=False)]
    given = [case.inputs() for case in cases]
    expected = [parity.kernel(case, inputs, torch.float32) for case, inputs in zip(cases, given, strict=True)]

    def work(index: int) -> None:
        for _ in range(20):
            assert_same_bits(parity.kernel(cases[index], given[index], torch.float32), expected[index])

    with ThreadPoolExecutor(3) as executor:
        for future in [executor.submit(work, index) for index in range(3)]:
            future.result(timeout=60)


# In the child only the kernel and NumPy run: PyTorch's own threads do not outlive a fork.
FORK = """
import os, signal, numpy, torch
from fastweights.ops.associative import cpu
from tests.ops.associative.parity import INPUTS, Case, gradient_of_outputs
torch.set_num_threads(2)
case = Case(20, 9, 130, 2)
inputs = case.inputs()
arguments = [*(inputs[name] for name in INPUTS), inputs["lengths"], case.constants]
grad_outputs = gradient_of_outputs(case)
def run():
    outputs = cpu.forward(*arguments)
    return [tensor.numpy() for tensor in (outputs, *cpu.backward(grad_outputs, outputs, *arguments))]
expected = run()
child = os.fork()
signal.alarm(30)  # who waits for a thread that is not there dies of this
same = all(numpy.array_equal(*pair) for pair in zip(run(), expected, strict=True))
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
assert same, "the parent's results changed"
assert status == 0, f"the child ended with {status}"
"""


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_fork() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Tensors of every kind


@needs_kernel
@pytest.mark.parametrize("kind", ["transposed", "strided", "negated", "imaginary"])
@pytest.mark.parametrize("name", [*parity.INPUTS, "outputs", "grad_outputs"])
def test_views(name: str, kind: str) -> None:
    def view(tensor: Tensor) -> Tensor:
        """A view that holds the same numbers in another way."""
        if kind == "transposed":
            return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        if kind == "strided":
            return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]
        if kind == "negated":
            return torch._neg_view(-tensor)
        return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag

    case = Case(20, 9, 5, 2)
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32)
    all_inputs = {**inputs, "outputs": expected["outputs"], "grad_outputs": parity.gradient_of_outputs(case)}
    changed = view(all_inputs[name])
    assert torch.equal(changed, all_inputs[name])
    assert changed.is_neg() == (kind in ("negated", "imaginary"))
    all_inputs[name] = changed
    arguments = parity.positional(case, all_inputs)
    gradients = cpu.backward(all_inputs["grad_outputs"], all_inputs["outputs"], *arguments)
    assert_same_bits(named(cpu.forward(*arguments), gradients), expected)


@needs_kernel
def test_expanded_inputs() -> None:
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
    }
    plain = {name: tensor.contiguous() for name, tensor in expanded.items()}
    assert_same_bits(parity.kernel(case, expanded, torch.float32), parity.kernel(case, plain, torch.float32))


@needs_kernel
@pytest.mark.parametrize("lengths", [False, True])
def test_empty_batch(lengths: bool) -> None:
    case = Case(5, 4, 0, lengths=False)
    inputs = {**case.inputs(), "lengths": torch.zeros(0, dtype=torch.int64) if lengths else None}
    results = parity.kernel(case, inputs, torch.float32)
    assert results["outputs"].shape == (4, 0, 5)
    for name in ("weight_hh", "norm_weight", "norm_bias"):
        assert torch.equal(results[name], torch.zeros_like(inputs[name])), name


@needs_kernel
def test_default_device_elsewhere() -> None:
    case = Case(5, 4, 2)
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32)
    grad_outputs = parity.gradient_of_outputs(case)
    with torch.device("meta"):
        arguments = parity.positional(case, inputs)
        outputs = cpu.forward(*arguments)
        gradients = cpu.backward(grad_outputs, outputs, *arguments)
    assert_same_bits(named(outputs, gradients), expected)


# Refusals


SMALL = Case(4, 3, 2)


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
        ({"lengths": torch.ones(2).int()}, TypeError, r"lengths must be int64 on the cpu, got torch.int32 on cpu"),
        (
            {"lengths": torch.ones(2, device="meta").long()},
            TypeError,
            r"lengths must be int64 on the cpu, got torch.int64 on meta",
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
def test_refuses_inputs(others: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = arguments_with(**others)
    with pytest.raises(error, match=message):
        cpu.forward(*arguments)
    with pytest.raises(error, match=message):
        cpu.backward(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), *arguments)


@needs_kernel
def test_refuses_other_dtypes() -> None:
    with pytest.raises(KernelError, match=r"the cpu kernel takes float32 and float64, got torch.bfloat16"):
        cpu.forward(*parity.positional(SMALL, SMALL.inputs(), torch.bfloat16))
    drive, *rest = arguments_with()
    message = r"weight_hh is torch.float32 on cpu, drive is torch.float64 on cpu"
    with pytest.raises(TypeError, match=message):
        cpu.forward(drive.double(), *rest)


@needs_kernel
@pytest.mark.parametrize("name", ["outputs", "grad_outputs"])
def test_backward_refuses_what_does_not_fit(name: str) -> None:
    right, short, double = torch.zeros(3, 2, 4), torch.zeros(2, 2, 4), torch.zeros(3, 2, 4).double()

    def run(wrong: Tensor) -> None:
        given = (right, wrong) if name == "outputs" else (wrong, right)
        cpu.backward(*given, *arguments_with())

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
        (Constants(-0.1, 0.5), "decay must lie between 0 and 1, got -0.1"),
        (Constants(1.1, 0.5), "decay must lie between 0 and 1, got 1.1"),
        (Constants(math.nan, 0.5), "decay must lie between 0 and 1, got nan"),
        (Constants(0.9, -0.5), "rate must be finite and not negative, got -0.5"),
        (Constants(0.9, math.inf), "rate must be finite and not negative, got inf"),
        (Constants(0.9, 0.5, 0), "inner_steps must be at least 1, got 0"),
        (Constants(0.9, 0.5, 1, "gelu"), "nonlinearity must be one of relu, tanh, got 'gelu'"),
        (Constants(0.9, 0.5, eps=0.0), "eps must be positive"),
        (Constants(0.9, 0.5, eps=-1e-5), "eps must be positive"),
    ],
)
def test_constants_out_of_range(constants: Constants, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        associative(torch.zeros(2, 1, 3), torch.eye(3), torch.zeros(1, 3), constants=constants)


# Choosing


def call(impl: str, dtype: torch.dtype = torch.float32) -> Tensor:
    *tensors, lengths, constants = parity.positional(SMALL, SMALL.inputs(), dtype)
    given: dict[str, Any] = dict(zip(parity.INPUTS, tensors, strict=True))
    return associative(**given, lengths=lengths, constants=constants, impl=impl)


def test_library_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call("reference")
    monkeypatch.setattr(_library, "LIBRARY", None)
    monkeypatch.setattr(_library, "MISSING", "libfastweights.so was not built: no compiler")
    with pytest.raises(KernelError, match=r"impl='cpu' was asked for, but libfastweights.so was not built: no comp"):
        call("cpu")
    assert torch.equal(call("auto"), expected)


@needs_kernel
def test_auto_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call("cpu")
    assert parity.error(expected, call("reference").double()) < 1e-6
    monkeypatch.delattr(reference, "recurrence")
    assert torch.equal(call("auto"), expected)


def test_cpu_cannot_take_half_precision() -> None:
    with pytest.raises(
        KernelError, match=r"impl='cpu' was asked for, but the cpu kernel takes float32 and float64, go"
    ):
        call("cpu", torch.bfloat16)
    assert torch.equal(call("auto", torch.bfloat16), call("reference", torch.bfloat16))


def test_triton_is_not_there() -> None:
    with pytest.raises(KernelError, match=r"impl='triton' was asked for, but there is no Triton kernel"):
        call("triton")


def test_unknown_impl() -> None:
    with pytest.raises(ValueError, match="impl must be one of auto, reference, cpu, triton, got 'cuda'"):
        call("cuda")


def test_load_missing(tmp_path: Path) -> None:
    library, reason = _library.load([tmp_path])
    assert library is None
    assert "libfastweights.so was not built" in reason
    assert "g++" in reason


def test_load_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / _library.NAME).write_text("not a library")
    library, reason = _library.load([tmp_path / "absent", tmp_path])
    assert library is None
    assert f"{tmp_path / _library.NAME} could not be loaded" in reason


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int fastweights_interface(void) { return 999; }\n", "interface 999, this package needs 1"),
        ("int something_else(void) { return 1; }\n", "could not be loaded"),
    ],
)
def test_load_another_library(source: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text(source)
    target = tmp_path / _library.NAME
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, tmp_path / "other.c"], check=True)
    library, found = _library.load([tmp_path])
    assert library is None
    assert str(target) in found
    assert reason in found


# Autograd


@needs_kernel
@pytest.mark.parametrize("full", [True, False])
def test_operators(full: bool) -> None:
    case = Case(4, 3, 2, 2, norm="norm" if full else "plain", memory=full, lengths=full)
    *tensors, constants = parity.positional(case, case.inputs())
    arguments = (*tensors, *astuple(constants))
    torch.library.opcheck(forward_operator, arguments)
    outputs = forward_operator(*arguments)
    torch.library.opcheck(backward_operator, (parity.gradient_of_outputs(case), outputs, *arguments))


GRADCHECKS = [
    Case(3, 4, 2, 1, rate=0.5),
    Case(3, 4, 2, 2, "tanh", "norm-initial", rate=0.5),
    Case(3, 4, 2, 2, "tanh", "plain", rate=0.2, memory=False),
    Case(3, 4, 2, 1, "relu", "plain", rate=0.2, lengths=False),
]


def differentiable(case: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    inputs = case.inputs()
    names = [name for name in parity.INPUTS if inputs[name] is not None]

    def run(*tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        return associative(**given, lengths=inputs["lengths"], constants=case.constants, impl="cpu")

    return run, [inputs[name].double().requires_grad_() for name in names]


@needs_kernel
@pytest.mark.parametrize("case", GRADCHECKS, ids=str)
def test_gradients_against_differences(case: Case) -> None:
    run, tensors = differentiable(case)
    torch.autograd.gradcheck(run, tensors)


@needs_kernel
@pytest.mark.parametrize("case", GRADCHECKS, ids=str)
def test_gradients_of_gradients_against_differences(case: Case) -> None:
    run, tensors = differentiable(case)
    torch.autograd.gradgradcheck(run, tensors)


@needs_kernel
def test_gradients_only_where_they_are_asked_for() -> None:
    inputs = SMALL.inputs()
    expected = parity.kernel(SMALL, inputs, torch.float32)
    assert not associative(**inputs, constants=SMALL.constants, impl="cpu").requires_grad
    inputs["weight_hh"].requires_grad_()
    outputs = associative(**inputs, constants=SMALL.constants, impl="cpu")
    outputs.backward(parity.gradient_of_outputs(SMALL))
    assert torch.equal(inputs["weight_hh"].grad, expected["weight_hh"])
    assert all(inputs[name].grad is None for name in parity.INPUTS if name != "weight_hh")
