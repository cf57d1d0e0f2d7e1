"""The reference of the delta family against a loop in NumPy, flash-linear-attention, and what users get wrong."""

from typing import Any

import numpy as np
import pytest
import torch

from fastweights.ops.delta import gated_delta_rule

from ..parity import error
from .cases import RULES, Case, call, run
from .numpy_loop import delta

SHAPES = {"rules": {}, "ragged": {"ragged": True}, "restarted": {"restarted": True, "ragged": True}}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", SHAPES)
def test_results_and_gradients_are_those_of_a_loop_in_numpy(rule: str, form: str) -> None:
    case = Case(rule, 9, **SHAPES[form])
    arrays = case.inputs()
    found = run(case, torch.float64, "reference")

    def loop(inputs: dict[str, Any]) -> tuple[Any, Any]:
        return delta(inputs, case.correct, case.keys**-0.5, case.starts(), case.lengths())

    for name, truth in zip(("outputs", "state"), loop(arrays), strict=True):
        assert error(found[name], torch.from_numpy(truth)) < 1e-12, name
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(found[name].shape, generator=generator, dtype=torch.float64) for name in ("outputs", "state")]
    for name, array in arrays.items():
        # The complex step along a random direction, which has no difference to cancel in.
        direction = np.random.default_rng(6).normal(size=array.shape)
        moved = loop(arrays | {name: array + 1e-30j * direction})
        slope = sum((grad.numpy() * result.imag).sum() for grad, result in zip(grads, moved, strict=True)) / 1e-30
        assert (found[f"gradient of {name}"].numpy() * direction).sum() == pytest.approx(slope, rel=1e-10), name


def test_it_is_flash_linear_attentions_own_loop() -> None:
    naive: Any = pytest.importorskip("fla.ops.gated_delta_rule.naive", exc_type=ImportError)
    plain: Any = pytest.importorskip("fla.ops.delta_rule.naive", exc_type=ImportError)
    simple: Any = pytest.importorskip("fla.ops.simple_gla.naive", exc_type=ImportError)
    linear: Any = pytest.importorskip("fla.ops.linear_attn.naive", exc_type=ImportError)

    def turned(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.transpose(1, 2) for tensor in tensors]

    def delta_recurrence(q: Any, k: Any, v: Any, beta: Any, **options: Any) -> Any:
        outputs, state = plain.delta_rule_recurrence(*turned(q, k, v, beta), **options)
        return outputs.transpose(1, 2), state

    theirs = {
        "gated_delta": naive.naive_recurrent_gated_delta_rule,
        "delta": delta_recurrence,
        "decay": simple.naive_chunk_simple_gla,
        "sum": lambda q, k, v, **_: (linear.naive_chunk_linear_attn(q, k, v), None),
    }
    for rule, function in theirs.items():
        case = Case(rule, 64, 16, 8, initial=rule != "sum")
        tensors = {name: torch.from_numpy(array).float() for name, array in case.inputs().items()}
        for impl in ("reference", "auto"):
            pairs = zip(call(case, tensors, impl), function(**tensors, output_final_state=True), strict=True)
            for mine, other in pairs:
                assert other is None or error(mine, other.double()) < 1e-5, rule


def test_gradients_of_gradients_against_differences() -> None:
    case = Case("gated_delta", 3, 2, 2, ragged=True, restarted=True)
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in case.inputs().items()}

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(case, dict(zip(tensors, values, strict=True)), "reference")

    assert torch.autograd.gradcheck(function, list(tensors.values()))
    assert torch.autograd.gradgradcheck(function, list(tensors.values()))


def test_nothing_is_left_of_what_a_start_cuts_off() -> None:
    case = Case("gated_delta", 6, batch=1)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
    tensors["v"][:, 2] = torch.nan
    starts = torch.zeros(1, 6, dtype=torch.bool)
    starts[:, 3] = True
    for impl in ("reference", "auto"):
        outputs, state = gated_delta_rule(**tensors, starts=starts, output_final_state=True, impl=impl)
        assert state is not None
        later = {name: tensor[:, 3:] for name, tensor in tensors.items() if name != "initial_state"}
        alone, end = gated_delta_rule(**later, output_final_state=True, impl=impl)
        torch.testing.assert_close(outputs[:, 3:], alone)
        torch.testing.assert_close(state, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    case = Case("gated_delta", 20)
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in case.inputs().items()}
    outputs, state = call(case, tensors, "auto")
    truth, end = call(case, {name: tensor.float() for name, tensor in tensors.items()}, "auto")
    assert outputs.dtype == dtype
    assert torch.equal(outputs, truth.to(dtype))
    assert state.dtype == torch.float32
    assert torch.equal(state, end)


def test_bad_input_is_refused() -> None:
    case = Case("gated_delta", 3)
    good: dict[str, Any] = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"got \[2, 3, 2, 4\], \[2, 3, 2, 5\] and", {"q": good["q"][..., :4]}),
        (ValueError, "a step, a head", {name: good[name][:, :0] for name in ("q", "k", "v", "g", "beta")}),
        (TypeError, "one floating dtype, got torch.float32, torch.float64", {"q": good["q"].float()}),
        (ValueError, r"g must be \[B,T,H\], \[2, 3, 2\] here, got \[2, 3\]", {"g": good["g"][..., 0]}),
        (ValueError, r"beta must be \[B,T,H\], \[2, 3, 2\] here, got \[2, 1, 2\]", {"beta": good["beta"][:, :1]}),
        (
            ValueError,
            r"\[B,H,K,V\], \[2, 2, 5, 4\] here, got \[2, 2, 4, 5\]",
            {"initial_state": good["initial_state"].mT},
        ),
        (ValueError, r"starts must be \[B,T\], \[2, 3\] here, got \[3, 2\]", {"starts": torch.zeros(3, 2).bool()}),
        (TypeError, "starts must be bool, got torch.float32", {"starts": torch.zeros(2, 3)}),
        (ValueError, r"lengths must be \[B\], \[2\] here, got \[3\]", {"lengths": torch.tensor([1, 2, 3])}),
        (TypeError, "lengths must be int64, got torch.float32", {"lengths": torch.tensor([1.0, 2.0])}),
        (ValueError, "impl must be one of auto, reference", {"impl": "triton"}),
    ]
    for kind, message, changed in bad:
        with pytest.raises(kind, match=message):
            gated_delta_rule(**good | changed)
