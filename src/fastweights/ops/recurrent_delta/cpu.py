"""The C++ kernels of the recurrent delta rule: check every tensor, then pass pointers (csrc/recurrent_delta.cpp)."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.recurrent_delta.reference import EPS, FIXED, Inputs, StepInputs, shapes_of, step_shapes_of

_CHUNK = 16  # steps, as in csrc/recurrent_delta.hpp


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("steps", "batch", "size", "heads", "taken")),
        ("eps", ctypes.c_double),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("features", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "drive", "hidden", "after")),
    ]


_Inputs = _native.define_pointers(*Inputs._fields)
_Results = _native.define_pointers("outputs", "memory", "inside", "kept")
_Gradients = _native.define_pointers(
    "drive", "products", "gain", "bias", "hidden", "memory", "taps", "taps_bias", "last"
)


def forward(inputs: Inputs, keep_trace: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel: the outputs, the last memory, and the trace that `backward` goes by, empty where not wanted."""
    problem, laid_out = _lay_out(inputs)
    outputs = _native.in_large_pages(laid_out.hidden.new_empty(*laid_out.drive.shape[:2], laid_out.hidden.shape[1]))
    memory = torch.empty_like(laid_out.memory)
    trace = _native.in_large_pages(outputs.new_empty(count_trace(inputs) if keep_trace else 0))
    results = _native.point(_Results, outputs, memory, *(_part(trace, inputs) if keep_trace else (None, None)))
    _call("forward", inputs, problem, _native.point(_Inputs, *laid_out), results)
    return outputs, memory, trace


def step(inputs: StepInputs) -> list[Tensor | None]:
    """Run the kernel of a step: the outputs, and the hidden state, the memory and `last` after it."""
    laid_out = _native.lay_out(inputs, step_shapes_of(inputs), inputs.x, "x")
    x, weight_ih, bias_ih, weight_hh, gain, bias, hidden, memory, taps, taps_bias, last = laid_out
    found = [None if tensor is None else torch.empty_like(tensor) for tensor in (hidden, hidden, memory, last)]
    (batch, features), size = x.shape, hidden.shape[1]
    problem = _Problem(1, batch, size, memory.shape[1], 0 if taps is None else taps.shape[1], EPS)
    recurrence = _native.point(_Inputs, None, weight_hh, gain, bias, hidden, memory, taps, taps_bias, last, None, None)
    addresses = (
        None if tensor is None else tensor.data_ptr() for tensor in (x, weight_ih, bias_ih, None, found[1], found[3])
    )
    around = _Step(features, *addresses)
    results = _native.point(_Results, found[0], found[2], None, None)
    arguments = (problem, recurrence, around, results, torch.get_num_threads())
    _native.call("recurrent_delta", "step", "x", x, *arguments)
    return found


def backward(
    grad_outputs: Tensor, grad_memory: Tensor | None, outputs: Tensor, trace: Tensor, inputs: Inputs
) -> list[Tensor]:
    """Return the gradients of all inputs that have one."""
    if trace.numel() == 0:
        outputs, _, trace = forward(inputs, keep_trace=True)
    problem, laid_out = _lay_out(inputs)
    drive, hidden = laid_out.drive, laid_out.hidden
    of_outputs = (*drive.shape[:2], hidden.shape[1])
    shapes: dict[str, Any] = {
        "grad_outputs": of_outputs,
        "grad_memory": laid_out.memory.shape,
        "outputs": of_outputs,
        "trace": (count_trace(inputs),),
    }
    outer, of_end, outputs, trace = _native.lay_out((grad_outputs, grad_memory, outputs, trace), shapes, drive, "drive")
    of_drive, of_hidden, of_memory = (
        _native.in_large_pages(torch.empty_like(tensor)) for tensor in (drive, hidden, laid_out.memory)
    )
    of_gain, of_bias = (torch.empty_like(hidden) for _ in range(2))
    taps, last, (batch, rows) = laid_out.taps, laid_out.last, drive.shape[1:]
    of_products = of_drive if taps is None else _native.in_large_pages(torch.empty_like(drive))
    of_taps = None if taps is None else drive.new_empty(batch, problem.taken, rows)
    of_shift = None if taps is None else drive.new_empty(batch, rows)
    of_last = None if last is None else torch.empty_like(last)
    kept = _native.point(_Results, outputs, None, *_part(trace, inputs))
    pointers = (None if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in (outer, of_end))
    results = _native.point(
        _Gradients, of_drive, of_products, of_gain, of_bias, of_hidden, of_memory, of_taps, of_shift, of_last
    )
    _call("backward", inputs, problem, _native.point(_Inputs, *laid_out), kept, *pointers, results)
    of_weight = _weight_gradient(of_products, outputs, hidden, laid_out.starts)
    of_convolution = (
        None if of_taps is None else of_taps.sum(0).t().contiguous(),
        None if of_shift is None or laid_out.taps_bias is None else of_shift.sum(0),
        of_last,
    )
    empty = drive.new_empty
    return [of_drive, of_weight, of_gain.sum(0), of_bias.sum(0), of_hidden, of_memory] + [
        empty(0) if gradient is None else gradient for gradient in of_convolution
    ]


def _weight_gradient(of_products: Tensor, outputs: Tensor, hidden: Tensor, starts: Tensor | None) -> Tensor:
    """Return the gradient of the weight: every step's products by the hidden state before it."""
    steps, first = outputs[:-1], hidden
    if starts is not None:
        steps, first = steps.masked_fill(starts[1:].unsqueeze(2), 0), first.masked_fill(starts[0].unsqueeze(1), 0)
    # So and not the other way round: MKL takes two thirds of the time where the short side of the result comes first.
    of_weight = first.t() @ of_products[0]
    return of_weight.addmm_(steps.flatten(0, 1).t(), of_products[1:].flatten(0, 1)).t().contiguous()


def count_trace(inputs: Inputs) -> int:
    """Return how many numbers the forward pass keeps: the inside of each step, and a memory for each chunk."""
    return sum(_count_parts(inputs))


def _count_parts(inputs: Inputs) -> tuple[int, int]:
    (steps, batch, _), (_, heads, part, _) = inputs.drive.shape, inputs.memory.shape
    each = inputs.drive.element_size()
    # As csrc/recurrent_delta.cpp has it: registers of half the size for heads that would fill half of one.
    lanes = (32 if _native.REGISTER_BYTES == 64 and part * each <= 32 else _native.REGISTER_BYTES) // each
    wide, gates = (-(-numbers // lanes) * lanes for numbers in (part, 2 * heads))
    inside = batch * steps * (5 * heads * wide + gates + lanes)  # `inside_numbers` in csrc/recurrent_delta.hpp
    return inside, batch * -(-steps // _CHUNK) * heads * part * wide


def _part(trace: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    inside, _ = _count_parts(inputs)
    return trace[:inside], trace[inside:]


def _lay_out(inputs: Inputs) -> tuple[_Problem, Inputs]:
    drive = inputs.drive
    _native.require(drive)
    tensors = _native.lay_out(inputs[:-FIXED], shapes_of(inputs), drive, "drive")
    steps, batch, _ = drive.shape
    lengths = _native.lay_out_lengths(inputs.lengths, batch, steps, drive.device)
    flags = _native.check_flags({"starts": inputs.starts}, steps, batch, drive.device)
    taken = 0 if inputs.taps is None else inputs.taps.shape[1]
    problem = _Problem(steps, batch, inputs.hidden.shape[1], inputs.memory.shape[1], taken, EPS)
    return problem, Inputs._make((*tensors, lengths, *flags))


def _call(entry: str, inputs: Inputs, *structures: Any) -> None:
    _native.call("recurrent_delta", entry, "drive", inputs.drive, *structures, torch.get_num_threads())
