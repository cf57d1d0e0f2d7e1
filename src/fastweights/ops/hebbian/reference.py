"""The smoothing of Hebbian Softmax in plain PyTorch: algorithm 1 of Rae et al. 2018, over the classes of one step."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Counting = Literal["literal", "running_mean", "constant"]
COUNTINGS: tuple[Counting, ...] = ("literal", "running_mean", "constant")  # the kernel knows them by their places
# Takes the mean activations of the classes [C,d], all weights [V,d] and the classes [C]; returns what these are drawn
# to, [C,d].
Targets = Callable[[Tensor, Tensor, Tensor], Tensor]


def smooth(
    weight: Tensor,
    counts: Tensor,
    activations: Tensor,
    labels: Tensor,
    gamma: float,
    limit: float,
    counting: Counting,
    targets: Targets,
) -> None:
    """Smooth into the weights, in place, and count; there is at least one label."""
    # Beside the step of a small vocabulary every operation counts: few of them, and one pass over the activations.
    ordered, order = labels.sort(stable=True)
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
        means = F.embedding_bag(order, activations.to(dtype), first, mode="mean")
        rates = smoothing_rates(before, times, gamma, counting, dtype).unsqueeze(1)
        rows = weight.index_select(0, chosen).to(dtype)
        drawn = torch.lerp(rows, targets(means, weight, chosen), rates)
        # A mean or a norm that overflows its dtype: the class keeps its weights.
        drawn = torch.where(torch.isfinite(drawn).all(1, keepdim=True), drawn, rows)
        weight.index_copy_(0, chosen, drawn.to(weight.dtype))
    counts.index_add_(0, present, occurrences)


def smoothing_rates(
    counts: Tensor, occurrences: Tensor, gamma: float, counting: Counting, dtype: torch.dtype
) -> Tensor:
    """Return lambda of classes below the limit, from their c [C] before this step and n [C] in it -> [C]."""
    if counting == "literal":
        rates = counts.clamp_min(1).to(dtype).reciprocal_()  # 1 / c of a class never seen stands for 1
    elif counting == "running_mean":
        rates = occurrences.to(dtype) / (counts + occurrences)
    else:
        rates = torch.zeros_like(counts, dtype=dtype)
    return rates.clamp_min_(gamma)


def bounded(w: Tensor, largest_norm: float) -> Tensor:
    """Return vectors [C,d], longer ones shortened to the largest norm; NaN where one is not finite."""
    if bool((torch.linalg.vector_norm(w, dim=1) <= largest_norm).all()):  # nearly always: saves two passes over w
        return w
    scaled, peaks = scale(w)
    most = largest_norm / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return torch.where(peaks <= most, w, scaled * most)


def scale(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors [C,d] over their largest components, and these [C,1]: the norm of w itself may overflow."""
    peaks = w.abs().amax(1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)  # zero stays zero
    return w / peaks, peaks
