"""What others compute of the delta family: the loop in NumPy, and flash-linear-attention's own loops."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ..parity import error
from .cases import Case, call, draw_grads, run
from .numpy_loop import Array, delta


def require_loop(case: Case, impl: str) -> None:
    """Compare the results in float64, and their gradients, with the loop in NumPy."""
    arrays = case.inputs()
    found = run(case, torch.float64, impl)

    def loop(inputs: Mapping[str, Array]) -> tuple[Array, Array]:
        return delta(inputs, case.correct, case.keys**-0.5, case.starts(), case.lengths())

    results = [found["outputs"], found["state"]]
    for result, truth in zip(results, loop(arrays), strict=True):
        assert error(result, torch.from_numpy(truth)) < 1e-12
    grads = [grad.numpy() for grad in draw_grads(results)]
    for name, array in arrays.items():
        # The complex step along a random direction, which has no difference to cancel in.
        direction = np.random.default_rng(6).normal(size=array.shape)
        moved = loop({**arrays, name: array + 1e-30j * direction})
        slope = sum((grad * result.imag).sum() for grad, result in zip(grads, moved, strict=True)) / 1e-30
        gradient = found[f"gradient of {name}"].numpy()
        off = abs((gradient * direction).sum() - slope)
        assert off < 1e-12 * np.linalg.norm(gradient) * np.linalg.norm(direction), name


def flash_linear_attention() -> dict[str, Callable[..., Any]]:
    """Return flash-linear-attention's loops by rule; skip the test where it is not installed."""
    gated: Any = pytest.importorskip("fla.ops.gated_delta_rule.naive", exc_type=ImportError)
    plain: Any = pytest.importorskip("fla.ops.delta_rule.naive", exc_type=ImportError)
    simple: Any = pytest.importorskip("fla.ops.simple_gla.naive", exc_type=ImportError)
    linear: Any = pytest.importorskip("fla.ops.linear_attn.naive", exc_type=ImportError)
    kimi: Any = pytest.importorskip("fla.ops.kda.naive", exc_type=ImportError)
    gla: Any = pytest.importorskip("fla.ops.gla.naive", exc_type=ImportError)
    dplr: Any = pytest.importorskip("fla.ops.generalized_delta_rule.dplr.naive", exc_type=ImportError)

    def delta_recurrence(q: Any, k: Any, v: Any, beta: Any, **options: Any) -> Any:
        turned = [tensor.transpose(1, 2) for tensor in (q, k, v, beta)]
        outputs, state = plain.delta_rule_recurrence(*turned, **options)
        return outputs.transpose(1, 2), state

    def dplr_recurrence(q: Any, k: Any, v: Any, a: Any, b: Any, gk: Any, **options: Any) -> Any:
        turned = [tensor.transpose(1, 2) for tensor in (q, k, v, a, b, gk)]
        outputs, state = dplr.dplr_recurrence(*turned, **options)
        return outputs.transpose(1, 2), state

    return {
        "dplr": dplr_recurrence,
        "gated_delta": gated.naive_recurrent_gated_delta_rule,
        "delta": delta_recurrence,
        "decay": simple.naive_recurrent_simple_gla,
        "sum": lambda q, k, v, **_: (linear.naive_chunk_linear_attn(q, k, v), None),
        "gated_delta-channels": kimi.naive_recurrent_kda,
        "decay-channels": lambda q, k, v, g, **options: gla.naive_recurrent_gla(q, k, v, g, **options),
    }


def require_flash(case: Case, impl: str) -> None:
    """Compare the results in float32, and their gradients, with flash-linear-attention's."""
    function = flash_linear_attention()[case.rule + "-channels" * case.channels]
    tensors = {name: torch.from_numpy(array).float().requires_grad_() for name, array in case.inputs().items()}
    theirs = [result for result in function(**tensors, output_final_state=True) if result is not None]
    ours = call(case, tensors, impl)[: len(theirs)]
    for mine, other in zip(ours, theirs, strict=True):
        assert error(mine.detach(), other.detach().double()) < 1e-5
    grads = draw_grads(ours)
    inputs = list(tensors.values())
    gradients = [torch.autograd.grad(results, inputs, grads) for results in (ours, theirs)]
    for name, mine, other in zip(tensors, *gradients, strict=True):
        assert error(mine, other.double()) < 1e-5, name
