"""The C++ kernel of the delta family: parity with the reference, and the laws of a compiled function."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.errors import KernelError
from fastweights.ops import _native
from fastweights.ops.delta import gated_delta_rule
from fastweights.ops.delta.reference import DeltaInputs

from ..parity import error, needs_kernel, negated_view
from .cases import RULES, Case, call, draw_grads, run
from .parity import CASES, require_parity
from .peers import require_flash, require_loop

pytestmark = needs_kernel

SMALL = Case("gated_delta", 3, 2, 2, ragged=True, restarted=True)


def tensors_of(case: Case) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in case.inputs().items()}


def function_of(case: Case) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Both results of the kernel, as a function of the inputs that the case has."""
    tensors = tensors_of(case)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        return call(case, dict(zip(tensors, values, strict=True)), "cpu")

    return function, [tensor.requires_grad_() for tensor in tensors.values()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case: Case) -> None:
    require_parity(case, draws=8)


@pytest.mark.parametrize("rule", RULES)
def test_numbers_that_are_lazily_negated_are_those_that_they_show(rule: str) -> None:
    case = Case(rule, 9)

    def results(view: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tensors = {name: view(tensor).requires_grad_() for name, tensor in tensors_of(case).items()}
        found = call(case, tensors, "cpu")
        gradients = torch.autograd.grad(found, list(tensors.values()), list(map(view, draw_grads(found))))
        return [*found, *gradients, *call(case, {name: tensor.detach() for name, tensor in tensors.items()}, "cpu")]

    for mine, theirs in zip(results(negated_view), results(lambda tensor: tensor), strict=True):
        assert torch.equal(mine, theirs)


STEPS, SIZES = (1, 63, 64, 65, 1000), (16, 64, 96, 128)
GRID = [
    *(Case("gated_delta", steps, keys, values, batch=1) for steps in STEPS for keys in SIZES for values in SIZES),
    *(Case(rule, steps, 64, 96, batch=1) for rule in ("sum", "decay", "delta") for steps in STEPS),
    *(
        Case("gated_delta", steps, keys, values, batch=1, heads=1, strongest=strongest, channels=True)
        for steps, strongest in zip((1, 15, 16, 17, 63, 64, 65, 1000), (0.5, 5.0, 80.0) * 3, strict=False)
        for keys in SIZES
        for values in SIZES
    ),
    *(Case("decay", steps, 64, 96, batch=1, strongest=80.0, channels=True) for steps in STEPS),
    *(
        Case("dplr", steps, keys, values, batch=1, heads=1, strongest=strongest)
        for steps, strongest in zip((1, 15, 16, 17, 63, 64, 65, 1000), (0.5, 5.0, 80.0) * 3, strict=False)
        for keys in SIZES
        for values in SIZES
    ),
    *(Case("decay", steps, 128, 64, batch=1, heads=16, key_heads=1) for steps in (1, 63, 64, 65)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_a_loop_in_numpy_gives_the_same(case: Case) -> None:
    require_loop(case, "cpu")


# Where flash-linear-attention is not installed, one skip says so.
THEIRS = [case for case in GRID if case.rule != "sum" and case.key_heads is None]


@pytest.mark.slow
@pytest.mark.parametrize("case", THEIRS if importlib.util.find_spec("fla") else THEIRS[:1], ids=str)
def test_flash_linear_attention_gives_the_same(case: Case) -> None:
    require_flash(case, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [16, 64, 96, 128])
@pytest.mark.parametrize("values", [64, 96, 256])
def test_parity_of_a_thousand_steps(keys: int, values: int) -> None:
    require_parity(Case("gated_delta", 1000, keys, values, batch=1, heads=1), draws=2)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_lowest_of_all_numbers_as_a_decay(dtype: torch.dtype, channels: bool) -> None:
    tensors = {
        name: tensor.to(dtype) for name, tensor in tensors_of(Case("gated_delta", 70, 6, 5, channels=channels)).items()
    }
    tensors["g"][:, 7::20] = torch.finfo(dtype).min  # as a mask would have it
    results = []
    for impl in ("reference", "cpu"):
        inputs = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        outputs, state = gated_delta_rule(**inputs, output_final_state=True, impl=impl)
        assert state is not None
        gradients = torch.autograd.grad(outputs.sum() + state.square().sum(), list(inputs.values()))
        results.append((outputs, state, *gradients))
    for mine, true in zip(results[1], results[0], strict=True):
        assert error(mine.detach(), true.detach().double()) < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("rule", ["gated_delta", "dplr"])
def test_a_channel_that_keeps_nothing(rule: str) -> None:
    tensors = tensors_of(Case(rule, 70, 6, 5, channels=rule == "gated_delta"))
    tensors["gk" if rule == "dplr" else "g"][:, 7::20, :, ::2] = -torch.inf
    results = []
    for impl in ("reference", "cpu"):
        inputs = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        outputs, state = RULES[rule](**inputs, output_final_state=True, impl=impl)
        assert state is not None
        gradients = torch.autograd.grad(outputs.sum() + state.square().sum(), list(inputs.values()))
        results.append((outputs, state, *gradients))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(rule, 3, 2, 2, ragged=True, restarted=True) for rule in RULES),
        *(Case(rule, 3, 2, 2, ragged=True, restarted=True, channels=True) for rule in ("decay", "gated_delta")),
        Case("gated_delta", 3, 2, 2, heads=2, key_heads=1),
        Case("decay", 3, 2, 2, ragged=True, restarted=True, weighed=True),
    ],
    ids=str,
)
def test_gradients_against_differences(case: Case) -> None:
    function, tensors = function_of(case)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@pytest.mark.parametrize("case", [SMALL, replace(SMALL, rule="dplr")], ids=str)
def test_operators(case: Case) -> None:
    forward, backward = torch.ops.fastweights.delta, torch.ops.fastweights.delta_backward
    tensors = tensors_of(case)
    tensors |= {"g": tensors.pop("gk", tensors.get("g")), "state": tensors.pop("initial_state")}
    tensors["lengths"] = torch.tensor(case.lengths())
    inputs = DeltaInputs._make([tensors.get(name) for name in DeltaInputs._fields])
    correct = case.correct
    torch.library.opcheck(forward.default, (*inputs, 0.5, correct, "cpu", False))
    # A trace has places past a length that nobody writes or reads, so its numbers cannot be compared.
    traced = (*inputs, 0.5, correct, "cpu", True)
    torch.library.opcheck(forward.default, traced, test_utils=("test_schema", "test_faketensor"))
    outputs, final, trace = forward(*traced)
    for grad_final in (None, torch.ones_like(final)):
        wanted = [True] * (len(inputs) - 2)
        torch.library.opcheck(
            backward.default, (torch.ones_like(outputs), grad_final, trace, *inputs, 0.5, correct, "cpu", wanted)
        )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


KINDS = [Case("gated_delta", 70, 20, 18), Case("gated_delta", 70, 20, 18, channels=True), Case("dplr", 70, 20, 18)]


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_any_number_of_threads_gives_the_same_bits(case: Case) -> None:
    case = replace(case, steps=100, batch=3, ragged=True)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(run(case, torch.float32, "cpu"))
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results[1:]), name


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_one_step_after_another_is_the_whole(case: Case) -> None:
    tensors = tensors_of(case)
    whole, end = call(case, tensors, "cpu")
    state, outputs = tensors.pop("initial_state"), []
    for step in range(case.steps):
        now = {name: tensor[:, step : step + 1] for name, tensor in tensors.items()}
        output, next_state = RULES[case.rule](**now, initial_state=state, output_final_state=True, impl="cpu")
        assert next_state is not None
        state = next_state
        outputs.append(output)
    assert error(torch.cat(outputs, 1), whole) < 1e-12
    assert error(state, end) < 1e-12


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_single_step_that_starts_anew_keeps_nothing_of_the_state(case: Case) -> None:
    tensors: dict[str, Any] = tensors_of(replace(case, steps=1))
    starts = torch.ones(case.batch, 1, dtype=torch.bool)
    tensors["initial_state"].fill_(torch.nan)
    outputs, state = RULES[case.rule](**tensors, starts=starts, output_final_state=True, impl="cpu")
    alone, end = RULES[case.rule](**tensors | {"initial_state": None}, output_final_state=True, impl="cpu")
    assert torch.equal(outputs, alone)
    assert torch.equal(state, end)


@pytest.mark.parametrize(
    "case",
    [*KINDS, Case("decay", 70, 6, 5, channels=True), Case("gated_delta", 70, 6, 5, heads=20, key_heads=1)],
    ids=str,
)
def test_what_is_not_a_number_crosses_no_start_in_gradients(case: Case) -> None:
    starts = torch.zeros(case.batch, case.steps, dtype=torch.bool)
    starts[:, 3::7] = True
    for name in ("q", "k", "v"):
        tensors: dict[str, Any] = tensors_of(case)
        tensors[name][:, 1] = tensors[name][:, 30] = torch.nan
        inputs = {each: tensor.requires_grad_() for each, tensor in tensors.items()}
        outputs, _ = RULES[case.rule](**inputs, starts=starts, impl="cpu")
        gradients = torch.autograd.grad(outputs.nan_to_num().sum(), list(inputs.values()))
        for each, gradient in zip(inputs, gradients, strict=True):
            if each != "initial_state":
                assert gradient[:, 3:24].isfinite().all(), (name, each)
                assert gradient[:, 31:].isfinite().all(), (name, each)


def test_what_is_not_a_number_goes_forwards_only() -> None:
    tensors = tensors_of(Case("gated_delta", 70, 6, 5))
    expected, _ = gated_delta_rule(**tensors)
    for name in ("q", "k", "v", "g", "beta"):
        spoilt: dict[str, Any] = tensors | {name: tensors[name].clone()}
        spoilt[name][0, 20, 1] = torch.nan
        outputs, _ = gated_delta_rule(**spoilt, impl="cpu")
        assert torch.equal(outputs[0, :20], expected[0, :20]), name
        assert torch.equal(outputs[0, :, 0], expected[0, :, 0]), name
        assert outputs[0, 20, 1].isnan().any(), name
        assert name == "q" or outputs[0, 21:, 1].isnan().any(-1).all(), name


@pytest.mark.parametrize("rule", ["gated_delta", "dplr"])
def test_compiled_without_a_graph_break_it_gives_the_same(rule: str) -> None:
    function, tensors = function_of(Case(rule, 5, 3, 4))
    results = []
    for each in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        outputs, state = each(*tensors)
        gradients = torch.autograd.grad(outputs.pow(2).sum() + state.sin().sum(), tensors)
        results.append((outputs, state, *gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_who_follows_a_call_finds_the_operator() -> None:
    tensors = tensors_of(Case("gated_delta", 1, 3, 4))

    def outputs_of(v: Tensor) -> Tensor:
        return gated_delta_rule(**tensors | {"v": v}, impl="cpu")[0]

    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    v = tensors["v"]
    with Record():
        recorded = outputs_of(v)
    assert torch.ops.fastweights.delta.default in called
    assert torch.equal(recorded, outputs_of(v))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        outputs_of(forward_ad.make_dual(v, v))


def test_under_vmap() -> None:
    tensors = tensors_of(Case("gated_delta", 5, 3, 4, batch=3))
    alone = {name: tensor.unsqueeze(1) for name, tensor in tensors.items()}

    def outputs_of(each: dict[str, Any]) -> Tensor:
        return gated_delta_rule(**each, impl="cpu")[0]

    torch.testing.assert_close(torch.func.vmap(outputs_of)(alone).squeeze(1), gated_delta_rule(**tensors)[0])


def test_what_the_kernel_cannot_take() -> None:
    tensors = tensors_of(SMALL)
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with pytest.raises(KernelError, match="needs tensors on the cpu, got meta"):
        gated_delta_rule(**meta, impl="cpu")


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "MISSING", "it was not built")
    tensors = tensors_of(SMALL)
    assert torch.equal(call(SMALL, tensors, "auto")[0], call(SMALL, tensors, "reference")[0])
    with pytest.raises(KernelError, match="impl='cpu' was asked for, but it was not built"):
        call(SMALL, tensors, "cpu")
