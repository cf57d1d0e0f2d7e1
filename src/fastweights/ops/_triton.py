"""What every call of a Triton kernel needs: whether Triton is here, and tensors that a kernel can take."""

import importlib.metadata
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from fastweights.ops._calls import plain, shaped

OLDEST = (3, 6)


def _find() -> str | None:
    """Why Triton cannot be used at all, or None; found without the second that its import takes."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'fastweights[gpu]'"
    # A build of somebody's own may go by another name: then its version is not asked for.
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("triton")
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            oldest = ".".join(str(part) for part in OLDEST)
            return f"the triton kernel needs Triton {oldest} or newer, got {version}"
    return None


MISSING = _find()


def unavailable(like: Tensor) -> str | None:
    """Why the kernels cannot take a call with such tensors, or None when they can."""
    if like.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the triton kernel needs tensors on a GPU, got {like.device}"
    if like.dtype not in (torch.float32, torch.float64):
        return f"the triton kernel takes float32 and float64, got {like.dtype}"
    return MISSING


def checked(tensor: Tensor, like: Tensor, shape: tuple[int, ...], name: str, like_name: str) -> Tensor:
    """The tensor, contiguous, of this shape and of the dtype and device of `like`."""
    return shaped(plain(tensor, like, name, like_name), shape, name)


def checked_lengths(lengths: Tensor | None, batch: int, like: Tensor) -> Tensor | None:
    """Lengths as a kernel takes them: one out of range counts as 0 or T, since to refuse it would wait for the GPU."""
    if lengths is None:
        return None
    if lengths.dtype != torch.int64 or lengths.device != like.device:
        raise TypeError(f"lengths must be int64 on {like.device}, got {lengths.dtype} on {lengths.device}")
    return shaped(lengths.contiguous(), (batch,), "lengths")


def launching_on(like: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels are launched where the tensor is."""
    return torch.cuda.device(like.device) if like.device.type == "cuda" else nullcontext()


def power_of_two(size: int) -> int:
    """Numbers of a block that holds a vector of `size`."""
    return max(16, 1 << max(size - 1, 0).bit_length())
