"""The C++ kernels of a softmax that adapts along a stream: says which tensors they take, then passes pointers.

Tensors are contiguous.
"""

import ctypes

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.nearest import product_error, relative_slack
from fastweights.ops.stream.reference import CLOSE, Pulls, Search, StreamRows


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


def predict(logits: Tensor, predictions: Tensor, first: int) -> Tensor:
    """Store the softmax of logits [T,V], which are overwritten."""
    normalisers = logits.new_empty(len(logits))
    problem = _Predict(*logits.shape, predictions.shape[1], first)
    tensors = _native.point(_Predicted, logits, normalisers, predictions)
    _native.call("stream", "predict", "predictions", predictions, problem, tensors)
    return normalisers


def find(products: Tensor, rows: StreamRows, search: Search) -> Pulls:
    """Find the nearest entries of each position."""
    positions, neighbours = len(products), search.neighbours
    found = Pulls(
        torch.empty(positions, neighbours, dtype=torch.int32),
        products.new_empty(positions, neighbours),
        torch.empty(positions, neighbours, dtype=torch.int64),
        torch.empty(positions, dtype=torch.int32),
    )
    rounding, slack = product_error(rows.keys), relative_slack(rows.keys.dtype)
    problem = _Find(
        positions=positions,
        rows=len(rows.keys),
        size=rows.keys.shape[1],
        threads=torch.get_num_threads(),
        close=CLOSE,
        rounding=rounding,
        slack=slack,
        **search._asdict(),
    )
    tensors = _native.point(_Found, products, *rows[:3], *found)
    _native.call("stream", "find", "products", products, problem, tensors)
    return found


def adapt(pulls: Pulls, rows: StreamRows, *, first: int, classes: int) -> Tensor:
    """Score the own labels of the positions."""
    positions, most = pulls.offsets.shape
    changes = pulls.pulls.new_empty(positions)
    problem = _Adapt(positions, classes, len(rows.keys), first, most, torch.get_num_threads())
    tensors = _native.point(_Adapted, rows.labels, rows.predictions, *pulls, changes)
    _native.call("stream", "adapt", "predictions", rows.predictions, problem, tensors)
    return changes


def subtract(outputs: Tensor, predictions: Tensor, nearest: Tensor, pulls: Tensor) -> None:
    """Subtract stored rows."""
    _, count, width = predictions.shape
    problem = _Subtract(*outputs.shape, count, nearest.shape[1], torch.get_num_threads(), width)
    tensors = _native.point(_Subtracted, predictions, nearest, pulls, outputs)
    _native.call("stream", "subtract", "predictions", predictions, problem, tensors)
