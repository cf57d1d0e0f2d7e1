"""The C++ kernels of a softmax that adapts along a stream: says which tensors they take, then passes pointers.

Entries lie in a ring of rows: position i of the stream in row i modulo their number (csrc/stream.hpp). Tensors are
contiguous, and positions that are given together lie in consecutive rows.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops import _native


class Ring(NamedTuple):
    """What is remembered, a row for each position."""

    keys: Tensor  # [rows,d]
    lengths: Tensor  # [rows], squared
    labels: Tensor  # [rows] int64
    predictions: Tensor  # [parts,rows,classes of a part], the softmax at each; uint16 holds the upper half of a float32


class Neighbours(NamedTuple):
    """The rows that positions adapt to, and by how much."""

    offsets: Tensor  # [T,K] int32, places of their rows in a part, in bytes
    pulls: Tensor  # [T,K]
    ordered: Tensor  # [T,K] int64, a label above the place of its neighbour, ascending
    counts: Tensor  # [T] int32, how many of the K there are


def _define(integers: str, numbers: str = "") -> type[ctypes.Structure]:
    fields = [(name, ctypes.c_int64) for name in integers.split()]
    return type("Problem", (ctypes.Structure,), {"_fields_": fields + [(n, ctypes.c_double) for n in numbers.split()]})


_Predict = _define("positions classes rows first")
_Find = _define(
    "positions rows first neighbours size seen capacity bias threads relative", "rate epsilon close rounding slack"
)
_Subtract = _define("positions classes rows neighbours threads width")
_Adapt = _define("positions classes rows first neighbours threads")
_Predicted = _native.define_pointers("logits", "normalisers", "predictions")
_Found = _native.define_pointers("products", "keys", "lengths", "labels", "offsets", "pulls", "ordered", "counts")
_Adapted = _native.define_pointers("labels", "predictions", "offsets", "pulls", "ordered", "counts", "changes")

_Subtracted = _native.define_pointers("predictions", "nearest", "pulls", "outputs")


def unavailable(like: Tensor) -> str | None:
    """Return why the kernels cannot take tensors like this one, or None when they can."""
    return _native.unavailable(like)


def part_classes(dtype: torch.dtype) -> int:
    """Return how many classes a part of the predictions has: as many as fill a line of a processor's caches."""
    return 64 // dtype.itemsize


def predict(logits: Tensor, predictions: Tensor, first: int) -> Tensor:
    """Store the softmax of logits [T,V] in the rows from `first` on, and return its normalisers [T].

    The logits are overwritten.
    """
    normalisers = logits.new_empty(len(logits))
    problem = _Predict(*logits.shape, predictions.shape[1], first)
    tensors = _native.point(_Predicted, logits, normalisers, predictions)
    _native.call("stream", "predict", "predictions", predictions, problem, tensors)
    return normalisers


def find(
    products: Tensor,
    ring: Ring,
    *,
    first: int,
    seen: int,
    capacity: int,
    neighbours: int,
    bias: bool,
    rate: float,
    relative: bool,
    epsilon: float,
    close: float,
    rounding: float,
    slack: float,
) -> Neighbours:
    """Return the nearest of the last entries before each of the positions in the rows from `first` on.

    Of those that are equally far the oldest are taken.

    Args:
        products: of the positions' keys with those of all rows, [T,rows]; those out of sight may be anything.
        ring: what is remembered, these positions too.
        first: the row of the first position.
        seen: the positions before it, ever.
        capacity: how many of the last positions each may see.
        neighbours: K, at most the capacity.
        bias: the softmax has one.
        rate: of the step.
        relative: the rate is in units of one over the neighbours' weighted mean squared length.
        epsilon: of the kernel.
        close: of the squared length of a key: squared distances below it are computed by difference.
        rounding: of a product, relative to the lengths of its keys.
        slack: of a key's length: distances that differ by less are equal.
    """
    positions, (rows, size) = len(products), ring.keys.shape
    found = Neighbours(
        torch.empty(positions, neighbours, dtype=torch.int32),
        products.new_empty(positions, neighbours),
        torch.empty(positions, neighbours, dtype=torch.int64),
        torch.empty(positions, dtype=torch.int32),
    )
    threads = torch.get_num_threads()
    sizes = positions, rows, first, neighbours, size, seen, capacity, int(bias), threads, int(relative)
    problem = _Find(*sizes, rate, epsilon, close, rounding, slack)
    tensors = _native.point(_Found, products, *ring[:3], *found)
    _native.call("stream", "find", "products", products, problem, tensors)
    return found


def adapt(neighbours: Neighbours, ring: Ring, *, first: int, classes: int) -> Tensor:
    """Return what log p of their own labels gains, of the positions in the rows from `first` on, [T].

    Of predictions that are rounded, uint16, it is log p itself: the softmax that adapts is the rounded one.

    Args:
        neighbours: of these positions.
        ring: what is remembered, these positions too.
        first: the row of the first position.
        classes: V.
    """
    positions, most = neighbours.offsets.shape
    changes = neighbours.pulls.new_empty(positions)
    problem = _Adapt(positions, classes, len(ring.keys), first, most, torch.get_num_threads())
    tensors = _native.point(_Adapted, ring.labels, ring.predictions, *neighbours, changes)
    _native.call("stream", "adapt", "predictions", ring.predictions, problem, tensors)
    return changes


def subtract(outputs: Tensor, predictions: Tensor, nearest: Tensor, pulls: Tensor) -> None:
    """Subtract from outputs [T,V] the stored rows [T,K] int64, weighted by pulls [T,K]; a pull of 0 skips its row.

    A part of the predictions has `part_classes` or four times as many.
    """
    _, rows, width = predictions.shape
    problem = _Subtract(*outputs.shape, rows, nearest.shape[1], torch.get_num_threads(), width)
    tensors = _native.point(_Subtracted, predictions, nearest, pulls, outputs)
    _native.call("stream", "subtract", "predictions", predictions, problem, tensors)
