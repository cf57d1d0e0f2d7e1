"""The C++ kernel of the delta family: checks every tensor, then passes pointers (csrc/delta.cpp)."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.delta.reference import DeltaInputs

_CHUNK = 64  # steps, as in csrc/delta.hpp


class _Problem(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("correct", ctypes.c_bool),
        ("scale", ctypes.c_double),
    ]


_INPUTS = ("q", "k", "v", "g", "beta", "state")
_Inputs = _native.define_pointers(*_INPUTS, "lengths")
_Results = _native.define_pointers("outputs", "final", "trace")
_Gradients = _native.define_pointers(*_INPUTS)


def state_shape(inputs: DeltaInputs) -> tuple[int, int, int, int]:
    """Return [B,H,K,V]."""
    batch, _, heads, keys = inputs.k.shape
    return batch, heads, keys, inputs.v.shape[-1]


def trace_shape(inputs: DeltaInputs) -> tuple[int, int, int, int, int]:
    """Return the shape of the states before all chunks, [B,H,chunks,K,V]."""
    batch, heads, keys, values = state_shape(inputs)
    return batch, heads, -(-inputs.v.shape[1] // _CHUNK), keys, values


def forward(inputs: DeltaInputs, scale: float, correct: bool, keep_trace: bool = False) -> tuple[Tensor, ...]:
    """Run the kernel: the outputs, the last state, and the trace that `backward` goes by, empty where not wanted."""
    structures, _tensors = _lay_out(inputs, scale, correct)
    outputs = inputs.v.new_empty(inputs.v.shape)
    final = outputs.new_empty(state_shape(inputs))
    trace = outputs.new_empty(trace_shape(inputs) if keep_trace else 0)
    results = _native.point(_Results, outputs, final, trace if keep_trace else None)
    _native.call("delta", "forward", "v", inputs.v, *structures, results, torch.get_num_threads())
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
    structures, tensors = _lay_out(inputs, scale, correct)
    shapes = {"grad_outputs": inputs.v.shape, "grad_final": state_shape(inputs), "trace": trace_shape(inputs)}
    given = _native.lay_out((grad_outputs, grad_final, trace), shapes, inputs.v, "v")
    gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors[:-1]]
    outer, final, kept = (None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in given)
    results = _native.point(_Gradients, *gradients)
    _native.call("delta", "backward", "v", inputs.v, *structures, kept, outer, final, results, torch.get_num_threads())
    return gradients


def _lay_out(
    inputs: DeltaInputs, scale: float, correct: bool
) -> tuple[tuple[ctypes.Structure, ctypes.Structure], Sequence[Tensor | None]]:
    """Return the inputs as the kernel takes them, and the tensors that must outlive the call."""
    v = inputs.v
    _native.require(v)
    batch, steps, heads, values = v.shape
    keys = inputs.k.shape[-1]
    of_keys, of_steps = (batch, steps, heads, keys), (batch, steps, heads)
    shapes = dict(
        zip(_INPUTS, (of_keys, of_keys, v.shape, of_steps, of_steps, (batch, heads, keys, values)), strict=True)
    )
    tensors = _native.lay_out(inputs[:-1], shapes, v, "v")
    if inputs.g is not None and inputs.g.numel() > 0 and (highest := inputs.g.max().item()) > 0:
        raise ValueError(f"g must be logs of decays, at most 0, got {highest:g}")
    tensors.append(_native.lay_out_lengths(inputs.lengths, batch, steps, v.device))
    problem = _Problem(batch, steps, heads, keys, values, correct, scale)
    return (problem, _native.point(_Inputs, *tensors)), tensors
