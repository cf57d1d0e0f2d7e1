"""The smoothing of Hebbian Softmax: Rae et al. 2018, "Fast parametric learning with activation memorization"."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.errors import KernelError
from fastweights.ops.hebbian import cpu, reference
from fastweights.ops.hebbian.reference import COUNTINGS, Counting, Targets

__all__ = ["COUNTINGS", "IMPLEMENTATIONS", "Counting", "Targets", "smooth"]

IMPLEMENTATIONS = ("auto", "reference", "cpu")


def smooth(
    weight: Tensor,
    counts: Tensor,
    activations: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    gamma: float,
    limit: float,
    counting: Counting = "literal",
    largest_norm: float = 10.0,
    targets: Targets | None = None,
    impl: str = "auto",
) -> None:
    """Draw the classes of one step to their mean activations, in place, and count them (Rae et al. 2018, algorithm 1).

    Args:
        weight: theta, [V,d], a row for each class; it changes.
        counts: occurrences of each class so far, [V] int64; they change.
        activations: the activations of every batch of the step, [n,d].
        labels: the labels of every batch, [n] int64, each from 0 to V - 1.
        gamma: the least share that a class takes of its mean activation, 0 to 1.
        limit: the number of occurrences from which a class is no longer drawn.
        counting: "literal", "running_mean" or "constant", as in `nn.HebbianSoftmax`.
        largest_norm: the largest norm of a mean activation; a longer one is shortened.
        targets: a function that returns what the classes are drawn to in place of their mean activations, from these
            [C,d], weight [V,d] and the classes [C].
        impl: "auto", "reference" or "cpu", which takes contiguous float32 and float64 without `targets`.

    Raises:
        ValueError: `impl` or `counting` is unknown, or a shape does not fit.
        IndexError: a label is no class.
        KernelError: the kernel was asked for by name and cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.hebbian import smooth
        >>> weight, counts = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
        >>> smooth(weight, counts, [torch.tensor([[1.0, 2.0], [3.0, 4.0]])], [torch.tensor([1, 1])],
        ...        gamma=0.1, limit=100)
        >>> weight.tolist(), counts.tolist()
        ([[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]], [0, 2, 0])
    """
    check_choice(IMPLEMENTATIONS, impl=impl)
    check_choice(COUNTINGS, counting=counting)
    if not activations:
        return
    h, classes = _concatenate(activations), _concatenate(labels)
    if weight.dim() != 2 or counts.shape != weight.shape[:1]:
        raise ValueError(f"weight must be [V,d] and counts [V], got {list(weight.shape)} and {list(counts.shape)}")
    if h.dim() != 2 or h.shape[1] != weight.shape[1] or classes.shape != h.shape[:1]:
        raise ValueError(
            f"activations must be [n,{weight.shape[1]}] and labels [n], got {list(h.shape)} and {list(classes.shape)}"
        )
    if counts.dtype != torch.int64 or classes.dtype != torch.int64:
        raise ValueError(f"counts and labels must be int64, got {counts.dtype} and {classes.dtype}")
    if len(classes) == 0:
        return
    reason = cpu.unavailable(weight, counts, h, classes) if targets is None else "it draws to the mean activations only"
    if impl == "cpu" and reason is not None:
        raise KernelError(f"impl='cpu' was asked for, but {reason}")
    if impl == "reference" or reason is not None:
        if targets is None:

            def targets(means: Tensor, *_: Tensor) -> Tensor:
                return reference.bounded(means, largest_norm)

        with torch.no_grad():
            reference.smooth(weight, counts, h, classes, gamma, limit, counting, targets)
    else:
        cpu.smooth(weight, counts, h, classes, gamma, limit, counting, largest_norm)


def _concatenate(batches: Sequence[Tensor]) -> Tensor:
    return batches[0] if len(batches) == 1 else torch.cat(list(batches))
