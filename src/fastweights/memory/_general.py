"""Local adaptation of any output network: a block of queries at once, each with parameters of its own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

Parameters = dict[str, Tensor]
# (parameter, gradient, state, step counted from 1, learning rate): writes to the parameter and the state alone, because
# one tensor may be the gradient of two parameters.
Rule = Callable[[Tensor, Tensor, tuple[Tensor, ...], int, float], None]


def _sgd(parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> None:
    parameter.sub_(gradient, alpha=lr)


def _rmsprop(parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> None:
    (square,) = state
    square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    parameter.addcdiv_(gradient, square.sqrt().add_(1e-8), value=-lr)


def _adam(parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> None:
    mean, square = state
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    parameter.addcdiv_(mean, (square / (1 - 0.999**step)).sqrt_().add_(1e-8), value=-lr / (1 - 0.9**step))


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
        return (weights * loss(functional_call(output, (parameters, buffers), (keys,)), values)).sum()

    def answer(parameters: Parameters, query: Tensor) -> Tensor:
        outputs: Tensor = functional_call(output, (parameters, buffers), (query.unsqueeze(0),))
        return outputs.squeeze(0)

    own = {name: value.repeat(len(queries), *[1] * value.dim()) for name, value in before.items()}  # [Q,...]
    states = {name: tuple(torch.zeros_like(value) for _ in range(kept)) for name, value in own.items()}
    for step in range(1, steps + 1):
        # In the first step all have the same parameters: those of the network are one product for all queries.
        shared = step == 1
        slopes = vmap(grad(objective), in_dims=(None if shared else 0, 0, 0, 0))
        gradients = slopes(before if shared else own, keys, values, weights)
        for name, gradient in gradients.items():
            if penalty:
                gradient = gradient + penalty * (own[name] - before[name])
            rule(own[name], gradient, states[name], step, lr)
    found: Tensor = vmap(answer)(own, queries)
    return found
