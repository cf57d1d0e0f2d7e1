"""The inner objectives of Hebbian Softmax: section 3.3 of Rae et al. 2018, equations (7) to (10)."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_choice, check_finite, check_not_negative, check_positive, check_sizes
from fastweights.ops.hebbian.reference import bounded, scale

ObjectiveName = Literal["l2", "inner_product", "svm", "sparse_softmax"]
NAMES: tuple[ObjectiveName, ...] = ("l2", "inner_product", "svm", "sparse_softmax")

MOST_DISTANCES = 2**24  # how many the search for neighbours holds at once


@dataclass(frozen=True)
class InnerObjective:
    """The objective g(w) whose maximum w*, within a norm, a class's weights are smoothed towards (Rae et al. 2018).

    With h the mean activation of a class in the batch, and the sums over the k weight vectors of other classes that are
    nearest to h by Euclidean distance: "l2" -|w - h| (7), "inner_product" w.h (8), both in closed form; "svm"
    w.h - xi sum_j w.theta_j [w.theta_j > epsilon] (9) and "sparse_softmax" exp(w.h) / sum_j exp(w.theta_j) (10), the
    latter as its logarithm, by gradient ascent from h. The paper gives the norm and the number of steps; the other
    numbers are ours.

    Args:
        name: "l2", "inner_product", "svm" or "sparse_softmax".
        neighbours: k of "svm" and "sparse_softmax"; all other classes where there are fewer.
        steps: the number of steps of gradient ascent.
        step_size: the size of a step of gradient ascent.
        penalty: xi of "svm": what similarity to a neighbour costs.
        threshold: epsilon of "svm": the similarity up to which a neighbour costs nothing.
        largest_norm: |w| is at most this.

    Raises:
        ValueError: an unknown name, or a number out of range.

    Examples:
        >>> from fastweights import nn
        >>> nn.HebbianSoftmax(64, 1000, objective=nn.InnerObjective("svm", neighbours=5))
        HebbianSoftmax(64, 1000, gamma=0.25, limit=500, objective='svm')
    """

    name: ObjectiveName
    neighbours: int = 10
    steps: int = 20
    step_size: float = 0.1
    penalty: float = 1.0
    threshold: float = 0.0
    largest_norm: float = 10.0

    def __post_init__(self) -> None:
        check_choice(NAMES, objective=self.name)
        check_sizes(neighbours=self.neighbours, steps=self.steps)
        check_positive(step_size=self.step_size, largest_norm=self.largest_norm)
        check_not_negative(penalty=self.penalty)
        check_finite(threshold=self.threshold)

    def maximum(self, activations: Tensor, weights: Tensor, classes: Tensor) -> Tensor:
        """Return w* of some classes: their mean activations [C,d], all weights [V,d], their indices [C] -> [C,d]."""
        if self.name == "inner_product":
            return F.normalize(scale(activations)[0], dim=1) * self.largest_norm
        w = bounded(activations, self.largest_norm)
        if self.name == "l2":
            return w
        others = self._nearest(activations, weights, classes)  # [C,k,d]
        for _ in range(self.steps):
            w = bounded(w + self.step_size * self._gradient(w, activations, others), self.largest_norm)
        return w

    def _gradient(self, w: Tensor, h: Tensor, others: Tensor) -> Tensor:
        similarities = (others @ w.unsqueeze(2)).squeeze(2)  # [C,k]
        if self.name == "svm":
            repulsion = self.penalty * (similarities > self.threshold).to(w.dtype)
        else:
            repulsion = similarities.softmax(1)
        return h - (repulsion.unsqueeze(1) @ others).squeeze(1)

    def _nearest(self, activations: Tensor, weights: Tensor, classes: Tensor) -> Tensor:
        count = min(self.neighbours, len(weights) - 1)
        squares = weights.square().sum(1).to(activations.dtype)
        nearest = []
        rows = max(1, MOST_DISTANCES // len(weights))
        for h, indices in zip(torch.split(activations, rows), torch.split(classes, rows), strict=True):
            # |h - theta|^2 without |h|^2, which is the same for all.
            distances = torch.addmm(squares, h, weights.to(h.dtype).T, alpha=-2)
            distances.scatter_(1, indices.unsqueeze(1), math.inf)
            nearest.append(distances.topk(count, largest=False, sorted=False).indices)
        return weights[torch.cat(nearest)].to(activations.dtype)
