"""The loss of a head: what it may be given, and how it is computed where the logits are many."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Logits of a batch past which the loss is computed without ever holding them all, and at how many activations at once:
# a quarter faster than the plain loss at 33,278 and at 267,735 classes. Torch's own choice there is 1 to 16, for which
# every product reads all of the weights: seven times as slow.
LARGEST_LOGITS = 2**25
ROWS_AT_ONCE = 256


def cross_entropy(
    h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, /, *, label_smoothing: float, **told: Any
) -> Tensor:
    """That of activations [n,d] and labels [n], with the keywords of `torch.nn.functional.cross_entropy`."""
    large = len(labels) * len(weight) > LARGEST_LOGITS and not label_smoothing and not transformed()
    if large and hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=ROWS_AT_ONCE)
        return F.linear_cross_entropy(h, weight, labels, linear_bias=bias, options=options, **told)
    return F.cross_entropy(F.linear(h, weight, bias), labels, label_smoothing=label_smoothing, **told)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def checked(
    h: Tensor, target: Tensor, weight: Tensor, ignore_index: int, remembers: bool
) -> tuple[Tensor, Tensor] | None:
    """The activations [n,d] and labels [n] to remember, without those that are ignored; None for nothing.

    Raises:
        ValueError: h or target of another shape or dtype than a head with `weight` [V,d] takes, a target out of range,
            or, where they are to be remembered, activations that are not finite.
    """
    classes, width = weight.shape
    if h.shape[-1:] != (width,) or h.shape[:-1] != target.shape:
        raise ValueError(
            f"loss takes activations [...,{width}] and a target for each, got h {list(h.shape)} and target "
            f"{list(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"target must hold class indices, int64, got {target.dtype}")
    # One pass over the targets, and one over the activations, where all is well.
    lowest, highest = map(int, torch.aminmax(target)) if target.numel() else (0, 0)
    if lowest < 0 or highest >= classes:
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if bool(wrong.any()):
            index = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"target {int(target[index])} at {index} is not one of the {classes} classes, 0 to "
                f"{classes - 1}, nor ignore_index {ignore_index}"
            )
    if not remembers:
        return None
    h, labels = h.detach().reshape(-1, width), target.reshape(-1)
    if lowest <= ignore_index <= highest:
        kept = labels != ignore_index
        h, labels = h[kept], labels[kept]
    if not math.isfinite(float(h.sum(dtype=torch.promote_types(h.dtype, torch.float32)))):
        bad = (~torch.isfinite(h)).any(1)
        if bool(bad.any()):
            raise ValueError(
                f"activations hold NaN or infinity, in {int(bad.sum())} of {len(h)} rows, first for a target of "
                f"class {int(labels[bad][0])}: they would reach the weights. Lower the learning rate, or leave the "
                "batch out"
            )
    return h, labels


def transformed() -> bool:
    """Whether torch.func is at work: what it hands on stands for other tensors and must not be kept."""
    return torch._C._are_functorch_transforms_active()
