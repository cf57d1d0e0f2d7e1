"""The Triton kernels of the slow network (Schlag & Schmidhuber 2017, eq 3 and 4): one program a sequence.

Both matrices lie with the inner units down: a product with the state is a sum across, one with the inner units a sum
down, and no vector has to be turned. They stay in registers from the first step to the last, or come from the cache a
panel of inner units at a time: the next state is a sum over panels.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import tanh, times, transposed_times
from fastweights.ops.gated._triton_steps import load_tile, valid_steps, vector

# Steps and batch change from call to call: a copy of the kernel for "1" or "divisible by 16" is not worth the seconds
# that it takes to compile.
_RUNTIME = ("steps", "batch")


@triton.jit(do_not_specialize=_RUNTIME)
def slow_forward(
    drive,  # [T,B,P]
    weight_hh,  # [P,S]
    weight_z,  # [S,P]
    bias_z,  # [S]
    hidden,  # [B,S]
    lengths,  # int64 [B]
    inners,  # [T,B,P]: result; rows past a length are not written
    states,  # [T,B,S]: result
    steps,
    batch,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PANEL: tl.constexpr,  # units of the inner layer at a time: all, if both matrices fit in registers
    ACROSS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """inner = tanh(drive + W_hh s), s' = tanh(W_z inner + b_z)."""
    b = tl.program_id(0).to(tl.int64)
    end = valid_steps(lengths, b, steps, LENGTHS)
    across = tl.arange(0, ACROSS)
    bias = vector(bias_z, across, SIZE)
    state = vector(hidden + b * SIZE, across, SIZE)
    RESIDENT: tl.constexpr = PANEL >= INNER
    if RESIDENT:
        down = tl.arange(0, PANEL)
        tile_hh = load_tile(weight_hh, down, across, INNER, SIZE, False)
        tile_z = load_tile(weight_z, down, across, INNER, SIZE, True)
    for t in range(0, end):
        row = t * batch.to(tl.int64) + b
        z = bias
        for start in range(0, INNER, PANEL):
            unit = start + tl.arange(0, PANEL)
            if not RESIDENT:
                tile_hh = load_tile(weight_hh, unit, across, INNER, SIZE, False)
                tile_z = load_tile(weight_z, unit, across, INNER, SIZE, True)
            inner = tanh(vector(drive + row * INNER, unit, INNER) + times(tile_hh, state))
            tl.store(inners + row * INNER + unit, inner, mask=unit < INNER)
            z += transposed_times(tile_z, inner)
        state = tanh(z)
        tl.store(states + row * SIZE + across, state, mask=across < SIZE)
    for t in range(end, steps):
        tl.store(states + (t * batch.to(tl.int64) + b) * SIZE + across, state, mask=across < SIZE)


@triton.jit(do_not_specialize=_RUNTIME)
def slow_backward(
    grad_inners,  # [T,B,P]
    grad_states,  # [T,B,S], where STATES says so
    inners,  # [T,B,P]
    states,  # [T,B,S]
    weight_hh,  # [P,S]
    weight_z,  # [S,P]
    lengths,  # int64 [B]
    grad_drive,  # [T,B,P]: result, and the next; rows past a length are not written
    grad_z,  # [T,B,S]: of what the next state is the tanh of
    grad_hidden,  # [B,S]: result
    steps,
    batch,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PANEL: tl.constexpr,
    ACROSS: tl.constexpr,
    LENGTHS: tl.constexpr,
    STATES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    end = valid_steps(lengths, b, steps, LENGTHS)
    across = tl.arange(0, ACROSS)
    grad = tl.zeros_like(vector(states + b * SIZE, across, SIZE))
    if STATES:  # the state stands still past a length
        for t in range(end, steps):
            grad += vector(grad_states + (t * batch.to(tl.int64) + b) * SIZE, across, SIZE)
    RESIDENT: tl.constexpr = PANEL >= INNER
    if RESIDENT:
        down = tl.arange(0, PANEL)
        tile_hh = load_tile(weight_hh, down, across, INNER, SIZE, False)
        tile_z = load_tile(weight_z, down, across, INNER, SIZE, True)
    for back in range(0, end):
        row = (end - 1 - back) * batch.to(tl.int64) + b
        if STATES:
            grad += vector(grad_states + row * SIZE, across, SIZE)
        state = vector(states + row * SIZE, across, SIZE)
        z = grad * (1.0 - state * state)
        tl.store(grad_z + row * SIZE + across, z, mask=across < SIZE)
        grad = tl.zeros_like(z)
        for start in range(0, INNER, PANEL):
            unit = start + tl.arange(0, PANEL)
            if not RESIDENT:
                tile_hh = load_tile(weight_hh, unit, across, INNER, SIZE, False)
                tile_z = load_tile(weight_z, unit, across, INNER, SIZE, True)
            inner = vector(inners + row * INNER, unit, INNER)
            pulled = vector(grad_inners + row * INNER, unit, INNER) + times(tile_z, z)
            pulled = pulled * (1.0 - inner * inner)
            tl.store(grad_drive + row * INNER + unit, pulled, mask=unit < INNER)
            grad += transposed_times(tile_hh, pulled)
    tl.store(grad_hidden + b * SIZE + across, grad, mask=across < SIZE)
