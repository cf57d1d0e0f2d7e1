"""Hebbian Softmax on several processes: the activations and labels of all, in their order."""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed


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
    sizes = [targets.new_zeros(1) for _ in range(distributed.get_world_size())]
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
