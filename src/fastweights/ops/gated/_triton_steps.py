"""The steps that the Triton kernels of the gated recurrence are made of: layers, what a step writes, their gradients.

A fast matrix is a tile of DOWN x ACROSS numbers. F1 lies in it as it is, F2 turned: then what the first layer gives
lies as the second reads it, and what that gives as the first reads it, and no vector ever has to be turned. Places
beyond a vector's or a matrix's own size are zero; masking is a selection or a load that does not happen, never a
product with zero, which would let NaN through.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import tanh


@triton.jit
def wide(number):
    """As 64 bits; in the interpreter what a loop counts is no tensor."""
    return number * tl.full((), 1, tl.int64)


@triton.jit
def valid_steps(lengths, b, steps, LENGTHS: tl.constexpr):
    if LENGTHS:
        return tl.minimum(tl.maximum(tl.load(lengths + b), 0), steps.to(tl.int64)).to(tl.int32)
    else:
        return steps


@triton.jit
def vector(pointer, places, NUMBERS: tl.constexpr):
    """The first NUMBERS places of a block, zero beyond."""
    return tl.load(pointer + places, mask=places < NUMBERS, other=0.0)


@triton.jit
def spread(down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Where a tile's numbers lie in a [ROWS,COLUMNS] matrix, or a [COLUMNS,ROWS] one that is turned; and which do."""
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
    """LN(tanh(sums)), and for the backward pass one over the deviation, and the mean."""
    values = tanh(sums)
    mean = tl.sum(values, axis=0) / SIZE
    centred = tl.where(places < SIZE, values - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / SIZE + EPS)
    return centred * inverse, inverse, mean


@triton.jit
def undo_layer(gradient, normal, inverse, mean, places, SIZE: tl.constexpr):
    """The gradient of `sums` from that of normal = LN(tanh(sums))."""
    values = normal / inverse + mean
    center = tl.sum(gradient, axis=0) / SIZE
    along = tl.sum(gradient * normal, axis=0) / SIZE
    pulled = (gradient - center - along * normal) * inverse * (1.0 - values * values)
    return tl.where(places < SIZE, pulled, 0.0)


@triton.jit
def parts(update, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr):
    """Of what a step writes: its factor and its gate down a tile, and both across it.

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
    """G * H + (1 - G) * F."""
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
    """From C = dL/d(G * H + (1 - G) * F) its share of dL/dF; the gradient of the update's parts goes to memory.

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
