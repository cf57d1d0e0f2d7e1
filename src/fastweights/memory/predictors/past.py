"""Positions of the text at hand that a query sees beside what a memory holds, and what is predicted from both."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 16  # queries for which a sort takes longer than to compare all labels


class Past(NamedTuple):
    """Positions of texts that are not in the memory (yet): a text's own past, of each query another part of it.

    Attributes:
        keys: [S,d].
        labels: the token after each, [S] int64.
        ages: [Q,S] int64: 1 for the last position before the query, 2 for the one before that, 0 for what is not seen.
        predictions: the model's own softmax at each, [S,V]; what MbPA reads, and None where it needs none.
        places: the rows of `predictions` [N,V] that these are, [S]; None if each has its own, in this order.
    """

    keys: Tensor
    labels: Tensor
    ages: Tensor
    predictions: Tensor | None = None
    places: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """How many positions each query sees, [Q]."""
        return self.ages.amax(1) if self.ages.shape[1] else self.ages.new_zeros(len(self.ages))

    def hide(self, count: int, capacity: int | None) -> Tensor:
        """Return which of `count` entries of a memory, the oldest first, and then of these are out of sight [Q,*]."""
        stored = self.counts.unsqueeze(1) + torch.arange(count, 0, -1, device=self.ages.device)
        ages = torch.cat([stored, self.ages], 1)
        return (ages <= 0) if capacity is None else (ages <= 0) | (ages > capacity)


class Recalled(NamedTuple):
    """How like each query is to what it sees: its prediction is the share of the likeness that a label has.

    Attributes:
        likeness: [Q,M], a logarithm; minus infinity of what is not seen.
        labels: [M] or [Q,M].
        seen: [Q] bool, whether there is anything to be seen.
    """

    likeness: Tensor
    labels: Tensor
    seen: Tensor

    def spread(self, num_classes: int) -> Tensor:
        """Return log p of all classes, [Q,V]; minus infinity of labels that nothing has."""
        weights = self.likeness.softmax(1).where(self.seen.unsqueeze(1), 0.0)
        p = weights.new_zeros(len(weights), num_classes)
        p.scatter_add_(1, self.labels.expand(weights.shape), weights)
        p /= p.sum(1, keepdim=True)  # added one after another, a thousand equal weights do not sum to exactly 1
        return p.log().where(self.seen.unsqueeze(1), -math.log(num_classes))


def count_ages(before: int, queries: int, like: Tensor) -> Tensor:
    """Return the ages of a text's first `before + queries` positions as its last `queries` ones see them, [Q,S]."""
    numbers = torch.arange(before + queries, device=like.device)
    return (numbers[before:].unsqueeze(1) - numbers).clamp_(min=0)


def find_labels(labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of what has the target's label, labels [M] of all rows or [Q,M] of each."""
    if labels.dim() == 2 or len(targets) <= _FEW:
        return (labels == targets.unsqueeze(1)).nonzero(as_tuple=True)  # type: ignore[return-value]
    # Few have it: to compare all pairs would take half as long as their products.
    ascending, columns = labels.sort(stable=True)  # what comes later changes nothing, not even an order
    first, end = (torch.searchsorted(ascending, targets, right=right) for right in (False, True))
    counts = end - first
    rows = torch.arange(len(targets), device=targets.device).repeat_interleave(counts)
    places = torch.arange(len(rows), device=rows.device) + (end - counts.cumsum(0))[rows]
    return rows, columns[places]
