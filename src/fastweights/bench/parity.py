"""The rule of parity: a figure counts only while every rival that computes the same is within rounding of the truth."""

import math

import torch
from torch import Tensor

from fastweights.errors import FastWeightsError

# Half a unit in the last place of bfloat16, which the outputs under autocast are rounded to.
LEAST = {"float32": 1e-5, "bfloat16": 2.0**-8}
MOST_BYTES = 2**30  # the most bytes that a float64 reference may keep
_PIECE = 2**22


def distance(value: Tensor, true: Tensor) -> float:
    """Return |value - true| / |true|, or NaN where a value is."""
    # A piece at a time: the difference of large tensors, in float64, may not fit.
    pieces = zip(*(torch.split(tensor.reshape(-1), _PIECE) for tensor in (value, true)), strict=True)
    squares = sum(float((piece.double() - exact).square().sum()) for piece, exact in pieces)
    return math.sqrt(squares) / float(true.norm())


def allowed_error(eager: float, precision: str = "float32") -> float:
    """Return the most that a kernel may be off: 1e-5 (bfloat16: 2^-8), or three times what eager PyTorch is off.

    Examples:
        >>> allowed_error(1e-7), allowed_error(0.25)
        (1e-05, 0.75)
    """
    return max(LEAST[precision], 3 * eager)


def choose_examples(batch: int, bytes_each: float) -> Tensor:
    """Return the examples that the float64 reference is run on: all, or as many as fit, spread over the batch."""
    fitting = int(MOST_BYTES / bytes_each)
    return torch.linspace(0, batch - 1, min(batch, max(2, fitting))).round().long()


def parity_error(reason: str) -> FastWeightsError:
    """Return the exception that reports a rival which disagrees."""
    return FastWeightsError(f"parity is red, so nothing is timed: {reason}")
