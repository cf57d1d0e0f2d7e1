"""The short convolution in plain PyTorch: the definition that the kernel is checked against.

    y_t = f(bias + sum over k of weight[:, W-1-k] x_{t-k})        of each channel, k from 0 to W - 1

x_{t-k} counts as zero where another sequence starts after it, up to step t. f is silu, or nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class ShortInputs(NamedTuple):
    """The tensors of a short convolution, in the order in which the reference and the kernel take them."""

    x: Tensor  # [B,T,C]
    weight: Tensor  # [C,W]
    bias: Tensor | None  # [C]; None is zero
    last: Tensor | None  # [B,W-1,C]: the inputs before x; None is zeros
    starts: Tensor | None  # bool [B,T]: the steps before which another sequence begins


def convolve(inputs: ShortInputs, silu: bool) -> tuple[Tensor]:
    """Return the outputs [B,T,C]."""
    x, weight, bias, last, starts = inputs
    (batch, steps, features), taps = x.shape, weight.shape[1]
    before = x.new_zeros(batch, taps - 1, features) if last is None else last
    whole = torch.cat((before, x), 1)
    sequence = None if starts is None else torch.cat((starts.new_zeros(batch, taps - 1), starts), 1).cumsum(1)
    y = x.new_zeros(features) if bias is None else bias
    # A product and a sum a step: torch's grouped convolution takes longer, most of all for a single step.
    for index in range(taps):
        now = whole[:, index : index + steps]
        if sequence is not None and index < taps - 1:
            same = sequence[:, index : index + steps] == sequence[:, taps - 1 :]
            now = torch.where(same.unsqueeze(2), now, torch.zeros_like(now))  # NaN must not go on either
        y = torch.addcmul(y, now, weight[:, index])
    return (F.silu(y) if silu else y,)
