"""The Triton kernels of the gated recurrence (Schlag & Schmidhuber 2017): one program a sequence.

The slow network (eq 3 and 4) has both matrices with the inner units down: a product with the state is a sum across, one
with the inner units a sum down, and no vector has to be turned. They stay in registers from the first step to the last,
or come from the cache a panel of inner units at a time: the next state is a sum over panels.

The fast network (eq 2 and 5 to 8) keeps both fast matrices in registers from the first step to the last; `triton.py`
says what its backward pass keeps. A fast matrix is a tile of DOWN x ACROSS numbers. F1 lies in it as it is, F2 turned:
then what the first layer gives lies as the second reads it, and what that gives as the first reads it.

Places beyond a vector's or a matrix's own size are zero; masking is a selection or a load that does not happen, never a
product with zero, which would let NaN through.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import tanh, times, transposed_times

# These change from call to call: a copy of the kernel for "1" or "divisible by 16" is not worth the seconds that it
# takes to compile.
_RUNTIME = ("steps", "batch")


@triton.jit
def wide(number):
    """Return a number in 64 bits; in the interpreter a loop's counter is no tensor."""
    return number * tl.full((), 1, tl.int64)


@triton.jit
def valid_steps(lengths, b, steps, LENGTHS: tl.constexpr):
    if LENGTHS:
        return tl.minimum(tl.maximum(tl.load(lengths + b), 0), steps.to(tl.int64)).to(tl.int32)
    else:
        return steps


@triton.jit
def vector(pointer, places, NUMBERS: tl.constexpr):
    """Load the first NUMBERS places of a block, zero beyond."""
    return tl.load(pointer + places, mask=places < NUMBERS, other=0.0)


@triton.jit
def spread(down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Return where a tile's numbers lie in a [ROWS,COLUMNS] matrix, or a turned [COLUMNS,ROWS] one, and which do."""
    places = across[None, :] * ROWS + down[:, None] if TURNED else down[:, None] * COLUMNS + across[None, :]
    return places, (down < ROWS)[:, None] & (across < COLUMNS)[None, :]


@triton.jit
def load_tile(matrix, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    places, valid = spread(down, across, ROWS, COLUMNS, TURNED)
    return tl.load(matrix + places, mask=valid, other=0.0)


@triton.jit
def store_tile(matrix, tile, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    places, valid = spread(down, across, ROWS, COLUMNS, TURNED)
    tl.store(matrix + places, tile, mask=valid)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))  # cannot overflow
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def layer(sums, places, SIZE: tl.constexpr, EPS: tl.constexpr):
    """Return LN(tanh(sums)), and for the backward pass one over the deviation, and the mean."""
    values = tanh(sums)
    mean = tl.sum(values, axis=0) / SIZE
    centred = tl.where(places < SIZE, values - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / SIZE + EPS)
    return centred * inverse, inverse, mean


@triton.jit
def undo_layer(gradient, normal, inverse, mean, places, SIZE: tl.constexpr):
    """Return the gradient of `sums` from that of normal = LN(tanh(sums))."""
    values = normal / inverse + mean
    center = tl.sum(gradient, axis=0) / SIZE
    along = tl.sum(gradient * normal, axis=0) / SIZE
    pulled = (gradient - center - along * normal) * inverse * (1.0 - values * values)
    return tl.where(places < SIZE, pulled, 0.0)


@triton.jit
def parts(update, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Load the parts of an update: its factor and its gate down a tile, and both across it.

    An update has alpha, beta, gamma and delta, of which alpha and gamma lie across a tile that is turned.
    """
    DOWN_FIRST: tl.constexpr = COLUMNS if TURNED else 0
    ACROSS_FIRST: tl.constexpr = 0 if TURNED else ROWS
    GATES: tl.constexpr = ROWS + COLUMNS
    return (
        tanh(vector(update + DOWN_FIRST, down, ROWS)),
        sigmoid(vector(update + GATES + DOWN_FIRST, down, ROWS)),
        tanh(vector(update + ACROSS_FIRST, across, COLUMNS)),
        sigmoid(vector(update + GATES + ACROSS_FIRST, across, COLUMNS)),
    )


@triton.jit
def write(tile, update, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Return G * H + (1 - G) * F."""
    down_factor, down_gate, across_factor, across_gate = parts(update, down, across, ROWS, COLUMNS, TURNED)
    new = down_factor[:, None] * across_factor[None, :]
    return tile + down_gate[:, None] * across_gate[None, :] * (new - tile)


@triton.jit
def undo_write(
    tile,
    carried,
    update,
    grad_update,
    down,
    across,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Return the part of C = dL/d(G * H + (1 - G) * F) in dL/dF, and store the gradient of the update's parts.

    With F in `tile` and C in `carried`, every sum that the parts need is one of C and of C * F along an axis.
    """
    down_factor, down_gate, across_factor, across_gate = parts(update, down, across, ROWS, COLUMNS, TURNED)
    both = carried * tile
    of_down = tl.sum(carried * (across_gate * across_factor)[None, :], axis=1)
    against_down = tl.sum(both * across_gate[None, :], axis=1)
    of_across = tl.sum(carried * (down_gate * down_factor)[:, None], axis=0)
    against_across = tl.sum(both * down_gate[:, None], axis=0)

    DOWN_FIRST: tl.constexpr = COLUMNS if TURNED else 0
    ACROSS_FIRST: tl.constexpr = 0 if TURNED else ROWS
    GATES: tl.constexpr = ROWS + COLUMNS
    grad = down_gate * of_down * (1.0 - down_factor * down_factor)
    tl.store(grad_update + DOWN_FIRST + down, grad, mask=down < ROWS)
    grad = (down_factor * of_down - against_down) * down_gate * (1.0 - down_gate)
    tl.store(grad_update + GATES + DOWN_FIRST + down, grad, mask=down < ROWS)
    grad = across_gate * of_across * (1.0 - across_factor * across_factor)
    tl.store(grad_update + ACROSS_FIRST + across, grad, mask=across < COLUMNS)
    grad = (across_factor * of_across - against_across) * across_gate * (1.0 - across_gate)
    tl.store(grad_update + GATES + ACROSS_FIRST + across, grad, mask=across < COLUMNS)
    return carried - carried * (down_gate[:, None] * across_gate[None, :])


@triton.jit(do_not_specialize=_RUNTIME)
def slow_forward(
    drive,  # [T,B,P]
    weight_hh,  # [P,S]
    weight_z,  # [S,P]
    bias_z,  # [S]
    hidden,  # [B,S]
    lengths,  # int64 [B]
    starts,  # bool [T,B]
    inners,  # [T,B,P]: result; rows past a length are not written
    states,  # [T,B,S]: result
    steps,
    batch,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PANEL: tl.constexpr,  # units of the inner layer at a time: all, if both matrices fit in registers
    ACROSS: tl.constexpr,
    LENGTHS: tl.constexpr,
    STARTS: tl.constexpr,
):
    """Run inner = tanh(drive + W_hh s), s' = tanh(W_z inner + b_z)."""
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
        if STARTS:
            state = tl.where(tl.load(starts + row), 0.0, state)
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
    starts,  # bool [T,B]
    grad_drive,  # [T,B,P]: result, and the next; rows past a length are not written
    grad_z,  # [T,B,S]: the gradient before the tanh of the next state
    grad_hidden,  # [B,S]: result
    steps,
    batch,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PANEL: tl.constexpr,
    ACROSS: tl.constexpr,
    LENGTHS: tl.constexpr,
    STARTS: tl.constexpr,
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
        if STARTS:
            grad = tl.where(tl.load(starts + row), 0.0, grad)
    tl.store(grad_hidden + b * SIZE + across, grad, mask=across < SIZE)


@triton.jit
def first_input(h, x, across, SIZE: tl.constexpr, FEATURES: tl.constexpr):
    """Return [h; x; 1], from h with zeros after it."""
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
    starts,  # bool [T,B]
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
    STARTS: tl.constexpr,
    TRACE: tl.constexpr,
):
    """Run a = LN(tanh(F1 [h; x; 1])), h' = LN(tanh(F2 [a; 1])), and then write both matrices."""
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
        if STARTS:
            anew = tl.load(starts + row)
            h, tile_1, tile_2 = tl.where(anew, 0.0, h), tl.where(anew, 0.0, tile_1), tl.where(anew, 0.0, tile_2)
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


@triton.jit(do_not_specialize=(*_RUNTIME, "longest"))
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
    starts,  # bool [T,B]
    bounds,  # [programs,T/K,H(M+N)]: scratch; both matrices as each chunk begins, F2 turned
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
    STARTS: tl.constexpr,
    LAST: tl.constexpr,
):
    """Run every sequence forwards, keeping the matrices as chunks begin; then go back chunk by chunk from the last.

    A chunk's matrices are written again from those at its beginning, and its steps are undone from the last.
    """
    WIDE_1: tl.constexpr = SIZE + FEATURES + 1
    WIDE_2: tl.constexpr = SIZE + 1
    FIRST: tl.constexpr = 2 * (SIZE + WIDE_1)
    NUMBERS: tl.constexpr = FIRST + 2 * (SIZE + WIDE_2)
    ONE: tl.constexpr = SIZE * WIDE_1
    BOTH: tl.constexpr = SIZE * (WIDE_1 + WIDE_2)
    program = tl.program_id(0).to(tl.int64)
    bounds += program * ((steps + longest - 1) // longest) * BOTH
    within += program * longest * BOTH
    down, across = tl.arange(0, DOWN), tl.arange(0, ACROSS)
    for turn in range(tl.program_id(0), batch, tl.num_programs(0)):
        b = wide(turn)
        end = valid_steps(lengths, b, steps, LENGTHS)
        chunks = (end + longest - 1) // longest
        tile_1 = load_tile(fast_1 + b * SIZE * WIDE_1, down, across, SIZE, WIDE_1, False)
        tile_2 = load_tile(fast_2 + b * SIZE * WIDE_2, down, across, WIDE_2, SIZE, True)
        for t in range(0, (chunks - 1) * longest + 1):
            if STARTS:
                anew = tl.load(starts + t * batch.to(tl.int64) + b)
                tile_1, tile_2 = tl.where(anew, 0.0, tile_1), tl.where(anew, 0.0, tile_2)
            if t % longest == 0:
                start = bounds + wide(t // longest) * BOTH
                store_tile(start, tile_1, down, across, SIZE, WIDE_1, False)
                store_tile(start + ONE, tile_2, down, across, WIDE_2, SIZE, False)
            update = updates + (t * batch.to(tl.int64) + b) * NUMBERS
            tile_1 = write(tile_1, update, down, across, SIZE, WIDE_1, False)
            tile_2 = write(tile_2, update + FIRST, down, across, WIDE_2, SIZE, True)
        # The code below may load the scratch in another arrangement of threads than the one that stored it.
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
            start = bounds + wide(chunk) * BOTH
            tile_1 = load_tile(start, down, across, SIZE, WIDE_1, False)
            tile_2 = load_tile(start + ONE, down, across, WIDE_2, SIZE, False)
            for k in range(0, count):
                place = within + wide(k) * BOTH
                if STARTS:
                    anew = tl.load(starts + (first + k) * batch.to(tl.int64) + b)
                    tile_1, tile_2 = tl.where(anew, 0.0, tile_1), tl.where(anew, 0.0, tile_2)
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
                if STARTS:
                    anew = tl.load(starts + row)
                    before = tl.where(anew, 0.0, before)

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
                if STARTS:  # the gradient ends at a start
                    grad = tl.where(anew, 0.0, grad)
                    carried_1, carried_2 = tl.where(anew, 0.0, carried_1), tl.where(anew, 0.0, carried_2)
            tl.debug_barrier()  # before the scratch is written again
        tl.store(grad_hidden + b * SIZE + across, grad, mask=across < SIZE)
        store_tile(grad_1 + b * SIZE * WIDE_1, carried_1, down, across, SIZE, WIDE_1, False)
        store_tile(grad_2 + b * SIZE * WIDE_2, carried_2, down, across, WIDE_2, SIZE, True)
