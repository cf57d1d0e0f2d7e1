"""The Triton kernels of the associative recurrence (Ba et al. 2016, eq 4): one program a sequence, step after step.

Both work on a chunk of consecutive steps whose first memory M is given, and never form A within it:

    A(t) v = kept[t] M v + sum_{n <= t} weight[t-n] h(n) (h(n).v),   kept[k] = decay^(k+1), weight[k] = rate decay^k,

with t and n counted from the first step of the chunk. Where sequences restart, n begins with `oldest`, and M is left
out from the first start on; where writes have strengths, weight[t-n] is that of step n too. `triton.py` strings chunks
together and does what is no recurrence as matrix products.

A vector has BLOCK elements, a power of two; what lies beyond SIZE is zero, so that sums need no mask. Masking is a
selection or a load that does not happen, never a product with zero, which would let NaN through. All arithmetic is that
of the tensors' own dtype: sums of products, not `tl.dot`, so that no TF32 can enter.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import tanh, times, transposed_times

# Steps, batch and the like change from call to call: a copy of the kernel for "1" or "divisible by 16" is not worth
# the seconds that it takes to compile.
_RUNTIME = ("first", "count", "batch", "inner", "segment", "room", "chunk")


@triton.jit
def square(matrix, columns, SIZE: tl.constexpr):
    """Load a [SIZE,SIZE] matrix as a [BLOCK,BLOCK] tile."""
    valid = (columns < SIZE)[:, None] & (columns < SIZE)[None, :]
    return tl.load(matrix + columns[:, None] * SIZE + columns[None, :], mask=valid, other=0.0)


@triton.jit
def stream(matrix, vector, columns, SIZE: tl.constexpr, PANEL: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Multiply a matrix too large for registers by a vector, PANEL rows at a time.

    A vector lies along the columns; its part along a panel's rows is picked, or put back, by a sum over one element.
    """
    total = tl.zeros_like(vector)
    for start in range(0, SIZE, PANEL):
        row = start + tl.arange(0, PANEL)
        tile = tl.load(
            matrix + row[:, None] * SIZE + columns[None, :],
            mask=(row < SIZE)[:, None] & (columns < SIZE)[None, :],
            other=0.0,
        )
        diagonal = row[:, None] == columns[None, :]
        if TRANSPOSED:
            part = tl.sum(tl.where(diagonal, vector[None, :], 0.0), axis=1)
            total += transposed_times(tile, part)
        else:
            part = times(tile, vector)
            total += tl.sum(tl.where(diagonal, part[:, None], 0.0), axis=0)
    return total


@triton.jit
def attend(
    v,
    rows,
    pitch,
    low,
    t,
    weights,
    strengths,
    batch,
    columns,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STRENGTHS: tl.constexpr,
):
    """Return sum_{low <= n <= t} weight[t-n] h(n) (h(n).v), symmetric, hence its own transpose.

    `rows` + n pitch is h(n). Without a softmax between them, scores and mixture need each row only once.
    """
    total = tl.zeros_like(v)
    for start in range(low, t + 1, ROWS):
        n = start + tl.arange(0, ROWS)
        known = n <= t
        tile = tl.load(
            rows + n.to(tl.int64)[:, None] * pitch + columns[None, :],
            mask=known[:, None] & (columns < SIZE)[None, :],
            other=0.0,
        )
        weight = tl.load(weights + (t - n), mask=known, other=0.0)
        if STRENGTHS:
            weight *= tl.load(strengths + n * batch, mask=known, other=0.0)
        total += transposed_times(tile, weight * times(tile, v))
    return total


@triton.jit
def activate(x, TANH: tl.constexpr):
    if TANH:
        return tanh(x)
    else:
        return tl.where(x < 0, 0.0, x)  # in this order NaN stays NaN


@triton.jit
def normalize(x, columns, SIZE: tl.constexpr, EPS: tl.constexpr):
    """Return (x - mean) / sqrt(variance + eps), and one over that root."""
    centred = tl.where(columns < SIZE, x - tl.sum(x, axis=0) / SIZE, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / SIZE + EPS)
    return centred * inverse, inverse


@triton.jit
def undo_activation(gradient, state, TANH: tl.constexpr):
    """Return the gradient of x from that of state = f(x), by the value of f."""
    if TANH:
        return gradient * (1.0 - state * state)
    else:
        return tl.where(state <= 0, 0.0, gradient)


@triton.jit
def undo_norm(gradient, slot, normals, inverses, columns, SIZE: tl.constexpr):
    """Return the gradient of the layer norm's input from that of its result, and that: row `slot` of `normals`."""
    valid = columns < SIZE
    normal = tl.load(normals + slot * SIZE + columns, mask=valid, other=0.0)
    mean = tl.sum(gradient, axis=0) / SIZE
    along = tl.sum(gradient * normal, axis=0) / SIZE
    return tl.load(inverses + slot) * tl.where(valid, gradient - mean - along * normal, 0.0), normal


@triton.jit(do_not_specialize=_RUNTIME)
def recurrence(
    drive,  # [T,B,H]
    weight_hh,  # [H,H]
    gain,  # [H]
    bias,  # [H]
    memory,  # [B,H,H]: A as the chunk begins
    stored,  # [T+1,B,H]: h(0) .. h(T); the chunk's first is given, or all of them (REPLAY)
    strengths,  # [T,B]
    lengths,  # int64 [B]
    oldest,  # int32 [T,B]: the first hidden state that a step reads, where STARTS says so
    clears,  # bool [T,B]: steps that leave W h out
    weights,  # [K]: rate decay^k
    kept,  # [K]: decay^(k+1)
    outputs,  # [T,B,H]
    states,  # [B,K,S,H]: the query of every read, kept by REPLAY for the backward pass
    normals,  # [B,K,S+1,H]: the normalised vectors, the initial state's in the last place
    inverses,  # [B,K,S+1]: one over their deviations
    first,
    count,
    batch,
    inner,  # S
    segment,  # steps of a program: `count`, or fewer in REPLAY, where no step waits for another
    room,  # K: the steps that fit in states, normals and inverses
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
    TANH: tl.constexpr,
    NORM: tl.constexpr,
    NORM_INITIAL: tl.constexpr,
    MEMORY: tl.constexpr,
    STRENGTHS: tl.constexpr,
    LENGTHS: tl.constexpr,
    STARTS: tl.constexpr,
    CLEARS: tl.constexpr,
    PANEL: tl.constexpr,
    REPLAY: tl.constexpr,
):
    """Run steps `first` .. `first + count - 1`, or repeat them from known hidden states and keep the inside (REPLAY).

    z = W h(t) + drive(t),   v_0 = f(z),   v_{s+1} = f(LN(z + A(t) v_s)),   h(t+1) = v_S
    """
    program = tl.program_id(0)
    b = (program % batch).to(tl.int64)
    begin = (program // batch) * segment
    end = tl.minimum(begin + segment, count)
    if LENGTHS:
        end = tl.minimum(end.to(tl.int64), tl.load(lengths + b) - first).to(tl.int32)
    columns = tl.arange(0, BLOCK)
    valid = columns < SIZE
    pitch = batch.to(tl.int64) * SIZE
    here = first * pitch + b * SIZE  # the chunk's first step in a [T,B,H] tensor
    stored += here
    memory += b * SIZE * SIZE
    steps = first * batch.to(tl.int64) + b  # the chunk's first step in a [T,B] tensor
    strengths += steps
    if NORM:
        scale = tl.load(gain + columns, mask=valid, other=0.0)
        shift = tl.load(bias + columns, mask=valid, other=0.0)
    RESIDENT: tl.constexpr = PANEL == BLOCK  # W and M stay in registers for all steps
    if RESIDENT:
        weight_tile = square(weight_hh, columns, SIZE)
        if MEMORY:
            memory_tile = square(memory, columns, SIZE)
    h = tl.load(stored + begin * pitch + columns, mask=valid, other=0.0)
    for t in range(begin, end):
        step = (b * room + t) * (inner + 1)
        if REPLAY:
            h = tl.load(stored + t * pitch + columns, mask=valid, other=0.0)
        low = 0
        if STARTS:
            read_from = tl.load(oldest + steps + t * batch) - first
            low = tl.maximum(read_from, 0)
            h = tl.where(low > t, 0.0, h)
        if CLEARS:
            h = tl.where(tl.load(clears + steps + t * batch), 0.0, h)
        z = tl.load(drive + here + t * pitch + columns, mask=valid, other=0.0)
        if RESIDENT:
            z += times(weight_tile, h)
        else:
            z += stream(weight_hh, h, columns, SIZE, PANEL, False)
        if NORM_INITIAL:
            normal, inverse = normalize(z, columns, SIZE, EPS)
            if REPLAY:
                tl.store(normals + (step + inner) * SIZE + columns, normal, mask=valid)
                tl.store(inverses + step + inner, inverse)
            h = activate(normal * scale + shift, TANH)
        else:
            h = activate(z, TANH)
        for s in range(inner):
            if REPLAY:
                tl.store(states + ((b * room + t) * inner + s) * SIZE + columns, h, mask=valid)
            u = z + attend(h, stored, pitch, low, t, weights, strengths, batch, columns, SIZE, ROWS, STRENGTHS)
            if MEMORY:
                of_memory = times(memory_tile, h) if RESIDENT else stream(memory, h, columns, SIZE, PANEL, False)
                if STARTS:
                    of_memory = tl.where(read_from > 0, 0.0, of_memory)
                u += tl.load(kept + t) * of_memory
            if NORM:
                normal, inverse = normalize(u, columns, SIZE, EPS)
                if REPLAY:
                    tl.store(normals + (step + s) * SIZE + columns, normal, mask=valid)
                    tl.store(inverses + step + s, inverse)
                u = normal * scale + shift
            h = activate(u, TANH)
        if not REPLAY:
            tl.store(outputs + here + t * pitch + columns, h, mask=valid)
            tl.store(stored + (t + 1) * pitch + columns, h, mask=valid)
            # The next step's attention loads this row in another arrangement of threads than the one that stored it.
            tl.debug_barrier()


@triton.jit(do_not_specialize=_RUNTIME)
def gradients(
    grad_outputs,  # [T,B,H]
    outputs,  # [T,B,H]
    weight_hh,  # [H,H]
    gain,  # [H]
    memory,  # [B,H,H]: A as the chunk begins
    stored,  # [T,B,H]: h(0) .. h(T-1)
    strengths,  # [T,B]
    lengths,  # int64 [B]
    oldest,  # int32 [T,B]
    clears,  # bool [T,B]
    weights,  # [K]: rate decay^k
    kept,  # [K]: decay^(k+1)
    states,  # [B,K,S,H], kept by the replay, like the two below
    normals,  # [B,K,S+1,H]
    inverses,  # [B,K,S+1]
    written,  # [B,K,H]: the gradient of h(n) from later chunks, through their M
    grad_reads,  # [B,K,S,H]: result; the gradient of every read
    grad_drive,  # [T,B,H]: result
    grad_norm,  # [chunks,2,B,H]: result; the sums of this sequence for the gain and the bias
    grad_strengths,  # [T,B]: result, without the part of later chunks
    carry,  # [B,H]: the gradient of h past the chunk; becomes that of its first h
    chunk,
    first,
    count,
    batch,
    inner,
    room,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TANH: tl.constexpr,
    NORM: tl.constexpr,
    NORM_INITIAL: tl.constexpr,
    MEMORY: tl.constexpr,
    WRITTEN: tl.constexpr,
    STRENGTHS: tl.constexpr,
    LENGTHS: tl.constexpr,
    STARTS: tl.constexpr,
    CLEARS: tl.constexpr,
    PANEL: tl.constexpr,
):
    """Take the gradient of one chunk, from its last step to its first.

    With v(r), g(r) what read r was asked and the gradient of what it gave, made at step t(r):

        gradient of v(r) = A(t)^T g(r)
        gradient of h(n) = W^T grad z(n) + sum_{t(r) >= n} weight[t(r)-n] (g(r) (v(r).h(n)) + v(r) (g(r).h(n)))

    The sum is gathered when h(n)'s turn comes, over rows that are written once: nothing is added to in memory. Where
    sequences restart, it ends there.
    """
    b = tl.program_id(0).to(tl.int64)
    end = count
    if LENGTHS:
        end = tl.minimum(count.to(tl.int64), tl.load(lengths + b) - first).to(tl.int32)
    columns = tl.arange(0, BLOCK)
    valid = columns < SIZE
    pitch = batch.to(tl.int64) * SIZE
    here = first * pitch + b * SIZE
    stored += here
    memory += b * SIZE * SIZE
    steps = first * batch.to(tl.int64) + b
    strengths += steps
    stop = end * 1  # the end of the sequence that a step belongs to
    states += b * room * inner * SIZE
    grad_reads += b * room * inner * SIZE
    grad = tl.load(carry + b * SIZE + columns, mask=valid, other=0.0)
    gain_sum, bias_sum = tl.zeros_like(grad), tl.zeros_like(grad)
    if NORM:
        scale = tl.load(gain + columns, mask=valid, other=0.0)
    RESIDENT: tl.constexpr = PANEL == BLOCK  # W and M stay in registers for all steps
    if RESIDENT:
        weight_tile = square(weight_hh, columns, SIZE)
        if MEMORY:
            memory_tile = square(memory, columns, SIZE)
    for back in range(0, end):
        t = end - 1 - back
        step = (b * room + t) * (inner + 1)
        low = 0
        if STARTS:
            read_from = tl.load(oldest + steps + t * batch) - first
            low = tl.maximum(read_from, 0)
        grad += tl.load(grad_outputs + here + t * pitch + columns, mask=valid, other=0.0)
        state = tl.load(outputs + here + t * pitch + columns, mask=valid, other=0.0)
        grad_z = tl.zeros_like(grad)
        for late in range(0, inner):
            s = inner - 1 - late
            grad = undo_activation(grad, state, TANH)
            if NORM:
                bias_sum += grad
                slot = step + s
                undone, normal = undo_norm(grad * scale, slot, normals, inverses, columns, SIZE)
                gain_sum += grad * normal
                grad = undone
            grad_z += grad
            read = (t.to(tl.int64) * inner + s) * SIZE + columns
            tl.store(grad_reads + read, grad, mask=valid)
            asked = attend(grad, stored, pitch, low, t, weights, strengths, batch, columns, SIZE, ROWS, STRENGTHS)
            if MEMORY:
                if RESIDENT:
                    of_memory = transposed_times(memory_tile, grad)
                else:
                    of_memory = stream(memory, grad, columns, SIZE, PANEL, True)
                if STARTS:
                    of_memory = tl.where(read_from > 0, 0.0, of_memory)
                asked += tl.load(kept + t) * of_memory
            grad = asked
            state = tl.load(states + read, mask=valid, other=0.0)
        grad = undo_activation(grad, state, TANH)
        if NORM_INITIAL:
            bias_sum += grad
            undone, normal = undo_norm(grad * scale, step + inner, normals, inverses, columns, SIZE)
            gain_sum += grad * normal
            grad = undone
        grad_z += grad
        tl.store(grad_drive + here + t * pitch + columns, grad_z, mask=valid)
        if RESIDENT:
            grad = transposed_times(weight_tile, grad_z)
        else:
            grad = stream(weight_hh, grad_z, columns, SIZE, PANEL, True)
        if STARTS:
            grad = tl.where(low > t, 0.0, grad)
            stop = tl.where(low > t, t, stop)
        if CLEARS:
            grad = tl.where(tl.load(clears + steps + t * batch), 0.0, grad)
        if WRITTEN:
            grad += tl.load(written + (b * room + t) * SIZE + columns, mask=valid, other=0.0)
        h = tl.load(stored + t * pitch + columns, mask=valid, other=0.0)
        # What follows loads this step's rows of `grad_reads` in another arrangement of threads than stored them.
        tl.debug_barrier()
        strength = 1.0
        if STRENGTHS:
            strength = tl.load(strengths + t * batch)
            of_strength = tl.sum(tl.zeros_like(grad), axis=0)
        for start in range(t * inner, stop * inner, ROWS):
            r = start + tl.arange(0, ROWS)
            known = r < stop * inner
            place = r.to(tl.int64)[:, None] * SIZE + columns[None, :]
            v = tl.load(states + place, mask=known[:, None] & valid[None, :], other=0.0)
            g = tl.load(grad_reads + place, mask=known[:, None] & valid[None, :], other=0.0)
            weight = tl.load(weights + (r // inner - t), mask=known, other=0.0)
            by_value, by_gradient = times(v, h), times(g, h)
            if STRENGTHS:
                of_strength += tl.sum(weight * by_value * by_gradient, axis=0)
                weight *= strength
            grad += transposed_times(g, weight * by_value) + transposed_times(v, weight * by_gradient)
        if STRENGTHS:
            tl.store(grad_strengths + steps + t * batch, of_strength)
    tl.store(carry + b * SIZE + columns, grad, mask=valid)
    if NORM:
        sums = grad_norm + (chunk.to(tl.int64) * 2 * batch + b) * SIZE + columns
        tl.store(sums, gain_sum, mask=valid)
        tl.store(sums + pitch, bias_sum, mask=valid)
