"""Schlag & Schmidhuber 2017 step by step in NumPy, one sequence at a time: it shares nothing with the library.

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


def layer_norm(x: Array) -> Array:
    centred = x - x.sum() / x.size
    result: Array = centred / np.sqrt((centred * centred).sum() / x.size + 1e-5)
    return result


def written(fast: Array, alpha: Array, beta: Array, gamma: Array, delta: Array) -> Array:
    new = np.outer(np.tanh(alpha), np.tanh(beta))
    gate = np.outer(sigmoid(gamma), sigmoid(delta))
    result: Array = gate * new + (1 - gate) * fast
    return result


def squash(sums: Array, norms: str) -> Array:
    before, after = norms in ("before", "both"), norms in ("after", "both")
    result = np.tanh(layer_norm(sums) if before else sums)
    return layer_norm(result) if after else result


def gated(inputs: Mapping[str, Array], lengths: list[int] | None, norms: str = "after") -> dict[str, Array]:
    """Outputs [T,B,H], zero past a length, and the state after each last step; `inputs` are named as the library's."""
    x = inputs["x"]
    steps, batch, _ = x.shape
    size, columns_1, columns_2 = inputs["fast_1"].shape[1], inputs["fast_1"].shape[2], inputs["fast_2"].shape[2]
    slow_size = inputs["slow_hidden"].shape[1]
    kind = np.result_type(*inputs.values())
    names = ("hidden", "slow_hidden", "fast_1", "fast_2")
    results = {name: inputs[name].astype(kind) for name in names}
    results["outputs"] = np.zeros((steps, batch, size), kind)
    bounds = np.cumsum([slow_size, size, columns_1, size, columns_1, size, columns_2, size])
    for b in range(batch):
        h, s, f1, f2 = (inputs[name][b] for name in names)
        for t in range(steps if lengths is None else lengths[b]):
            inner = np.tanh(inputs["slow_in_weight"] @ np.concatenate((s, x[t, b])) + inputs["slow_in_bias"])
            z, *updates = np.split(inputs["slow_out_weight"] @ inner + inputs["slow_out_bias"], bounds)
            inside = squash(f1 @ np.concatenate((h, x[t, b], [1])), norms)
            h = squash(f2 @ np.concatenate((inside, [1])), norms)
            s, f1, f2 = np.tanh(z), written(f1, *updates[:4]), written(f2, *updates[4:])
            results["outputs"][t, b] = h
        for name, value in zip(names, (h, s, f1, f2), strict=True):
            results[name][b] = value
    return results
