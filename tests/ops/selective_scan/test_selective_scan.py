"""The selective scan: its reference against a loop in NumPy and transformers' own, its kernel against the reference."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fastweights.errors import KernelError
from fastweights.ops.selective_scan import selective_scan, selective_state_update
from fastweights.ops.selective_scan.reference import ScanInputs

from ..parity import error, needs_kernel, negated_view
from .cases import NAMES, Case, call, draw_grads, loop, run
from .parity import CASES, require_parity

SMALL = Case(3, 2, 2)
IMPLEMENTATIONS = ["reference", pytest.param("cpu", marks=needs_kernel)]


def tensors_of(case: Case) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in case.inputs().items()}


@needs_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    require_parity(case, draws=8)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [Case(9), Case(70, 3, 2, batch=1), Case(9, plain=True)], ids=str)
def test_a_loop_in_numpy_gives_the_same(case: Case, impl: str) -> None:
    arrays = case.inputs()
    found = run(case, torch.float64, impl)
    results = (found["outputs"], found["state"])
    for result, truth in zip(results, loop(arrays, not case.plain), strict=True):
        assert error(result, torch.from_numpy(truth)) < 1e-12
    grads = [grad.numpy() for grad in draw_grads(results)]
    for name, array in arrays.items():
        direction = np.random.default_rng(6).normal(size=array.shape)
        moved = loop({**arrays, name: array + 1e-30j * direction}, not case.plain)
        slope = sum((grad * result.imag).sum() for grad, result in zip(grads, moved, strict=True)) / 1e-30
        gradient = found[f"gradient of {name}"].numpy()
        off = abs((gradient * direction).sum() - slope)
        assert off < 1e-12 * np.linalg.norm(gradient) * np.linalg.norm(direction), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_transformers_own_gives_the_same(impl: str) -> None:
    mamba: Any = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    if not hasattr(mamba, "mamba_selective_scan"):
        pytest.skip("this version of transformers has the scan within a layer")
    theirs = inspect.unwrap(mamba.mamba_selective_scan)
    names = [name for name in NAMES if name != "initial_state"]  # which theirs does not have
    tensors = {name: tensor.float().requires_grad_() for name, tensor in tensors_of(Case(70, 6, 16)).items()}
    tensors.pop("initial_state")
    own = {"dt" if name == "delta" else name: tensor for name, tensor in tensors.items()}
    expected = theirs(own.pop("u"), **own, delta_softplus=True, return_last_state=True)
    results = selective_scan(**tensors, delta_softplus=True, return_last_state=True, impl=impl)
    inputs = [tensors[name] for name in names]
    gradients = [torch.autograd.grad(both, inputs, draw_grads(results)) for both in (results, expected)]
    for mine, true in zip((*results, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert error(mine.detach(), true.detach().double()) < 1e-5


@needs_kernel
@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("plain", [False, True])
def test_gradients_against_differences(plain: bool, impl: str) -> None:
    case = Case(3, 2, 2, plain=plain)
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors_of(case).items()}

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return call(case, dict(zip(tensors, values, strict=True)), impl)

    assert torch.autograd.gradcheck(function, list(tensors.values()))
    assert torch.autograd.gradgradcheck(function, list(tensors.values()))


@needs_kernel
@pytest.mark.parametrize("plain", [False, True])
def test_numbers_that_are_lazily_negated_are_those_that_they_show(plain: bool) -> None:
    case = Case(9, plain=plain)

    def results(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tensors = {name: view(tensor).requires_grad_() for name, tensor in tensors_of(case).items()}
        found = call(case, tensors, "cpu")
        gradients = torch.autograd.grad(found, list(tensors.values()), list(map(view, draw_grads(found))))
        plain_found = call(case, {name: tensor.detach() for name, tensor in tensors.items()}, "cpu")
        step: dict[str, Any] = {name: view(tensor) for name, tensor in step_of(Case(1)).items()}
        step["state"] = step["state"].clone()
        return [*found, *gradients, *plain_found, selective_state_update(**step, impl="cpu"), step["state"]]

    for mine, theirs in zip(results(negated_view), results(lambda tensor: tensor), strict=True):
        assert torch.equal(mine, theirs)


@needs_kernel
def test_operators() -> None:
    tensors = tensors_of(SMALL)
    turned = {name: tensors[name].transpose(1, 2).contiguous() for name in ("u", "delta", "B", "C", "z")}
    inputs = ScanInputs(turned["u"], turned["delta"].exp(), tensors["A"], turned["B"], turned["C"], *[None] * 5)
    every = inputs._replace(
        bias=tensors["delta_bias"], skip=tensors["D"], gate=turned["z"], state=tensors["initial_state"]
    )
    forward, backward = torch.ops.fastweights.selective_scan, torch.ops.fastweights.selective_scan_backward
    for each, softplus in ((inputs, False), (every, True)):
        torch.library.opcheck(forward.default, (*each, softplus, False))
        torch.library.opcheck(forward.default, (*each, softplus, True))
        outputs, final, trace = forward(*each, softplus, True)
        for grad_final in (None, torch.ones_like(final)):
            wanted = [True] * (len(each) - 1)
            given = (torch.ones_like(outputs), grad_final, trace, *each, softplus, wanted)
            torch.library.opcheck(backward.default, given)


@needs_kernel
def test_any_number_of_threads_gives_the_same_bits() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(Case(100, 70, 4, batch=3), torch.float32, "cpu"))
    finally:
        torch.set_num_threads(before)
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_packed_sequences_are_separate_ones(impl: str) -> None:
    lengths = (1, 70, 0, 64, 3, 130)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    tensors: dict[str, Any] = tensors_of(Case(sum(lengths), 6, 4, batch=1))
    tensors["initial_state"] = torch.randn(len(lengths), 6, 4, dtype=torch.float64)
    for tensor in tensors.values():
        tensor.requires_grad_()
    packed = selective_scan(**tensors, cu_seqlens=bounds.int(), return_last_state=True, delta_softplus=True, impl=impl)
    outputs, states = [], []
    for index, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        state = tensors["initial_state"][index : index + 1]
        if start == end:
            states.append(state)
            continue
        own = {
            name: tensor[..., start:end] if tensor.shape[-1] == sum(lengths) else tensor
            for name, tensor in tensors.items()
        }
        own["initial_state"] = state
        output, last = selective_scan(**own, return_last_state=True, delta_softplus=True, impl=impl)
        outputs.append(output)
        states.append(last)
    separate = (torch.cat(outputs, 2), torch.cat(states))
    inputs = list(tensors.values())
    gradients = [torch.autograd.grad(both, inputs, draw_grads(packed)) for both in (packed, separate)]
    for mine, true in zip((*packed, *gradients[0]), (*separate, *gradients[1]), strict=True):
        assert error(mine.detach(), true.detach()) < 1e-13


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_state_that_grows_past_all_numbers_is_infinite(impl: str) -> None:
    one = torch.ones(1, 1, 3)
    y = selective_scan(one, 100 * one, torch.ones(1, 1), one, one, initial_state=torch.ones(1, 1, 1), impl=impl)
    assert y.isinf().all()
    y = selective_scan(one, 50 * one, torch.ones(1, 1), one, one, impl=impl)
    torch.testing.assert_close(y[..., 1], torch.full((1, 1), 50 * math.exp(50) + 50), rtol=1e-5, atol=0)


@needs_kernel
def test_it_compiles_and_takes_half_precision() -> None:
    tensors: dict[str, Any] = {name: tensor.bfloat16() for name, tensor in tensors_of(Case(9)).items()}
    y, state = selective_scan(**tensors, delta_softplus=True, return_last_state=True)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact: dict[str, Any] = {name: tensor.double() for name, tensor in tensors.items()}
    expected = selective_scan(**exact, delta_softplus=True, return_last_state=True)
    torch.testing.assert_close(state.double(), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y, expected[0].bfloat16())
    compiled = torch.compile(selective_scan, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**tensors, delta_softplus=True), y)


def test_bad_input_is_refused() -> None:
    good: dict[str, Any] = tensors_of(SMALL)  # B 2, D 2, N 2, T 3
    for wrong, words in [
        ({"u": good["u"][0]}, r"u must be \[B,D,T\] and A \[D,N\], .* got \[2, 3\] and \[2, 2\]"),
        ({"A": good["A"][:1]}, r"got \[2, 2, 3\] and \[1, 2\]"),
        ({"delta": good["delta"][:, :1]}, r"delta must be \[B,D,T\], \[2, 2, 3\] here, got \[2, 1, 3\]"),
        ({"B": good["B"][:1]}, r"B must be \[B,N,T\], \[2, 2, 3\] here, got \[1, 2, 3\]"),
        ({"C": good["C"][..., :1]}, r"C must be \[B,N,T\]"),
        ({"D": torch.ones(3)}, r"D must be \[D\], \[2\] here, got \[3\]"),
        ({"initial_state": torch.ones(2, 2)}, r"initial_state must be \[B,D,N\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "packed into one row, B = 1, got a batch of 2"),
        ({"cu_seqlens": torch.tensor(3)}, "cu_seqlens must hold the start of each packed sequence"),
        ({"impl": "gpu"}, "impl must be one of"),
    ]:
        with pytest.raises(ValueError, match=words):
            selective_scan(**good | wrong)
    for wrong, words in [
        ({"z": good["z"].int()}, "z must be of real numbers on cpu, got torch.int32"),
        ({"A": good["A"].to(torch.complex64)}, "A must be of real numbers on cpu, got torch.complex64"),
        ({"delta": 1.0}, "delta must be a tensor, got a float"),
    ]:
        with pytest.raises(TypeError, match=words):
            selective_scan(**good | wrong)
    one = {name: tensor[:1] if name not in ("A", "D", "delta_bias") else tensor for name, tensor in good.items()}
    for impl in ("reference", "auto"):
        for bounds in ([0, 2, 1, 3], [1, 3], [0, 4]):
            one["initial_state"] = torch.zeros(len(bounds) - 1, 2, 2)
            with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to the number of steps, 3 here, got"):
                selective_scan(**one, cu_seqlens=torch.tensor(bounds), impl=impl)


def step_of(case: Case, *, heads: int = 0, **more: Any) -> dict[str, Any]:
    """Return the arguments of one step: of channels, or of heads with three channels each and keys for two groups."""
    generator = torch.Generator().manual_seed(2)
    channels = (heads, 3) if heads else (case.channels,)
    shapes = {
        "state": (case.batch, *channels, case.numbers),
        "x": (case.batch, *channels),
        "dt": (case.batch, *channels),
        "A": (*channels, case.numbers),
        "B": (case.batch, 2, case.numbers) if heads else (case.batch, case.numbers),
        "C": (case.batch, 2, case.numbers) if heads else (case.batch, case.numbers),
        "D": channels,
        "z": (case.batch, *channels),
        "dt_bias": channels,
    }
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return tensors | {"A": -tensors["A"].abs()} | more


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [Case(1), Case(1, 37, 16, batch=3), Case(1, 9, 130, batch=1)], ids=str)
def test_a_step_is_a_scan_of_one(case: Case, impl: str) -> None:
    step = step_of(case)
    before, address = step["state"].clone(), step["state"].data_ptr()
    y = selective_state_update(**step, dt_softplus=True, impl=impl)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    own = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    turned = {
        name: step[mine].unsqueeze(2) if name in ("u", "delta", "B", "C", "z") else step[mine]
        for name, mine in zip(names, own, strict=True)
    }
    expected, last = selective_scan(
        **turned, delta_softplus=True, return_last_state=True, initial_state=before, impl="reference"
    )
    torch.testing.assert_close(y, expected.squeeze(2), rtol=0, atol=1e-12)
    torch.testing.assert_close(step["state"], last, rtol=0, atol=1e-12)
    assert step["state"].data_ptr() == address


@needs_kernel
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("names", [(), ("D",), ("z",), ("delta_bias",), ("D", "z", "delta_bias")])
def test_each_part_alone_and_of_large_numbers_is_that_of_the_reference(names: tuple[str, ...], softplus: bool) -> None:
    tensors = tensors_of(Case(70, 21, 7))
    large = tensors | {"z": 60 * tensors["z"], "delta": (40 if softplus else 1) * tensors["delta"].abs()}
    if softplus:
        large["delta"] = torch.where(tensors["delta"] < 0, -large["delta"], large["delta"])
    given: dict[str, Any] = {name: large[name].requires_grad_() for name in ("u", "delta", "A", "B", "C", *names)}
    results = []
    for impl in ("reference", "cpu"):
        found = selective_scan(**given, delta_softplus=softplus, return_last_state=True, impl=impl)
        results.append([*found, *torch.autograd.grad(found, list(given.values()), draw_grads(found))])
    for mine, true in zip(*results, strict=True):
        assert error(mine.detach(), true.detach()) < 1e-12


@needs_kernel
@pytest.mark.parametrize("channels", [1, 64, 131])
def test_large_steps_and_gates_are_those_of_the_reference(channels: int) -> None:
    case = Case(1, channels, 3)
    step = step_of(case)
    step |= {"dt": 40 * step["dt"], "z": 60 * step["z"], "A": 0.1 * step["A"]}
    results = []
    for impl in ("reference", "cpu"):
        state = step["state"].clone()
        results.append((selective_state_update(**step | {"state": state}, dt_softplus=True, impl=impl), state))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_numbers_close_a_gate_and_a_step(dtype: torch.dtype, impl: str) -> None:
    """As those do that a mask of a model leaves."""
    least = torch.finfo(dtype).min
    one, rate = torch.ones(1, 1, 2, dtype=dtype), -torch.ones(1, 1, dtype=dtype)
    for low in (-1e30, least):
        z, delta = (torch.full_like(one, low).requires_grad_() for _ in range(2))
        y = selective_scan(one, one, rate, one, one, z=z, impl=impl)
        assert not y.any()
        assert not torch.autograd.grad(y.sum(), z)[0].any()
        y = selective_scan(1e30 * one, delta, rate, one, one, delta_softplus=True, impl=impl)
        assert not y.any()
        assert not torch.autograd.grad(y.sum(), delta)[0].any()
        state = torch.zeros(1, 1, 1, dtype=dtype)
        gate, now = torch.full((1, 1), low, dtype=dtype), one[..., 0]
        assert not selective_state_update(state, now, now, rate, now, now, z=gate, impl=impl).any()


def test_a_step_goes_through_what_looks_into_functions() -> None:
    step = step_of(Case(1))
    expected = selective_state_update(**step | {"state": step["state"].clone()})

    def take(state: Tensor, x: Tensor) -> Tensor:
        return selective_state_update(**step | {"state": state.clone(), "x": x})

    graph = make_fx(take)(step["state"], torch.zeros_like(step["x"]))
    compiled = torch.compile(take, backend="aot_eager", fullgraph=True)
    for function in (graph, compiled, torch.func.functionalize(take)):
        torch.testing.assert_close(function(step["state"], step["x"]), expected, rtol=0, atol=1e-12)
    each = {name: tensor.unsqueeze(1) for name, tensor in step.items() if tensor.shape[0] == len(expected)}
    assert {"state", "x", "B"} <= set(each)
    many = torch.func.vmap(lambda one: selective_state_update(**step | one))(each)
    torch.testing.assert_close(many.squeeze(1), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("one_rate", [False, True])
def test_a_step_of_heads_is_that_of_their_channels(one_rate: bool, impl: str) -> None:
    step = step_of(Case(1, numbers=20), heads=4)
    if one_rate:
        step["A"] = step["A"][:, :1, :1].expand(-1, 3, 20)
    states = step["state"].clone()
    y = selective_state_update(**step, impl=impl)
    for head in range(4):
        alone = {name: step[name][head] for name in ("A", "D", "dt_bias")}
        alone |= {name: step[name][:, head] for name in ("x", "dt", "z")}
        alone |= {name: step[name][:, head // 2] for name in ("B", "C")}
        state = states[:, head].clone()
        torch.testing.assert_close(y[:, head], selective_state_update(state, **alone, impl="reference"))
        torch.testing.assert_close(step["state"][:, head], state)


def test_a_step_of_states_that_the_kernel_does_not_take() -> None:
    step = step_of(Case(1))
    expected, after = selective_state_update(**step | {"state": step["state"].clone()}), step["state"].clone()
    selective_state_update(**step | {"state": after})
    turned = step["state"].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(selective_state_update(**step | {"state": turned}), expected)
    torch.testing.assert_close(turned, after)
    half = {name: tensor.bfloat16() for name, tensor in step.items()}
    y = selective_state_update(**half)
    assert y.dtype == half["state"].dtype == torch.bfloat16
    torch.testing.assert_close(half["state"].double(), after, rtol=0.05, atol=0.05)
    with pytest.raises(KernelError, match=r"float32 or float64 alone.* got a state of torch.bfloat16"):
        selective_state_update(**half, impl="cpu")


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_step_tells_autograd_that_it_writes(impl: str) -> None:
    step = step_of(Case(1))
    version = step["state"]._version
    selective_state_update(**step, impl=impl)
    assert step["state"]._version > version
    with torch.inference_mode():
        expected = selective_state_update(**step | {"state": step["state"].clone()}, impl=impl)
    torch.testing.assert_close(selective_state_update(**step, impl=impl), expected)


def test_a_step_refuses_what_it_cannot_take() -> None:
    step, heads = step_of(Case(1)), step_of(Case(1), heads=4)
    before = step["state"].clone()
    for given, wrong, words in [
        (step, {"state": step["state"][0]}, r"state must be \[B,D,N\] or \[B,H,P,N\], got \[5, 3\]"),
        (step, {"x": step["x"][:, :2]}, r"x must be \[B,D\], \[2, 5\] here, got \[2, 2\]"),
        (step, {"B": step["B"][:1]}, r"B must be \[B,N\], \[2, 3\] here, got \[1, 3\]"),
        (heads, {"A": heads["A"][0]}, r"A must be \[H,P,N\], \[4, 3, 3\] here, got \[3, 3\]"),
        (
            heads,
            {"C": heads["C"].repeat(1, 2, 1)[:, :3]},
            r"C must be \[B,groups,N\].* divide 4 heads, got \[2, 3, 3\]",
        ),
        (heads, {"C": heads["C"][:, :1]}, "B and C must have as many groups, got 2 and 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            selective_state_update(**given | wrong)
    with pytest.raises(TypeError, match=r"z must be of real numbers on cpu, got torch\.int64"):
        selective_state_update(**step | {"z": step["z"].long()})
    with pytest.raises(RuntimeError, match=r"has no gradient: call it in torch\.no_grad\(\), or use selective_scan"):
        selective_state_update(**step | {"x": step["x"].requires_grad_()})
    assert torch.equal(step["state"], before)
