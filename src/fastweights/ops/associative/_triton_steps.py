"""The steps that the Triton kernels of the associative recurrence are made of: products, attention, norm, activation.

A vector has BLOCK elements, a power of two; what lies beyond SIZE is zero, so that sums need no mask. Masking is a
selection or a load that does not happen, never a product with zero, which would let NaN through. All arithmetic is that
of the tensors' own dtype: sums of products, not `tl.dot`, so that no TF32 can enter.
"""

import triton
import triton.language as tl

from fastweights.ops._triton_steps import tanh, times, transposed_times


@triton.jit
def square(matrix, columns, SIZE: tl.constexpr):
    """A [SIZE,SIZE] matrix as a [BLOCK,BLOCK] tile."""
    valid = (columns < SIZE)[:, None] & (columns < SIZE)[None, :]
    return tl.load(matrix + columns[:, None] * SIZE + columns[None, :], mask=valid, other=0.0)


@triton.jit
def stream(matrix, vector, columns, SIZE: tl.constexpr, PANEL: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The product of a matrix too large for registers, PANEL rows at a time.

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
def attend(v, rows, pitch, t, weights, columns, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """sum_{n <= t} weight[t-n] h(n) (h(n).v): symmetric, hence its own transpose. `rows` + n pitch points at h(n).

    Without a softmax between them, scores and mixture need each row only once.
    """
    total = tl.zeros_like(v)
    for start in range(0, t + 1, ROWS):
        n = start + tl.arange(0, ROWS)
        known = n <= t
        tile = tl.load(
            rows + n.to(tl.int64)[:, None] * pitch + columns[None, :],
            mask=known[:, None] & (columns < SIZE)[None, :],
            other=0.0,
        )
        weight = tl.load(weights + (t - n), mask=known, other=0.0)
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
    """(x - mean) / sqrt(variance + eps), and one over that root."""
    centred = tl.where(columns < SIZE, x - tl.sum(x, axis=0) / SIZE, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / SIZE + EPS)
    return centred * inverse, inverse


@triton.jit
def undo_activation(gradient, state, TANH: tl.constexpr):
    """The gradient of x from that of state = f(x), by the value of f."""
    if TANH:
        return gradient * (1.0 - state * state)
    else:
        return tl.where(state <= 0, 0.0, gradient)


@triton.jit
def undo_norm(gradient, slot, normals, inverses, columns, SIZE: tl.constexpr):
    """The gradient of the layer norm's input from that of its normalised vector, which is row `slot` of `normals`."""
    valid = columns < SIZE
    normal = tl.load(normals + slot * SIZE + columns, mask=valid, other=0.0)
    mean = tl.sum(gradient, axis=0) / SIZE
    along = tl.sum(gradient * normal, axis=0) / SIZE
    return tl.load(inverses + slot) * tl.where(valid, gradient - mean - along * normal, 0.0), normal
