"""Triton on this machine: whether its kernels can run, and where they are launched."""

import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from fastweights.errors import KernelError

OLDEST = (3, 6)


def _find() -> str | None:
    """Return why Triton cannot be used at all, or None, without the second that its import takes."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; run `pip install '.[gpu]'` in the checkout of fastweights"
    # A build of one's own may have another name: then its version is not asked for.
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("triton")
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            oldest = ".".join(str(part) for part in OLDEST)
            return f"the triton kernel needs Triton {oldest} or newer, got {version}"
    return None


MISSING = _find()


def unavailable(like: Tensor) -> str | None:
    """Return why the kernels cannot take tensors like this one, or None when they can."""
    if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the triton kernel needs tensors on a GPU, got {like.device}"
    if like.dtype not in (torch.float32, torch.float64):
        return f"the triton kernel takes float32 and float64, got {like.dtype}"
    return MISSING


def require(like: Tensor) -> None:
    """Refuse a call whose tensors the kernels cannot take."""
    reason = unavailable(like)
    if reason is not None:
        raise KernelError(reason)


def launching_on(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched where the tensor is."""
    return torch.cuda.device(like.device) if like.device.type == "cuda" else nullcontext()


def power_of_two(size: int) -> int:
    """Return the size of a block that holds a vector of `size` numbers."""
    return max(16, 1 << max(size - 1, 0).bit_length())
