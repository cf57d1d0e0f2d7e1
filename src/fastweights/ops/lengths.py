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


def take_recent(x: Tensor, before: Tensor, lengths: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return the inputs up to each sequence's last valid step that a convolution still reads, [B,N,C].

    Args:
        x: [B,T,C].
        before: the inputs before x, [B,N,C].
        lengths: valid steps of each sequence, int64 [B]; None is T for all.
        starts: the steps before which another sequence begins, bool [B,T]: what is before such a step is zeros. None is
            nowhere; those past a length do nothing.

    Examples:
        >>> import torch
        >>> from fastweights.ops.lengths import take_recent
        >>> x = torch.arange(3.0).view(1, 3, 1)
        >>> take_recent(x, torch.full((1, 2, 1), -1.0), torch.tensor([1]), None).flatten().tolist()
        [-1.0, 0.0]
    """
    (batch, steps, features), count = x.shape, before.shape[1]
    if lengths is None or steps == 0:
        recent = x[:, steps - count :] if steps >= count else torch.cat((before[:, steps:], x), 1)
    else:
        places = (lengths.unsqueeze(1) + torch.arange(-count, 0, device=x.device)).unsqueeze(2)
        older = (places + count).clamp(0, max(count - 1, 0)).expand(-1, -1, features)
        newer = places.clamp(0, steps - 1).expand(-1, -1, features)
        recent = torch.where(places < 0, before.gather(1, older), x.gather(1, newer))
    if starts is not None and steps and count:
        sequence = torch.cat((starts.new_zeros(batch, count), starts), 1).cumsum(1)
        kept = sequence[:, steps:] if lengths is None else sequence.gather(1, (places.squeeze(2) + count).clamp(min=0))
        recent = torch.where((kept == kept[:, -1:]).unsqueeze(2), recent, torch.zeros_like(recent))
    # x, of all steps, need not be kept for them; a state is laid out alike whatever it came from.
    return recent.clone(memory_format=torch.contiguous_format)
