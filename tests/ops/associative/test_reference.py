"""Both forms of the reference, and the layer, against a loop in NumPy that was written from the paper alone."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastweights import nn
from fastweights.ops import _native
from fastweights.ops.associative import Constants, Inputs, attention_scores, final_memory, reference

from . import numpy_loop
from .numpy_loop import Array

TOLERANCE = 1e-12
FORMS: dict[str, Callable[..., Tensor]] = {
    "matrix": reference.matrix_form,
    "attention": reference.attention_form,
}
NORMS = ("plain", "norm", "norm-initial")  # none; in front of every inner step; in front of h_0 too


@dataclass(frozen=True)
class Case:
    inner_steps: int = 2
    nonlinearity: str = "relu"
    norm: str = "norm"
    decay: float = 0.9
    start: str = "state"  # "zeros", "hidden" (without a memory) or "state"
    lengths: tuple[int, ...] | None = None
    steps: int = 5
    batch: int = 2
    size: int = 3
    hold_input: bool = True

    def __str__(self) -> str:
        ends = "full" if self.lengths is None else "-".join(map(str, self.lengths))
        held = "" if self.hold_input else "-method2"
        return f"{self.inner_steps}-{self.nonlinearity}-{self.norm}-decay{self.decay}-{self.start}-{ends}{held}"

    def settings(self) -> dict[str, Any]:
        return {
            "decay": self.decay,
            "rate": 0.5 if self.norm != "plain" else 0.02,
            "inner_steps": self.inner_steps,
            "nonlinearity": self.nonlinearity,
            "normalize_initial": self.norm == "norm-initial",
            "hold_input": self.hold_input,
        }

    def inputs(self) -> dict[str, Any]:
        random = np.random.default_rng(7)
        steps, batch, size = self.steps, self.batch, self.size
        spread = 0.5 if self.norm != "plain" else 0.2  # nothing but the normalisation keeps large memories in check
        return {
            "drive": random.normal(size=(steps, batch, size)),
            "weight_hh": random.normal(size=(size, size)) * spread,
            "norm_weight": random.normal(size=size) + 1 if self.norm != "plain" else None,
            "norm_bias": random.normal(size=size) / 2 if self.norm != "plain" else None,
            "hidden": random.normal(size=(batch, size)) * (self.start != "zeros"),
            "memory": random.normal(size=(batch, size, size)) * spread if self.start == "state" else None,
        }

    def projections(self) -> tuple[Array, Array]:
        """What outputs and final memory are weighed with to make one number."""
        random = np.random.default_rng(11)
        return (
            random.normal(size=(self.steps, self.batch, self.size)),
            random.normal(size=(self.batch, self.size, self.size)),
        )


VALUES = [
    Case(inner_steps, nonlinearity, norm, decay, start, lengths)
    for inner_steps, nonlinearity, norm, decay, (start, lengths) in itertools.product(
        (1, 2, 3),
        ("relu", "tanh"),
        NORMS,
        (0.0, 0.9, 1.0),
        (("zeros", None), ("state", None), ("hidden", (5, 2)), ("state", (0, 3))),
    )
]
VALUES += [
    Case(*choice, lengths=(5, 2), hold_input=False) for choice in itertools.product((1, 2, 3), ("relu", "tanh"), NORMS)
]
GRADIENTS = [
    *(Case(steps, norm=norm, hold_input=False) for steps in (1, 2) for norm in NORMS),
    *(Case(*choice, lengths=(5, 3)) for choice in itertools.product((1, 2, 3), ("relu", "tanh"), NORMS)),
    *(Case(decay=decay, norm=norm) for decay in (0.0, 0.5, 1.0) for norm in NORMS),
    Case(start="zeros"),
    Case(start="hidden", lengths=(0, 5)),
    Case(lengths=(0, 4), nonlinearity="tanh"),
    Case(steps=1, size=4, batch=1),
]


def tensors(inputs: numpy_loop.Inputs) -> dict[str, Any]:
    return {name: None if a is None else torch.tensor(a, requires_grad=True) for name, a in inputs.items()}


def run(form: Callable[..., Tensor], case: Case, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    constants = Constants(**case.settings())
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    outputs = form(Inputs(**given, lengths=lengths), constants)
    return outputs, final_memory(outputs, given["hidden"], given["memory"], lengths, constants)


def assert_equal(actual: Tensor | None, expected: Array) -> None:
    assert actual is not None
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual.detach().numpy() - expected) <= TOLERANCE * np.linalg.norm(expected)


@functools.cache
def expected_gradients(case: Case) -> dict[str, Array]:
    lengths = None if case.lengths is None else list(case.lengths)
    weigh_outputs, weigh_memory = case.projections()

    def scalar(inputs: numpy_loop.Inputs) -> Any:
        outputs, memory = numpy_loop.recurrence(inputs, lengths, case.settings())
        return (weigh_outputs * outputs).sum() + (weigh_memory * memory).sum()

    return numpy_loop.derivatives(scalar, case.inputs())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", VALUES, ids=str)
def test_values(case: Case, form: str) -> None:
    lengths = None if case.lengths is None else list(case.lengths)
    expected, expected_memory = numpy_loop.recurrence(case.inputs(), lengths, case.settings())
    outputs, memory = run(FORMS[form], case, tensors(case.inputs()))
    assert_equal(outputs, expected)
    assert_equal(memory, expected_memory)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients(case: Case, form: str) -> None:
    given = tensors(case.inputs())
    outputs, memory = run(FORMS[form], case, given)
    weigh_outputs, weigh_memory = (torch.tensor(array) for array in case.projections())
    ((weigh_outputs * outputs).sum() + (weigh_memory * memory).sum()).backward()
    expected = expected_gradients(case)
    assert expected.keys() == {name for name, tensor in given.items() if tensor is not None}
    for name, gradient in expected.items():
        assert_equal(given[name].grad, gradient)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, (6, 3, 0)])
def test_starts_and_the_control_of_the_write(form: str, lengths: tuple[int, ...] | None) -> None:
    case = Case(steps=6, batch=3, lengths=lengths)
    random = np.random.default_rng(3)
    inputs = {**case.inputs(), "strengths": random.normal(size=(6, 3))}
    flags = {"starts": random.random((6, 3)) < 0.3, "clears": random.random((6, 3)) < 0.4}
    flags["starts"][0, :2] = True, False
    ends = None if lengths is None else list(lengths)
    weigh_outputs, weigh_memory = case.projections()

    def scalar(inputs: numpy_loop.Inputs) -> Any:
        outputs, memory = numpy_loop.recurrence(inputs, ends, case.settings(), **flags)
        return (weigh_outputs * outputs).sum() + (weigh_memory * memory).sum()

    given = tensors(inputs)
    starts, clears = (torch.tensor(array) for array in flags.values())
    valid = None if lengths is None else torch.tensor(lengths)
    constants = Constants(**case.settings())
    outputs = FORMS[form](Inputs(**given, lengths=valid, starts=starts, clears=clears), constants)
    memory = final_memory(
        outputs,
        given["hidden"],
        given["memory"],
        valid,
        constants,
        starts=starts,
        strengths=given["strengths"],
    )
    expected, expected_memory = numpy_loop.recurrence(inputs, ends, case.settings(), **flags)
    assert_equal(outputs, expected)
    assert_equal(memory, expected_memory)
    ((torch.tensor(weigh_outputs) * outputs).sum() + (torch.tensor(weigh_memory) * memory).sum()).backward()
    for name, gradient in numpy_loop.derivatives(scalar, inputs).items():
        assert_equal(given[name].grad, gradient)


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("inner_steps", [1, 3])
def test_attention_scores_are_the_products_of_eq_4(inner_steps: int, control: bool) -> None:
    case = Case(steps=6, batch=3, inner_steps=inner_steps)
    random = np.random.default_rng(3)
    inputs, settings = case.inputs(), case.settings()
    strengths, starts, clears = random.random((6, 3)), random.random((6, 3)) < 0.3, random.random((6, 3)) < 0.4
    flags = {"starts": starts, "clears": clears} if control else {}
    if control:
        inputs = {**inputs, "strengths": strengths}
    outputs, _ = numpy_loop.recurrence(inputs, None, settings, **flags)
    stored = np.concatenate([inputs["hidden"][None], outputs[:-1]])
    expected = np.zeros((6, 3, 6))
    for b in range(3):
        first, given = 0, 1.0  # the oldest state that is read, and whether the given memory is
        for t in range(6):
            if control and starts[t, b]:
                first, given = t + 1, 0.0
            h = np.zeros_like(stored[t, b]) if first > t or (control and clears[t, b]) else stored[t, b]
            z = inputs["weight_hh"] @ h + inputs["drive"][t, b]
            v = numpy_loop.relu(z)
            for _ in range(inner_steps):
                read = given * settings["decay"] ** (t + 1) * inputs["memory"][b] @ v
                for n in range(first, t + 1):
                    strength = strengths[n, b] if control else 1.0
                    weight = settings["rate"] * strength * settings["decay"] ** (t - n)
                    expected[t, b, n] = weight * stored[n, b] @ v
                    read = read + expected[t, b, n] * stored[n, b]
                v = numpy_loop.relu(numpy_loop.layer_norm(z + read, inputs["norm_weight"], inputs["norm_bias"]))
            np.testing.assert_allclose(v, outputs[t, b], rtol=1e-10, atol=1e-12)
    given_flags = {name: torch.tensor(flag) for name, flag in flags.items()}
    ours = Inputs(**{**tensors(inputs), **given_flags})
    assert_equal(attention_scores(torch.tensor(outputs), ours, Constants(**settings)), expected)


@pytest.mark.parametrize(("steps", "form"), [(6, "attention_form"), (7, "matrix_form")])
def test_form_that_costs_less(steps: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(steps=steps, size=3)
    other = {"attention_form": "matrix_form", "matrix_form": "attention_form"}[form]
    monkeypatch.delattr(reference, other)
    outputs, _ = run(reference.recurrence, case, tensors(case.inputs()))
    assert_equal(outputs, numpy_loop.recurrence(case.inputs(), None, case.settings())[0])


def test_padding_never_reaches_a_value() -> None:
    case = Case(lengths=(2, 5))
    clean = run(reference.recurrence, case, tensors(case.inputs()))
    given = tensors(case.inputs())
    given["drive"].data[2:, 0] = torch.nan
    for actual, expected in zip(run(reference.recurrence, case, given), clean, strict=True):
        assert torch.equal(actual, expected)


# The layer: drive = C x + b comes into it, and the implementation that runs is its own choice.


@dataclass(frozen=True)
class LayerCase(Case):
    features: int = 2

    def inputs(self) -> dict[str, Any]:
        random = np.random.default_rng(13)
        return {
            **super().inputs(),
            "x": random.normal(size=(self.steps, self.batch, self.features)),
            "weight_ih": random.normal(size=(self.size, self.features)),
            "bias": random.normal(size=self.size) / 2,
        }


LAYERS = [
    LayerCase(1, "relu", "norm", 0.95),
    LayerCase(3, "tanh", "norm-initial", 0.9, lengths=(5, 2)),
    LayerCase(2, "relu", "norm-initial", 0.5, start="zeros", lengths=(0, 5)),
    LayerCase(2, "tanh", "plain", 1.0),
    LayerCase(1, "relu", "plain", 0.0, lengths=(3, 4)),
]


def driven(inputs: numpy_loop.Inputs) -> dict[str, Any]:
    """The recurrence's inputs from the layer's."""
    drive = np.einsum("hd,tbd->tbh", inputs["weight_ih"], inputs["x"]) + inputs["bias"]
    names = ("weight_hh", "norm_weight", "norm_bias", "hidden", "memory")
    return {"drive": drive, **{name: inputs[name] for name in names}}


@functools.cache
def expected_of_layer(case: LayerCase) -> tuple[Array, Array, dict[str, Array]]:
    lengths = None if case.lengths is None else list(case.lengths)
    weigh_outputs, weigh_memory = case.projections()

    def scalar(inputs: numpy_loop.Inputs) -> Any:
        outputs, memory = numpy_loop.recurrence(driven(inputs), lengths, case.settings())
        return (weigh_outputs * outputs).sum() + (weigh_memory * memory).sum()

    inputs = {name: array for name, array in case.inputs().items() if name != "drive"}
    return *numpy_loop.recurrence(driven(inputs), lengths, case.settings()), numpy_loop.derivatives(scalar, inputs)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_layer(case: LayerCase, impl: str) -> None:
    if impl == "cpu" and _native.MISSING is not None:
        pytest.skip(_native.MISSING)
    expected, expected_memory, expected_derivatives = expected_of_layer(case)
    normed = case.norm != "plain"
    layer = nn.FastWeightsRNN(
        case.features, case.size, layer_norm=normed, impl=impl, dtype=torch.float64, **case.settings()
    )
    given = tensors(case.inputs())
    parameters = {name: name for name in ("weight_ih", "weight_hh", "bias")}
    parameters |= {"norm_weight": "norm.weight", "norm_bias": "norm.bias"} if normed else {}
    layer.load_state_dict({parameter: given[name] for name, parameter in parameters.items()})
    state = None if case.start == "zeros" else nn.FastWeightsState(given["hidden"], given["memory"])
    lengths = None if case.lengths is None else torch.tensor(case.lengths)
    outputs, after = layer(given["x"], state, lengths=lengths)
    assert_equal(outputs, expected)
    assert_equal(after.memory, expected_memory)
    history = np.concatenate([case.inputs()["hidden"][None], expected])
    assert_equal(after.hidden, np.stack([history[n, b] for b, n in enumerate(case.lengths or [case.steps] * 2)]))

    weigh_outputs, weigh_memory = (torch.tensor(array) for array in case.projections())
    ((weigh_outputs * outputs).sum() + (weigh_memory * after.memory).sum()).backward()
    actual = {name: layer.get_parameter(parameter).grad for name, parameter in parameters.items()}
    actual |= {name: given[name].grad for name in ("x", *(("hidden", "memory") if state is not None else ()))}
    for name, gradient in actual.items():
        assert_equal(gradient, expected_derivatives[name])
