"""Local adaptation of an affine output by gradient descent, in the few directions that it can go: no copy of weights.

Gradients of an affine map's weights are combinations of its inputs, the keys of the neighbours. So after any number of
steps they are W + U^T H and b + U^T 1, with H [K,d] the keys and U [K,V] the coefficients, of which a step makes

    U <- (1 - alpha beta) U - alpha diag(w) R(Z + (H H^T + 1 1^T) U)

Z = H W^T + b the outputs before, w the weights of the neighbours, and R what the loss's gradient leaves at each output:
softmax - one-hot, or twice the error over the outputs' number. The query q then has W q + b + U^T (H q + 1).

What is kept is C, of which U = -alpha diag(w) C: the factors go into the small matrices on both of its sides.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 2**22  # neighbours' outputs at once: a step passes over them four times


class Context(NamedTuple):
    """What a block of queries retrieved."""

    keys: Tensor  # [Q,K,d]
    values: Tensor  # [Q,K] int64 class indices, or [Q,K,V] targets
    weights: Tensor  # [Q,K], the sum of each row is 1


def residuals(outputs: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """What the loss's gradient leaves at each output [...,V]."""
    if values.is_floating_point():
        return torch.sub(outputs, values, out=out).mul_(2 / outputs.shape[-1])
    torch.softmax(outputs, -1, out=out)
    return out.scatter_add_(-1, values.unsqueeze(-1), out.new_full((1,), -1.0).expand(*values.shape, 1))


def pulls(queries: Tensor, context: Context, bias: Tensor | None, lr: float) -> Tensor:
    """How much of each neighbour's residuals a query's outputs lose in a step, [Q,K]: alpha diag(w) (H q + 1)."""
    likeness = (queries.unsqueeze(1) @ context.keys.transpose(1, 2)).squeeze(1)  # faster than keys times query
    if bias is not None:
        likeness += 1
    return likeness.mul_(context.weights).mul_(lr)


def adapted(
    queries: Tensor,
    context: Context,
    outputs: Callable[[slice], Tensor],
    weight: Tensor,
    bias: Tensor | None,
    *,
    steps: int,
    lr: float,
    penalty: float,
) -> Tensor:
    """The outputs of queries [Q,d] after steps of gradient descent on their own neighbours: [Q,V].

    `outputs` gives those of the neighbours of some queries, [n,K,V], before any step.
    """
    after = torch.nn.functional.linear(queries, weight, bias)
    pull = pulls(queries, context, bias, lr).unsqueeze(1)
    size = max(1, min(len(queries), NUMBERS // (len(weight) * context.keys.shape[1])))
    room = queries.new_empty(3, size, context.keys.shape[1], len(weight))  # once: fresh pages cost as much as the work
    for first in range(0, len(queries), size):
        part = slice(first, first + size)
        own = Context(*(tensor[part] for tensor in context))
        moved, left, coefficients = room[:, : len(own.keys)]
        before = outputs(part)
        residuals(before, own.values, coefficients)
        if steps > 1:
            gram = own.keys @ own.keys.transpose(1, 2)
            if bias is not None:
                gram += 1
            gram *= -lr * own.weights.unsqueeze(1)
        for _ in range(steps - 1):
            torch.baddbmm(before, gram, coefficients, out=moved)
            torch.add(residuals(moved, own.values, left), coefficients, alpha=1 - lr * penalty, out=coefficients)
        after[part] -= (pull[part] @ coefficients).squeeze(1)
    return after


def adapted_once(
    queries: Tensor, values: Tensor, rows: Tensor, pull: Tensor, stored: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The same after one step, from the softmax of every entry as it was before.

    Classes `values` [Q,K], `rows` [Q,K] into what is stored, [parts,N,width] by parts of the classes, and what `pulls`
    gives. A part of all entries stays near the processor while every query takes its own from it.
    """
    after = torch.nn.functional.linear(queries, weight, bias)
    after.scatter_add_(1, values, pull)
    width = stored.shape[2]
    for part, of_part in zip(stored, torch.split(after, width, 1), strict=True):
        taken = torch.nn.functional.embedding_bag(rows, part, per_sample_weights=pull, mode="sum")
        of_part -= taken[:, : of_part.shape[1]]
    return after
