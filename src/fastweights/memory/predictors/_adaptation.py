"""Local adaptation by gradient descent: each query's own parameters, fitted to its neighbours.

Gradients of an affine map's weights are combinations of its inputs, the keys of the neighbours. So after any number of
steps they are W + U^T H and b + U^T 1, with H [K,d] the keys and U [K,V] the coefficients, of which a step makes

    U <- (1 - alpha beta) U - alpha diag(w) R(Z + (H H^T + 1 1^T) U)

Z = H W^T + b the outputs before, w the weights of the neighbours, and R what the loss's gradient leaves at each output:
softmax - one-hot, or twice the error over the outputs' number. The query q then has W q + b + U^T (H q + 1). That is
`adapt_affine`. With U = -alpha diag(w) C it needs only two products of C, with small matrices that take these factors.

Of the squared error this is the descent of a quadratic: each step multiplies what is left of the error by
1 - alpha (2 / V) eigenvalue of (H^T diag(w) H), so that at an alpha of 2 over the largest it grows without end
(`largest_rates`). The eigenvalues' sum is the weighted mean of the keys' squared lengths, which is what a rate is
measured in where none is given (`choose_rates`). The gradient of cross entropy is bounded, whatever alpha is.

Where other layers follow the map, `adapt_first_layer` keeps U itself, of which a step makes
(1 - alpha beta) U - alpha G, with G [K,h] the gradients of the map's outputs: only the layers that follow have a copy
of their parameters for each query. Any other network has a copy of all of them: `adapt_general`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights.checks import check_choice, check_not_negative, check_sizes
from fastweights.memory.store.neighbours import Neighbours
from fastweights.nn import HebbianSoftmax
from fastweights.ops import stream

NUMBERS = 2**22  # neighbours' outputs at once: a step passes over them several times
# In units of the keys' squared length, over the root of the steps: found on new classes and on turned images of 64 to
# 1,280 features, with 8 to 256 neighbours and 1 to 20 steps. Half of it changes few answers, twice of it too many.
WAY = 64.0
_ROUNDS = 20  # rounds of the power iteration

Parameters = dict[str, Tensor]
# (parameter, gradient, state, step counted from 1, learning rate): writes to the parameter and the state alone, because
# one tensor may be the gradient of two parameters.
Rule = Callable[[Tensor, Tensor, tuple[Tensor, ...], int, float], None]


class Descent(NamedTuple):
    """The steps that a query takes."""

    steps: int
    lr: float | None  # alpha; None for `choose_rates`
    penalty: float  # beta
    optimizer: str  # one of RULES; an affine map takes "sgd" alone

    def check(self) -> None:
        """Refuse settings that are none, or with which every step leads further away.

        Raises:
            ValueError: steps less than 1, a negative number, an unknown optimizer, no rate for one that needs it, or a
                rate of 2 and more over the penalty.
        """
        check_sizes(steps=self.steps)
        check_not_negative(penalty=self.penalty)
        check_choice(RULES, optimizer=self.optimizer)
        if self.lr is None:
            if self.optimizer != "sgd":
                raise ValueError(
                    f"lr=None is for optimizer='sgd': a step of {self.optimizer!r} is about lr long whatever the "
                    "features are; give lr, such as 0.01"
                )
            return
        check_not_negative(lr=self.lr)
        if self.optimizer == "sgd" and self.steps > 1 and self.lr * self.penalty >= 2:
            raise ValueError(
                f"lr={self.lr} times penalty={self.penalty} must be less than 2, or every step leads further away from "
                f"the trained parameters: give lr less than {2 / self.penalty:.3g}, or None"
            )


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


def choose_rates(units: Tensor, descent: Descent, width: int, *, squared: bool) -> Tensor:
    """Return the learning rates [Q] where no number was given.

    A step moves the output at a key by the rate times the key's squared length times what the loss's gradient leaves
    there. Of squared errors the rate is one over the greatest curvature that there can be, 2 units / V: a step goes all
    the way to the neighbours, and no further. Of classes a way of 64 units is long enough to change the answer of a
    network that is sure, and steps that are several, each of which sees what those before it have done, are shorter.

    Args:
        units: weighted mean squared lengths of the neighbours' keys, each with the 1 of the bias, [Q].
        descent: the steps.
        width: V.
        squared: whether the loss is the squared error.
    """
    curvature = 2 / width if squared else math.sqrt(descent.steps) / WAY
    return 1 / (curvature * units + _felt_penalty(descent)).clamp(min=torch.finfo(units.dtype).tiny)


def measure_units(neighbours: Neighbours, bias: Tensor | None) -> Tensor:
    """Return the weighted mean squared lengths of the neighbours' keys, with the 1 of the bias, [Q]."""
    return (neighbours.weights * neighbours.keys.square().sum(2)).sum(1) + (bias is not None)


def largest_rates(neighbours: Neighbours, bias: Tensor | None, descent: Descent, width: int) -> Tensor:
    """Return the learning rates [Q] from which on steps of an affine map on squared errors diverge."""
    keys = neighbours.keys if bias is None else F.pad(neighbours.keys, (0, 1), value=1.0)
    keys = keys * neighbours.weights.sqrt().unsqueeze(2)
    # The power iteration comes from below: what it finds too large must diverge.
    vector = torch.randn(1, 1, keys.shape[2], generator=torch.Generator().manual_seed(0)).to(keys)
    vector = vector.expand(len(keys), -1, -1)
    for _ in range(_ROUNDS):
        vector = F.normalize(vector, dim=2) @ keys.transpose(1, 2) @ keys
    curvatures: Tensor = 2 / width * vector.norm(dim=2).squeeze(1)
    return 2 / (curvatures + _felt_penalty(descent))


def _felt_penalty(descent: Descent) -> float:
    return descent.penalty if descent.steps > 1 else 0.0  # nothing at the trained parameters


def adapt_affine(
    output: Affine, queries: Tensor, neighbours: Neighbours, descent: Descent, rates: float | Tensor | None = None
) -> Tensor:
    """Return the outputs [Q,V] of queries [Q,d] after steps on their own neighbours.

    Args:
        output: the map.
        queries: [Q,d].
        neighbours: of the queries.
        descent: the steps.
        rates: the learning rate, or that of each query [Q,1]; by default the number that `descent` has.
    """
    weight, bias, values = output.weight, output.bias, neighbours.values
    after = F.linear(queries, weight, bias)
    rates = torch.as_tensor(descent.lr if rates is None else rates, dtype=queries.dtype, device=queries.device)
    rates = rates.expand(len(queries), 1)
    pull = pulls(queries, neighbours, bias, rates).unsqueeze(1)
    count = neighbours.keys.shape[1]
    size = max(1, min(len(queries), NUMBERS // (len(weight) * count)))
    room = queries.new_empty(size, count, len(weight))  # once: fresh pages cost as much as the work
    for first in range(0, len(queries), size):
        part = slice(first, first + size)
        keys, keep = neighbours.keys[part], 1 - (descent.penalty * rates[part]).unsqueeze(2)
        residuals = room[: len(keys)]
        before = output.outputs(neighbours, part)
        _residuals(before, values[part], residuals)
        # A step makes (1 - alpha beta) C + R of C. Its products follow in the same way, so C itself is never formed.
        pulled = pull[part] @ residuals
        if descent.steps > 1:
            now = before.clone() if descent.penalty else before
            gram = keys @ keys.transpose(1, 2)
            if bias is not None:
                gram += 1
            gram *= (-rates[part] * neighbours.weights[part]).unsqueeze(1)
        for _ in range(descent.steps - 1):
            if descent.penalty:
                now.sub_(before).mul_(keep).add_(before)
                pulled.mul_(keep)
            now.baddbmm_(gram, residuals)
            _residuals(now, values[part], residuals)
            pulled.baddbmm_(pull[part], residuals)
        after[part] -= pulled.squeeze(1)
    return after


def affine_of(output: nn.Module) -> Affine | None:
    """Return the weight and the bias of a network that is an affine map and nothing else, or None."""
    inner = getattr(output, "_orig_mod", output)  # what torch.compile has wrapped is the map that it was
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in (output, inner))
    if type(inner) not in (nn.Linear, HebbianSoftmax) or hooked:
        return None
    output = inner
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
    stream.subtract(outputs, stored, rows, pull)


def part_classes(dtype: torch.dtype) -> int:
    """Return how many classes a part of the stored softmax has: some thousand entries of it stay near the processor."""
    return 4 * stream.part_classes(dtype)


def split_classes(outputs: Tensor, width: int) -> Tensor:
    """Cut outputs into parts of the classes, [n,V] -> [parts,n,width]; the last part is filled up with zeros."""
    parts = -(-outputs.shape[1] // width)
    padded = F.pad(outputs, (0, parts * width - outputs.shape[1]))
    return padded.view(len(outputs), parts, width).transpose(0, 1)


def pulls(queries: Tensor, neighbours: Neighbours, bias: Tensor | None, lr: float | Tensor) -> Tensor:
    """Return how much of each neighbour's residuals a query's outputs lose: alpha [Q,1] diag(w) (H q + 1), [Q,K]."""
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

    def predict(parameters: Parameters, keys: Tensor) -> Tensor:
        outputs: Tensor = functional_call(output, (parameters, buffers), (keys,))
        return outputs

    def objective(parameters: Parameters, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return (weights * _losses(predict(parameters, keys), values)).sum()

    def choose(parameters: Parameters, gradients: Parameters, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        def move(rate: Tensor) -> Tensor:
            return predict({name: parameters[name] - rate * gradients[name] for name in parameters}, keys)

        return _choose_rate(move, _length(gradients).square(), length, values, weights, descent)

    length = _length(before)
    current = {name: value.repeat(len(queries), *[1] * value.dim()) for name, value in before.items()}  # [Q,...]
    states = {name: tuple(torch.zeros_like(value) for _ in range(kept)) for name, value in current.items()}
    near = neighbours.keys, neighbours.values, neighbours.weights
    for step in range(1, descent.steps + 1):
        # In the first step all have the same parameters: those of the network are one product for all queries.
        start, shared = (before, None) if step == 1 else (current, 0)
        gradients = vmap(grad(objective), in_dims=(shared, 0, 0, 0))(start, *near)
        rates: Any = descent.lr
        if rates is None:
            rates = vmap(choose, in_dims=(shared, 0, 0, 0, 0))(start, gradients, *near)
        for name, gradient in gradients.items():
            if descent.penalty:
                gradient = gradient + descent.penalty * (current[name] - before[name])
            if isinstance(rates, Tensor):  # SGD with each query's own
                current[name] -= rates.view(-1, *[1] * (gradient.dim() - 1)) * gradient
            else:
                rule(current[name], gradient, states[name], step, rates)

    def answer(parameters: Parameters, query: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        losses = (objective(each, keys, values, weights) for each in (before, parameters))
        return _keep_better(predict(parameters, query.unsqueeze(0)).squeeze(0), values, losses)

    answers: Tensor = vmap(answer)(current, queries, *near)
    return answers.detach()


def _keep_better(answer: Tensor, values: Tensor, losses: Iterator[Tensor]) -> Tensor:
    """Return an answer, or NaN where steps have run away from numbers: the error is ten times what it and they were.

    The losses, before and after, are not computed for classes: with a few small steps they would be half of the time.
    """
    if not values.is_floating_point():
        return answer
    before, after = losses
    return torch.where(after <= 10 * (before + values.square().mean()), answer, math.nan)


def _choose_rate(
    move: Callable[[Tensor], Tensor],
    squared_length: Tensor,
    length: Tensor,
    values: Tensor,
    weights: Tensor,
    descent: Descent,
) -> Tensor:
    """Return a step's learning rate, of a query whose output is no affine map.

    In place of the keys' squared lengths stands how fast the outputs change along the gradient, measured by a move of a
    thousandth of the parameters: what the two are for an affine map, if all neighbours have one key.

    Args:
        move: returns the outputs at the neighbours [K,V] after a step of some rate.
        squared_length: of the gradient.
        length: of all parameters.
        values: of the neighbours.
        weights: of the neighbours, [K].
        descent: the steps.
    """
    least = torch.finfo(weights.dtype).tiny
    rate = 1e-3 * length / squared_length.clamp(min=least).sqrt()
    now = move(torch.zeros_like(rate))
    speed = (weights * (move(rate) - now).square().flatten(1).sum(1)).sum() / rate.square().clamp(min=least)
    units = speed / squared_length.clamp(min=least)
    return choose_rates(units, descent, now[0].numel(), squared=values.is_floating_point())


def _length(parameters: Parameters) -> Tensor:
    return torch.as_tensor(sum(parameter.square().sum() for parameter in parameters.values())).sqrt()


class FirstLayer(NamedTuple):
    """A network that begins with an affine map, which shares nothing with the rest."""

    first: nn.Linear
    rest: nn.Module


def adapt_first_layer(output: FirstLayer, queries: Tensor, neighbours: Neighbours, descent: Descent) -> Tensor:
    """Return the same as `adapt_general` under SGD, without copies of the first map's weights."""
    (first, rest), penalty = output, descent.penalty
    before = {name: parameter.detach() for name, parameter in rest.named_parameters()}
    buffers = {name: buffer.detach() for name, buffer in rest.named_buffers()}
    keys = neighbours.keys
    with torch.no_grad():
        at_keys, at_query = first(keys), first(queries)
        gram, likeness = keys @ keys.transpose(1, 2), (keys @ queries.unsqueeze(2)).squeeze(2)
        if first.bias is not None:
            gram, likeness = gram + 1, likeness + 1

    length = _length(dict(output.first.named_parameters()) | before).detach()

    def predict(hidden: Tensor, parameters: Parameters) -> Tensor:
        outputs: Tensor = functional_call(rest, (parameters, buffers), (hidden,))
        return outputs

    def objective(hidden: Tensor, parameters: Parameters, values: Tensor, weights: Tensor) -> Tensor:
        return (weights * _losses(predict(hidden, parameters), values)).sum()

    def choose(
        start: tuple[Tensor, Parameters],
        gradients: tuple[Tensor, Parameters],
        gram: Tensor,
        values: Tensor,
        weights: Tensor,
    ) -> Tensor:
        (hidden, parameters), (pull, slopes) = start, gradients
        slope = gram @ pull
        squares = [(pull * slope).sum(), *(each.square().sum() for each in slopes.values())]

        def move(rate: Tensor) -> Tensor:
            return predict(hidden - rate * slope, {name: parameters[name] - rate * slopes[name] for name in parameters})

        return _choose_rate(move, torch.stack(squares).sum(), length, values, weights, descent)

    def answer(
        at_keys: Tensor, at_query: Tensor, gram: Tensor, likeness: Tensor, values: Tensor, weights: Tensor
    ) -> Tensor:
        parameters, coefficients = before, torch.zeros_like(at_keys)
        for _ in range(descent.steps):
            hidden = at_keys + gram @ coefficients
            pull, gradients = grad(objective, argnums=(0, 1))(hidden, parameters, values, weights)
            lr: Any = descent.lr
            if lr is None:
                lr = choose((hidden, parameters), (pull, gradients), gram, values, weights)
            coefficients = (1 - lr * penalty) * coefficients - lr * pull
            if penalty:
                gradients = {name: gradients[name] + penalty * (parameters[name] - before[name]) for name in parameters}
            parameters = {name: parameters[name] - lr * gradients[name] for name in parameters}
        hidden = at_keys + gram @ coefficients
        losses = (objective(*each, values, weights) for each in ((at_keys, before), (hidden, parameters)))
        return _keep_better(
            predict((at_query + likeness @ coefficients).unsqueeze(0), parameters).squeeze(0), values, losses
        )

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
