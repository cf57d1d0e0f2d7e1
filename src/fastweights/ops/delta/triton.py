"""The Triton kernels of the delta family (`_kernels.py`): checks every tensor, makes room, launches.

A program takes its steps one after another, so long sequences of few heads leave most of a GPU idle:
flash-linear-attention's kernels, which take chunks of steps as products of matrices, are faster there. The rule with a
matrix of rank one (`dplr_delta_rule`) has no kernel here.

Memory: the forward pass keeps the state before every chunk of 64 steps; the backward pass makes room for the states
of one chunk, of as many heads and sequences at a time as take up to `ROOM` bytes, or of one. A program holds few of
the columns, and the gradients that all columns share are written once for each program: with K = V = 128 four times.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _triton
from fastweights.ops._native import lay_out, make_contiguous
from fastweights.ops._triton import launching_on, power_of_two
from fastweights.ops.delta.cpu import CHUNK, trace_shape
from fastweights.ops.delta.reference import DeltaInputs, check_inputs, check_numbers, state_shape

MOST_KEYS = 512
_TILE = 16384  # bytes of a state that a program holds: 32 numbers a thread in float32
ROOM = 2**28


def unavailable(inputs: DeltaInputs) -> str | None:
    """Return why the kernels cannot take this call, or None when they can."""
    if inputs.a is not None:
        return "dplr_delta_rule, the rule with a matrix of rank one, has no triton kernel"
    if inputs.k.dim() == 4 and inputs.k.shape[3] > MOST_KEYS:
        return f"the triton kernel takes keys of up to {MOST_KEYS} features, got {inputs.k.shape[-1]}"
    return _triton.unavailable(inputs.v)


def options(keys: int, values: int, dtype: torch.dtype, scale: float, correct: bool, **flags: Any) -> dict[str, Any]:
    """Return the constants that both kernels are compiled for."""
    rows = power_of_two(keys)
    columns = min(power_of_two(values), max(4, _TILE // (rows * dtype.itemsize)))
    return {
        "K": keys,
        "V": values,
        "ROWS": rows,
        "COLUMNS": columns,
        "CHUNK": CHUNK,
        "SCALE": scale,
        "CORRECT": correct,
        **flags,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": True,  # a product and its sum rounded once: Triton's default changes with its versions
    }


def forward(inputs: DeltaInputs, scale: float, correct: bool, keep_trace: bool = False) -> tuple[Tensor, ...]:
    """Run the kernel: the outputs, the last state, and the trace that `backward` goes by, empty where not wanted."""
    from fastweights.ops.delta import _kernels

    inputs = _lay_out(inputs, correct)
    v = inputs.v
    # Rows past a length, and those of no packed sequence, are never written.
    outputs = torch.empty_like(v) if inputs.lengths is None and inputs.cu_seqlens is None else torch.zeros_like(v)
    final = v.new_empty(state_shape(inputs))
    trace = v.new_empty(trace_shape(inputs) if keep_trace else 0)
    given = _options(inputs, scale, correct) | {"STATE": inputs.state is not None, "TRACE": keep_trace}
    with launching_on(v):
        _kernels.forward[_grid(inputs, given)](
            *inputs[:3], *_pointers(inputs), _or_v(inputs, inputs.state), _bounds(inputs), outputs, final, trace,
            *_sizes(inputs), **given,
        )  # fmt: skip
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
    from fastweights.ops.delta import _kernels

    if trace.numel() == 0:
        trace = forward(inputs, scale, correct, keep_trace=True)[2]
    inputs = _lay_out(inputs, correct)
    v, (batch, steps, heads, values) = inputs.v, inputs.v.shape
    pairs, keys = state_shape(inputs)[0] * heads, inputs.k.shape[-1]
    shapes = {"grad_outputs": v.shape, "grad_final": state_shape(inputs), "trace": trace_shape(inputs)}
    grad_outputs, grad_final, trace = lay_out((grad_outputs, grad_final, trace), shapes, v, "v")
    given = _options(inputs, scale, correct) | {"FINAL": grad_final is not None}
    _, slices = _grid(inputs, given)

    def sums(*shape: int) -> Tensor:
        return v.new_zeros(slices, batch, steps, heads, *shape)

    of_q, of_k, of_v, of_state = sums(keys), sums(keys), torch.zeros_like(v), v.new_empty(state_shape(inputs))
    of_g = None if inputs.g is None else sums(*inputs.g.shape[3:])
    of_beta = None if inputs.beta is None else sums()
    most = max(1, ROOM // (CHUNK * keys * values * v.element_size()))
    room = v.new_empty(min(most, pairs), CHUNK, keys, values)
    with launching_on(v):
        for first in range(0, pairs, most):
            _kernels.backward[min(most, pairs - first), slices](
                grad_outputs, _or_v(inputs, grad_final), trace, *inputs[:3], *_pointers(inputs), _bounds(inputs), room,
                of_q, of_k, of_v, _or_v(inputs, of_g), _or_v(inputs, of_beta), of_state,
                first, batch * steps, *_sizes(inputs), **given,
            )  # fmt: skip

    def of_keys(gradient: Tensor) -> Tensor:
        """Add up slices of values, and the heads that share a key."""
        return gradient.sum(0).view(batch, steps, inputs.k.shape[2], heads // inputs.k.shape[2], keys).sum(3)

    return [
        of_keys(of_q),
        of_keys(of_k),
        of_v,
        None if of_g is None else of_g.sum(0),
        None if of_beta is None else of_beta.sum(0),
        None,
        None,
        None if inputs.skip is None else _of_skip(grad_outputs, inputs),
        None if inputs.state is None else of_state,
    ]


def _of_skip(grad_outputs: Tensor, inputs: DeltaInputs) -> Tensor:
    products = grad_outputs * inputs.v
    if inputs.lengths is not None:
        past = torch.arange(products.shape[1], device=products.device) >= inputs.lengths.unsqueeze(1)
        products = products.masked_fill(past[:, :, None, None], 0)
    return products.sum((0, 1, 3))


def _lay_out(inputs: DeltaInputs, correct: bool) -> DeltaInputs:
    check_inputs(inputs)
    if inputs.v.is_cpu:  # in the interpreter; elsewhere the look at the numbers would wait
        check_numbers(inputs, correct)
    return DeltaInputs._make([None if tensor is None else make_contiguous(tensor) for tensor in inputs])


def _options(inputs: DeltaInputs, scale: float, correct: bool) -> dict[str, Any]:
    decay = "none" if inputs.g is None else "head" if inputs.g.dim() == 3 else "channel"
    flags = {"BETA": inputs.beta, "SKIP": inputs.skip, "LENGTHS": inputs.lengths, "PACKED": inputs.cu_seqlens}
    present = {name: tensor is not None for name, tensor in flags.items()}
    keys, values = inputs.k.shape[-1], inputs.v.shape[-1]
    return options(keys, values, inputs.v.dtype, scale, correct, DECAY=decay, **present)


def _grid(inputs: DeltaInputs, given: dict[str, Any]) -> tuple[int, int]:
    sequences, heads, _, values = state_shape(inputs)
    return sequences * heads, -(-values // given["COLUMNS"])


def _sizes(inputs: DeltaInputs) -> tuple[int, int, int, int]:
    return inputs.v.shape[1], inputs.v.shape[2], inputs.k.shape[2], trace_shape(inputs)[1]


def _or_v(inputs: DeltaInputs, tensor: Tensor | None) -> Tensor:
    return inputs.v if tensor is None else tensor  # some pointer, which the kernel's options keep it from using


def _pointers(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    return tuple(_or_v(inputs, tensor) for tensor in (inputs.g, inputs.beta, inputs.skip))


def _bounds(inputs: DeltaInputs) -> Tensor:
    return _or_v(inputs, inputs.lengths if inputs.cu_seqlens is None else inputs.cu_seqlens)
