"""Local adaptation by gradient descent: each query's own parameters, fitted to its neighbours.

Gradients of an affine map's weights are combinations of its inputs, the keys of the neighbours. So after any number of
steps they are W + U^T H and b + U^T 1, with H [K,d] the keys and U [K,V] the coefficients, of which a step makes

    U <- (1 - alpha beta) U - alpha diag(w) R(Z + (H H^T + 1 1^T) U)

Z = H W^T + b the outputs before, w the weights of the neighbours, and R what the loss's gradient leaves at each output:
softmax - one-hot, or twice the error over the outputs' number. The query q then has W q + b + U^T (H q + 1). That is
`adapt_affine`. With U = -alpha diag(w) C it needs only two products of C, with small matrices that take these factors.

Where other layers follow the map, `adapt_first_layer` keeps U itself, of which a step makes
(1 - alpha beta) U - alpha G, with G [K,h] the gradients of the map's outputs: only the layers that follow have a copy
of their parameters for each query. Any other network has a copy of all of them: `adapt_general`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights.memory.neighbours import Neighbours
from fastweights.nn import HebbianSoftmax
from fastweights.ops import stream

NUMBERS = 2**22  # neighbours' outputs at once: a step passes over them several times

Parameters = dict[str, Tensor]
# (parameter, gradient, state, step counted from 1, learning rate): writes to the parameter and the state alone, because
# one tensor may be the gradient of two parameters.
Rule = Callable[[Tensor, Tensor, tuple[Tensor, ...], int, float], None]


class Descent(NamedTuple):
    """The steps that a query takes."""

    steps: int
    lr: float  # alpha
    penalty: float  # beta
    optimizer: str  # one of RULES; an affine map takes "sgd" alone


class Affine(NamedTuple):
    """An affine output, and optionally its outputs at every entry of the memory."""

    weight: Tensor  # [V,d]
    bias: Tensor | None  # [V]
    stored: Tensor | None = None  # [1,rows,V], or softmax in parts of the classes, [parts,rows,width]
    rows: Tensor | None = None  # [entries]: where an entry's outputs are stored

    def outputs(self, neighbours: Neighbours, part: slice) -> Tensor:
        """Return the outputs at the neighbours of some queries, [n,K,V]."""
        if self.stored is None or self.rows is None:
            return F.linear(neighbours.keys[part], self.weight, self.bias)
        rows = self.rows[neighbours.indices[part]]
        return self.stored[0].index_select(0, rows.view(-1)).view(*rows.shape, len(self.weight))


def adapt_affine(output: Affine, queries: Tensor, neighbours: Neighbours, descent: Descent) -> Tensor:
    """Return the outputs [Q,V] of queries [Q,d] after steps on their own neighbours."""
    weight, bias, values = output.weight, output.bias, neighbours.values
    after = F.linear(queries, weight, bias)
    pull = pulls(queries, neighbours, bias, descent.lr).unsqueeze(1)
    count = neighbours.keys.shape[1]
    size = max(1, min(len(queries), NUMBERS // (len(weight) * count)))
    room = queries.new_empty(size, count, len(weight))  # once: fresh pages cost as much as the work
    keep = 1 - descent.lr * descent.penalty
    for first in range(0, len(queries), size):
        part = slice(first, first + size)
        keys = neighbours.keys[part]
        residuals = room[: len(keys)]
        before = output.outputs(neighbours, part)
        _residuals(before, values[part], residuals)
        # A step makes (1 - alpha beta) C + R of C. Its products follow in the same way, so C itself is never formed.
        pulled = pull[part] @ residuals
        if descent.steps > 1:
            now = before if keep == 1 else before.clone()
            gram = keys @ keys.transpose(1, 2)
            if bias is not None:
                gram += 1
            gram *= -descent.lr * neighbours.weights[part].unsqueeze(1)
        for _ in range(descent.steps - 1):
            now.baddbmm_(gram, residuals, beta=keep)
            if keep != 1:
                now.add_(before, alpha=1 - keep)
            _residuals(now, values[part], residuals)
            pulled.baddbmm_(pull[part], residuals, beta=keep)
        after[part] -= pulled.squeeze(1)
    return after


def affine_of(output: nn.Module) -> Affine | None:
    """Return the weight and the bias of a network that is an affine map and nothing else, or None."""
    if type(output) not in (nn.Linear, HebbianSoftmax) or output._forward_hooks or output._forward_pre_hooks:
        return None
    weight, bias = output.weight, output.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return Affine(weight.detach(), None if bias is None else bias.detach())


def adapt_once(outputs: Tensor, stored: Tensor, values: Tensor, rows: Tensor, pull: Tensor) -> None:
    """Make of the outputs [Q,V] of queries what they are after one step, from the stored softmax of every entry.

    Classes `values` [Q,K], `rows` [Q,K] into what is stored, [parts,rows,width], `pull` [Q,K] of `pulls`. A part of all
    entries stays near the processor while every query takes its own from it.
    """
    outputs.scatter_add_(1, values, pull)
    if stream.unavailable(outputs) is None and stored.shape[2] == part_classes(stored.dtype):
        stream.subtract(outputs, stored, rows, pull)
        return
    for part, of_part in zip(stored, torch.split(outputs, stored.shape[2], 1), strict=True):
        taken = F.embedding_bag(rows, part, per_sample_weights=pull, mode="sum")
        of_part -= taken[:, : of_part.shape[1]]


def part_classes(dtype: torch.dtype) -> int:
    """Return how many classes a part of the stored softmax has: some thousand entries of it stay near the processor."""
    return 4 * stream.part_classes(dtype)


def split_classes(outputs: Tensor, width: int) -> Tensor:
    """Cut outputs into parts of the classes, [n,V] -> [parts,n,width]; the last part is filled up with zeros."""
    parts = -(-outputs.shape[1] // width)
    padded = F.pad(outputs, (0, parts * width - outputs.shape[1]))
    return padded.view(len(outputs), parts, width).transpose(0, 1)


def pulls(queries: Tensor, neighbours: Neighbours, bias: Tensor | None, lr: float) -> Tensor:
    """Return how much of each neighbour's residuals a query's outputs lose: alpha diag(w) (H q + 1), [Q,K]."""
    likeness = (queries.unsqueeze(1) @ neighbours.keys.transpose(1, 2)).squeeze(1)  # faster than keys times query
    if bias is not None:
        likeness += 1
    return likeness.mul_(neighbours.weights).mul_(lr)


def _residuals(outputs: Tensor, values: Tensor, out: Tensor) -> None:
    """Write what the loss's gradient leaves at each output [...,V]."""
    if values.is_floating_point():
        torch.sub(outputs, values, out=out).mul_(2 / outputs.shape[-1])
        return
    torch.softmax(outputs, -1, out=out)
    out.scatter_add_(-1, values.unsqueeze(-1), out.new_full((1,), -1.0).expand(*values.shape, 1))


def adapt_general(output: nn.Module, queries: Tensor, neighbours: Neighbours, descent: Descent) -> Tensor:
    """Return the outputs [Q,V] of queries [Q,d] after steps on their own neighbours, each on its own parameters."""
    rule, kept = RULES[descent.optimizer]
    before = {name: parameter.detach() for name, parameter in output.named_parameters()}
    buffers = {name: buffer.detach() for name, buffer in output.named_buffers()}

    def objective(parameters: Parameters, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return (weights * _losses(functional_call(output, (parameters, buffers), (keys,)), values)).sum()

    def answer(parameters: Parameters, query: Tensor) -> Tensor:
        outputs: Tensor = functional_call(output, (parameters, buffers), (query.unsqueeze(0),))
        return outputs.squeeze(0)

    current = {name: value.repeat(len(queries), *[1] * value.dim()) for name, value in before.items()}  # [Q,...]
    states = {name: tuple(torch.zeros_like(value) for _ in range(kept)) for name, value in current.items()}
    for step in range(1, descent.steps + 1):
        # In the first step all have the same parameters: those of the network are one product for all queries.
        shared = step == 1
        slopes = vmap(grad(objective), in_dims=(None if shared else 0, 0, 0, 0))
        gradients = slopes(before if shared else current, neighbours.keys, neighbours.values, neighbours.weights)
        for name, gradient in gradients.items():
            if descent.penalty:
                gradient = gradient + descent.penalty * (current[name] - before[name])
            rule(current[name], gradient, states[name], step, descent.lr)
    answers: Tensor = vmap(answer)(current, queries)
    return answers.detach()


class FirstLayer(NamedTuple):
    """A network that begins with an affine map, which shares nothing with the rest."""

    first: nn.Linear
    rest: nn.Module


def adapt_first_layer(output: FirstLayer, queries: Tensor, neighbours: Neighbours, descent: Descent) -> Tensor:
    """Return the same as `adapt_general` under SGD, without copies of the first map's weights."""
    (first, rest), lr, penalty = output, descent.lr, descent.penalty
    before = {name: parameter.detach() for name, parameter in rest.named_parameters()}
    buffers = {name: buffer.detach() for name, buffer in rest.named_buffers()}
    keys = neighbours.keys
    with torch.no_grad():
        at_keys, at_query = first(keys), first(queries)
        gram, likeness = keys @ keys.transpose(1, 2), (keys @ queries.unsqueeze(2)).squeeze(2)
        if first.bias is not None:
            gram, likeness = gram + 1, likeness + 1

    def objective(hidden: Tensor, parameters: Parameters, values: Tensor, weights: Tensor) -> Tensor:
        return (weights * _losses(functional_call(rest, (parameters, buffers), (hidden,)), values)).sum()

    def answer(
        at_keys: Tensor, at_query: Tensor, gram: Tensor, likeness: Tensor, values: Tensor, weights: Tensor
    ) -> Tensor:
        parameters, coefficients = before, torch.zeros_like(at_keys)
        for _ in range(descent.steps):
            hidden = at_keys + gram @ coefficients
            pull, gradients = grad(objective, argnums=(0, 1))(hidden, parameters, values, weights)
            coefficients = (1 - lr * penalty) * coefficients - lr * pull
            if penalty:
                gradients = {name: gradients[name] + penalty * (parameters[name] - before[name]) for name in parameters}
            parameters = {name: parameters[name] - lr * gradients[name] for name in parameters}
        hidden = at_query + likeness @ coefficients
        outputs: Tensor = functional_call(rest, (parameters, buffers), (hidden.unsqueeze(0),))
        return outputs.squeeze(0)

    answers: Tensor = vmap(answer)(at_keys, at_query, gram, likeness, neighbours.values, neighbours.weights)
    return answers.detach()


def _losses(outputs: Tensor, values: Tensor) -> Tensor:
    """Return the loss of each neighbour: outputs [K,...] and values -> [K]."""
    if values.is_floating_point():
        return (outputs - values).square().flatten(1).mean(1)
    return F.cross_entropy(outputs, values, reduction="none")


def _step_sgd(parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> None:
    parameter.sub_(gradient, alpha=lr)


def _step_rmsprop(parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> None:
    (square,) = state
    square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    parameter.addcdiv_(gradient, square.sqrt().add_(1e-8), value=-lr)


def _step_adam(parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...], step: int, lr: float) -> None:
    mean, square = state
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    parameter.addcdiv_(mean, (square / (1 - 0.999**step)).sqrt_().add_(1e-8), value=-lr / (1 - 0.9**step))


# The optimizers of torch.optim with the settings that they have there, and how many tensors they keep of a parameter.
RULES: dict[str, tuple[Rule, int]] = {"sgd": (_step_sgd, 0), "rmsprop": (_step_rmsprop, 1), "adam": (_step_adam, 2)}
