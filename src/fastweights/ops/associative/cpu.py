"""The C++ kernel of the associative recurrence: checks every tensor, then passes pointers (csrc/associative.cpp)."""

import ctypes

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
from fastweights.ops.associative.reference import Constants

_ALIGNMENT = 64  # bytes, of the widest register


class _Problem(ctypes.Structure):
    _fields_ = [
        ("steps", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("inner_steps", ctypes.c_int),
        ("norms", ctypes.c_int),
        ("tanh", ctypes.c_bool),
        ("normalize_initial", ctypes.c_bool),
        ("matrix", ctypes.c_bool),
        ("decay", ctypes.c_double),
        ("rate", ctypes.c_double),
        ("eps", ctypes.c_double),
    ]


_Inputs = pointers("drive", "weight", "gain", "shift", "hidden", "memory", "lengths")
_Gradients = pointers("drive", "weight", "gain", "shift", "hidden", "memory")


class _Results(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("outputs", "final", "trace")),
        ("trace_size", ctypes.c_int64),
    ]


def choose_form(drive: Tensor, keep_memory: bool) -> str:
    """The form that takes less time, "attention" or "matrix", as measured on AVX-512 (docs/performance.md).

    The attention form works on chunks of sequences, the matrix form on a few or on one: what a chunk that is not full
    wastes counts against the first; up to 32 units, reading more states costs little. A single step leaves the matrix
    behind that the next one begins with.
    """
    steps, batch, size = drive.shape
    if steps == 1 and keep_memory:
        return "matrix"
    lanes = 2 * register_width(drive)
    chunks = (batch + lanes - 1) // lanes
    crossover = 200 if size > 32 else 400
    return "matrix" if steps * lanes * chunks > crossover * (batch - lanes * chunks * 3 / 8) else "attention"


def trace_size(drive: Tensor, has_norm: bool, constants: Constants, form: str) -> int:
    """Numbers that the inside of all steps takes: `Trace` in csrc/associative_matrix.hpp and associative_chunk.hpp."""
    steps, batch, size = drive.shape
    width = register_width(drive)
    norms = _norms(has_norm, constants)
    if form == "matrix":
        return steps * batch * ((constants.inner_steps + norms) * padded(size, width) + padded(norms, width))
    rows = (constants.inner_steps + norms) * padded(size, 8) + norms
    return steps * padded(batch, 2 * width) * rows


def _norms(has_norm: bool, constants: Constants) -> int:
    return constants.inner_steps + constants.normalize_initial if has_norm else 0


def forward(
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
    form: str,
    keep_memory: bool = False,
    keep_trace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel: outputs [T,B,H] as `reference.recurrence` gives them; from the matrix form, where it is wanted,
    the fast matrix [B,H,H] that `reference.final_memory` gives; and the trace that `backward` goes by, where it is
    wanted. What is not wanted is empty."""
    if keep_memory and form != "matrix":
        raise ValueError(f"only the matrix form has the final memory to give, got form {form!r}")
    arguments = _Arguments(drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths, constants, form)
    _, batch, size = drive.shape
    outputs = torch.empty(drive.shape, dtype=drive.dtype, device=drive.device)
    final = outputs.new_empty((batch, size, size) if keep_memory else (0,))
    trace = outputs.new_empty(trace_size(drive, norm_weight is not None, constants, form) if keep_trace else 0)
    arguments.call("forward", outputs, final if keep_memory else None, trace if keep_trace else None)
    return outputs, final, trace


def backward(
    grad_outputs: Tensor,
    outputs: Tensor,
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    constants: Constants,
    form: str,
    trace: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of drive, weight_hh, norm_weight, norm_bias, hidden and memory, None for an input that is None.

    Without the trace of the forward pass, that pass is run again.
    """
    inputs = (drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths)
    if trace is None or trace.numel() == 0:
        trace = forward(*inputs, constants, form, keep_trace=True)[2]
    arguments = _Arguments(drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths, constants, form)
    grad_outputs, outputs = (
        plain(grad_outputs, drive, "grad_outputs", "drive"),
        plain(outputs, drive, "outputs", "drive"),
    )
    for name, tensor in (("grad_outputs", grad_outputs), ("outputs", outputs)):
        shaped(tensor, tuple(drive.shape), name)
    trace = shaped(
        plain(trace, drive, "trace", "drive"), (trace_size(drive, norm_weight is not None, constants, form),), "trace"
    )
    if trace.data_ptr() % _ALIGNMENT:  # a slice of a stack, under vmap, or what a hook on saved tensors gave back
        trace = trace.clone()
    gradients = [None if t is None else torch.empty_like(t) for t in arguments.tensors]
    given = ctypes.c_void_p(grad_outputs.data_ptr())
    arguments.call("backward", outputs, None, trace, given, filled(_Gradients, *gradients))
    return gradients


class _Arguments:
    """The inputs as the kernel wants them: plain, contiguous, of one dtype and of fitting shapes, kept alive."""

    def __init__(
        self,
        drive: Tensor,
        weight_hh: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        hidden: Tensor,
        memory: Tensor | None,
        lengths: Tensor | None,
        constants: Constants,
        form: str,
    ) -> None:
        require(drive)
        if drive.dim() != 3:
            raise ValueError(f"drive must be [T,B,H], got shape {tuple(drive.shape)}")
        if (norm_weight is None) != (norm_bias is None):
            raise ValueError("norm_weight and norm_bias come together: give both, or neither")
        steps, batch, size = drive.shape
        shapes = {
            "drive": (steps, batch, size),
            "weight_hh": (size, size),
            "norm_weight": (size,),
            "norm_bias": (size,),
            "hidden": (batch, size),
            "memory": (batch, size, size),
        }
        given = (drive, weight_hh, norm_weight, norm_bias, hidden, memory)
        self.tensors = [
            None if tensor is None else shaped(plain(tensor, drive, name, "drive"), shape, name)
            for tensor, (name, shape) in zip(given, shapes.items(), strict=True)
        ]
        lengths = checked_lengths(lengths, batch, steps)
        self.lengths, self.dtype = lengths, drive.dtype
        self.problem = _Problem(
            steps,
            batch,
            size,
            constants.inner_steps,
            _norms(norm_weight is not None, constants),
            constants.nonlinearity == "tanh",
            constants.normalize_initial,
            form == "matrix",
            constants.decay,
            constants.rate,
            constants.eps,
        )

    def call(self, direction: str, outputs: Tensor, final: Tensor | None, trace: Tensor | None, *more: object) -> None:
        inputs = filled(_Inputs, *self.tensors, self.lengths)
        addresses = (None if t is None else t.data_ptr() for t in (outputs, final, trace))
        results = ctypes.byref(_Results(*addresses, 0 if trace is None else trace.numel()))
        what = f"drive of shape {(self.problem.steps, self.problem.batch, self.problem.size)}"
        structures = ctypes.byref(self.problem), inputs, results
        call("associative", direction, self.dtype, what, *structures, *more, torch.get_num_threads())
