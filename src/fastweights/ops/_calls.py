"""What every call of a kernel needs: which one it gets, tensors that it can take, an error for a code of C++."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops import _library

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_REGISTER_BYTES = {"x86-64-v4": 64, "x86-64-v3": 32}


def register_width(like: Tensor) -> int:
    """How many of its numbers a vector register holds in the kernels that are in use."""
    return _REGISTER_BYTES.get(_library.STATUS, 16) // like.element_size()


def padded(size: int, width: int) -> int:
    """The least multiple of `width` that is not less than `size`."""
    return -(-size // width) * width


def choose(like: Tensor, impl: str, without_triton: Callable[[], str | None]) -> str:
    """The implementation that a call gets: "cpu", "triton" or "reference".

    `without_triton` says why the Triton kernel cannot take the call, or None when it can.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "reference":
        return impl
    wanted = impl if impl != "auto" else "cpu" if like.device.type == "cpu" else "triton"
    reason = unavailable(like) if wanted == "cpu" else without_triton()
    if reason is None:
        return wanted
    if impl != "auto":
        raise KernelError(f"impl={impl!r} was asked for, but {reason}")
    return "reference"


def unavailable(like: Tensor) -> str | None:
    """Why the C++ kernels cannot take a call with such tensors, or None when they can."""
    if like.device.type != "cpu":
        return f"the cpu kernel needs tensors on the cpu, got {like.device}"
    if like.dtype not in (torch.float32, torch.float64):
        return f"the cpu kernel takes float32 and float64, got {like.dtype}"
    return _library.MISSING


def require(like: Tensor) -> None:
    """Refuse a call with such tensors if the C++ kernels cannot take it."""
    reason = unavailable(like)
    if reason is not None:
        raise KernelError(reason)


def plain(tensor: Tensor, like: Tensor, name: str, like_name: str) -> Tensor:
    """The tensor, contiguous and without a lazy negation; its device and dtype must be those of `like`."""
    if tensor.device != like.device or tensor.dtype != like.dtype:
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, {like_name} is {like.dtype} on {like.device}")
    return tensor.resolve_neg().contiguous()


def shaped(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """The tensor, if it has this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    return tensor


def checked_lengths(lengths: Tensor | None, batch: int, steps: int) -> Tensor | None:
    """Lengths as a kernel takes them; one out of range would be read out of bounds."""
    if lengths is None:
        return None
    lengths = shaped(lengths.contiguous(), (batch,), "lengths")
    if lengths.dtype != torch.int64 or lengths.device.type != "cpu":
        raise TypeError(f"lengths must be int64 on the cpu, got {lengths.dtype} on {lengths.device}")
    low, high = (int(bound) for bound in torch.aminmax(lengths)) if batch > 0 else (0, 0)
    if low < 0 or high > steps:
        raise ValueError(f"lengths must lie between 0 and {steps}, got {low} to {high}")
    return lengths


def pointers(*names: str) -> type[ctypes.Structure]:
    """A structure of C that holds pointers by these names."""
    return type("Pointers", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_void_p) for name in names]})


def filled(structure: type[ctypes.Structure], *tensors: Tensor | None) -> Any:
    """Such a structure, as an entry point takes it; the tensors must outlive the call."""
    return ctypes.byref(structure(*(None if tensor is None else tensor.data_ptr() for tensor in tensors)))


def call(kernel: str, entry: str, dtype: torch.dtype, what: str, *arguments: Any) -> None:
    """Call an entry point of a kernel for a dtype; what it cannot do is said of `what`."""
    suffix = str(dtype).removeprefix("torch.")
    check(getattr(_library.LIBRARY, f"fastweights_{kernel}_{entry}_{suffix}")(*arguments), kernel, what)


def check(code: int, kernel: str, what: str) -> None:
    """Raise what an entry point's number stands for: csrc/guarded.hpp."""
    if code == 0:
        return
    if code == 1:
        raise MemoryError(f"the {kernel} kernel ran out of memory for {what}")
    if code == 2:
        raise KernelError(
            f"the {kernel} kernel could not start {torch.get_num_threads()} threads; with one, "
            "torch.set_num_threads(1), it needs none"
        )
    if code == 4:
        raise IndexError(f"the {kernel} kernel got an index out of range with {what}")
    raise KernelError(f"the {kernel} kernel failed for {what}")
