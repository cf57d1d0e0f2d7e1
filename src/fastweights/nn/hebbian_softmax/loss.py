"""The loss of a Hebbian Softmax head: the check of its inputs, and cross entropy where the logits are many."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn.compiler import outside_graphs, torch_func_is_active
from fastweights.ops.autocast import autocast_is_on, without_autocast

# Logits of a batch past which the loss is computed without ever holding them all, and at how many activations at once:
# a quarter faster than the plain loss at 33,278 and at 267,735 classes, because it asks the system for less
# new memory in each step. Torch's own choice there is 1 to 16, for which every product reads all of the weights:
# seven times as slow.
LARGEST_LOGITS = 2**24
ROWS_AT_ONCE = 256

IGNORED = -100  # the target of activations that do not count, as everywhere in torch


def cross_entropy(
    h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, /, *, label_smoothing: float, **options: Any
) -> Tensor:
    """Compute the cross entropy of activations [n,d] and labels [n], with the options of torch's function."""
    # In one piece less is won: with 64 activations it took a fifth longer at 2^24 logits.
    most = LARGEST_LOGITS if len(labels) > ROWS_AT_ONCE else 2 * LARGEST_LOGITS
    large = len(labels) * len(weight) > most and not label_smoothing and not torch_func_is_active()
    if large and hasattr(F, "linear_cross_entropy"):
        chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=ROWS_AT_ONCE)
        # It does not know of autocast, under which the plain loss is in single precision, and would round its own.
        dtype = torch.promote_types(h.dtype, weight.dtype)
        if autocast_is_on(h.device.type):
            dtype = torch.promote_types(dtype, torch.float32)
        with without_autocast(h.device.type):
            bias = None if bias is None else bias.to(dtype)
            return F.linear_cross_entropy(
                h.to(dtype), weight.to(dtype), labels, linear_bias=bias, options=chunks, **options
            )
    return F.cross_entropy(F.linear(h, weight, bias), labels, label_smoothing=label_smoothing, **options)


def flatten(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten activations [...,d] and a target for each to [n,d] and [n]; no operation where they are flat already."""
    return (h, target) if target.dim() == 1 else (h.reshape(-1, h.shape[-1]), target.reshape(-1))


@outside_graphs
def check_inputs(h: Tensor, target: Tensor, weight: Tensor, ignore_index: int) -> bool:
    """Check activations and targets, and return whether some of the targets may be `ignore_index`.

    Raises:
        ValueError: h or target of another shape or dtype than a head with `weight` [V,d] takes, or a target out of
            range.
    """
    classes, width = weight.shape
    if h.shape[-1:] != (width,) or h.shape[:-1] != target.shape:
        raise ValueError(
            f"loss takes activations [...,{width}] and a target for each, got h {list(h.shape)} and target "
            f"{list(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"target must hold class indices, int64, got {target.dtype}")
    # One pass over the targets, where all is well.
    lowest, highest = map(int, torch.aminmax(target)) if target.numel() else (0, 0)
    if lowest < 0 or highest >= classes:
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if bool(wrong.any()):
            index = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"target {int(target[index])} at {index} is not one of the {classes} classes, 0 to "
                f"{classes - 1}, nor ignore_index {ignore_index}"
            )
    return lowest <= ignore_index <= highest


def select_batch(h: Tensor, labels: Tensor, loss: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Select the activations [n,d] and labels [n] to remember: those that are not ignored, none after an overflow.

    Raises:
        ValueError: activations are not finite.
    """
    h = h.detach()
    if ignore_index is not None:
        kept = labels != ignore_index
        h, labels = h[kept], labels[kept]
    # One number that is not finite makes all logits of its activation so, and the loss: a pass over h less.
    loss = loss.detach()
    if not math.isfinite((loss if loss.dim() == 0 else loss.sum()).item()):
        bad = (~torch.isfinite(h)).any(1)
        if bool(bad.any()):
            raise ValueError(
                f"activations hold NaN or infinity, in {int(bad.sum())} of {len(h)} rows, first for a target of "
                f"class {int(labels[bad][0])}: they would reach the weights. Lower the learning rate, or leave the "
                "batch out"
            )
        return h[:0], labels[:0]  # logits too large for the dtype: a step that gradient scaling will skip
    return h, labels
