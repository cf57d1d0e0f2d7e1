"""The Triton kernels of the fast network (Schlag & Schmidhuber 2017, eq 2 and 5 to 8): one program a sequence.

The fast matrices stay in registers from the first step to the last. `triton.py` says what the backward pass keeps.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import times, transposed_times
from fastweights.ops.gated._triton_steps import (
    layer,
    load_tile,
    store_tile,
    undo_layer,
    undo_write,
    valid_steps,
    vector,
    wide,
    write,
)

_RUNTIME = ("steps", "batch", "longest")  # as in `_triton_slow.py`


@triton.jit
def first_input(h, x, across, SIZE: tl.constexpr, FEATURES: tl.constexpr):
    """[h; x; 1], from h with zeros after it."""
    feature = (across >= SIZE) & (across < SIZE + FEATURES)
    now = tl.load(x + across - SIZE, mask=feature, other=0.0)
    return tl.where(across < SIZE, h, tl.where(across == SIZE + FEATURES, 1.0, now))


@triton.jit(do_not_specialize=_RUNTIME)
def fast_forward(
    updates,  # [T,B,4H+2M+2N]
    x,  # [T,B,D]
    hidden,  # [B,H]
    fast_1,  # [B,H,M]
    fast_2,  # [B,H,N]
    lengths,  # int64 [B]
    outputs,  # [T,B,H]: result; rows past a length are not written
    last_1,  # [B,H,M]: result
    last_2,  # [B,H,N]: result
    trace,  # [T,B,H+4]: result, where TRACE says so: a, then of each layer norm one over the deviation and the mean
    steps,
    batch,
    SIZE: tl.constexpr,
    FEATURES: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    EPS: tl.constexpr,
    LENGTHS: tl.constexpr,
    TRACE: tl.constexpr,
):
    """a = LN(tanh(F1 [h; x; 1])), h' = LN(tanh(F2 [a; 1])), and then both matrices are written."""
    WIDE_1: tl.constexpr = SIZE + FEATURES + 1
    WIDE_2: tl.constexpr = SIZE + 1
    FIRST: tl.constexpr = 2 * (SIZE + WIDE_1)  # numbers of an update that are F1's
    NUMBERS: tl.constexpr = FIRST + 2 * (SIZE + WIDE_2)
    b = tl.program_id(0).to(tl.int64)
    end = valid_steps(lengths, b, steps, LENGTHS)
    down, across = tl.arange(0, DOWN), tl.arange(0, ACROSS)
    tile_1 = load_tile(fast_1 + b * SIZE * WIDE_1, down, across, SIZE, WIDE_1, False)
    tile_2 = load_tile(fast_2 + b * SIZE * WIDE_2, down, across, WIDE_2, SIZE, True)
    h = vector(hidden + b * SIZE, across, SIZE)
    for t in range(0, end):
        row = t * batch.to(tl.int64) + b
        read = first_input(h, x + row * FEATURES, across, SIZE, FEATURES)
        inside, inverse_1, mean_1 = layer(times(tile_1, read), down, SIZE, EPS)
        between = tl.where(down == SIZE, 1.0, inside)
        h, inverse_2, mean_2 = layer(transposed_times(tile_2, between), across, SIZE, EPS)
        tl.store(outputs + row * SIZE + across, h, mask=across < SIZE)
        if TRACE:
            kept = trace + row * (SIZE + 4)
            tl.store(kept + down, inside, mask=down < SIZE)
            tl.store(kept + SIZE, inverse_1)
            tl.store(kept + SIZE + 1, mean_1)
            tl.store(kept + SIZE + 2, inverse_2)
            tl.store(kept + SIZE + 3, mean_2)
        tile_1 = write(tile_1, updates + row * NUMBERS, down, across, SIZE, WIDE_1, False)
        tile_2 = write(tile_2, updates + row * NUMBERS + FIRST, down, across, WIDE_2, SIZE, True)
    store_tile(last_1 + b * SIZE * WIDE_1, tile_1, down, across, SIZE, WIDE_1, False)
    store_tile(last_2 + b * SIZE * WIDE_2, tile_2, down, across, WIDE_2, SIZE, True)


@triton.jit(do_not_specialize=_RUNTIME)
def fast_backward(
    grad_outputs,  # [T,B,H]
    grad_last_1,  # [B,H,M], where LAST says so, and the next
    grad_last_2,  # [B,H,N]
    outputs,  # [T,B,H]
    trace,  # [T,B,H+4]
    updates,  # [T,B,4H+2M+2N]
    x,  # [T,B,D]
    hidden,  # [B,H]
    fast_1,  # [B,H,M]
    fast_2,  # [B,H,N]
    lengths,  # int64 [B]
    starts,  # [programs,T/K,H(M+N)]: scratch; both matrices as each chunk begins, F2 turned
    within,  # [programs,K,H(M+N)]: scratch; both matrices before each step of one chunk
    grad_updates,  # [T,B,4H+2M+2N]: result, and the next; rows past a length are not written
    grad_x,  # [T,B,D]
    grad_hidden,  # [B,H]: result
    grad_1,  # [B,H,M]: result
    grad_2,  # [B,H,N]: result
    steps,
    batch,
    longest,  # K: steps of a chunk
    SIZE: tl.constexpr,
    FEATURES: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    LENGTHS: tl.constexpr,
    LAST: tl.constexpr,
):
    """Every sequence: forwards once, keeping the matrices as chunks begin; then chunk by chunk from the last.

    A chunk's matrices are written again from those at its beginning, and its steps are undone from the last.
    """
    WIDE_1: tl.constexpr = SIZE + FEATURES + 1
    WIDE_2: tl.constexpr = SIZE + 1
    FIRST: tl.constexpr = 2 * (SIZE + WIDE_1)
    NUMBERS: tl.constexpr = FIRST + 2 * (SIZE + WIDE_2)
    ONE: tl.constexpr = SIZE * WIDE_1
    BOTH: tl.constexpr = SIZE * (WIDE_1 + WIDE_2)
    program = tl.program_id(0).to(tl.int64)
    starts += program * ((steps + longest - 1) // longest) * BOTH
    within += program * longest * BOTH
    down, across = tl.arange(0, DOWN), tl.arange(0, ACROSS)
    for turn in range(tl.program_id(0), batch, tl.num_programs(0)):
        b = wide(turn)
        end = valid_steps(lengths, b, steps, LENGTHS)
        chunks = (end + longest - 1) // longest
        tile_1 = load_tile(fast_1 + b * SIZE * WIDE_1, down, across, SIZE, WIDE_1, False)
        tile_2 = load_tile(fast_2 + b * SIZE * WIDE_2, down, across, WIDE_2, SIZE, True)
        for t in range(0, (chunks - 1) * longest + 1):
            if t % longest == 0:
                start = starts + wide(t // longest) * BOTH
                store_tile(start, tile_1, down, across, SIZE, WIDE_1, False)
                store_tile(start + ONE, tile_2, down, across, WIDE_2, SIZE, False)
            update = updates + (t * batch.to(tl.int64) + b) * NUMBERS
            tile_1 = write(tile_1, update, down, across, SIZE, WIDE_1, False)
            tile_2 = write(tile_2, update + FIRST, down, across, WIDE_2, SIZE, True)
        # What follows loads the scratch perhaps in another arrangement of threads than the one that stored it.
        tl.debug_barrier()

        origin = vector(hidden + b * SIZE, across, SIZE)
        grad = tl.zeros_like(origin)
        if LAST:
            carried_1 = load_tile(grad_last_1 + b * SIZE * WIDE_1, down, across, SIZE, WIDE_1, False)
            carried_2 = load_tile(grad_last_2 + b * SIZE * WIDE_2, down, across, WIDE_2, SIZE, True)
        else:
            carried_1, carried_2 = tl.zeros_like(tile_1), tl.zeros_like(tile_2)
        for back in range(0, chunks):
            chunk = chunks - 1 - back
            first = chunk * longest
            count = tl.minimum(longest, end - first)
            start = starts + wide(chunk) * BOTH
            tile_1 = load_tile(start, down, across, SIZE, WIDE_1, False)
            tile_2 = load_tile(start + ONE, down, across, WIDE_2, SIZE, False)
            for k in range(0, count):
                place = within + wide(k) * BOTH
                store_tile(place, tile_1, down, across, SIZE, WIDE_1, False)
                store_tile(place + ONE, tile_2, down, across, WIDE_2, SIZE, False)
                update = updates + ((first + k) * batch.to(tl.int64) + b) * NUMBERS
                tile_1 = write(tile_1, update, down, across, SIZE, WIDE_1, False)
                tile_2 = write(tile_2, update + FIRST, down, across, WIDE_2, SIZE, True)
            tl.debug_barrier()
            for late in range(0, count):
                k = count - 1 - late
                t = first + k
                row = t * batch.to(tl.int64) + b
                place = within + wide(k) * BOTH
                kept = trace + row * (SIZE + 4)
                update, grad_update = updates + row * NUMBERS, grad_updates + row * NUMBERS
                inside = vector(kept, down, SIZE)
                between = tl.where(down == SIZE, 1.0, inside)
                normal = vector(outputs + row * SIZE, across, SIZE)
                known = tl.where(t > 0, SIZE, 0)
                before = tl.load(outputs + (row - batch) * SIZE + across, mask=across < known, other=0.0)
                before = tl.where(t > 0, before, origin)

                grad += vector(grad_outputs + row * SIZE, across, SIZE)
                pulled = undo_layer(grad, normal, tl.load(kept + SIZE + 2), tl.load(kept + SIZE + 3), across, SIZE)
                tile = load_tile(place + ONE, down, across, WIDE_2, SIZE, False)
                of_inside = tl.where(down < SIZE, times(tile, pulled), 0.0)
                carried_2 = undo_write(
                    tile, carried_2, update + FIRST, grad_update + FIRST, down, across, WIDE_2, SIZE, True
                )
                carried_2 += between[:, None] * pulled[None, :]

                pushed = undo_layer(of_inside, inside, tl.load(kept + SIZE), tl.load(kept + SIZE + 1), down, SIZE)
                tile = load_tile(place, down, across, SIZE, WIDE_1, False)
                of_read = transposed_times(tile, pushed)
                carried_1 = undo_write(tile, carried_1, update, grad_update, down, across, SIZE, WIDE_1, False)
                read = first_input(before, x + row * FEATURES, across, SIZE, FEATURES)
                carried_1 += pushed[:, None] * read[None, :]
                feature = (across >= SIZE) & (across < SIZE + FEATURES)
                tl.store(grad_x + row * FEATURES + across - SIZE, of_read, mask=feature)
                grad = tl.where(across < SIZE, of_read, 0.0)
            tl.debug_barrier()  # before the scratch is written anew
        tl.store(grad_hidden + b * SIZE + across, grad, mask=across < SIZE)
        store_tile(grad_1 + b * SIZE * WIDE_1, carried_1, down, across, SIZE, WIDE_1, False)
        store_tile(grad_2 + b * SIZE * WIDE_2, carried_2, down, across, WIDE_2, SIZE, True)
