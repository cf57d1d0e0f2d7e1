"""The C++ kernel of the smoothing: says which tensors it takes, then passes pointers (csrc/hebbian.cpp)."""

import ctypes

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.hebbian.reference import COUNTINGS, Counting

_MOST = 2**31  # classes and activations: csrc/hebbian.hpp sorts a label and a place in one number of 64 bits


class _Problem(ctypes.Structure):
    _fields_ = [
        ("classes", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("gamma", ctypes.c_double),
        ("limit", ctypes.c_double),
        ("largest_norm", ctypes.c_double),
        ("counting", ctypes.c_int32),
    ]


_Tensors = _native.define_pointers("weight", "counts", "activations", "labels")


def unavailable(weight: Tensor, counts: Tensor, activations: Tensor, labels: Tensor) -> str | None:
    """Return why the kernel cannot take these tensors, whose shapes fit, or None when it can."""
    if torch.compiler.is_compiling():
        return "the cpu kernel cannot be traced by torch.compile"
    reason = _native.unavailable(weight)
    if reason is not None:
        return reason
    for name, tensor, dtype in (
        ("weight", weight, weight.dtype),
        ("counts", counts, torch.int64),
        ("activations", activations, weight.dtype),
        ("labels", labels, torch.int64),
    ):
        # A subclass may keep its numbers elsewhere, as one that is spread over several processes does.
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"the cpu kernel takes plain tensors, {name} is a {type(tensor).__name__}"
        if not tensor.is_cpu or tensor.dtype != dtype:
            return f"the cpu kernel needs {name} in {dtype} on the cpu, got {tensor.dtype} on {tensor.device}"
        if not tensor.is_contiguous() or tensor.is_neg():
            return f"the cpu kernel needs contiguous tensors, {name} is not"
    if max(len(weight), len(labels)) > _MOST:
        return f"the cpu kernel takes at most {_MOST:,} classes and activations"
    start, size = activations.data_ptr(), activations.nbytes
    if start < weight.data_ptr() + weight.nbytes and weight.data_ptr() < start + size:
        return "the cpu kernel writes into the weights while it reads the activations, which lie in the same memory"
    return None


def smooth(
    weight: Tensor,
    counts: Tensor,
    activations: Tensor,
    labels: Tensor,
    gamma: float,
    limit: float,
    counting: Counting,
    largest_norm: float,
) -> None:
    """Smooth as `reference.smooth`, tensors for which `unavailable` has no reason."""
    classes, size = weight.shape
    problem = _Problem(classes, len(labels), size, gamma, limit, largest_norm, COUNTINGS.index(counting))
    tensors = _native.point(_Tensors, weight, counts, activations, labels)
    _native.call("hebbian", "smooth", "activations", activations, problem, tensors)
    torch.autograd.graph.increment_version([weight, counts])  # as every operation of torch does that writes
