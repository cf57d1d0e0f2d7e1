"""Autocast, switched off around a recurrence and asked about."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off."""
    return torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext()


def autocast_is_on(device: str, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether autocast is on for a device and tensors of a dtype: it leaves float64 as it is."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return on and dtype != torch.float64


def lstm_takes_bfloat16(device: str) -> bool:
    """Return whether `torch.nn.LSTM` runs in bfloat16: on a processor without AVX-512 oneDNN refuses it."""
    # PyTorch has no public name for the question, and hands oneDNN the LSTM without asking it.
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
