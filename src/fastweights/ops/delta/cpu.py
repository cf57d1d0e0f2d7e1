"""The C++ kernel of the delta family: checks every tensor, then passes pointers (csrc/delta.cpp)."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.delta.reference import DeltaInputs, check_inputs, check_numbers, state_shape

CHUNK = 64  # steps, as in csrc/delta.hpp
_MOST_SLICES = 8  # of the heads of a head of q and k, as in csrc/delta_backward.hpp
_FEWEST = 2**20  # numbers in the states, for several threads to take one step


class _Problem(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("correct", ctypes.c_bool),
        ("channels", ctypes.c_bool),
        ("scale", ctypes.c_double),
    ]


_INPUTS = ("q", "k", "v", "g", "beta", "a", "b", "skip", "state")
_Inputs = _native.define_pointers(*_INPUTS, "lengths", "cu_seqlens")
_Results = _native.define_pointers("outputs", "final", "trace")
_Gradients = _native.define_pointers(*_INPUTS)


def trace_shape(inputs: DeltaInputs) -> tuple[int, int, int, int]:
    """Return the shape of the states before the chunks of all sequences, [H,chunks,K,V]."""
    sequences, heads, keys, values = state_shape(inputs)
    steps = inputs.v.shape[1]
    # Packed sequences begin a chunk each, wherever they are.
    chunks = sequences * -(-steps // CHUNK) if inputs.cu_seqlens is None else steps // CHUNK + sequences
    return heads, chunks, keys, values


def forward(inputs: DeltaInputs, scale: float, correct: bool, keep_trace: bool = False) -> tuple[Tensor, ...]:
    """Run the kernel: the outputs, the last state, and the trace that `backward` goes by, empty where not wanted."""
    structures, laid_out = _lay_out(inputs, scale, correct)
    v, state = laid_out.v, laid_out.state
    outputs = _native.in_large_pages(torch.empty_like(v))
    final = v.new_empty(state_shape(inputs)) if state is None else torch.empty_like(state)
    trace = _native.in_large_pages(v.new_empty(trace_shape(inputs) if keep_trace else 0))
    results = _native.point(_Results, outputs, final, trace if keep_trace else None)
    # Threads that sleep take longer to wake than a step of some heads takes.
    threads = 1 if v.shape[1] == 1 and final.numel() < _FEWEST else torch.get_num_threads()
    _call("forward", laid_out, correct, *structures, results, threads)
    return outputs, final, trace


def backward(
    grad_outputs: Tensor,
    grad_final: Tensor | None,
    trace: Tensor,
    inputs: DeltaInputs,
    scale: float,
    correct: bool,
) -> list[Tensor | None]:
    """Return the gradients of all inputs that have one, None for an input that is None."""
    if trace.numel() == 0:
        trace = forward(inputs, scale, correct, keep_trace=True)[2]
    structures, laid_out = _lay_out(inputs, scale, correct)
    shapes = {"grad_outputs": inputs.v.shape, "grad_final": state_shape(inputs), "trace": trace_shape(inputs)}
    given = _native.lay_out((grad_outputs, grad_final, trace), shapes, inputs.v, "v")
    gradients = [
        None if tensor is None else _native.in_large_pages(torch.empty_like(tensor)) for tensor in laid_out[:-2]
    ]
    slices = min(inputs.v.shape[2] // inputs.k.shape[2], _MOST_SLICES)
    sums = [_native.in_large_pages(inputs.v.new_empty(slices, *inputs.k.shape)) for _ in range(2)]  # of q and k
    sequences, heads = state_shape(inputs)[:2]
    of_skip = None if inputs.skip is None else inputs.v.new_empty(sequences, heads)
    outer, final, kept = (None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in given)
    results = _native.point(_Gradients, *sums, *gradients[2:7], of_skip, gradients[8])
    _call("backward", laid_out, correct, *structures, kept, outer, final, results, torch.get_num_threads())
    of_keys = [each[0] if slices == 1 else each.sum(0) for each in sums]
    return [*of_keys, *gradients[2:7], None if of_skip is None else of_skip.sum(0), gradients[8]]


def _call(entry: str, inputs: DeltaInputs, correct: bool, *arguments: Any) -> None:
    try:
        _native.call("delta", entry, "v", inputs.v, *arguments)
    except _native.NumberError:
        check_numbers(inputs, correct)  # says which
        raise


def _lay_out(
    inputs: DeltaInputs, scale: float, correct: bool
) -> tuple[tuple[ctypes.Structure, ctypes.Structure], DeltaInputs]:
    """Return the inputs as the kernel takes them, and the tensors that must outlive the call."""
    _native.require(inputs.v)
    check_inputs(inputs)
    laid_out = DeltaInputs._make([None if tensor is None else _native.make_contiguous(tensor) for tensor in inputs])
    _, steps, _, values = inputs.v.shape
    sequences, heads = state_shape(inputs)[:2]
    channels = inputs.g is not None and inputs.g.dim() == 4
    problem = _Problem(sequences, steps, heads, inputs.k.shape[-1], values, inputs.k.shape[2], correct, channels, scale)
    return (problem, _native.point(_Inputs, *laid_out)), laid_out
