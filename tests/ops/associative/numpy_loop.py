"""Ba et al. 2016 step by step in NumPy, one sequence at a time with A formed: it shares nothing with the library.

Every line is complex-analytic (ReLU goes by the sign of the real part), so that an imaginary step far below rounding
gives derivatives without subtraction: d f / d x = Im f(x + i e) / e.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Inputs = Mapping[str, Any]  # arrays, or None for an input that is left out
FLAGS = ("starts", "clears")


def relu(x: Array) -> Array:
    return np.where(x.real > 0, x, 0)


def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    centred = x - x.sum() / x.size
    variance = (centred * centred).sum() / x.size
    result: Array = gain * centred / np.sqrt(variance + 1e-5) + bias
    return result


def sequence(
    drive: Array,
    weight_hh: Array,
    gain: Array | None,
    bias: Array | None,
    h: Array,
    memory: Array,
    strengths: Array | None,
    starts: Array | None,
    clears: Array | None,
    *,
    decay: float,
    rate: float,
    inner_steps: int,
    nonlinearity: str,
    normalize_initial: bool,
    hold_input: bool = True,
) -> tuple[list[Array], Array]:
    """h(1) .. h(T), and the fast matrix that the last step read, of drive [T,H]; the control is [T] each."""
    functions: dict[str, Callable[[Array], Array]] = {"relu": relu, "tanh": np.tanh}
    f = functions[nonlinearity]

    def norm(x: Array) -> Array:
        return x if gain is None or bias is None else layer_norm(x, gain, bias)

    outputs = []
    for t, c in enumerate(drive):
        if starts is not None and starts[t]:
            h, memory = np.zeros_like(h), np.zeros_like(memory)
        seen = np.zeros_like(h) if clears is not None and clears[t] else h
        z = weight_hh @ seen + c  # 1
        strength = 1.0 if strengths is None else strengths[t]
        memory = decay * memory + rate * strength * np.outer(h, h)  # 2
        h = f(norm(z)) if normalize_initial else f(z)  # 3
        for _ in range(inner_steps):  # 4
            h = f(norm((z if hold_input else h) + memory @ h))
        outputs.append(h)
    return outputs, memory


def recurrence(
    inputs: Inputs, lengths: list[int] | None, settings: Mapping[str, Any], **flags: Array
) -> tuple[Array, Array]:
    """outputs [T,B,H], zero past each length, and the final memory [B,H,H]; `inputs` are named as the library's."""
    drive, weight_hh, hidden = inputs["drive"], inputs["weight_hh"], inputs["hidden"]
    steps, batch, size = drive.shape
    memory = inputs["memory"] if inputs["memory"] is not None else np.zeros((batch, size, size))
    kind = np.result_type(*(array for array in inputs.values() if array is not None))
    outputs, final = np.zeros((steps, batch, size), kind), np.zeros((batch, size, size), kind)
    for b in range(batch):
        length = steps if lengths is None else lengths[b]
        states, final[b] = sequence(
            drive[:length, b],
            weight_hh,
            inputs["norm_weight"],
            inputs["norm_bias"],
            hidden[b],
            memory[b],
            *(None if steps is None else steps[:, b] for steps in (inputs.get("strengths"), *map(flags.get, FLAGS))),
            **settings,
        )
        for t, state in enumerate(states):
            outputs[t, b] = state
    return outputs, final


def derivatives(function: Callable[[Inputs], Any], inputs: Inputs) -> dict[str, Array]:
    """The gradient of the scalar `function(inputs)` for every input that is there, by the complex step."""
    step = 1e-200
    result = {}
    for name, array in inputs.items():
        if array is None:
            continue
        gradient = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            moved = array.astype(complex)
            moved[index] += step * 1j
            gradient[index] = function({**inputs, name: moved}).imag / step
        result[name] = gradient
    return result
