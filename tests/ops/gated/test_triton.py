"""The Triton kernels of the gated recurrence: parity with the reference, in the interpreter and on a GPU (`gpu`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import nn
from fastweights.errors import KernelError
from fastweights.ops.gated import gated
from fastweights.ops.gated import triton as kernel
from fastweights.ops.gated.reference import SlowInputs

from ..parity import BOTH, DRAWS
from ..triton_here import child, poisoned, skip_unless_available
from .cases import Case
from .test_kernel import CASES as LARGE
from .test_kernel import check, check_operators, operands, run

# The interpreter takes about 40 ms for a step of one sequence, forwards and backwards: a few small cases, and the
# smallest with every part by default.
in_detail = pytest.mark.slow
CASES = [
    Case(1, 1, 1, 1, 1, 1),
    Case(5, 4, 2, 3, 4, 5, ragged=True),
    Case(5, 5, 2, 3, 4, 5, starts=True),
    pytest.param(Case(3, 9, 3, 2, 3, 4, ragged=True, starts=True), marks=in_detail),
    pytest.param(Case(16, 2, 2, 1, 17, 3), marks=in_detail),
    pytest.param(Case(3, 12, 2, 20, 2, 17, ragged=True), marks=in_detail),
    pytest.param(Case(17, 5, 1, 15, 16, 33), marks=in_detail),
]


def draws(device: str) -> int:
    """Return how many draws a test can wait for: one takes the interpreter as long as 32 take a GPU."""
    return 1 if device == "cpu" else DRAWS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case, device: str) -> None:
    check(case, "triton", device=device, draws=draws(device))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LARGE, Case(40, 70, 100, 15, 40, 100, ragged=True, starts=True)], ids=str)
def test_parity_of_larger_cases(case: Case) -> None:
    skip_unless_available("cuda")
    x = torch.empty(1, 1, case.features, device="cuda")
    dtypes = [dtype for dtype in BOTH if kernel.unavailable(x, x.new_empty(1, case.size, dtype=dtype)) is None]
    assert dtypes or case.size == 100
    check(case, "triton", device="cuda", dtypes=dtypes)


@in_detail
def test_a_program_takes_one_sequence_after_another(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "programs", lambda batch, matrix, device: min(batch, 2))
    check(Case(3, 4, 5, ragged=True), "triton", device=device, draws=draws(device))


@in_detail
def test_weights_of_the_slow_network_a_panel_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(3, 3, 2, 2, 5, 21, ragged=True)
    whole = run(case, torch.float64, "triton", device)
    take = kernel.slow_options
    monkeypatch.setattr(kernel, "slow_options", lambda *sizes, **flags: {**take(*sizes, **flags), "PANEL": 8})
    for name, value in run(case, torch.float64, "triton", device).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-14)


def tensors_of(case: Case, device: str) -> tuple[SlowInputs, tuple[Any, ...]]:
    """Return the slow network's inputs, and those of the fast one's recurrence, which begin with the updates."""
    slow, (inners, weight, bias, *fast) = operands(case, torch.float32)
    updates = torch.nn.functional.linear(inners, weight, bias)
    placed = [None if tensor is None else tensor.to(device) for tensor in (*slow, updates, *fast)]
    return SlowInputs._make(placed[: len(slow)]), tuple(placed[len(slow) :])


def everything(slow: SlowInputs, fast: tuple[Any, ...], grad: float | Tensor = 1.0) -> list[Tensor]:
    """Return the results of all four kernels; `grad` multiplies the gradient of all outputs."""
    inners, states = kernel.slow_forward(slow)
    *last, trace = kernel.run_forward(*(*fast, True))
    of_slow = kernel.slow_backward(torch.ones_like(inners) * grad, torch.ones_like(states), inners, states, slow)
    grads = (torch.ones_like(last[0]) * grad, *map(torch.ones_like, last[1:]))
    of_fast = kernel.run_backward(*(*grads, last[0], trace, *fast))
    return [tensor.cpu() for tensor in (inners, states, *last, *of_slow, *of_fast)]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


@in_detail
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.filterwarnings("ignore:Deterministic behavior")  # cuBLAS wants a variable of the environment for that
def test_results_do_not_depend_on_what_memory_held(ragged: bool, device: str) -> None:
    slow, fast = tensors_of(Case(3, 5, 2, ragged=ragged), device)
    clean = everything(slow, fast)
    assert all(tensor.isfinite().all() for tensor in clean)
    with poisoned():
        assert_same_bits(everything(slow, fast), clean)


@in_detail
def test_padding_reaches_nothing(device: str) -> None:
    case = Case(3, 5, 3)
    (drive, *slow, _, _), (updates, x, *fast, _, _) = tensors_of(case, device)
    lengths = torch.tensor([0, 5, 3], device=device)
    past = (torch.arange(case.steps, device=device).unsqueeze(1) >= lengths).unsqueeze(2)

    def results(fill: float, lengths: Tensor) -> list[Tensor]:
        sick = [tensor.masked_fill(past, fill) for tensor in (drive, updates, x)]
        grad = torch.ones_like(x[:, :, :1]).masked_fill(past, fill)
        return everything(SlowInputs._make((sick[0], *slow, lengths, None)), (*sick[1:], *fast, lengths, None), grad)

    expected = results(0.0, lengths)
    actual = results(torch.nan, lengths)
    assert_same_bits(actual, expected)
    inners, _, outputs, *_ = actual
    of_drive, of_z, _, of_updates, of_x, of_hidden, *of_matrices = actual[5:]
    for tensor in (inners, outputs, of_drive, of_z, of_updates, of_x):
        assert (tensor[past.squeeze(2).cpu()] == 0).all()
    assert (of_hidden[0] == 0).all()
    for tensor in of_matrices:
        assert (tensor[0] == 1).all()  # what came in goes through a sequence of no steps
    # A length out of range counts as 0 or T.
    assert_same_bits(results(0.0, torch.tensor([-(2**40), 2**40, 3], device=device)), expected)


@in_detail
def test_nan_stays_in_its_sequence(device: str) -> None:
    slow, (updates, x, *rest) = tensors_of(Case(3, 4, 3), device)
    healthy = everything(slow, (updates, x, *rest))[2:]
    x = x.clone()
    x[1, 1, 0] = torch.nan
    others = [0, 2]
    for index, (mine, theirs) in enumerate(zip(everything(slow, (updates, x, *rest))[2:], healthy, strict=True)):
        batch_axis = 1 if index in (0, 3, 4, 6, 7) else 0
        assert torch.equal(mine.movedim(batch_axis, 0)[others], theirs.movedim(batch_axis, 0)[others])
        # The first step's row was fine, and the matrices are written by the slow network alone.
        assert mine.movedim(batch_axis, 0)[1].isnan().any() == (index not in (1, 2, 3, 4, 5))


@in_detail
def test_backward_without_a_trace_runs_the_forward_pass_again(device: str) -> None:
    _, fast = tensors_of(Case(3, 4, 2, ragged=True), device)
    *outputs, trace = kernel.run_forward(*(*fast, True))
    assert kernel.run_forward(*fast)[-1].numel() == 0
    given = (torch.ones_like(outputs[0]), None, None, outputs[0])
    with_trace = kernel.run_backward(*given, trace, *fast)
    assert_same_bits([*kernel.run_backward(*given, trace.new_empty(0), *fast)], [*with_trace])
    nothing = (None, torch.zeros_like(outputs[1]), None, outputs[0])
    assert all((tensor == 0).all() for tensor in kernel.run_backward(*nothing, trace, *fast))


@pytest.mark.slow  # in the interpreter; of the C++ kernels the same are checked in seconds
def test_operators() -> None:
    skip_unless_available("cpu")
    check_operators(True, "triton")


def test_an_empty_batch(device: str) -> None:
    slow, fast = tensors_of(Case(3, 4, 1), device)
    slow = slow._replace(drive=slow.drive[:, :0], hidden=slow.hidden[:0])
    fast = (*(tensor[:, :0] for tensor in fast[:2]), *(tensor[:0] for tensor in fast[2:5]), *fast[5:])
    assert [tuple(tensor.shape) for tensor in everything(slow, fast)[:5]] == [
        (4, 0, 5),
        (4, 0, 4),
        (4, 0, 3),
        (0, 3, 7),
        (0, 3, 4),
    ]


@in_detail
def test_results_share_no_memory(device: str) -> None:
    slow, fast = tensors_of(Case(3, 4, 2), device)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in everything(slow, fast)}
    assert len(pointers) == 13


def test_the_layer_takes_it_and_its_gradients_differentiate(device: str) -> None:
    results = []
    for impl in ("triton", "reference"):
        torch.manual_seed(0)
        layer = nn.GatedFastWeightsRNN(2, 3, slow_inner_size=4, impl=impl, dtype=torch.float64).to(device)
        x = torch.randn(3, 2, 2, dtype=torch.float64).to(device).requires_grad_()
        y, state = layer(x, lengths=torch.tensor([3, 2], device=device))
        loss = y.square().sum() + sum(tensor.sum() for tensor in state)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        results.append([y, grad, *torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()])])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_scratch_grows_with_the_root_of_the_steps_and_not_with_the_batch() -> None:
    for steps in (1, 2, 31, 32, 33, 2000):
        chunk = kernel.chunk_steps(steps)
        assert chunk + -(-steps // chunk) <= 2 * steps**0.5 + 2
    for batch, matrix, expected in [(10**6, 65536, 1), (10**6, 16384, 4), (10**6, 1024, 16), (3, 1024, 3)]:
        assert kernel.programs(batch, matrix, torch.device("cpu")) == expected


def test_what_does_not_fit_is_refused() -> None:
    skip_unless_available("cpu")
    slow, fast = tensors_of(Case(4, 3, 2), "cpu")
    with pytest.raises(ValueError, match=r"fast_1 must have shape \(2, 4, 8\), got \(2, 4, 7\)"):
        kernel.run_forward(*(*fast[:3], fast[3][:, :, :7], *fast[4:]))
    with pytest.raises(TypeError, match=r"hidden is torch.float64 on cpu, x is torch.float32 on cpu"):
        kernel.run_forward(*(*fast[:2], fast[2].double(), *fast[3:]))
    with pytest.raises(TypeError, match=r"lengths must be int64 on cpu, got torch.int32"):
        kernel.slow_forward(slow._replace(lengths=torch.ones(2).int()))
    with pytest.raises(KernelError, match=r"takes float32 and float64, got torch.float16"):
        kernel.slow_forward(SlowInputs(*(tensor.half() for tensor in slow[:5])))


def test_asked_for_by_name_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [torch.from_numpy(array) for array in Case(4, 3, 2).inputs().values()]
    with pytest.raises(KernelError, match="impl='triton' was asked for, but the triton kernel needs tensors on a GPU"):
        gated(*tensors, impl="triton")


def test_matrices_too_large_for_the_chip_are_refused_by_name() -> None:
    skip_unless_available("cpu")
    tensors = [torch.from_numpy(array).float() for array in Case(128, 1, 1).inputs().values()]
    message = "up to 64 KiB on chip; with 128 units and 3 features, padded to 256 x 256, one takes 256 KiB"
    with pytest.raises(KernelError, match=message):
        gated(*tensors, impl="triton")
    assert kernel.unavailable(torch.empty(1, 1, 27), torch.empty(1, 100)) is None
    assert gated(*tensors).outputs.shape == (1, 1, 128)


@pytest.mark.slow
def test_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    # The interpreter takes much that the compiler refuses; the compiler needs no GPU.
    skip_unless_available("cpu")
    done = child("-m", "tests.ops.gated.compile_triton", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
