"""The LSTM step by step in NumPy, one sequence at a time: it shares nothing with the library.

Every line is complex-analytic, for derivatives by the complex step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


def normalise(x: Array, inputs: Mapping[str, Array], of: str) -> Array:
    """Return x, or its layer norm where the inputs have a gain and a bias for it."""
    if f"{of} gain" not in inputs:
        return x
    centred = x - x.sum() / x.size
    result: Array = centred / np.sqrt((centred * centred).sum() / x.size + 1e-5)
    return result * inputs[f"{of} gain"] + inputs[f"{of} bias"]


def lstm(
    inputs: Mapping[str, Array], mask: Array | None, lengths: list[int] | None, starts: Array | None
) -> dict[str, Array]:
    """Outputs [T,B,H], zero past a length, and the state after each last step; `inputs` are named as the library's."""
    x = inputs["x"]
    steps, batch, _ = x.shape
    kind = np.result_type(*inputs.values())
    results = {name: inputs[name].astype(kind) for name in ("hidden", "cell")}
    results["outputs"] = np.zeros((steps, *inputs["hidden"].shape), kind)
    for b in range(batch):
        h, c = results["hidden"][b].copy(), results["cell"][b].copy()
        for t in range(steps if lengths is None else lengths[b]):
            if starts is not None and starts[t, b]:
                h, c = np.zeros_like(h), np.zeros_like(c)
            read = h if mask is None else h * mask[b]
            drive = normalise(inputs["weight_ih"] @ x[t, b], inputs, "input") + inputs["bias"]
            i, f, g, o = np.split(drive + normalise(inputs["weight_hh"] @ read, inputs, "state"), 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(normalise(c, inputs, "cell"))
            results["outputs"][t, b] = h
        results["hidden"][b], results["cell"][b] = h, c
    return results
