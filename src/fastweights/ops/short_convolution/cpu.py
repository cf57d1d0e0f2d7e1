"""The C++ kernel of the short convolution: lays out every tensor, then passes pointers (csrc/short_convolution.cpp)."""

import ctypes

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.short_convolution.reference import ShortInputs

_BLOCK = 64  # steps, as in csrc/short_convolution.hpp


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "steps", "channels", "taps", "sequence_pitch", "step_pitch")),
        ("silu", ctypes.c_bool),
    ]


_Inputs = _native.define_pointers(*ShortInputs._fields)
_Gradients = _native.define_pointers("x", "weight", "last")


def forward(inputs: ShortInputs, silu: bool) -> Tensor:
    """Return the outputs [B,T,C]."""
    problem, laid_out = _lay_out(inputs, silu)
    outputs = _native.in_large_pages(laid_out.x.new_empty(inputs.x.shape))
    _call("forward", inputs.x, problem, _native.point(_Inputs, *laid_out), ctypes.c_void_p(outputs.data_ptr()))
    return outputs


def backward(grad_outputs: Tensor, inputs: ShortInputs, silu: bool) -> list[Tensor | None]:
    """Return the gradients of x, weight, bias and last; None for what is None."""
    problem, laid_out = _lay_out(inputs, silu)
    (batch, steps, channels), taps = inputs.x.shape, inputs.weight.shape[1]
    new, outer = laid_out.x.new_empty, _native.make_contiguous(grad_outputs)
    x, sums = _native.in_large_pages(new(inputs.x.shape)), new(batch * -(-steps // _BLOCK), taps + 1, channels)
    last = None if inputs.last is None else laid_out.x.new_zeros(inputs.last.shape)  # no steps write none
    results = _native.point(_Gradients, x, sums, last)
    pointers = _native.point(_Inputs, *laid_out), ctypes.c_void_p(outer.data_ptr())
    _call("backward", inputs.x, problem, *pointers, results)
    of_weights = sums.sum(0)
    weight, bias = of_weights[:taps].t().contiguous(), of_weights[taps].clone()
    return [x, weight, None if inputs.bias is None else bias, last]


def _call(entry: str, x: Tensor, *arguments: object) -> None:
    _native.call("short_convolution", entry, "x", x, *arguments, torch.get_num_threads())


def _lay_out(inputs: ShortInputs, silu: bool) -> tuple[_Problem, ShortInputs]:
    """Return the sizes, and the tensors as the kernel takes them: channels innermost, steps of x however far apart."""
    _native.require(inputs.x)
    x = inputs.x.resolve_neg()
    if x.stride(2) != 1:
        x = _native.make_contiguous(x)
    weight = inputs.weight.resolve_neg().t().contiguous()
    bias, last = (None if each is None else _native.make_contiguous(each) for each in (inputs.bias, inputs.last))
    starts = None if inputs.starts is None else inputs.starts.contiguous()
    problem = _Problem(*x.shape, inputs.weight.shape[1], *x.stride()[:2], silu)
    return problem, ShortInputs(x, weight, bias, last, starts)
