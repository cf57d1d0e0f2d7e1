"""Elastic weight consolidation (Kirkpatrick et al. 2017): a penalty on changing weights that earlier tasks need."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights.nn.modes import evaluating

Parameters = dict[str, Tensor]

_NUMBERS = 2**20  # numbers in the gradients of a block of examples


class ElasticWeightConsolidation:
    """A penalty on leaving the weights that a classifier had after each of its tasks (Kirkpatrick et al. 2017, eq 3).

    One quadratic penalty a task, with F the diagonal of the Fisher information at the weights theta* of its end::

        penalty = 1/2 sum_tasks sum_i F_i (theta_i - theta*_i)^2
        F_i     = mean over inputs x of (d log p(y | x) / d theta_i)^2,    y drawn from p(y | x)

    The labels are drawn from what the model itself predicts, and the squares are of each example's own gradient. A sum
    of quadratics is one quadratic: what is kept, two numbers a weight, does not grow with the tasks, and the penalty is
    theirs exactly. Weights that do not require a gradient are left out.

    Args:
        model: inputs [B,...] -> logits [B,C], of two classes at least, each example on its own; differentiable by
            `torch.func`.

    Attributes:
        tasks: how many penalties there are.

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
    def __init__(self, model: nn.Module) -> None:
        self.model = model
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
            generator: draws the labels, on the inputs' device.

        Raises:
            ValueError: no inputs; inputs, weights, predictions or squares of gradients that are not finite; logits of
                another shape than [N,C], or of one class; or weights of other names or shapes than before; nothing was
                changed.
        """
        weights = self._same_weights()
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
        return {"tasks": self.tasks, "least": self._least, **copies}

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            ValueError: it is of a model with other weights, or of no such object, or its numbers are none that
                `consolidate` makes; nothing was changed.
        """
        if not isinstance(state, dict):
            raise ValueError(f"load_state_dict takes what state_dict gave, got {type(state).__name__}")
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
                labels = self._draw_labels(part, generator)
                for name, gradients in self._gradients(weights, part, labels).items():
                    totals[name] += gradients.square().sum(0)
        return {name: total / len(inputs) for name, total in totals.items()}

    @torch.no_grad()
    def _draw_labels(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw labels [B] from the model's predictions."""
        logits = self.model(inputs)
        if logits.dim() != 2 or len(logits) != len(inputs):
            raise ValueError(f"the model must give logits [{len(inputs)},C], got {list(logits.shape)}")
        if logits.shape[1] == 1:  # its softmax is 1 whatever the weights are: the penalty would be 0 for ever
            raise ValueError(
                f"the model gives one logit, [{len(inputs)},1], of which the softmax is always 1: give it two classes, "
                "such as by torch.nn.functional.pad(logit, (1, 0)), whose first logit is 0"
            )
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model's predictions hold NaN or infinity; nothing was changed")
        return torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)

    def _gradients(self, weights: Parameters, inputs: Tensor, labels: Tensor) -> Parameters:
        """Return the gradients of each example, [B,...]."""
        fixed = {name: value.detach() for name, value in self.model.named_parameters() if name not in weights}
        fixed |= {name: value.detach() for name, value in self.model.named_buffers()}

        def loss(weights: Parameters, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.model, (weights, fixed), (x.unsqueeze(0),)), y.unsqueeze(0))

        gradients: Parameters = vmap(grad(loss), in_dims=(None, 0, 0))(weights, inputs, labels)
        return gradients

    def _add(self, name: str, added: Tensor, at: Tensor) -> None:
        # By the distance of the two centres, as the parallel axes of moments: sums of F theta^2 would cancel.
        before, centre = self._fisher[name], self._centre[name]
        total = before + added
        share = torch.where(total > 0, added / total, 0.0)
        away = at - centre
        self._least += 0.5 * float((before * share * away.square()).sum(dtype=torch.float64))
        self._fisher[name], self._centre[name] = total, centre + share * away


def _shapes(weights: Parameters) -> dict[str, list[int]]:
    return {name: list(weight.shape) for name, weight in weights.items()}


def _check_finite(values: Parameters, what: str) -> None:
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the {what} hold NaN or infinity in {name!r}; nothing was changed")
