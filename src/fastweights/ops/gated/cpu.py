"""The C++ kernels of the gated recurrence: checks every argument, then calls them through ctypes."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops import _library
from fastweights.ops._calls import check, checked_lengths, padded, plain, register_width, shaped, unavailable
from fastweights.ops.gated._shapes import fast_shapes, slow_shapes


class _SlowProblem(ctypes.Structure):
    _fields_ = [
        ("steps", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("inner", ctypes.c_int),
        ("size", ctypes.c_int),
    ]


class _FastProblem(ctypes.Structure):
    _fields_ = [
        ("steps", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("size", ctypes.c_int),
        ("features", ctypes.c_int),
        ("eps", ctypes.c_double),
        ("trace_numbers", ctypes.c_int64),  # of a step of a sequence
    ]


def _pointers(*names: str) -> type[ctypes.Structure]:
    return type("Pointers", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_void_p) for name in names]})


_SlowInputs = _pointers("drive", "weight_hh", "weight_z", "bias_z", "hidden", "lengths")
_SlowResults = _pointers("inners", "states")
_SlowGradients = _pointers("drive", "z", "hidden")
_FastInputs = _pointers("updates", "x", "hidden", "fast_1", "fast_2", "lengths")
_FastResults = _pointers("outputs", "fast_1", "fast_2", "trace")
_FastGradients = _pointers("updates", "x", "hidden", "fast_1", "fast_2")


def _filled(structure: type[ctypes.Structure], *tensors: Tensor | None) -> Any:
    return ctypes.byref(structure(*(None if tensor is None else tensor.data_ptr() for tensor in tensors)))


class _Slow(NamedTuple):
    """The inputs of the slow network as the kernel wants them."""

    problem: _SlowProblem
    drive: Tensor
    weight_hh: Tensor
    weight_z: Tensor
    bias_z: Tensor
    hidden: Tensor
    lengths: Tensor | None


def _slow(
    drive: Tensor, weight_hh: Tensor, weight_z: Tensor, bias_z: Tensor, hidden: Tensor, lengths: Tensor | None
) -> _Slow:
    _require(drive)
    shapes = slow_shapes(drive, hidden)
    steps, batch, inner = drive.shape
    size = hidden.shape[-1]
    given = (drive, weight_hh, weight_z, bias_z, hidden)
    tensors = [shaped(plain(t, drive, n, "drive"), shapes[n], n) for t, n in zip(given, shapes, strict=True)]
    drive, weight_hh, weight_z, bias_z, hidden = tensors
    problem = _SlowProblem(steps, batch, inner, size)
    return _Slow(problem, drive, weight_hh, weight_z, bias_z, hidden, checked_lengths(lengths, batch, steps))


def slow_forward(
    drive: Tensor, weight_hh: Tensor, weight_z: Tensor, bias_z: Tensor, hidden: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The inner units [T,B,P] and the states [T,B,S] that `reference.slow_network` gives."""
    given = _slow(drive, weight_hh, weight_z, bias_z, hidden, lengths)
    steps, batch, inner = drive.shape
    results = given.drive.new_empty(steps, batch, inner), given.drive.new_empty(steps, batch, hidden.shape[1])
    _call("slow_forward", given, _SlowInputs, _filled(_SlowResults, *results))
    return results


def slow_backward(
    grad_inners: Tensor,
    grad_states: Tensor | None,
    inners: Tensor,
    states: Tensor,
    drive: Tensor,
    weight_hh: Tensor,
    weight_z: Tensor,
    bias_z: Tensor,
    hidden: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of drive [T,B,P], of what tanh is taken of for the next state [T,B,S], and of hidden [B,S]."""
    given = _slow(drive, weight_hh, weight_z, bias_z, hidden, lengths)
    names = ("grad_inners", "grad_states", "inners", "states")
    shapes = (given.drive.shape, (*drive.shape[:2], hidden.shape[1]))
    tensors = [
        None if tensor is None else shaped(plain(tensor, drive, name, "drive"), tuple(shape), name)
        for tensor, name, shape in zip((grad_inners, grad_states, inners, states), names, shapes * 2, strict=True)
    ]
    results = torch.empty_like(given.drive), torch.empty_like(states), torch.empty_like(given.hidden)
    from_and_grads = _filled(_SlowResults, *tensors[2:]), _filled(_SlowResults, *tensors[:2])
    _call("slow_backward", given, _SlowInputs, *from_and_grads, _filled(_SlowGradients, *results))
    return results


class _Fast(NamedTuple):
    """The inputs of the fast network as the kernel wants them."""

    problem: _FastProblem
    updates: Tensor
    x: Tensor
    hidden: Tensor
    fast_1: Tensor
    fast_2: Tensor
    lengths: Tensor | None


def _fast(
    updates: Tensor, x: Tensor, hidden: Tensor, fast_1: Tensor, fast_2: Tensor, lengths: Tensor | None, eps: float
) -> _Fast:
    _require(x)
    shapes = fast_shapes(x, hidden)
    steps, batch, features = x.shape
    size = hidden.shape[-1]
    given = (updates, x, hidden, fast_1, fast_2)
    tensors = [shaped(plain(t, x, n, "x"), shapes[n], n) for t, n in zip(given, shapes, strict=True)]
    updates, x, hidden, fast_1, fast_2 = tensors
    problem = _FastProblem(steps, batch, size, features, eps, trace_shape(x, hidden)[-1])
    return _Fast(problem, updates, x, hidden, fast_1, fast_2, checked_lengths(lengths, batch, steps))


def trace_shape(x: Tensor, hidden: Tensor) -> tuple[int, int, int]:
    """Of what the forward pass leaves for the backward pass: `Trace` in csrc/gated_fast.hpp."""
    width = register_width(x)
    steps, batch, features = x.shape
    size = hidden.shape[-1]
    columns = padded(size + features + 1, width) + padded(size + 1, width)
    return steps, batch, 5 * padded(size, width) + 2 * columns + padded(4, width)


def fast_forward(
    updates: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
    keep_trace: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `reference.fast_network` gives, and the trace that `fast_backward` goes by; empty where it is not wanted."""
    given = _fast(updates, x, hidden, fast_1, fast_2, lengths, eps)
    outputs = given.x.new_empty(*x.shape[:2], hidden.shape[1])
    trace = given.x.new_empty(trace_shape(x, hidden) if keep_trace else (0,))
    results = outputs, torch.empty_like(given.fast_1), torch.empty_like(given.fast_2)
    _call("fast_forward", given, _FastInputs, _filled(_FastResults, *results, trace if keep_trace else None))
    return *results, trace


def fast_backward(
    grad_outputs: Tensor | None,
    grad_fast_1: Tensor | None,
    grad_fast_2: Tensor | None,
    outputs: Tensor,
    trace: Tensor,
    updates: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of updates, x, hidden, fast_1 and fast_2.

    Without the trace of the forward pass, that pass is run again.
    """
    if trace.numel() == 0:
        trace = fast_forward(updates, x, hidden, fast_1, fast_2, lengths, eps, keep_trace=True)[-1]
    given = _fast(updates, x, hidden, fast_1, fast_2, lengths, eps)
    outputs = shaped(plain(outputs, x, "outputs", "x"), (*x.shape[:2], hidden.shape[1]), "outputs")
    trace = shaped(plain(trace, x, "trace", "x"), trace_shape(x, hidden), "trace")
    likes = {"grad_outputs": outputs, "grad_fast_1": given.fast_1, "grad_fast_2": given.fast_2}
    grads = [
        None if grad is None else shaped(plain(grad, x, name, "x"), tuple(like.shape), name)
        for grad, (name, like) in zip((grad_outputs, grad_fast_1, grad_fast_2), likes.items(), strict=True)
    ]
    results = tuple(torch.empty_like(tensor) for tensor in given[1:6])
    from_and_grads = _filled(_FastResults, outputs, None, None, trace), _filled(_FastResults, *grads, None)
    _call("fast_backward", given, _FastInputs, *from_and_grads, _filled(_FastGradients, *results))
    return results


def _require(like: Tensor) -> None:
    reason = unavailable(like)
    if reason is not None:
        raise KernelError(reason)


def _call(entry: str, given: _Slow | _Fast, inputs: type[ctypes.Structure], *structures: Any) -> None:
    suffix = str(given[1].dtype).removeprefix("torch.")
    function = getattr(_library.LIBRARY, f"fastweights_gated_{entry}_{suffix}")
    arguments = (ctypes.byref(given.problem), _filled(inputs, *given[1:]), *structures)
    code = function(*arguments, torch.get_num_threads())
    check(code, "gated", f"inputs of shape {tuple(given[1].shape)}")
