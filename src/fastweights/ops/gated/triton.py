"""The Triton kernels of the gated recurrence (`_kernels.py`): checks every tensor, makes room, launches.

One program takes one sequence from its first step to its last. The slow network's holds its two matrices in registers,
or, where they are too large for that, takes them from the cache so many rows at a time. The fast network's holds F1 and
F2, padded to powers of two; matrices that do not fit are refused, and `impl="auto"` takes the reference for them. What
is a product over all steps at once is left to PyTorch. In the kernels there is no TF32, and nothing depends on the
order in which programs run: the same bits every time.

Memory, with M = H+D+1 and N = H+1: between the passes T B (H+4) numbers, which are the inner units of the fast network
and what its layer norms divided by, and no fast matrix but the last. The backward pass goes forwards once more, keeping
the matrices every K = sqrt(T) steps, and writes those between again a chunk at a time; never does it divide by 1-G. So
every step is written three times in all, which takes no sum, and read once each way. A program's scratch is
(K + T/K) H (M+N) numbers, and only about as many programs run as the device has room for, each with one sequence after
another: the scratch does not grow with the batch. With H = 40, D = 15 and T = 32 it is 182 KiB a program, and at most
94 MiB on an H100, which has 132 processors with four programs each.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import KernelError
from fastweights.ops import _triton
from fastweights.ops._native import check_flags, lay_out, lay_out_lengths
from fastweights.ops._triton import launching_on, power_of_two
from fastweights.ops.gated.reference import EPS, FIXED, FastInputs, SlowInputs, fast_shapes, slow_shapes

LARGEST = 65536  # bytes of a fast matrix, padded, or of a part of the slow network's weights
MOST_PROGRAMS = 16  # programs of the fast network's backward pass on each multiprocessor


def unavailable(x: Tensor, hidden: Tensor) -> str | None:
    """Return why the kernels cannot take this call, or None when they can; x [T,B,D], hidden [B,H]."""
    reason = _triton.unavailable(hidden)
    if reason is not None:
        return reason
    size, features = hidden.shape[-1], x.shape[-1]
    down, across = tile(size, features)
    if down * across * hidden.element_size() > LARGEST:
        return (
            f"the triton kernel keeps fast matrices of up to {LARGEST // 1024} KiB on chip; with {size} units and "
            f"{features} features, padded to {down} x {across}, one takes "
            f"{down * across * hidden.element_size() // 1024} KiB"
        )
    return None


def tile(size: int, features: int) -> tuple[int, int]:
    """Return the shape that F1 [H,H+D+1] and F2 turned, [H+1,H], are padded to."""
    return power_of_two(size + 1), power_of_two(size + features + 1)


def chunk_steps(steps: int) -> int:
    """Return the steps of a chunk of the backward pass: with the root of their number the scratch is smallest."""
    return math.isqrt(max(steps, 1) - 1) + 1


def programs(batch: int, matrix: int, device: torch.device) -> int:
    """Return how many programs the fast network's backward pass has: as many as run at once, at most one a sequence.

    A processor has registers for one whose matrices take `LARGEST` bytes, and for the more the smaller they are.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(batch, processors * min(MOST_PROGRAMS, LARGEST // matrix))


def _compiler(matrix: int) -> dict[str, Any]:
    return {
        "num_warps": max(4, min(16, matrix // 4096)),  # by bytes: a thread holds 32 numbers of the matrix in float32
        "num_stages": 1,
        "enable_fp_fusion": True,  # a product and its sum rounded once: Triton's default changes with its versions
    }


def slow_options(inner: int, size: int, dtype: torch.dtype, *, lengths: bool, starts: bool) -> dict[str, Any]:
    """Return the constants that the slow network's kernels are compiled for."""
    across = power_of_two(size)
    panel = min(power_of_two(inner), max(1, LARGEST // (across * dtype.itemsize)))
    return {
        "INNER": inner,
        "SIZE": size,
        "PANEL": panel,
        "ACROSS": across,
        "LENGTHS": lengths,
        "STARTS": starts,
        **_compiler(panel * across * dtype.itemsize),
    }


def fast_options(size: int, features: int, dtype: torch.dtype, *, lengths: bool, starts: bool) -> dict[str, Any]:
    """Return the constants that the fast network's kernels are compiled for."""
    down, across = tile(size, features)
    return {
        "SIZE": size,
        "FEATURES": features,
        "DOWN": down,
        "ACROSS": across,
        "LENGTHS": lengths,
        "STARTS": starts,
        **_compiler(down * across * dtype.itemsize),
    }


def slow_forward(inputs: SlowInputs) -> tuple[Tensor, Tensor]:
    """Return the inner units [T,B,P] and the states [T,B,S] that `reference.slow_network` gives."""
    inputs = _lay_out_slow(inputs)
    drive, lengths, starts = inputs.drive, inputs.lengths, inputs.starts
    (steps, batch, inner), size = drive.shape, inputs.hidden.shape[1]
    inners, states = _empty_rows(drive, lengths, inner), drive.new_empty(steps, batch, size)
    if states.numel() > 0:
        from fastweights.ops.gated import _kernels

        options = slow_options(inner, size, drive.dtype, lengths=lengths is not None, starts=starts is not None)
        with launching_on(drive):
            flags = _or(lengths, drive), _or(starts, drive)
            _kernels.slow_forward[(batch,)](*inputs[:-FIXED], *flags, inners, states, steps, batch, **options)
    return inners, states


def slow_backward(
    grad_inners: Tensor, grad_states: Tensor | None, inners: Tensor, states: Tensor, inputs: SlowInputs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of drive [T,B,P], of z [T,B,S], whose tanh is the next state, and of hidden [B,S]."""
    drive, weight_hh, weight_z, _, hidden, lengths, starts = _lay_out_slow(inputs)
    (steps, batch, inner), size = drive.shape, hidden.shape[1]
    wide, narrow = (steps, batch, inner), (steps, batch, size)
    shapes = {"grad_inners": wide, "grad_states": narrow, "inners": wide, "states": narrow}
    tensors = lay_out((grad_inners, grad_states, inners, states), shapes, drive, "drive")
    grad_inners, grad_states, inners, states = tensors
    results = _empty_rows(drive, lengths, inner), _empty_rows(drive, lengths, size), torch.empty_like(hidden)
    if states.numel() > 0:
        from fastweights.ops.gated import _kernels

        options = slow_options(inner, size, drive.dtype, lengths=lengths is not None, starts=starts is not None)
        with launching_on(drive):
            _kernels.slow_backward[(batch,)](
                grad_inners,
                _or(grad_states, drive),
                inners,
                states,
                weight_hh,
                weight_z,
                _or(lengths, drive),
                _or(starts, drive),
                *results,
                steps,
                batch,
                STATES=grad_states is not None,
                **options,
            )
    return results


def trace_shape(x: Tensor, hidden: Tensor) -> tuple[int, int, int]:
    """Return the shape of the trace, which the forward pass keeps for the backward pass."""
    return x.shape[0], x.shape[1], hidden.shape[-1] + 4


def count_trace(weight: Tensor, x: Tensor, hidden: Tensor) -> int:
    """Return how many numbers the trace has."""
    return math.prod(trace_shape(x, hidden))


def fast_forward(inputs: FastInputs, keep_trace: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `reference.fast_network` gives, and the trace that `fast_backward` goes by, empty if not wanted."""
    *results, trace = run_forward(_multiply(inputs), *inputs[3:], keep_trace)
    outputs, last_1, last_2 = results
    return outputs, last_1, last_2, trace.flatten()


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

    The updates are computed again rather than kept.
    """
    inners, weight, bias, x, hidden, *_ = inputs
    if trace.numel() > 0:
        trace = trace.view(trace_shape(x, hidden))
    recurrent: Any = inputs[3:]
    grads = (grad_outputs, grad_fast_1, grad_fast_2)
    of_updates, *of_others = run_backward(*grads, outputs, trace, _multiply(inputs), *recurrent)
    if not matrices:
        of_others[-2:] = x.new_empty(0), x.new_empty(0)
    of_bias = of_updates.sum((0, 1)).to(bias.dtype)  # the sum of T B terms needs a higher dtype
    rows = of_updates.flatten(0, 1).to(inners.dtype)
    return [(rows @ weight).view_as(inners), rows.t() @ inners.flatten(0, 1), of_bias, *of_others]


def _multiply(inputs: FastInputs) -> Tensor:
    """Return the updates [T,B,U] of the whole batch."""
    return F.linear(inputs.inners, inputs.weight, inputs.bias).to(inputs.x.dtype)


def run_forward(
    updates: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    keep_trace: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the fast network's recurrence over given updates; the trace is empty where it is not wanted."""
    inputs, lengths, starts = _lay_out_fast(updates, x, hidden, fast_1, fast_2, lengths, starts)
    _, x, hidden, fast_1, fast_2 = inputs
    (steps, batch, features), size = x.shape, hidden.shape[1]
    trace = x.new_empty(trace_shape(x, hidden) if keep_trace else (0,))
    results = _empty_rows(x, lengths, size), torch.empty_like(fast_1), torch.empty_like(fast_2), trace
    if hidden.numel() > 0:
        from fastweights.ops.gated import _kernels

        options = fast_options(size, features, x.dtype, lengths=lengths is not None, starts=starts is not None)
        with launching_on(x):
            _kernels.fast_forward[(batch,)](
                *inputs, _or(lengths, x), _or(starts, x), *results, steps, batch, EPS=EPS, TRACE=keep_trace, **options
            )
    return results


def run_backward(
    grad_outputs: Tensor | None,
    grad_fast_1: Tensor | None,
    grad_fast_2: Tensor | None,
    outputs: Tensor,
    trace: Tensor,
    updates: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of updates, x, hidden, fast_1 and fast_2.

    Without the trace of the forward pass, that pass is run again.
    """
    inputs, lengths, starts = _lay_out_fast(updates, x, hidden, fast_1, fast_2, lengths, starts)
    updates, x, hidden, fast_1, fast_2 = inputs
    (steps, batch, features), size = x.shape, hidden.shape[1]
    if trace.numel() == 0:
        trace = run_forward(updates, x, hidden, fast_1, fast_2, lengths, starts, keep_trace=True)[-1]
    shapes = {
        "grad_outputs": (steps, batch, size),
        "grad_fast_1": fast_1.shape,
        "grad_fast_2": fast_2.shape,
        "outputs": (steps, batch, size),
        "trace": trace_shape(x, hidden),
    }
    *grads, outputs, trace = lay_out((grad_outputs, grad_fast_1, grad_fast_2, outputs, trace), shapes, x, "x")
    grads = [
        torch.zeros_like(like) if grad is None else grad
        for grad, like in zip(grads, (outputs, fast_1, fast_2), strict=True)
    ]
    results = (
        _empty_rows(x, lengths, updates.shape[2]),
        _empty_rows(x, lengths, features),
        *(torch.empty_like(tensor) for tensor in (hidden, fast_1, fast_2)),
    )
    if hidden.numel() > 0:
        from fastweights.ops.gated import _kernels

        longest, both = chunk_steps(steps), size * (fast_1.shape[2] + fast_2.shape[2])
        parallel = programs(batch, math.prod(tile(size, features)) * x.element_size(), x.device)
        bounds, within = (x.new_empty(parallel, kept, both) for kept in (-(-steps // longest), longest))
        options = fast_options(size, features, x.dtype, lengths=lengths is not None, starts=starts is not None)
        with launching_on(x):
            _kernels.fast_backward[(parallel,)](
                *grads,
                outputs,
                trace,
                *inputs,
                _or(lengths, x),
                _or(starts, x),
                bounds,
                within,
                *results,
                steps,
                batch,
                longest,
                LAST=grad_fast_1 is not None or grad_fast_2 is not None,
                **options,
            )
    return results


def _lay_out_slow(inputs: SlowInputs) -> SlowInputs:
    drive = inputs.drive
    _triton.require(drive)
    tensors = lay_out(inputs[:-FIXED], slow_shapes(drive, inputs.hidden), drive, "drive")
    (steps, batch, _), device = drive.shape, drive.device
    lengths = lay_out_lengths(inputs.lengths, batch, None, device)
    flags = check_flags({"starts": inputs.starts}, steps, batch, device)
    return SlowInputs._make((*tensors, lengths, *flags))


def _lay_out_fast(
    updates: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    reason = unavailable(x, hidden)
    if reason is not None:
        raise KernelError(reason)
    tensors = lay_out((updates, x, hidden, fast_1, fast_2), fast_shapes(x, hidden), x, "x")
    steps, batch, _ = x.shape
    (starts,) = check_flags({"starts": starts}, steps, batch, x.device)
    return tensors, lay_out_lengths(lengths, batch, None, x.device), starts


def _empty_rows(like: Tensor, lengths: Tensor | None, numbers: int) -> Tensor:
    """Return an empty result [T,B,...]; zeros where the kernel does not write the rows past a length."""
    make = like.new_empty if lengths is None else like.new_zeros
    return make(*like.shape[:2], numbers)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor  # some pointer, which the kernel's options keep it from using
