"""Local adaptation of an affine output by gradient descent, in the few directions that it can go: no copy of weights.

Gradients of an affine map's weights are combinations of its inputs, the keys of the neighbours. So after any number of
steps they are W + U^T H and b + U^T 1, with H [K,d] the keys and U [K,V] the coefficients, of which a step makes

    U <- (1 - alpha beta) U - alpha diag(w) R(Z + (H H^T + 1 1^T) U)

Z = H W^T + b the outputs before, w the weights of the neighbours, and R what the loss's gradient leaves at each output:
softmax - one-hot, or twice the error over the outputs' number. The query q then has W q + b + U^T (H q + 1).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Context(NamedTuple):
    """What a block of queries retrieved."""

    keys: Tensor  # [Q,K,d]
    values: Tensor  # [Q,K] int64 class indices, or [Q,K,V] targets
    weights: Tensor  # [Q,K], the sum of each row is 1


def residuals(outputs: Tensor, values: Tensor) -> Tensor:
    """What the loss's gradient leaves at each output [...,V]; the outputs' memory is used up."""
    if values.is_floating_point():
        return outputs.sub_(values).mul_(2 / outputs.shape[-1])
    found = torch.softmax(outputs, -1)
    return found.scatter_add_(-1, values.unsqueeze(-1), found.new_full((1,), -1.0).expand(*values.shape, 1))


def adapted(
    queries: Tensor, context: Context, weight: Tensor, bias: Tensor | None, *, steps: int, lr: float, penalty: float
) -> Tensor:
    """The outputs of queries [Q,d] after steps of gradient descent on their own neighbours: [Q,V]."""
    keys, values, shares = context
    before = torch.nn.functional.linear(queries, weight, bias)
    likeness = (keys @ queries.unsqueeze(2)).squeeze(2)  # [Q,K]: how far each coefficient moves the query's output
    if bias is not None:
        likeness += 1
    outputs = torch.nn.functional.linear(keys, weight, bias)  # [Q,K,V]
    shrink, pull = 1 - lr * penalty, -lr * shares.unsqueeze(2)
    if steps == 1:
        coefficients = residuals(outputs, values).mul_(pull)
    else:
        gram = keys @ keys.transpose(1, 2)
        if bias is not None:
            gram += 1
        coefficients = residuals(outputs.clone(), values).mul_(pull)
        for _ in range(steps - 1):
            moved = torch.baddbmm(outputs, gram, coefficients)
            coefficients.mul_(shrink).add_(residuals(moved, values).mul_(pull))
    return before + (likeness.unsqueeze(1) @ coefficients).squeeze(1)


def adapted_once(
    queries: Tensor,
    context: Context,
    indices: Tensor,
    stored: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    lr: float,
) -> Tensor:
    """The same after one step, from the softmax of every entry as it was before: stored [N,V], indices [Q,K] into it.

    The corrections of a block of queries are one product with what is stored, less what their own labels pull.
    """
    keys, values, shares = context
    outputs = torch.nn.functional.linear(queries, weight, bias)
    likeness = (keys @ queries.unsqueeze(2)).squeeze(2)
    if bias is not None:
        likeness += 1
    pull = likeness.mul_(shares).mul_(lr)
    outputs.scatter_add_(1, values, pull)
    spread = pull.new_zeros(len(queries), len(stored)).scatter_add_(1, indices, pull)
    return outputs.addmm_(spread, stored, alpha=-1)
