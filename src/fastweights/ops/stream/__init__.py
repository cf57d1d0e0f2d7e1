"""A softmax that adapts at each position of a stream to those before it: Sprechmann et al. 2018, with one step."""

from types import ModuleType

from torch import Tensor

from fastweights.ops.stream import cpu, reference
from fastweights.ops.stream.cpu import unavailable
from fastweights.ops.stream.reference import CLOSE, Pulls, Search, StreamRows, Weighed, part_classes, weigh

__all__ = [
    "CLOSE",
    "Pulls",
    "Search",
    "StreamRows",
    "Weighed",
    "adapt",
    "find",
    "part_classes",
    "predict",
    "subtract",
    "weigh",
]


def _choose(like: Tensor) -> ModuleType:
    return cpu if unavailable(like) is None else reference


def predict(logits: Tensor, predictions: Tensor, first: int) -> Tensor:
    """Store the softmax of logits [T,V] in the rows from `first` on, and return its normalisers [T].

    The logits may be overwritten.
    """
    normalisers: Tensor = _choose(logits).predict(logits, predictions, first)
    return normalisers


def find(products: Tensor, rows: StreamRows, search: Search) -> Pulls:
    """Return what the nearest of the last entries before each of the positions pull.

    Of those that are equally far the oldest are taken.

    Args:
        products: of the positions' keys with those of all rows, [T,rows]; those out of sight may be anything.
        rows: what is remembered, these positions too.
        search: which positions look, what they may see, and the step.
    """
    pulls: Pulls = _choose(products).find(products, rows, search)
    return pulls


def adapt(pulls: Pulls, rows: StreamRows, *, first: int, classes: int) -> Tensor:
    """Return what log p of their own labels gains, of the positions in the rows from `first` on, [T].

    Of predictions that are rounded, uint16, it is log p itself: the softmax that adapts is the rounded one.

    Args:
        pulls: of these positions.
        rows: what is remembered, these positions too.
        first: the row of the first position.
        classes: V.
    """
    gains: Tensor = _choose(pulls.pulls).adapt(pulls, rows, first=first, classes=classes)
    return gains


def subtract(outputs: Tensor, predictions: Tensor, nearest: Tensor, pulls: Tensor) -> None:
    """Subtract from outputs [T,V] the stored rows [T,K] int64, weighted by pulls [T,K]; a pull of 0 skips its row.

    The kernels take parts of `part_classes`, or of four times as many.
    """
    takes = predictions.shape[2] in (width := part_classes(predictions.dtype), 4 * width)
    (_choose(outputs) if takes else reference).subtract(outputs, predictions, nearest, pulls)
