"""Elastic weight consolidation (Kirkpatrick et al. 2017): a penalty on changing weights that earlier tasks need."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights.checks import check_choice
from fastweights.nn.modes import evaluating

Parameters = dict[str, Tensor]
Output = Literal["softmax", "bernoulli", "gaussian"]

_NUMBERS = 2**20  # numbers in the gradients of a block of examples


class ElasticWeightConsolidation:
    """A penalty on leaving the weights that a model had after each of its tasks (Kirkpatrick et al. 2017, eq 3).

    One quadratic penalty a task, with F the diagonal of the Fisher information at the weights theta* of its end::

        penalty = 1/2 sum_tasks sum_i F_i (theta_i - theta*_i)^2
        F_i     = mean over inputs x of (d log p(y | x) / d theta_i)^2,    y drawn from p(y | x)

    Each y is drawn from what the model itself predicts, and the squares are of each example's own gradient. A sum
    of quadratics is one quadratic: what is kept, two numbers a weight, does not grow with the tasks, and the penalty is
    theirs exactly. Weights that do not require a gradient are left out.

    Args:
        model: inputs [B,...] -> outputs [B,C], each example on its own; differentiable by `torch.func`. At least one
            weight requires a gradient.
        output: what an output is, which no model tells by its shape: it goes with the loss that you train by.
            "softmax": the logits of C classes, two at least, of which one is right (`cross_entropy`). "bernoulli": C
            logits of yes or no, each on its own (`binary_cross_entropy_with_logits`). "gaussian": C numbers, the means
            of normal distributions of variance 1 (`mse_loss`, of which 1/2 the sum over outputs is -log p).

    Raises:
        ValueError: `output` is another word, or no weight requires a gradient.

    Attributes:
        tasks: how many penalties there are.
        output: as given.

    Examples:
        >>> import torch
        >>> from fastweights.training import ElasticWeightConsolidation
        >>> model = torch.nn.Linear(4, 3)
        >>> consolidation = ElasticWeightConsolidation(model)
        >>> consolidation.consolidate(torch.randn(100, 4))       # at the end of a task: its inputs [N,...]
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)
        >>> loss = 0.0 + 100.0 * consolidation.penalty()         # in training on the next
        >>> bool(loss > 0)
        True
    """

    # What is kept takes part in the penalty's gradient, which it cannot as tensors of the caller's inference mode.
    @torch.inference_mode(False)
    def __init__(self, model: nn.Module, output: Output = "softmax") -> None:
        check_choice(get_args(Output), output=output)
        self.model, self.output = model, output
        if not self._weights():
            raise ValueError(
                f"no weight of the {type(model).__name__} requires a gradient, so the penalty would stay 0: make "
                "this before weights are frozen, or thaw some by requires_grad_()"
            )
        self.tasks = 0
        self._fisher = {name: torch.zeros_like(value) for name, value in self._weights().items()}  # summed over tasks
        self._centre = {name: value.clone() for name, value in self._weights().items()}  # the least of the penalty
        self._least = 0.0  # the penalty there

    @torch.inference_mode(False)
    def consolidate(self, inputs: Tensor, *, generator: torch.Generator | None = None) -> None:
        """Add the penalty of a task that ends now, with the model's present weights.

        The model is read in evaluation mode and is left as it was. The call may stand under `torch.no_grad` or
        `torch.inference_mode`.

        Args:
            inputs: the inputs of the task, [N,...].
            generator: draws what is predicted, on the inputs' device.

        Raises:
            ValueError: no inputs; inputs, weights, predictions or squares of gradients that are not finite; outputs of
                another shape than [N,C], or a softmax of one class; or weights of other names or shapes than before;
                nothing was changed.
            TypeError: the inputs, or what the model returns, are no tensor; nothing was changed.
        """
        weights = self._same_weights()
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"inputs must be one tensor [N,...] of a task's inputs, got a {type(inputs).__name__}: "
                "torch.as_tensor(inputs), or torch.cat of the inputs of a loader's batches"
            )
        if inputs.dim() < 1 or len(inputs) == 0:
            raise ValueError(f"consolidate needs the inputs of a task, [N,...], at least one, got {list(inputs.shape)}")
        if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
            raise ValueError("the inputs hold NaN or infinity; nothing was changed")
        _check_finite(weights, "weights")
        fisher = self._estimate_fisher(weights, inputs.clone() if inputs.is_inference() else inputs, generator)
        _check_finite(fisher, "squares of the gradients")
        for name, added in fisher.items():
            self._add(name, added, weights[name])
        self.tasks += 1

    def penalty(self) -> Tensor:
        """Return the penalties of all tasks at the model's present weights, a scalar; zero before there are any.

        Raises:
            ValueError: weights of other names or shapes than before.
        """
        self._same_weights()
        now = dict(self.model.named_parameters())
        total = sum(((now[name] - self._centre[name]).square() * fisher).sum() for name, fisher in self._fisher.items())
        return 0.5 * torch.as_tensor(total) + self._least

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what a resumed run needs beside the model's own state; later tasks do not change them."""
        kept = {"fisher": self._fisher, "centre": self._centre}
        copies = {part: {name: value.clone() for name, value in values.items()} for part, values in kept.items()}
        return {"output": self.output, "tasks": self.tasks, "least": self._least, **copies}

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            ValueError: it is of a model with other weights or another `output`, or of no such object, or its numbers
                are none that `consolidate` makes; nothing was changed.
        """
        if not isinstance(state, dict):
            raise ValueError(f"load_state_dict takes what state_dict gave, got {type(state).__name__}")
        if (output := state.get("output", "softmax")) != self.output:  # older states are all of a softmax
            raise ValueError(f"the state is of output={output!r}, and this is of {self.output!r}; nothing was changed")
        fisher, centre = (self._copy_part(state, part) for part in ("fisher", "centre"))
        for name, value in fisher.items():
            if bool((value < 0).any()):
                raise ValueError(f"the state's fisher of {name!r} is negative, {value.min()}; nothing was changed")
        tasks, least = state.get("tasks"), state.get("least")
        if type(tasks) is not int or tasks < 0:
            raise ValueError(f"the state's tasks must be an integer of at least 0, got {tasks!r}; nothing was changed")
        if not isinstance(least, int | float) or not 0 <= least < float("inf"):
            raise ValueError(f"the state's least must be finite and not negative, got {least!r}; nothing was changed")
        self._fisher, self._centre, self.tasks, self._least = fisher, centre, tasks, float(least)

    def _copy_part(self, state: dict[str, Any], part: str) -> Parameters:
        """Return copies, like the weights, of this part of a state."""
        weights, values = self._weights(), state.get(part)
        tensors = values if isinstance(values, dict) and all(isinstance(v, Tensor) for v in values.values()) else {}
        if _shapes(tensors) != _shapes(weights):
            raise ValueError(f"the state's {part} does not belong to a model with the weights {_shapes(weights)}")
        copies = {name: tensors[name].to(weight, copy=True) for name, weight in weights.items()}
        _check_finite(copies, f"numbers of the state's {part}")
        return copies

    def _weights(self) -> Parameters:
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}

    def _same_weights(self) -> Parameters:
        weights = self._weights()
        if _shapes(weights) != _shapes(self._fisher):
            raise ValueError(
                f"the model has weights {_shapes(weights)}, and had {_shapes(self._fisher)} when this was made: a "
                "penalty needs the same weights"
            )
        return weights

    def _estimate_fisher(self, weights: Parameters, inputs: Tensor, generator: torch.Generator | None) -> Parameters:
        """Return the diagonal of the Fisher information at these weights."""
        totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        block = max(1, _NUMBERS // max(1, sum(weight.numel() for weight in weights.values())))
        with evaluating(self.model):
            for part in torch.split(inputs, block):
                slopes = self._draw_slopes(part, generator)
                for name, gradients in self._gradients(weights, part, slopes).items():
                    totals[name] += gradients.square().sum(0)
        return {name: total / len(inputs) for name, total in totals.items()}

    @torch.no_grad()
    def _draw_slopes(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw y from the model's predictions z and return d log p(y | x) / d z, [B,C]."""
        predicted = self.model(inputs)
        _check_outputs(predicted, len(inputs), self.output)
        slopes = torch.empty_like(predicted)
        if self.output == "gaussian":
            return slopes.normal_(generator=generator)  # y - z, without the rounding of z + (y - z)
        if self.output == "bernoulli":
            p = predicted.sigmoid()
            return torch.sub(torch.bernoulli(p, generator=generator), p, out=slopes)
        p = predicted.softmax(1)
        y = torch.multinomial(p, 1, generator=generator).squeeze(1)
        return torch.sub(F.one_hot(y, p.shape[1]), p, out=slopes)

    def _gradients(self, weights: Parameters, inputs: Tensor, slopes: Tensor) -> Parameters:
        """Return the gradients of each example's log p(y | x), [B,...]."""
        fixed = {name: value.detach() for name, value in self.model.named_parameters() if name not in weights}
        fixed |= {name: value.detach() for name, value in self.model.named_buffers()}

        def log_likelihood(weights: Parameters, x: Tensor, slope: Tensor) -> Tensor:  # but for what has no gradient
            predicted: Tensor = functional_call(self.model, (weights, fixed), (x.unsqueeze(0),))
            return (predicted.squeeze(0) * slope).sum()

        gradients: Parameters = vmap(grad(log_likelihood), in_dims=(None, 0, 0))(weights, inputs, slopes)
        return gradients

    def _add(self, name: str, added: Tensor, at: Tensor) -> None:
        # By the distance of the two centres, as the parallel axes of moments: sums of F theta^2 would cancel.
        before, centre = self._fisher[name], self._centre[name]
        total = before + added
        share = torch.where(total > 0, added / total, 0.0)
        away = at - centre
        self._least += 0.5 * float((before * share * away.square()).sum(dtype=torch.float64))
        self._fisher[name], self._centre[name] = total, centre + share * away


def _check_outputs(predicted: Any, examples: int, output: Output) -> None:
    """Refuse what a model returned where it is not outputs [B,C] of this kind."""
    what = "numbers" if output == "gaussian" else "logits"
    if not isinstance(predicted, Tensor):
        raise TypeError(
            f"the model must return a tensor of {what} [{examples},C], got a {type(predicted).__name__}: wrap it in a "
            "module that returns that tensor alone"
        )
    if predicted.dim() != 2 or len(predicted) != examples:
        hint = f": unsqueeze(1) makes it [{examples},1]" if list(predicted.shape) == [examples] else ""
        raise ValueError(f"the model must give {what} [{examples},C], got {list(predicted.shape)}{hint}")
    if predicted.shape[1] == 1 and output == "softmax":  # it is 1 whatever the weights are: the penalty would be 0
        raise ValueError(
            f'the model gives one logit, [{examples},1], of which the softmax is always 1: give output="bernoulli" '
            'for two classes, output="gaussian" for a number'
        )
    if not bool(torch.isfinite(predicted).all()):
        raise ValueError("the model's predictions hold NaN or infinity; nothing was changed")


def _shapes(weights: Parameters) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in weights.items()}


def _check_finite(values: Parameters, what: str) -> None:
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the {what} hold NaN or infinity in {name!r}; nothing was changed")
