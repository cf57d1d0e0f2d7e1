"""Local adaptation of any output network: a block of queries at once, each with parameters of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

Parameters = dict[str, Tensor]
# (gradient, state, step counted from 1, learning rate) -> what is added to a parameter, and the next state.
Rule = Callable[[Tensor, tuple[Tensor, ...], int, float], tuple[Tensor, tuple[Tensor, ...]]]


def _sgd(gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    return -lr * gradient, state


def _rmsprop(gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    square = 0.99 * state[0] + 0.01 * gradient.square()
    return -lr * gradient / (square.sqrt() + 1e-8), (square,)


def _adam(gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    mean = 0.9 * state[0] + 0.1 * gradient
    square = 0.999 * state[1] + 0.001 * gradient.square()
    scale = (square / (1 - 0.999**step)).sqrt() + 1e-8
    return -lr / (1 - 0.9**step) * mean / scale, (mean, square)


# The optimizers of torch.optim with the settings that they have there, and how many tensors they keep of a parameter.
RULES: dict[str, tuple[Rule, int]] = {"sgd": (_sgd, 0), "rmsprop": (_rmsprop, 1), "adam": (_adam, 2)}


def loss(outputs: Tensor, values: Tensor) -> Tensor:
    """The loss of each neighbour: outputs [K,...] and values -> [K]."""
    if values.is_floating_point():
        return (outputs - values).square().flatten(1).mean(1)
    return F.cross_entropy(outputs, values, reduction="none")


def adapted(
    output: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor,
    *,
    steps: int,
    lr: float,
    penalty: float,
    optimizer: str,
) -> Tensor:
    """The outputs of queries [Q,d] after steps on their own neighbours: keys [Q,K,d], values and weights [Q,K]."""
    rule, kept = RULES[optimizer]
    before = {name: parameter.detach() for name, parameter in output.named_parameters()}
    buffers = {name: buffer.detach() for name, buffer in output.named_buffers()}

    def objective(parameters: Parameters, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        found: Tensor = (weights * loss(functional_call(output, (parameters, buffers), (keys,)), values)).sum()
        if penalty:
            distance = sum((parameters[name] - before[name]).square().sum() for name in parameters)
            found = found + 0.5 * penalty * distance
        return found

    def one(query: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Any:
        parameters = before
        states = {name: (torch.zeros_like(value),) * kept for name, value in before.items()}
        for step in range(1, steps + 1):
            gradients = grad(objective)(parameters, keys, values, weights)
            moved = {name: rule(gradients[name], states[name], step, lr) for name in parameters}
            parameters = {name: parameters[name] + added for name, (added, _) in moved.items()}
            states = {name: state for name, (_, state) in moved.items()}
        return functional_call(output, (parameters, buffers), (query.unsqueeze(0),)).squeeze(0)

    outputs: Tensor = vmap(one)(queries, keys, values, weights)
    return outputs
