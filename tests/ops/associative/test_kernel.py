"""The C++ kernel: parity with the reference, and all that a compiled function can get wrong with memory and threads."""

import ctypes
import itertools
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.associative import Constants, Inputs, cpu

from ..parity import error, needs_kernel
from . import parity
from .parity import Case, assert_same_bits, named

ROOT = Path(__file__).parents[3]


@needs_kernel
@pytest.mark.parametrize("case", [*parity.CASES, *parity.LONG, *parity.STARTS], ids=str)
def test_parity(case: Case) -> None:
    parity.check(case, parity.FORMS, parity.draws(case))


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
def test_rounding_is_that_of_eager(case: Case, form: str) -> None:
    # One draw of rounding errors says little, and where the memory is strong it is amplified: the mean of eight does.
    ratios: dict[str, list[float]] = {}
    for seed in range(8):
        inputs = case.inputs(seed)
        truth, plain = parity.eager(case, inputs, torch.float64), parity.eager(case, inputs, torch.float32)
        for name, result in parity.kernel(case, inputs, torch.float32, form).items():
            ratio = error(result, truth[name]) / error(plain[name], truth[name])
            ratios.setdefault(name, []).append(math.log(ratio))
    means = {name: math.exp(sum(logs) / len(logs)) for name, logs in ratios.items()}
    assert max(means.values()) < 2, means


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that PyTorch allocates begins as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills with NaN what is left uninitialised
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [*parity.FEW, parity.TOGETHER, *parity.STARTS], ids=str)
def test_results_do_not_depend_on_what_memory_held(case: Case, dtype: torch.dtype, form: str) -> None:
    inputs = case.inputs()
    clean = parity.kernel(case, inputs, dtype, form)
    with poisoned():
        assert torch.empty(3).isnan().all()
        for _ in range(3):
            scratch = [torch.full((size,), torch.nan) for size in (10, 1_000, 30_000, 100_000, 1_000_000)]
            del scratch
            assert_same_bits(parity.kernel(case, inputs, dtype, form), clean)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [*parity.FEW, parity.TOGETHER, *parity.STARTS], ids=str)
def test_reads_and_writes_nothing_beside_the_tensors(case: Case, dtype: torch.dtype, form: str) -> None:
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
    expected = parity.kernel(case, inputs, dtype, form)
    given, constants = parity.positional(case, inputs, dtype)
    count = len(parity.INPUTS)
    tensors: list[Any] = [between(tensor, torch.nan)[1] for tensor in given[:count]]
    fixed = [between(tensor, filler)[1] for tensor, filler in zip(given[count:], (2**40, 1, 1), strict=True)]
    grad_outputs = between(parity.gradient_of_outputs(case).to(dtype), torch.nan)[1]
    assert grad_outputs is not None
    arguments = cpu._Arguments(Inputs(*tensors, *fixed), constants, form)
    for used, tensor in zip(arguments.tensors, tensors, strict=True):
        assert used is tensor or (used is not None and used.data_ptr() == tensor.data_ptr())

    results = [guarded(expected["outputs"]), *(guarded(tensor) for tensor in tensors)]
    (_, outputs), *gradients = results
    assert outputs is not None
    expected_final = parity.final(case, inputs, dtype)[1]
    final = guarded(expected_final)
    trace = guarded(outputs.new_empty(cpu.count_trace(given, case.constants, form)))
    drive, threads = tensors[0], torch.get_num_threads()
    assert trace[1] is not None

    def pointers(memory: Tensor | None) -> ctypes.Structure:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (outputs, memory, trace[1])]
        return cpu._Results(*addresses, arguments.trace_size)

    made = pointers(final[1] if form == "matrix" else None)
    _native.call("associative", "forward", "drive", drive, *arguments.structures, made, threads)
    grad = ctypes.c_void_p(grad_outputs.data_ptr())
    wanted = _native.point(cpu._Gradients, *(gradient for _, gradient in gradients))
    structures = (*arguments.structures, pointers(None), grad, wanted)
    _native.call("associative", "backward", "drive", drive, *structures, threads)

    assert_same_bits(named(outputs, [gradient for _, gradient in gradients]), expected)
    assert form != "matrix" or (final[1] is not None and torch.equal(final[1], expected_final))
    for whole, _ in (*results, final, trace):
        if whole is not None:
            assert (whole[:around] == 7).all()
            assert (whole[-around:] == 7).all()


@needs_kernel
@pytest.mark.parametrize("case", [parity.FEW[0], parity.FEW[3]], ids=str)
def test_padding_reaches_nothing(case: Case, form: str) -> None:
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32, form)
    past = torch.arange(case.steps).unsqueeze(1) >= inputs["lengths"]
    assert past.any()
    poisoned = {**inputs, "drive": inputs["drive"].masked_fill(past.unsqueeze(2), torch.nan)}
    actual = parity.kernel(case, poisoned, torch.float32, form)
    assert_same_bits(actual, expected)
    assert (actual["outputs"][past] == 0).all()
    assert (actual["drive"][past] == 0).all()
    # Nor does the gradient of outputs that are constants.
    arguments = parity.positional(case, inputs)
    grad_outputs = parity.gradient_of_outputs(case).masked_fill(past.unsqueeze(2), torch.nan)
    gradients = cpu.backward(grad_outputs, expected["outputs"], *(*arguments, form))
    assert_same_bits(named(expected["outputs"], gradients), expected)


@needs_kernel
@pytest.mark.parametrize("sick", ["drive", "hidden", "memory"])
@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
@pytest.mark.parametrize("norm", ["norm", "plain"])
def test_nan_stays_in_its_sequence(sick: str, nonlinearity: str, norm: str, form: str) -> None:
    case, patient = Case(20, 7, 37, 2, nonlinearity, norm, lengths=False), 18
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, torch.float32, form)
    infected = inputs[sick].clone()
    infected[(3, patient, 5) if sick == "drive" else (patient, 5)] = torch.nan
    actual = parity.kernel(case, {**inputs, sick: infected}, torch.float32, form)
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
@pytest.mark.parametrize(
    "case", [Case(20, 9, 40, 2), Case(63, 15, 40, 1, "tanh", "norm-initial"), Case(100, 37, 40)], ids=str
)
def test_an_example_has_the_same_bits_in_every_batch(case: Case, dtype: torch.dtype, form: str) -> None:
    inputs = case.inputs()
    expected = parity.kernel(case, inputs, dtype, form)
    grad_outputs = parity.gradient_of_outputs(case).to(dtype)
    for chosen in ([5], [39, 20, 3], list(range(7, 40))):
        some = {name: inputs[name][chosen] for name in ("hidden", "memory", "lengths")}
        arguments = parity.positional(case, {**inputs, **some, "drive": inputs["drive"][:, chosen]}, dtype)
        outputs = cpu.forward(*(*arguments, form, False))[0]
        results = named(outputs, cpu.backward(grad_outputs[:, chosen], outputs, *(*arguments, form)))
        for name in ("outputs", "drive"):
            assert torch.equal(results[name], expected[name][:, chosen]), name
        for name in ("hidden", "memory"):
            assert torch.equal(results[name], expected[name][chosen]), name


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, for this test only."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_bits_on_any_number_of_threads(dtype: torch.dtype, threads: Callable[[int], None], form: str) -> None:
    case = Case(20, 9, 2100, 2)  # more chunks than there are groups of sums
    inputs = case.inputs()
    threads(1)
    expected = parity.kernel(case, inputs, dtype, form)
    for number in (2, 3, 2, 1):
        threads(number)
        assert_same_bits(parity.kernel(case, inputs, dtype, form), expected)


@needs_kernel
def test_python_threads_at_the_same_time(threads: Callable[[int], None], form: str) -> None:
    threads(2)
    cases = [Case(20, 9, 130, 2), Case(33, 6, 200, 1, "tanh"), Case(50, 12, 100, norm="plain", memory=False)]
    given = [case.inputs() for case in cases]
    expected = [parity.kernel(case, inputs, torch.float32, form) for case, inputs in zip(cases, given, strict=True)]

    def work(index: int) -> None:
        for _ in range(20):
            assert_same_bits(parity.kernel(cases[index], given[index], torch.float32, form), expected[index])

    with ThreadPoolExecutor(3) as executor:
        for future in [executor.submit(work, index) for index in range(3)]:
            future.result(timeout=60)


# In the child only the kernel and NumPy run: PyTorch's own threads do not outlive a fork.
FORK = """
import os, signal, sys, numpy, torch
from fastweights.ops.associative import cpu
from tests.ops.associative.parity import Case, gradient_of_outputs, positional
torch.set_num_threads(2)
form = sys.argv[1]
case = Case(20, 9, 130, 2)
inputs = case.inputs()
arguments = positional(case, inputs)
grad_outputs = gradient_of_outputs(case)
def run():
    outputs = cpu.forward(*arguments, form, False)[0]
    results = (outputs, *cpu.backward(grad_outputs, outputs, *arguments, form))
    return [tensor.numpy() for tensor in results if tensor is not None]
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
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="denormals are flushed on x86-64")
def test_what_decays_reaches_zero() -> None:
    """A unit that falls silent leaves no denormals, which would slow every later step; outside they stay."""
    drive = torch.full((2500, 1, 4), -1.0)
    drive[:5, :, :2] = 1.0
    drive[:, :, 2:] = 1.0
    inputs = Inputs(drive, torch.zeros(4, 4), None, None, torch.zeros(1, 4))
    _, memory, _ = cpu.forward(inputs, Constants(0.95, 1e-4), "matrix", True)
    tiny = torch.finfo(torch.float32).tiny
    assert memory[0, 2:, 2:].min() > 1e-3
    assert not ((memory != 0) & (memory.abs() < tiny)).any()
    assert (memory[0, :2] == 0).all()
    assert torch.tensor(1e-30) * torch.tensor(1e-10) != 0


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_fork(form: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, form], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
