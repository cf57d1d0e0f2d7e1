"""The Triton kernels behind the operators: the products that give the updates are of the whole batch, around a kernel.

The updates are computed again in the backward pass rather than kept.
"""

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.gated import triton
from fastweights.ops.gated.triton import slow_backward, slow_forward

__all__ = ["fast_backward", "fast_forward", "slow_backward", "slow_forward", "trace_size"]


def trace_size(weight: Tensor, x: Tensor, hidden: Tensor) -> int:
    """Numbers that the forward pass leaves for the backward pass."""
    return math.prod(triton.trace_shape(x, hidden))


def fast_forward(
    inners: Tensor, weight: Tensor, bias: Tensor, x: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `reference.fast_network` gives, and the trace; the arguments end with whether it is wanted."""
    updates = F.linear(inners, weight, bias).to(x.dtype)
    *results, trace = triton.fast_forward(updates, x, *given)
    outputs, last_1, last_2 = results
    return outputs, last_1, last_2, trace.flatten()


def fast_backward(
    grad_outputs: Tensor | None,
    grad_fast_1: Tensor | None,
    grad_fast_2: Tensor | None,
    outputs: Tensor,
    trace: Tensor,
    inners: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    hidden: Tensor,
    *given: Any,
    matrices: bool = True,
) -> tuple[Tensor, ...]:
    """Gradients of inners, weight, bias, x, hidden, fast_1 and fast_2, the last two empty without `matrices`."""
    updates = F.linear(inners, weight, bias).to(x.dtype)
    if trace.numel() > 0:
        trace = trace.view(triton.trace_shape(x, hidden))
    grads = (grad_outputs, grad_fast_1, grad_fast_2)
    of_updates, *of_others = triton.fast_backward(*grads, outputs, trace, updates, x, hidden, *given)
    if not matrices:
        of_others[-2:] = x.new_empty(0), x.new_empty(0)
    of_bias = of_updates.sum((0, 1)).to(bias.dtype)  # as many terms as T B: not in a lower dtype
    rows = of_updates.flatten(0, 1).to(inners.dtype)
    return (rows @ weight).view_as(inners), rows.t() @ inners.flatten(0, 1), of_bias, *of_others
