"""The Triton kernels of the delta family: one program takes a slice of the values of one head of one sequence.

It holds that slice of the state S [K,V] on chip and takes one step after another, as `reference.py` has them:

    S <- exp(g_t) S,   u = beta_t (v_t - S^T k_t),   S <- S + k_t u^T,   o_t = scale S^T q_t + skip v_t.

No column of S knows of another, so nothing passes between slices but sums of gradients, which are written apart and
added up outside. The backward pass goes through chunks of steps from the last to the first: it makes the states of a
chunk again from the one before it, which is all that the forward pass keeps, and never divides by a decay.

Rows and columns that do not exist are zero, so that sums need no mask. Nothing is multiplied by a decay of zero: what
is before a start is left out, NaN too. All arithmetic is that of the tensors' own dtype, without TF32.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import times, transposed_times

# They change from call to call: a copy of the kernel for "1" or "divisible by 16" is not worth its seconds.
_RUNTIME = ("steps", "heads", "key_heads", "chunks")


@triton.jit
def find(spans, sequence, steps, LENGTHS: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row of a sequence among all rows, and how many steps it has."""
    row, count = sequence.to(tl.int64) * steps, steps.to(tl.int64)
    if PACKED:
        row = tl.minimum(tl.maximum(tl.load(spans + sequence), 0), steps)
        count = tl.minimum(tl.maximum(tl.load(spans + sequence + 1), 0), steps) - row
    if LENGTHS:
        count = tl.minimum(tl.maximum(tl.load(spans + sequence), 0), steps)
    return row, count


@triton.jit
def fade(state, g, place, keys, K: tl.constexpr, DECAY: tl.constexpr):
    """Return what is kept of the state at a step: all of it, or as much as its decay, or that of each row, leaves."""
    if DECAY == "head":
        now = tl.load(g + place)
        state = tl.where(now == -float("inf"), 0.0, tl.exp(now) * state)
    if DECAY == "channel":
        now = tl.load(g + place * K + keys, mask=keys < K, other=0.0)
        state = tl.where((now == -float("inf"))[:, None], 0.0, tl.exp(now)[:, None] * state)
    return state


@triton.jit
def write(state, key, value, beta, place, CORRECT: tl.constexpr, BETA: tl.constexpr):
    """Return what is written for a key, before beta and after it."""
    if CORRECT:
        value -= transposed_times(state, key)
    written = value
    if BETA:
        written = tl.load(beta + place) * value
    return value, written


@triton.jit(do_not_specialize=_RUNTIME)
def forward(
    q,  # [B,T,G,K]
    k,  # [B,T,G,K]
    v,  # [B,T,H,V]
    g,  # [B,T,H], or [B,T,H,K], where DECAY says so
    beta,  # [B,T,H], where BETA says so
    skip,  # [H], where SKIP says so
    state,  # [N,H,K,V], where STATE says so
    spans,  # int64: [N] lengths, or [N+1] bounds of packed sequences, where LENGTHS or PACKED says so
    outputs,  # [B,T,H,V]: result; rows past a length are not written
    final,  # [N,H,K,V]: result
    trace,  # [H,chunks,K,V]: result, where TRACE says so
    steps,
    heads,
    key_heads,
    chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    DECAY: tl.constexpr,
    CORRECT: tl.constexpr,
    BETA: tl.constexpr,
    SKIP: tl.constexpr,
    STATE: tl.constexpr,
    LENGTHS: tl.constexpr,
    PACKED: tl.constexpr,
    TRACE: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // heads, pair % heads
    keys, values = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (keys < K)[:, None] & (values < V)[None, :]
    tile = keys[:, None] * V + values[None, :]
    row, count = find(spans, sequence, steps, LENGTHS, PACKED)
    chunk = row // CHUNK + sequence if PACKED else sequence * ((steps + CHUNK - 1) // CHUNK)

    now = tl.zeros([ROWS, COLUMNS], v.dtype.element_ty)
    if STATE:
        now = tl.load(state + pair * K * V + tile, mask=valid, other=0.0)
    for t in range(0, count):
        if TRACE and t % CHUNK == 0:
            tl.store(trace + (head * chunks + chunk + t // CHUNK) * K * V + tile, now, mask=valid)
        place = (row + t) * heads + head
        of_key = ((row + t) * key_heads + head // (heads // key_heads)) * K + keys
        key = tl.load(k + of_key, mask=keys < K, other=0.0)
        query = tl.load(q + of_key, mask=keys < K, other=0.0)
        value = tl.load(v + place * V + values, mask=values < V, other=0.0)
        now = fade(now, g, place, keys, K, DECAY)
        _, written = write(now, key, value, beta, place, CORRECT, BETA)
        now += key[:, None] * written[None, :]
        output = SCALE * transposed_times(now, query)
        if SKIP:
            output += tl.load(skip + head) * value
        tl.store(outputs + place * V + values, output, mask=values < V)
    tl.store(final + pair * K * V + tile, now, mask=valid)


@triton.jit(do_not_specialize=("first", "rows", *_RUNTIME))
def backward(
    grad_outputs,  # [B,T,H,V]
    grad_final,  # [N,H,K,V], where FINAL says so
    trace,  # [H,chunks,K,V]
    q,  # as in `forward`, and so on
    k,
    v,
    g,
    beta,
    skip,
    spans,
    room,  # [programs,CHUNK,K,V]: the state before each step of a chunk
    grad_q,  # [slices,B,T,H,K]: results, to be added up; rows past a length are not written
    grad_k,  # [slices,B,T,H,K]
    grad_v,  # [B,T,H,V]
    grad_g,  # [slices,B,T,H], or [slices,B,T,H,K]
    grad_beta,  # [slices,B,T,H]
    grad_state,  # [N,H,K,V]
    first,  # the pair of a sequence and a head that the first program takes
    rows,  # B T
    steps,
    heads,
    key_heads,
    chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    DECAY: tl.constexpr,
    CORRECT: tl.constexpr,
    BETA: tl.constexpr,
    SKIP: tl.constexpr,
    LENGTHS: tl.constexpr,
    PACKED: tl.constexpr,
    FINAL: tl.constexpr,
):
    pair = first + tl.program_id(0).to(tl.int64)
    sequence, head = pair // heads, pair % heads
    slice = tl.program_id(1).to(tl.int64)
    keys, values = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (keys < K)[:, None] & (values < V)[None, :]
    tile = keys[:, None] * V + values[None, :]
    row, count = find(spans, sequence, steps, LENGTHS, PACKED)
    chunk = row // CHUNK + sequence if PACKED else sequence * ((steps + CHUNK - 1) // CHUNK)
    before = room + tl.program_id(0).to(tl.int64) * CHUNK * K * V + tile

    carried = tl.zeros([ROWS, COLUMNS], v.dtype.element_ty)  # the gradient of the state after a step
    if FINAL:
        carried = tl.load(grad_final + pair * K * V + tile, mask=valid, other=0.0)
    for back in range(0, (count + CHUNK - 1) // CHUNK):
        index = (count + CHUNK - 1) // CHUNK - 1 - back
        start = index * CHUNK
        end = tl.minimum(start + CHUNK, count)
        now = tl.load(trace + (head * chunks + chunk + index) * K * V + tile, mask=valid, other=0.0)
        for t in range(start, end):
            tl.store(before + (t - start) * K * V, now, mask=valid)
            place = (row + t) * heads + head
            of_key = ((row + t) * key_heads + head // (heads // key_heads)) * K + keys
            key = tl.load(k + of_key, mask=keys < K, other=0.0)
            value = tl.load(v + place * V + values, mask=values < V, other=0.0)
            now = fade(now, g, place, keys, K, DECAY)
            _, written = write(now, key, value, beta, place, CORRECT, BETA)
            now += key[:, None] * written[None, :]
        tl.debug_barrier()  # another thread may have written what this one reads
        for step in range(0, end - start):
            t = end - 1 - step
            place = (row + t) * heads + head
            of_key = ((row + t) * key_heads + head // (heads // key_heads)) * K + keys
            key = tl.load(k + of_key, mask=keys < K, other=0.0)
            query = tl.load(q + of_key, mask=keys < K, other=0.0)
            value = tl.load(v + place * V + values, mask=values < V, other=0.0)
            outer = tl.load(grad_outputs + place * V + values, mask=values < V, other=0.0)
            kept = fade(tl.load(before + (t - start) * K * V, mask=valid, other=0.0), g, place, keys, K, DECAY)
            error, written = write(kept, key, value, beta, place, CORRECT, BETA)

            of_head = (slice * rows + row + t) * heads + head
            carried += SCALE * query[:, None] * outer[None, :]
            of_query = SCALE * times(kept + key[:, None] * written[None, :], outer)
            tl.store(grad_q + of_head * K + keys, of_query, mask=keys < K)
            grad_error = transposed_times(carried, key)
            grad_key = times(carried, written)
            if BETA:
                tl.store(grad_beta + of_head, tl.sum(grad_error * error, axis=0))
                grad_error *= tl.load(beta + place)
            grad_value = grad_error
            if SKIP:
                grad_value += tl.load(skip + head) * outer
            tl.store(grad_v + place * V + values, grad_value, mask=values < V)
            if CORRECT:
                carried -= key[:, None] * grad_error[None, :]
                grad_key -= times(kept, grad_error)
            tl.store(grad_k + of_head * K + keys, grad_key, mask=keys < K)
            if DECAY == "head":
                tl.store(grad_g + of_head, tl.sum(tl.sum(carried * kept, axis=1), axis=0))
            if DECAY == "channel":
                tl.store(grad_g + of_head * K + keys, tl.sum(carried * kept, axis=1), mask=keys < K)
            carried = fade(carried, g, place, keys, K, DECAY)
        tl.debug_barrier()  # the next chunk's states come to the same place
    tl.store(grad_state + pair * K * V + tile, carried, mask=valid)
