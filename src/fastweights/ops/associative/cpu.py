"""The C++ kernel of the associative recurrence: checks every tensor, then passes pointers (csrc/associative.cpp)."""

import ctypes

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.associative.reference import FIXED, Constants, Inputs, input_shapes, lay_out_flags

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


_INPUTS = ("drive", "weight", "gain", "shift", "hidden", "memory", "strengths")
_Inputs = _native.define_pointers(*_INPUTS, "lengths", "starts", "clears")
_Gradients = _native.define_pointers(*_INPUTS)


class _Results(ctypes.Structure):
    _fields_ = [
        ("outputs", ctypes.c_void_p),
        ("final", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("trace_size", ctypes.c_int64),
    ]


def choose_form(drive: Tensor, keep_memory: bool) -> str:
    """Return the form that takes less time, "attention" or "matrix", as measured (docs/performance.md).

    The attention form works on chunks of sequences, the matrix form on a few or on one: what a chunk that is not full
    wastes counts against the first; up to 24 units, reading more states costs little. A single step leaves the matrix
    behind that the next one begins with.
    """
    steps, batch, size = drive.shape
    if steps == 1 and keep_memory:
        return "matrix"
    lanes = 2 * (_native.REGISTER_BYTES // drive.element_size())
    chunks = (batch + lanes - 1) // lanes
    crossover = 180 if size > 24 else 240
    return "matrix" if steps * lanes * chunks > crossover * (batch - lanes * chunks * 3 / 8) else "attention"


def count_trace(inputs: Inputs, constants: Constants, form: str) -> int:
    """Return how many numbers all steps keep: `Trace` in csrc/associative_matrix.hpp and _chunk.hpp."""
    drive = inputs.drive
    steps, batch, size = drive.shape
    width = _native.REGISTER_BYTES // drive.element_size()
    norms = _count_norms(inputs, constants)
    if form == "matrix":
        rows = (constants.inner_steps + norms) * -(-size // width) * width + -(-norms // width) * width
        return steps * batch * rows
    rows = (constants.inner_steps + norms) * -(-size // 8) * 8 + norms
    lanes = 2 * width
    return steps * -(-batch // lanes) * lanes * rows


def _count_norms(inputs: Inputs, constants: Constants) -> int:
    return constants.inner_steps + constants.normalize_initial if inputs.norm_weight is not None else 0


def forward(
    inputs: Inputs, constants: Constants, form: str, keep_memory: bool = False, keep_trace: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel.

    Returns:
        The outputs [T,B,H] of `reference.recurrence`; from the matrix form, where it is wanted, the fast matrix [B,H,H]
        of `reference.final_memory`; and the trace that `backward` goes by, where it is wanted. What is not wanted is
        empty.
    """
    if keep_memory and form != "matrix":
        raise ValueError(f"only form='matrix' can return the final memory, got form {form!r}")
    arguments = _Arguments(inputs, constants, form)
    drive = inputs.drive
    _, batch, size = drive.shape
    outputs = _native.in_large_pages(torch.empty(drive.shape, dtype=drive.dtype, device=drive.device))
    final = outputs.new_empty((batch, size, size) if keep_memory else (0,))
    trace = _native.in_large_pages(outputs.new_empty(arguments.trace_size if keep_trace else 0))
    results = _Results(
        outputs.data_ptr(),
        final.data_ptr() if keep_memory else None,
        trace.data_ptr() if keep_trace else None,
        trace.numel(),
    )
    _native.call("associative", "forward", "drive", drive, *arguments.structures, results, torch.get_num_threads())
    return outputs, final, trace


def backward(
    grad_outputs: Tensor, outputs: Tensor, inputs: Inputs, constants: Constants, form: str, trace: Tensor | None = None
) -> list[Tensor | None]:
    """Return the gradients of all inputs that have one, None for an input that is None.

    Without the trace of the forward pass, that pass is run again.
    """
    if trace is None or trace.numel() == 0:
        trace = forward(inputs, constants, form, keep_trace=True)[2]
    arguments = _Arguments(inputs, constants, form)
    drive = inputs.drive
    shapes = {"grad_outputs": drive.shape, "outputs": drive.shape, "trace": (arguments.trace_size,)}
    grad_outputs, outputs, trace = _native.lay_out((grad_outputs, outputs, trace), shapes, drive, "drive")
    if (
        trace.data_ptr() % _ALIGNMENT
    ):  # a slice of a stack, under vmap, or a tensor that a hook on saved tensors returned
        trace = trace.clone()
    gradients = [
        None if tensor is None else _native.in_large_pages(torch.empty_like(tensor)) for tensor in arguments.tensors
    ]
    results = _Results(outputs.data_ptr(), None, trace.data_ptr(), trace.numel())
    pointers = ctypes.c_void_p(grad_outputs.data_ptr()), _native.point(_Gradients, *gradients)
    threads = torch.get_num_threads()
    _native.call("associative", "backward", "drive", drive, *arguments.structures, results, *pointers, threads)
    return gradients


class _Arguments:
    """The inputs as the kernel takes them: they fit together, are contiguous, and are kept alive."""

    def __init__(self, inputs: Inputs, constants: Constants, form: str) -> None:
        drive, shapes = inputs.drive, input_shapes(inputs)
        steps, batch, size = drive.shape
        self.trace_size = count_trace(inputs, constants, form)
        problem = _Problem(
            steps,
            batch,
            size,
            constants.inner_steps,
            _count_norms(inputs, constants),
            constants.nonlinearity == "tanh",
            constants.normalize_initial,
            form == "matrix",
            constants.decay,
            constants.rate,
            constants.eps,
        )
        _native.require(drive)
        self.tensors = _native.lay_out(inputs[:-FIXED], shapes, drive, "drive")
        lengths = _native.lay_out_lengths(inputs.lengths, batch, steps, drive.device)
        self.fixed = lengths, *lay_out_flags(inputs)
        self.structures = problem, _native.point(_Inputs, *self.tensors, *self.fixed)
