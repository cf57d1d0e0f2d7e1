"""The C++ kernels of the gated recurrence: checks every argument, then calls them through ctypes."""

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.ops._calls import (
    call,
    checked_lengths,
    filled,
    padded,
    plain,
    pointers,
    register_width,
    require,
    shaped,
)
from fastweights.ops.gated._shapes import fast_shapes, slow_shapes

# Of one piece of the batch: so many bytes of updates, but at least so many sequences.
_PIECE_BYTES, _PIECE = 2**21, 8


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
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("size", ctypes.c_int),
        ("features", ctypes.c_int),
        ("eps", ctypes.c_double),
        ("inside_numbers", ctypes.c_int64),
    ]


_SlowInputs = pointers("drive", "weight_hh", "weight_z", "bias_z", "hidden", "lengths")
_SlowResults = pointers("inners", "states")
_SlowGradients = pointers("drive", "z", "hidden")
_FastInputs = pointers("updates", "bias", "x", "hidden", "fast_1", "fast_2", "lengths")
_FastResults = pointers("outputs", "fast_1", "fast_2", "squashed", "inside")
_FastGradients = pointers("updates", "x", "hidden", "fast_1", "fast_2")


class _Slow(NamedTuple):
    """The inputs of the slow network as the kernel wants them."""

    problem: _SlowProblem
    drive: Tensor
    weight_hh: Tensor
    weight_z: Tensor
    bias_z: Tensor
    hidden: Tensor
    lengths: Tensor | None


def empty_sequences(like: Tensor, numbers: int) -> Tensor:
    """A tensor [T,B,...] in whose memory every sequence is whole: the fast network takes one after the other."""
    return like.new_empty(like.shape[1], like.shape[0], numbers).transpose(0, 1)


def _sequences(tensor: Tensor, like: Tensor, name: str, like_name: str) -> Tensor:
    return plain(tensor.transpose(0, 1), like, name, like_name).transpose(0, 1)


def _slow(
    drive: Tensor, weight_hh: Tensor, weight_z: Tensor, bias_z: Tensor, hidden: Tensor, lengths: Tensor | None
) -> _Slow:
    require(drive)
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
    results = empty_sequences(drive, drive.shape[2]), given.drive.new_empty(*drive.shape[:2], hidden.shape[1])
    _call("slow_forward", given.drive, given.problem, filled(_SlowInputs, *given[1:]), filled(_SlowResults, *results))
    return results


def slow_backward(
    grad_inners: Tensor, grad_states: Tensor | None, inners: Tensor, states: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of drive [T,B,P], of what tanh is taken of for the next state [T,B,S], and of hidden [B,S].

    `arguments` are those of `slow_forward`.
    """
    given = _slow(*arguments)
    drive, size = given.drive, given.hidden.shape[1]
    wide, narrow = tuple(drive.shape), (*drive.shape[:2], size)
    inners = shaped(_sequences(inners, drive, "inners", "drive"), wide, "inners")
    states = shaped(plain(states, drive, "states", "drive"), narrow, "states")
    grad_inners = shaped(_sequences(grad_inners, drive, "grad_inners", "drive"), wide, "grad_inners")
    if grad_states is not None:
        grad_states = shaped(plain(grad_states, drive, "grad_states", "drive"), narrow, "grad_states")
    results = torch.empty_like(drive), empty_sequences(drive, size), torch.empty_like(given.hidden)
    from_and_grads = filled(_SlowResults, inners, states), filled(_SlowResults, grad_inners, grad_states)
    inputs = filled(_SlowInputs, *given[1:])
    _call("slow_backward", drive, given.problem, inputs, *from_and_grads, filled(_SlowGradients, *results))
    return results


class _Fast(NamedTuple):
    """The inputs of the fast network as the kernel wants them, and the product that gives the updates."""

    inners: Tensor
    weight: Tensor
    bias: Tensor
    x: Tensor
    hidden: Tensor
    fast_1: Tensor | None  # None where it is zero
    fast_2: Tensor | None
    lengths: Tensor | None
    eps: float

    def pieces(self) -> Iterator[tuple[slice, _FastProblem]]:
        """The batch in pieces whose updates stay in a cache between the product and the recurrence."""
        steps, batch, features = self.x.shape
        count = max(_PIECE, _PIECE_BYTES // (steps * len(self.weight) * self.x.element_size()))
        size, inside = self.hidden.shape[1], inside_numbers(self.x, self.hidden)
        for first in range(0, batch, count):
            last = min(first + count, batch)
            yield slice(first, last), _FastProblem(steps, batch, first, last - first, size, features, self.eps, inside)

    def call(
        self, entry: str, problem: _FastProblem, updates: Tensor | None, bias: Tensor | None, *structures: Any
    ) -> None:
        inputs = filled(_FastInputs, updates, bias, *self[3:8])
        _call(entry, self.x, problem, inputs, *structures)


def _fast(
    inners: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
) -> _Fast:
    require(x)
    shapes = fast_shapes(x, hidden)
    updates = shapes.pop("updates")
    x, hidden = (shaped(plain(t, x, n, "x"), shapes[n], n) for t, n in ((x, "x"), (hidden, "hidden")))
    matrices = _matrix(fast_1, x, shapes["fast_1"], "fast_1"), _matrix(fast_2, x, shapes["fast_2"], "fast_2")
    inner = inners.shape[-1]
    products = (
        shaped(_sequences(inners, inners, "inners", "inners"), (*x.shape[:2], inner), "inners"),
        shaped(plain(weight, inners, "weight", "inners"), (updates[2], inner), "weight"),
        shaped(plain(bias, inners, "bias", "inners"), updates[2:], "bias"),
    )
    return _Fast(*products, x, hidden, *matrices, checked_lengths(lengths, x.shape[1], x.shape[0]), eps)


def _matrix(tensor: Tensor, like: Tensor, shape: tuple[int, ...], name: str) -> Tensor | None:
    """A fast matrix as the kernel wants it: None for a single zero expanded to its shape, which is not laid out."""
    shaped(tensor, shape, name)
    single = tensor.numel() > 0 and not any(tensor.stride())
    if single and plain(tensor[0, 0, 0], like, name, "x").item() == 0:
        return None
    return plain(tensor, like, name, "x")


def inside_numbers(x: Tensor, hidden: Tensor) -> int:
    """What the inside of a step of a sequence takes: `Inside` in csrc/gated_fast.hpp."""
    return padded(hidden.shape[-1], register_width(x)) + 4


def trace_size(weight: Tensor, x: Tensor, hidden: Tensor) -> int:
    """Numbers that the forward pass leaves for the backward pass: squashed updates, and the inside of the steps."""
    return x.shape[0] * x.shape[1] * (len(weight) + inside_numbers(x, hidden))


def _parts(trace: Tensor, given: _Fast) -> tuple[Tensor, Tensor]:
    """The squashed updates [B,T,U], and the inside of all steps [B,T,...]."""
    steps, batch, _ = given.x.shape
    numbers = steps * batch * len(given.weight)
    return trace[:numbers].view(batch, steps, len(given.weight)), trace[numbers:]


def _rows(tensor: Tensor, piece: slice) -> Tensor:
    """The rows [count*T,...] of a piece of a tensor [T,B,...] whose sequences are whole."""
    return tensor[:, piece].transpose(0, 1).flatten(0, 1)


def fast_forward(
    inners: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
    keep_trace: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `reference.fast_network` gives, and the trace that `fast_backward` goes by; empty where it is not wanted."""
    given = _fast(inners, weight, bias, x, hidden, fast_1, fast_2, lengths, eps)
    outputs = given.x.new_empty(*x.shape[:2], hidden.shape[1])
    results = outputs, given.x.new_empty(fast_1.shape), given.x.new_empty(fast_2.shape)
    trace = given.x.new_empty(trace_size(weight, x, hidden) if keep_trace else 0)
    bias = given.bias.to(x.dtype)  # added by the kernel, which saves a pass over the updates
    squashed, inside = _parts(trace, given) if keep_trace else (None, None)
    product = given.inners.new_empty(0)
    for piece, problem in given.pieces():
        rows = _rows(given.inners, piece)
        product.resize_(len(rows), len(weight))  # the same memory for all pieces, and so in a cache
        torch.mm(rows, given.weight.t(), out=product)
        wanted = filled(_FastResults, *results, None if squashed is None else squashed[piece], inside)
        given.call("fast_forward", problem, product.to(x.dtype), bias, wanted)
    return *results, trace


def fast_backward(
    grad_outputs: Tensor | None,
    grad_fast_1: Tensor | None,
    grad_fast_2: Tensor | None,
    outputs: Tensor,
    trace: Tensor,
    *arguments: Any,
    matrices: bool = True,
) -> tuple[Tensor, ...]:
    """Gradients of inners, weight, bias, x, hidden, fast_1 and fast_2; `arguments` are those of `fast_forward`.

    Those of fast_1 and fast_2 are empty where `matrices` are not wanted. Without the trace of the forward pass, that
    pass is run again.
    """
    if trace.numel() == 0:
        trace = fast_forward(*(*arguments, True))[-1]
    given = _fast(*arguments)
    x, weight = given.x, given.weight
    outputs = shaped(plain(outputs, x, "outputs", "x"), (*x.shape[:2], given.hidden.shape[1]), "outputs")
    trace = shaped(plain(trace, x, "trace", "x"), (trace_size(weight, x, given.hidden),), "trace")
    shapes = fast_shapes(x, given.hidden)
    wanted = {
        "grad_outputs": (grad_outputs, tuple(outputs.shape)),
        "grad_fast_1": (grad_fast_1, shapes["fast_1"]),
        "grad_fast_2": (grad_fast_2, shapes["fast_2"]),
    }
    grads = [
        None if grad is None else shaped(plain(grad, x, name, "x"), shape, name)
        for name, (grad, shape) in wanted.items()
    ]
    of_inners = empty_sequences(given.inners, weight.shape[1])
    # Summed over the pieces in the dtype of the recurrence, which under autocast is not that of the products.
    of_weight, of_bias = x.new_zeros(weight.shape), x.new_zeros(len(weight))
    of_matrices = [x.new_empty(shapes[name] if matrices else 0) for name in ("fast_1", "fast_2")]
    results = torch.empty_like(x), torch.empty_like(given.hidden), *of_matrices
    squashed, inside = _parts(trace, given)
    updates = trace.new_empty(0)
    for piece, problem in reversed([*given.pieces()]):  # the last of the forward pass is still in a cache
        rows = _rows(given.inners, piece)
        updates.resize_(len(rows), len(weight))  # the same memory for all pieces, and so in a cache
        kept, given_grads = (outputs, None, None, squashed[piece], inside), (*grads, None, None)
        gradients = filled(_FastGradients, updates, *results[:2], *(of_matrices if matrices else (None, None)))
        kept_and_wanted = filled(_FastResults, *kept), filled(_FastResults, *given_grads)
        given.call("fast_backward", problem, None, None, *kept_and_wanted, gradients)
        grad = updates.to(weight.dtype)
        torch.mm(grad, weight, out=_rows(of_inners, piece))
        if weight.dtype == x.dtype:
            of_weight.addmm_(grad.t(), rows)
        else:
            of_weight += grad.t() @ rows
        of_bias += updates.sum(0)
    return of_inners, of_weight.to(weight.dtype), of_bias.to(weight.dtype), *results


def _call(entry: str, like: Tensor, problem: ctypes.Structure, *structures: Any) -> None:
    what = f"inputs of shape {tuple(like.shape)}"
    call("gated", entry, like.dtype, what, ctypes.byref(problem), *structures, torch.get_num_threads())
