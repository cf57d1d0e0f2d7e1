"""The C++ kernel of the selective scan: lays out every tensor, then passes pointers (csrc/selective_scan.cpp)."""

import ctypes

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.packed import check_bounds
from fastweights.ops.selective_scan.reference import ScanInputs, UpdateInputs, state_shape

_CHUNK = 64  # steps, and slices of channels, as in csrc/selective_scan.hpp
_SLICES = 8


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "steps", "channels", "states")),
        ("softplus", ctypes.c_bool),
    ]


_Inputs = _native.define_pointers(*ScanInputs._fields)
_Results = _native.define_pointers("outputs", "final", "trace")
_Gradients = _native.define_pointers(*ScanInputs._fields[:-1])


class _UpdateProblem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "channels", "states", "groups")),
        ("one_rate", ctypes.c_bool),
        ("softplus", ctypes.c_bool),
    ]


_UpdateTensors = _native.define_pointers("state", "outputs", *UpdateInputs._fields)
_FEWEST = 2**18  # numbers in the states, for several threads to take one step


def trace_shape(inputs: ScanInputs) -> tuple[int, int, int]:
    """Return the shape of the states before the chunks of all sequences, [chunks,N,D]."""
    (sequences, channels, states), steps = state_shape(inputs), inputs.u.shape[1]
    # Packed sequences begin a chunk each, wherever they are.
    chunks = sequences * -(-steps // _CHUNK) if inputs.cu_seqlens is None else steps // _CHUNK + sequences
    return chunks, states, channels


def forward(inputs: ScanInputs, softplus: bool, keep_trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel: the outputs, the last state, and the trace that `backward` goes by, empty where not wanted."""
    problem, laid_out = _lay_out(inputs, softplus)
    outputs = _native.in_large_pages(torch.empty_like(laid_out.u))
    sequences, channels, states = state_shape(inputs)
    final = outputs.new_empty(sequences, states, channels)
    trace = _native.in_large_pages(outputs.new_empty(trace_shape(inputs) if keep_trace else 0))
    results = _native.point(_Results, outputs, final, trace if keep_trace else None)
    _call("forward", inputs, problem, _native.point(_Inputs, *laid_out), results)
    return outputs, final.transpose(1, 2).contiguous(), trace


def backward(
    grad_outputs: Tensor, grad_final: Tensor | None, trace: Tensor, inputs: ScanInputs, softplus: bool
) -> list[Tensor | None]:
    """Return the gradients of all inputs that have one, None for one that is None."""
    if trace.numel() == 0:
        trace = forward(inputs, softplus, keep_trace=True)[2]
    problem, laid_out = _lay_out(inputs, softplus)
    sequences, channels, states = state_shape(inputs)
    new = laid_out.u.new_empty
    u, delta = (_native.in_large_pages(torch.empty_like(laid_out.u)) for _ in range(2))
    b, c = (_native.in_large_pages(new(_SLICES, *laid_out.b.shape)) for _ in range(2))
    bias, skip = (None if each is None else new(sequences, channels) for each in (inputs.bias, inputs.skip))
    gate = None if inputs.gate is None else _native.in_large_pages(torch.empty_like(laid_out.u))
    a = new(sequences, states, channels)
    state = None if inputs.state is None else new(sequences, states, channels)
    outer = _native.make_contiguous(grad_outputs)
    last = None if grad_final is None else _native.make_contiguous(grad_final.transpose(1, 2))
    kept = _native.make_contiguous(trace)
    pointers = (None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in (kept, outer, last))
    results = _native.point(_Gradients, u, delta, a, b, c, bias, skip, gate, state)
    _call("backward", inputs, problem, _native.point(_Inputs, *laid_out), *pointers, results)
    bias, skip = (None if each is None else each.sum(0) for each in (bias, skip))
    of_state = None if state is None else state.transpose(1, 2).contiguous()
    return [u, delta, a.sum(0).t().contiguous(), b.sum(0), c.sum(0), bias, skip, gate, of_state]


def update(state: Tensor, inputs: UpdateInputs, softplus: bool) -> Tensor:
    """Take one step: change the states [B,D,N] in place, and return the outputs [B,D]."""
    batch, channels, states = state.shape
    groups = 1 if inputs.b.dim() == 2 else inputs.b.shape[1]
    problem = _UpdateProblem(batch, channels, states, groups, inputs.a.dim() == 1, softplus)
    tensors = [None if tensor is None else _native.make_contiguous(tensor) for tensor in inputs]
    outputs = state.new_empty(batch, channels)
    # Threads that sleep take longer to wake than a step of few channels takes.
    threads = 1 if state.numel() < _FEWEST else torch.get_num_threads()
    pointers = _native.point(_UpdateTensors, state, outputs, *tensors)
    _native.call("selective_scan", "update", "state", state, problem, pointers, threads)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)  # as every operation of torch does that writes
    return outputs


def _call(entry: str, inputs: ScanInputs, *arguments: object) -> None:
    try:
        _native.call("selective_scan", entry, "u", inputs.u, *arguments, torch.get_num_threads())
    except _native.NumberError:
        if inputs.cu_seqlens is not None:
            check_bounds(inputs.cu_seqlens, inputs.u.shape[1])  # says which
        raise


def _lay_out(inputs: ScanInputs, softplus: bool) -> tuple[_Problem, ScanInputs]:
    """Return the sizes, and the tensors as the kernel takes them: channels innermost."""
    _native.require(inputs.u)
    a, state = inputs.a.t(), None if inputs.state is None else inputs.state.transpose(1, 2)
    tensors = inputs._replace(a=a, state=state)
    laid_out = ScanInputs._make([None if tensor is None else _native.make_contiguous(tensor) for tensor in tensors])
    sequences, channels, states = state_shape(inputs)
    return _Problem(sequences, inputs.u.shape[1], channels, states, softplus), laid_out
