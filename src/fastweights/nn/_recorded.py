"""The activations and labels that a head remembers between a loss and the step of the optimizer."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class _Batch:
    activations: Tensor  # [n,d], detached
    labels: Tensor  # [n] int64
    version: int  # of the activations' memory: whether somebody has written into it since
    backward: int | None = None  # the backward pass that the loss took part in


class Recorded:
    """What the losses since the last step were computed of, each once, and only while its gradient is wanted.

    A batch counts from its loss on, except inside a backward pass: what activation checkpointing computes again there
    counts when its own loss is differentiated, which happens to the one form of checkpointing that did not record at
    first, and not to the other.
    """

    def __init__(self) -> None:
        self._batches: list[_Batch] = []

    def add(self, activations: Tensor, labels: Tensor, loss: Tensor, weight: Tensor) -> None:
        """Remember activations [n,d] and labels [n] of a loss that was computed with `weight`."""
        batch = _Batch(activations.detach(), labels, activations._version)
        if _backward() is None:
            self._batches.append(batch)
        if not loss.requires_grad:
            return

        def differentiated(_: Tensor) -> None:
            batch.backward = _backward()
            earlier = [each for each in self._batches if each.backward not in (None, batch.backward)]
            if earlier and _cleared(weight, labels):
                # The gradients of earlier passes were thrown away before a step: an overflow under gradient scaling, or
                # a batch that the caller gave up. What they were computed of goes with them.
                self._batches = [each for each in self._batches if each not in earlier]
            if batch not in self._batches:
                self._batches.append(batch)

        loss.register_hook(differentiated)  # type: ignore[no-untyped-call]

    def take(self) -> tuple[list[Tensor], list[Tensor]]:
        """Hand over the activations and labels, and forget them: of the losses that went backward, or of all if none.

        Raises:
            RuntimeError: activations were written over since their loss.
        """
        batches, self._batches = self._batches, []
        batches = [each for each in batches if each.backward is not None] or batches
        for batch in batches:
            if batch.activations._version != batch.version:
                raise RuntimeError(
                    f"activations of shape {tuple(batch.activations.shape)} were changed in place after their loss: "
                    "give head.loss a tensor that stays as it is until the optimizer's step"
                )
        return [batch.activations for batch in batches], [batch.labels for batch in batches]

    def clear(self) -> None:
        """Forget everything."""
        self._batches = []


def _backward() -> int | None:
    """Which backward pass this thread is in, None outside: as torch.utils.checkpoint itself finds out."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _cleared(weight: Tensor, labels: Tensor) -> bool:
    """Whether no gradient waits for a step, judged by the rows that these labels will pull at."""
    if not weight.requires_grad:
        return False
    return weight.grad is None or not bool(weight.grad[labels].any())
