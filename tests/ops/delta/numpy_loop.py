"""The delta family in NumPy, one sequence and head at a time: it shares nothing with the library.

Every line is complex-analytic, for derivatives by the complex step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def delta(
    inputs: Mapping[str, Array], correct: bool, scale: float, starts: Array | None, lengths: list[int] | None
) -> tuple[Array, Array]:
    """Outputs [B,T,H,V], zero past a length, and the last state [B,H,K,V].

    g, or gk, beta, a and b, skip, and the state may be missing.
    """
    v = inputs["v"]
    batch, steps, heads, size = v.shape
    q, k = (np.repeat(inputs[name], heads // inputs[name].shape[2], axis=2) for name in ("q", "k"))
    kind = np.result_type(*inputs.values())
    outputs = np.zeros(v.shape, kind)
    final = np.zeros((batch, heads, k.shape[3], size), kind)
    if "initial_state" in inputs:
        final += inputs["initial_state"]
    for b in range(batch):
        for h in range(heads):
            state = final[b, h].copy()
            for t in range(steps if lengths is None else lengths[b]):
                if starts is not None and starts[b, t]:
                    state = np.zeros_like(state)
                before = state
                for name in {"g", "gk"} & inputs.keys():
                    state = np.exp(inputs[name][b, t, h])[..., None] * state  # a number, or one for each key
                written = v[b, t, h] - state.T @ k[b, t, h] if correct else v[b, t, h]
                if "beta" in inputs:
                    written = inputs["beta"][b, t, h] * written
                state = state + np.outer(k[b, t, h], written)
                if "a" in inputs:
                    state = state + np.outer(inputs["b"][b, t, h], before.T @ inputs["a"][b, t, h])
                outputs[b, t, h] = scale * state.T @ q[b, t, h]
                if "skip" in inputs:
                    outputs[b, t, h] += inputs["skip"][h] * v[b, t, h]
            final[b, h] = state
    return outputs, final
