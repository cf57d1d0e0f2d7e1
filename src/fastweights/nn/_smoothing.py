"""The Hebbian half of Hebbian Softmax: algorithm 1 of Rae et al. 2018, over the classes of one step."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, distributed

from fastweights.nn._inner_objectives import InnerObjective

Counting = Literal["literal", "running_mean"]
COUNTINGS: tuple[Counting, ...] = ("literal", "running_mean")


def smoothing_rates(counts: Tensor, occurrences: Tensor, gamma: float, counting: Counting) -> Tensor:
    """lambda of classes that are below the limit: c [C] before this step and n [C] in it -> [C] float64."""
    before, now = counts.double(), occurrences.double()
    # 1 / c of a class never seen stands for 1; the running mean of none and n is that of the n.
    rates = 1 / before.clamp_min(1) if counting == "literal" else now / (before + now)
    return rates.clamp_min(gamma)


def smooth(
    weight: Tensor,
    counts: Tensor,
    activations: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    gamma: float,
    limit: float,
    counting: Counting,
    objective: InnerObjective,
) -> None:
    """Smooth the batches of one step into the weights, in place, and count their classes.

    Args:
        weight: theta after the optimizer's step, [V,d].
        counts: c, [V] int64.
        activations: of every batch, [n,d].
        labels: of every batch, [n] int64, within 0 to V - 1.
    """
    if sum(map(len, labels)) == 0:
        return
    classes, inverse, occurrences = torch.unique(torch.cat(list(labels)), return_inverse=True, return_counts=True)
    below = counts[classes] < limit
    if bool(below.any()):
        chosen, times = classes[below], occurrences[below]
        # Where the sum of a class stands, past the end for those that are summed up no more.
        place = torch.where(below, below.cumsum(0) - 1, len(chosen))[inverse]
        means = _sums(activations, place, len(chosen), weight) / times.unsqueeze(1)
        rates = smoothing_rates(counts[chosen], times, gamma, counting).to(means.dtype).unsqueeze(1)
        rows = weight[chosen].to(means.dtype)
        weight[chosen] = rows.lerp_(objective.maximum(means, weight, chosen), rates).to(weight.dtype)
    counts.index_add_(0, classes, occurrences)


def _sums(activations: Sequence[Tensor], place: Tensor, count: int, weight: Tensor) -> Tensor:
    """The activations of each class, summed: [count,d], in single precision at least."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    sums = weight.new_zeros((count + 1, weight.shape[1]), dtype=dtype)
    for batch, places in zip(activations, torch.split(place, [len(batch) for batch in activations]), strict=True):
        sums.index_add_(0, places, batch.to(dtype))
    return sums[:count]


def gathered(
    activations: Sequence[Tensor], labels: Sequence[Tensor], weight: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The batches of all processes, in their order; without several processes, what was given."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return list(activations), list(labels)
    # Activations and labels, whose number is the batch's; sums of all classes would be V x d.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    own = torch.cat([weight.new_empty((0, weight.shape[1]), dtype=dtype), *(batch.to(dtype) for batch in activations)])
    targets = torch.cat([own.new_empty(0, dtype=torch.int64), *labels])
    sizes = [torch.zeros_like(targets.new_zeros(1)) for _ in range(distributed.get_world_size())]
    distributed.all_gather(sizes, targets.new_tensor([len(targets)]))
    counts = [int(size) for size in sizes]
    return _all(own, counts), _all(targets, counts)


def _all(own: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The tensors of all processes, of so many rows each: sent padded, for what is gathered has one size."""
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]
