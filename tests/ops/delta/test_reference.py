"""The reference of the delta family against a loop in NumPy, flash-linear-attention, and what users get wrong."""

from typing import Any

import pytest
import torch

from fastweights.ops.delta import dplr_delta_rule, gated_delta_rule, simple_gla

from .cases import RULES, Case, call
from .peers import require_flash, require_loop

SHAPES = {"rules": {}, "ragged": {"ragged": True}, "restarted": {"restarted": True, "ragged": True}}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", SHAPES)
def test_results_and_gradients_are_those_of_a_loop_in_numpy(rule: str, form: str) -> None:
    require_loop(Case(rule, 9, **SHAPES[form]), "reference")


@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("strongest", [0.5, 80.0])
def test_decays_of_each_channel_are_those_of_a_loop_in_numpy(rule: str, form: str, strongest: float) -> None:
    require_loop(Case(rule, 9, strongest=strongest, channels=True, **SHAPES[form]), "reference")


@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_decays_of_each_channel_are_flash_linear_attentions(rule: str) -> None:
    for impl in ("reference", "auto"):
        require_flash(Case(rule, 64, 16, 8, channels=True), impl)


def test_an_additive_rule_writes_values_with_any_beta() -> None:
    require_loop(Case("decay", 9, weighed=True, restarted=True, ragged=True), "reference")
    require_loop(Case("decay", 70, weighed=True), "auto")


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_skip_that_does_not_fit_is_refused(impl: str) -> None:
    tensors: dict[str, Any] = {
        name: torch.from_numpy(array) for name, array in Case("decay", 3, weighed=True).inputs().items()
    }
    for kind, message, skip in (
        (ValueError, r"skip must be \[H\], \[2\] here, got \[3\]", torch.ones(3).double()),
        (TypeError, "skip is torch.float64 on meta, v is torch.float64 on cpu", tensors["skip"].to("meta")),
        (TypeError, r"skip must be a tensor, got a float: torch\.as_tensor\(skip\)", 0.5),
    ):
        with pytest.raises(kind, match=message):
            simple_gla(**tensors | {"skip": skip}, impl=impl)


def test_equal_decays_of_all_channels_are_one_decay() -> None:
    tensors: dict[str, Any] = {
        name: torch.from_numpy(array) for name, array in Case("gated_delta", 20).inputs().items()
    }
    one = gated_delta_rule(**tensors, output_final_state=True)
    tensors["g"] = tensors["g"].unsqueeze(-1).expand_as(tensors["k"])
    torch.testing.assert_close(gated_delta_rule(**tensors, output_final_state=True), one, rtol=0, atol=1e-13)


def draw_unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64), dim=-1)


def test_the_rules_of_models_are_calls_of_the_general_one() -> None:
    torch.manual_seed(0)
    q, k, p, v = draw_unit(4, 2, 90, 3, 8).unbind()
    g, erase, write = -torch.rand(2, 90, 3, 8).double(), *torch.rand(2, 2, 90, 3, 8).double().unbind()
    beta = torch.rand(2, 90, 3, 1).double()

    def run_loop(read: torch.Tensor, scaled: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state, outputs = torch.zeros(2, 3, 8, 8).double(), []
        for t in range(90):
            state = g[:, t].exp().unsqueeze(-1) * state
            written = value[:, t] - torch.einsum("bhk,bhkv->bhv", read[:, t], state)
            state = state + (scaled[:, t] * k[:, t]).unsqueeze(-1) * written.unsqueeze(-2)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(outputs, 1)

    one = torch.ones_like(beta)
    models = {
        "Kimi delta": ((beta * k, v, g.exp() * k, -beta * k), run_loop(k, beta, v)),
        "Gated DeltaNet-2": ((k, write * v, g.exp() * erase * k, -k), run_loop(erase * k, one, write * v)),
        "Comba": ((beta * k, v, g.exp() * p, -beta * k), run_loop(p, beta, v)),
    }
    for name, (tensors, truth) in models.items():
        outputs, _ = dplr_delta_rule(q, *tensors, g, scale=1.0)
        torch.testing.assert_close(outputs, truth, rtol=0, atol=1e-12, msg=name)
    kimi, _ = gated_delta_rule(q, k, v, g, beta.squeeze(-1), scale=1.0)
    torch.testing.assert_close(kimi, models["Kimi delta"][1], rtol=0, atol=1e-12)


def test_decays_of_the_general_rule_may_be_one_for_a_step_or_none() -> None:
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in Case("dplr", 70).inputs().items()}
    shared = tensors["gk"][..., 0]
    of_each, _ = dplr_delta_rule(**tensors | {"gk": shared.unsqueeze(-1).expand_as(tensors["gk"]).clone()})
    torch.testing.assert_close(dplr_delta_rule(**tensors | {"gk": shared})[0], of_each)
    none, _ = dplr_delta_rule(**tensors | {"gk": torch.zeros_like(tensors["gk"])})
    torch.testing.assert_close(dplr_delta_rule(**tensors | {"gk": None})[0], none)


def test_bad_input_of_the_general_rule_is_refused() -> None:
    good: dict[str, Any] = {name: torch.from_numpy(array) for name, array in Case("dplr", 3).inputs().items()}
    few = {name: good[name][:, :, :1] for name in ("q", "k")}
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, r"a must be a tensor, got a NoneType", {"a": None}),
        (TypeError, r"gk must be a tensor, got a float", {"gk": -0.5}),
        (TypeError, r"k must be a tensor, got a list", {"k": [1.0]}),
        (
            ValueError,
            r"as v, \[2, 3, 2, 5\] here, got \[2, 3, 2, 5\] for k, \[2, 3, 2, 4\] for b",
            {"b": good["b"][..., :4]},
        ),
        (ValueError, r"as v, \[2, 3, 2, 5\] here, got \[2, 3, 1, 5\] for k, \[2, 3, 2, 5\] for a", few),
        (ValueError, r"gk must be \[B,T,H\], \[2, 3, 2\] here, or \[B,T,H,K\]", {"gk": good["gk"][..., :3]}),
        (ValueError, r"a value at least, got \[3, 2, 5\]", {name: tensor[0] for name, tensor in good.items()}),
        (ValueError, r"gk must be logs of decays, at most 0, got 0\.5", {"gk": torch.full_like(good["gk"], 0.5)}),
        (TypeError, "a is torch.float64 on meta, v is torch.float64 on cpu", {"a": good["a"].to("meta")}),
    ]
    for kind, message, changed in bad:
        for impl in ("reference", "auto"):
            with pytest.raises(kind, match=message):
                dplr_delta_rule(**{**good, "impl": impl, **changed})


@pytest.mark.parametrize("rule", RULES)
def test_it_is_flash_linear_attentions_own_loop(rule: str) -> None:
    for impl in ("reference", "auto"):
        require_flash(Case(rule, 64, 16, 8, initial=rule != "sum"), impl)


@pytest.mark.parametrize("rule", ["gated_delta", "gated_delta-channels", "dplr"])
def test_gradients_of_gradients_against_differences(rule: str) -> None:
    rule, _, channels = rule.partition("-")
    case = Case(rule, 3, 2, 2, ragged=True, restarted=True, channels=bool(channels))
    tensors = {name: torch.from_numpy(array).requires_grad_() for name, array in case.inputs().items()}

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call(case, dict(zip(tensors, values, strict=True)), "reference")

    assert torch.autograd.gradcheck(function, list(tensors.values()))
    assert torch.autograd.gradgradcheck(function, list(tensors.values()))


@pytest.mark.parametrize("rule", ["gated_delta", "dplr"])
def test_what_is_past_a_length_reaches_no_gradient(rule: str) -> None:
    case = Case(rule, 6, batch=2)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
    for name in {"q", "k", "v", "a", "b", "beta"} & tensors.keys():
        tensors[name][1, 3:] = torch.nan
    for impl in ("reference", "auto"):
        inputs = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        outputs, _ = RULES[rule](**inputs, lengths=torch.tensor([6, 3]), impl=impl)
        gradients = torch.autograd.grad(outputs.sum(), list(inputs.values()))
        assert all(gradient.isfinite().all() for gradient in gradients), impl


@pytest.mark.parametrize("rule", ["gated_delta", "dplr"])
def test_nothing_is_left_of_what_a_start_cuts_off(rule: str) -> None:
    case = Case(rule, 6, batch=1)
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in case.inputs().items()}
    tensors["v"][:, 2] = torch.nan
    starts = torch.zeros(1, 6, dtype=torch.bool)
    starts[:, 3] = True
    for impl in ("reference", "auto"):
        outputs, state = RULES[rule](**tensors, starts=starts, output_final_state=True, impl=impl)
        assert state is not None
        later = {name: tensor[:, 3:] for name, tensor in tensors.items() if name != "initial_state"}
        alone, end = RULES[rule](**later, output_final_state=True, impl=impl)
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
        (
            ValueError,
            r"g must be \[B,T,H\], \[2, 3, 2\] here, or \[B,T,H,K\], \[2, 3, 2, 5\], got \[2, 3\]",
            {"g": good["g"][..., 0]},
        ),
        (ValueError, r"beta must be \[B,T,H\], \[2, 3, 2\] here, got \[2, 1, 2\]", {"beta": good["beta"][:, :1]}),
        (
            ValueError,
            r"\[B,H,K,V\], \[2, 2, 5, 4\] here, got \[2, 2, 4, 5\]",
            {"initial_state": good["initial_state"].mT},
        ),
        (ValueError, r"starts must be \[B,T\], \[2, 3\] here, got \[3, 2\]", {"starts": torch.zeros(3, 2).bool()}),
        (TypeError, "starts must be bool, got torch.float32", {"starts": torch.zeros(2, 3)}),
        (ValueError, r"g must be .* got \[3\]", {"g": -torch.ones(3).double(), "starts": torch.zeros(2, 3).bool()}),
        (ValueError, r"lengths must be \[B\], \[2\] here, got \[3\]", {"lengths": torch.tensor([1, 2, 3])}),
        (TypeError, "lengths must be int64 on cpu, got torch.float32", {"lengths": torch.tensor([1.0, 2.0])}),
        (TypeError, "beta is torch.float64 on meta, v is torch.float64 on cpu", {"beta": good["beta"].to("meta")}),
        (ValueError, r"g must be logs of decays, at most 0, got 0\.5", {"g": torch.full_like(good["g"], 0.5)}),
        (ValueError, r"g must be logs of decays, at most 0, got 0\.5", {"g": torch.full_like(good["k"], 0.5)}),
        (ValueError, r"\[2, 3, 2, 5\], got \[2, 3, 2, 4\]", {"g": -torch.ones(2, 3, 2, 4).double()}),
        (ValueError, r"beta must lie between 0 and 2, got 2\.5", {"beta": good["beta"] + 2.5 - good["beta"][0, 0, 0]}),
        (ValueError, r"beta must lie between 0 and 2, got -0\.25", {"beta": torch.full_like(good["beta"], -0.25)}),
        (ValueError, "lengths must lie between 0 and 3, got 4", {"lengths": torch.tensor([1, 4])}),
        (ValueError, "lengths must lie between 0 and 3, got -1", {"lengths": torch.tensor([-1, 4])}),
        (ValueError, "impl must be one of auto, reference", {"impl": "cuda"}),
        (TypeError, r"beta must be a tensor, got a float: torch\.as_tensor\(beta\)", {"beta": 0.5}),
        (TypeError, "lengths must be a tensor, got a list", {"lengths": [1, 2]}),
        (TypeError, "starts must be a tensor, got a list", {"starts": [[False] * 3] * 2}),
        (ValueError, "a key and a value at least, got", {name: good[name][..., :0] for name in ("q", "k")}),
        (ValueError, "a key and a value at least, got", {name: torch.tensor(1.0) for name in ("q", "k", "v")}),
        (TypeError, "g must be of real numbers, got torch.int64", {"g": good["g"].long()}),
        (TypeError, "beta must be of real numbers, got torch.bool", {"beta": good["beta"] > 0.5}),
        (TypeError, "initial_state must be of real numbers, got torch.complex", {"initial_state": good["v"] + 0j}),
        (TypeError, "scale must be a number, got True", {"scale": True}),
        # Its gradient would be lost without a word.
        (TypeError, r"scale must be a number, got tensor\(0\.5000", {"scale": torch.tensor(0.5, requires_grad=True)}),
    ]
    for kind, message, changed in bad:
        for impl in ("reference", "auto"):
            with pytest.raises(kind, match=message):
                gated_delta_rule(**{**good, "impl": impl, **changed})
