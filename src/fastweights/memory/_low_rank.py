"""Local adaptation by gradient descent of a network that begins with an affine map: no copy of its largest weights.

The gradients of the first map's weights are combinations of its inputs, the keys of the neighbours, as in `_affine.py`:
after any number of steps they are W + U^T H and b + U^T 1, with H [K,d] the keys and U [K,h] what the gradients G [K,h]
of its outputs have added up to:

    U <- (1 - alpha beta) U - alpha G

The map's outputs are then Z + (H H^T + 1 1^T) U at the keys, Z those before, and W q + b + U^T (H q + 1) at the query.

What comes after the map has a copy of its weights for each query, as in `_general.py`.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fastweights.memory._general import Parameters, loss

Parts = tuple[nn.Linear, nn.Module]  # a first map, and what comes after it


def parts_of(output: nn.Module) -> Parts | None:
    """The parts of layers one after another, of which the first is affine and shares nothing with the rest, or None."""
    if type(output) is not nn.Sequential or len(output) < 2:
        return None
    first, rest = output[0], output[1:]
    if type(first) is not nn.Linear or any(part._forward_hooks or part._forward_pre_hooks for part in (output, first)):
        return None
    own = set(map(id, first.parameters()))
    return None if any(id(parameter) in own for parameter in rest.parameters()) else (first, rest)


def pays(first: nn.Linear, count: int) -> bool:
    """Whether a step with `count` neighbours moves less here than through a copy of the first map's weights.

    Here it passes over K (h + K) numbers, and there several times over the copy's d h.
    """
    return count * (first.out_features + count) < first.in_features * first.out_features / 2


def adapted(
    first: nn.Linear,
    rest: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor,
    *,
    steps: int,
    lr: float,
    penalty: float,
) -> Tensor:
    """The outputs of queries [Q,d] after steps on their own neighbours: keys [Q,K,d], values and weights [Q,K]."""
    before = {name: parameter.detach() for name, parameter in rest.named_parameters()}
    buffers = {name: buffer.detach() for name, buffer in rest.named_buffers()}
    with torch.no_grad():
        at_keys, at_query = first(keys), first(queries)
        gram, likeness = keys @ keys.transpose(1, 2), (keys @ queries.unsqueeze(2)).squeeze(2)
        if first.bias is not None:
            gram, likeness = gram + 1, likeness + 1

    def objective(hidden: Tensor, parameters: Parameters, values: Tensor, weights: Tensor) -> Tensor:
        return (weights * loss(functional_call(rest, (parameters, buffers), (hidden,)), values)).sum()

    def one(
        at_keys: Tensor, at_query: Tensor, gram: Tensor, likeness: Tensor, values: Tensor, weights: Tensor
    ) -> Tensor:
        parameters, coefficients = before, torch.zeros_like(at_keys)
        for _ in range(steps):
            hidden = at_keys + gram @ coefficients
            pull, gradients = grad(objective, argnums=(0, 1))(hidden, parameters, values, weights)
            coefficients = (1 - lr * penalty) * coefficients - lr * pull
            if penalty:
                gradients = {name: gradients[name] + penalty * (parameters[name] - before[name]) for name in parameters}
            parameters = {name: parameters[name] - lr * gradients[name] for name in parameters}
        hidden = at_query + likeness @ coefficients
        found: Tensor = functional_call(rest, (parameters, buffers), (hidden.unsqueeze(0),))
        return found.squeeze(0)

    outputs: Tensor = vmap(one)(at_keys, at_query, gram, likeness, values, weights)
    return outputs
