"""Sequences that are packed into one row, one behind the other: the check of their bounds."""

import torch
from torch import Tensor


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, device: torch.device) -> int:
    """Refuse what cannot be the bounds of sequences packed into one row, and return how many sequences there are.

    Raises:
        ValueError: another shape than [sequences + 1], or more than one row.
        TypeError: no integers, or on another device.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            "cu_seqlens must hold the start of each packed sequence and the end of the last, got shape "
            f"{list(cu_seqlens.shape)}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != device:
        raise TypeError(f"cu_seqlens must be int64 or int32 on {device}, got {cu_seqlens.dtype} on {cu_seqlens.device}")
    if batch != 1:
        raise ValueError(f"cu_seqlens are for sequences packed into one row, B = 1, got a batch of {batch}")
    return len(cu_seqlens) - 1


def check_bounds(cu_seqlens: Tensor, steps: int) -> None:
    """Refuse bounds that do not ascend from 0 to the number of steps."""
    bounds = cu_seqlens.tolist()
    if bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, steps):
        raise ValueError(f"cu_seqlens must ascend from 0 to the number of steps, {steps} here, got {bounds}")


def find_starts(cu_seqlens: Tensor, batch: int, steps: int, device: torch.device) -> Tensor:
    """Check bounds, and return where each packed sequence but the first begins, bool [1,steps]."""
    check_cu_seqlens(cu_seqlens, batch, device)
    check_bounds(cu_seqlens, steps)
    starts = torch.zeros(1, steps + 1, dtype=torch.bool, device=device)
    starts[:, cu_seqlens[1:-1].long()] = True  # of a sequence without steps at the end, past the last
    return starts[:, :steps]
