"""The C++ kernels of the gated recurrence: checks every argument, then calls them through ctypes."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops._native import (
    call,
    check_flags,
    check_tensors,
    define_pointers,
    lay_out,
    lay_out_lengths,
    point,
    require,
)
from fastweights.ops.gated.reference import EPS, FIXED, FastInputs, SlowInputs, fast_shapes, slow_shapes


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
        ("inner", ctypes.c_int),
        ("size", ctypes.c_int),
        ("features", ctypes.c_int),
        ("eps", ctypes.c_double),
        ("inside_numbers", ctypes.c_int64),
    ]


_SlowInputs = define_pointers("drive", "weight_hh", "weight_z", "bias_z", "hidden", "lengths", "starts")
_SlowResults = define_pointers("inners", "states")
_SlowGradients = define_pointers("drive", "z", "hidden")
_FastInputs = define_pointers("inners", "weight", "bias", "x", "hidden", "fast_1", "fast_2", "lengths", "starts")
_FastResults = define_pointers("outputs", "fast_1", "fast_2", "squashed", "inside")
_FastGradients = define_pointers("inners", "weight", "bias", "x", "hidden", "fast_1", "fast_2")


def empty_sequences(like: Tensor, numbers: int) -> Tensor:
    """Return a tensor [T,B,...] in whose memory every sequence is whole: the fast network takes one after another."""
    return like.new_empty(like.shape[1], like.shape[0], numbers).transpose(0, 1)


def _lay_out_sequences(tensor: Tensor) -> Tensor:
    return _native.make_contiguous(tensor.transpose(0, 1)).transpose(0, 1)


def _lay_out_slow(inputs: SlowInputs) -> tuple[SlowInputs, _SlowProblem]:
    drive, hidden = inputs.drive, inputs.hidden
    require(drive)
    tensors = lay_out(inputs[:-FIXED], slow_shapes(drive, hidden), drive, "drive")
    steps, batch, inner = drive.shape
    lengths = lay_out_lengths(inputs.lengths, batch, steps, drive.device)
    flags = check_flags({"starts": inputs.starts}, steps, batch, drive.device)
    return SlowInputs._make((*tensors, lengths, *flags)), _SlowProblem(steps, batch, inner, hidden.shape[-1])


def slow_forward(inputs: SlowInputs) -> tuple[Tensor, Tensor]:
    """Return the inner units [T,B,P] and the states [T,B,S] that `reference.slow_network` gives."""
    inputs, problem = _lay_out_slow(inputs)
    drive = inputs.drive
    inners = _native.in_large_pages(empty_sequences(drive, drive.shape[2]))
    results = inners, drive.new_empty(*drive.shape[:2], inputs.hidden.shape[1])
    _call("slow_forward", drive, problem, point(_SlowInputs, *inputs), point(_SlowResults, *results))
    return results


def slow_backward(
    grad_inners: Tensor, grad_states: Tensor | None, inners: Tensor, states: Tensor, inputs: SlowInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of drive [T,B,P], of z [T,B,S], whose tanh is the next state, and of hidden [B,S]."""
    inputs, problem = _lay_out_slow(inputs)
    drive, size = inputs.drive, inputs.hidden.shape[1]
    wide, narrow = tuple(drive.shape), (*drive.shape[:2], size)
    shapes = {"grad_inners": wide, "grad_states": narrow, "inners": wide, "states": narrow}
    check_tensors((grad_inners, grad_states, inners, states), shapes, drive, "drive")
    inners, grad_inners = _lay_out_sequences(inners), _lay_out_sequences(grad_inners)
    states = _native.make_contiguous(states)
    if grad_states is not None:
        grad_states = _native.make_contiguous(grad_states)
    of_drive, of_states = (
        _native.in_large_pages(each) for each in (torch.empty_like(drive), empty_sequences(drive, size))
    )
    results = of_drive, of_states, torch.empty_like(inputs.hidden)
    from_and_grads = point(_SlowResults, inners, states), point(_SlowResults, grad_inners, grad_states)
    pointers = point(_SlowInputs, *inputs)
    _call("slow_backward", drive, problem, pointers, *from_and_grads, point(_SlowGradients, *results))
    return results


class _Fast(NamedTuple):
    """The inputs of the fast network as the kernel takes them."""

    inners: Tensor
    weight: Tensor
    bias: Tensor
    x: Tensor
    hidden: Tensor
    fast_1: Tensor | None  # None where it is zero
    fast_2: Tensor | None
    lengths: Tensor | None
    starts: Tensor | None

    def call(self, entry: str, *structures: Any) -> None:
        (steps, batch, features), size = self.x.shape, self.hidden.shape[1]
        inside = count_inside(self.x, self.hidden)
        problem = _FastProblem(steps, batch, self.weight.shape[1], size, features, EPS, inside)
        _call(entry, self.x, problem, point(_FastInputs, *self), *structures)


def _lay_out_fast(inputs: FastInputs) -> _Fast:
    inners, weight, bias, x, hidden, fast_1, fast_2, lengths, starts = inputs
    require(x)
    shapes = fast_shapes(x, hidden)
    (steps, batch, _), (_, _, numbers), inner = x.shape, shapes.pop("updates"), inners.shape[-1]
    check_tensors((x, hidden, fast_1, fast_2), shapes, x, "x")
    product_shapes = {"inners": (steps, batch, inner), "weight": (numbers, inner), "bias": (numbers,)}
    check_tensors((inners, weight, bias), product_shapes, inners, "inners")
    # Under autocast the inner units and the weight have its dtype; their products are exact in the dtype of x.
    return _Fast(
        _lay_out_sequences(inners.to(x.dtype)),
        _native.make_contiguous(weight.to(x.dtype)),
        _native.make_contiguous(bias.to(x.dtype)),
        _native.make_contiguous(x),
        _native.make_contiguous(hidden),
        _lay_out_matrix(fast_1),
        _lay_out_matrix(fast_2),
        lay_out_lengths(lengths, batch, steps, x.device),
        *check_flags({"starts": starts}, steps, batch, x.device),
    )


def _lay_out_matrix(tensor: Tensor) -> Tensor | None:
    """Return a fast matrix as the kernel takes it: None for a single zero expanded to its shape, not laid out."""
    if tensor.numel() > 0 and not any(tensor.stride()) and tensor[0, 0, 0].item() == 0:
        return None
    return _native.make_contiguous(tensor)


def count_inside(x: Tensor, hidden: Tensor) -> int:
    """Return how many numbers a step of a sequence keeps for the backward pass: `Inside` in csrc/gated_fast.hpp."""
    width = _native.REGISTER_BYTES // x.element_size()
    return -(-hidden.shape[-1] // width) * width + 4


def count_trace(weight: Tensor, x: Tensor, hidden: Tensor) -> int:
    """Return how many numbers the forward pass keeps: squashed updates, and the inside of the steps."""
    return x.shape[0] * x.shape[1] * (len(weight) + count_inside(x, hidden))


def _part(trace: Tensor, inputs: _Fast) -> tuple[Tensor, Tensor]:
    """Return the squashed updates of all steps [B,T,U], and their inside [B,T,...]."""
    steps, batch, _ = inputs.x.shape
    numbers = steps * batch * len(inputs.weight)
    return trace[:numbers], trace[numbers:]


def fast_forward(inputs: FastInputs, keep_trace: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `reference.fast_network` gives, and the trace that `fast_backward` goes by, empty if not wanted."""
    laid_out = _lay_out_fast(inputs)
    weight, x, hidden = laid_out.weight, laid_out.x, laid_out.hidden
    outputs = x.new_empty(*x.shape[:2], hidden.shape[1])
    results = outputs, x.new_empty(inputs.fast_1.shape), x.new_empty(inputs.fast_2.shape)
    trace = _native.in_large_pages(x.new_empty(count_trace(weight, x, hidden) if keep_trace else 0))
    squashed, inside = _part(trace, laid_out) if keep_trace else (None, None)
    laid_out.call("fast_forward", point(_FastResults, *results, squashed, inside))
    return *results, trace


def fast_backward(
    grad_outputs: Tensor | None,
    grad_fast_1: Tensor | None,
    grad_fast_2: Tensor | None,
    outputs: Tensor,
    trace: Tensor,
    inputs: FastInputs,
    matrices: bool = True,
) -> list[Tensor]:
    """Return the gradients of all inputs that have one; those of fast_1 and fast_2 are empty without `matrices`.

    Without the trace of the forward pass, that pass is run again.
    """
    if trace.numel() == 0:
        trace = fast_forward(inputs, keep_trace=True)[-1]
    laid_out = _lay_out_fast(inputs)
    x, weight, hidden = laid_out.x, laid_out.weight, laid_out.hidden
    shapes = fast_shapes(x, hidden)
    kept_shapes = {
        "grad_outputs": (*x.shape[:2], hidden.shape[1]),
        "grad_fast_1": shapes["fast_1"],
        "grad_fast_2": shapes["fast_2"],
        "outputs": (*x.shape[:2], hidden.shape[1]),
        "trace": (count_trace(weight, x, hidden),),
    }
    *grads, outputs, trace = lay_out((grad_outputs, grad_fast_1, grad_fast_2, outputs, trace), kept_shapes, x, "x")
    products = _native.in_large_pages(empty_sequences(x, weight.shape[1]))
    of_product = products, torch.empty_like(weight), torch.empty_like(laid_out.bias)
    of_matrices = [x.new_empty(shapes[name] if matrices else 0) for name in ("fast_1", "fast_2")]
    of_others = torch.empty_like(x), torch.empty_like(hidden)
    kept_and_grads = (
        point(_FastResults, outputs, None, None, *_part(trace, laid_out)),
        point(_FastResults, *grads, None, None),
    )
    wanted = of_matrices if matrices else (None, None)
    laid_out.call("fast_backward", *kept_and_grads, point(_FastGradients, *of_product, *of_others, *wanted))
    return [*(tensor.to(inputs.weight.dtype) for tensor in of_product), *of_others, *of_matrices]


def _call(entry: str, like: Tensor, problem: ctypes.Structure, *structures: Any) -> None:
    call("gated", entry, "inputs", like, problem, *structures, torch.get_num_threads())
