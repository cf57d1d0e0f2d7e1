"""The Hebbian half of Hebbian Softmax: algorithm 1 of Rae et al. 2018, over the classes of one step."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from fastweights.nn._inner_objectives import InnerObjective

Counting = Literal["literal", "running_mean"]
COUNTINGS: tuple[Counting, ...] = ("literal", "running_mean")


def smoothing_rates(
    counts: Tensor, occurrences: Tensor, gamma: float, counting: Counting, dtype: torch.dtype
) -> Tensor:
    """lambda of classes that are below the limit: c [C] before this step and n [C] in it -> [C]."""
    if counting == "literal":
        rates = counts.clamp_min(1).to(dtype).reciprocal_()  # 1 / c of a class never seen stands for 1
    else:
        rates = occurrences.to(dtype) / (counts + occurrences)
    return rates.clamp_min_(gamma)


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
    # Beside the step of a small vocabulary every operation counts: few of them, and one pass over the activations.
    ordered, order = _together(labels).sort(stable=True)
    present, occurrences = torch.unique_consecutive(ordered, return_counts=True)
    before = counts.index_select(0, present)
    chosen, times = present, occurrences
    if not int(before.max()) < limit:
        below = before < limit
        order = order[below.repeat_interleave(occurrences)]
        chosen, times, before = present[below], occurrences[below], before[below]
    if len(chosen) > 0:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        first = times.cumsum(0) - times  # where each class begins in the order
        means = F.embedding_bag(order, _together(activations).to(dtype), first, mode="mean")
        rates = smoothing_rates(before, times, gamma, counting, dtype).unsqueeze(1)
        rows = weight.index_select(0, chosen).to(dtype)
        weight.index_copy_(0, chosen, rows.lerp_(objective.maximum(means, weight, chosen), rates).to(weight.dtype))
    counts.index_add_(0, present, occurrences)


def _together(batches: Sequence[Tensor]) -> Tensor:
    return batches[0] if len(batches) == 1 else torch.cat(list(batches))


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
