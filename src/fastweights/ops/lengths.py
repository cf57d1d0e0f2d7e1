"""Sequences of several lengths in one padded batch."""

import torch
from torch import Tensor


def take_last(outputs: Tensor, lengths: Tensor | None, before: Tensor) -> Tensor:
    """Return the output of each sequence's last valid step, [B,H].

    Args:
        outputs: [T,B,H], with at least one step.
        lengths: valid steps of each sequence, int64 [B]; None is T for all.
        before: what a sequence without a valid step keeps, [B,H].

    Examples:
        >>> import torch
        >>> from fastweights.ops.lengths import take_last
        >>> outputs = torch.arange(6.0).view(3, 2, 1)
        >>> take_last(outputs, torch.tensor([2, 0]), torch.full((2, 1), -1.0)).flatten().tolist()
        [2.0, -1.0]
    """
    if lengths is None:
        return outputs[-1].clone()
    index = (lengths - 1).clamp(0, outputs.shape[0] - 1).view(1, -1, 1).expand(1, -1, outputs.shape[2])
    return torch.where((lengths > 0).unsqueeze(1), outputs.gather(0, index).squeeze(0), before)
