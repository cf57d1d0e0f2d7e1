"""The activations and labels that a head remembers between a loss and the step of the optimizer."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import Variable

# Which gradient tensor a weight has, and how often it was written to; None where it has none.
_Mark = tuple[int, int] | None


@dataclass(eq=False)
class _Batch:
    activations: Tensor  # [n,d], detached
    labels: Tensor  # [n] int64, a copy
    version: int  # of the activations' memory: whether somebody has written into it since
    backward: int | None = None  # the backward pass that the loss took part in
    before: _Mark = None  # the weight's gradient as that pass began
    accumulated: bool = False  # whether the pass has added to the weight's gradient


class Recorded:
    """What the losses since the last step were computed of, each once, and only while its gradient is wanted.

    A batch counts from its loss on, except inside a backward pass: what activation checkpointing computes again there
    counts when its own loss is differentiated, which happens to the one form of checkpointing that did not record at
    first, and not to the other.
    """

    def __init__(self) -> None:
        self._batches: list[_Batch] = []
        self._after: _Mark = None  # the weight's gradient as the last backward pass ended

    def add(self, activations: Tensor, labels: Tensor, loss: Tensor, weight: Tensor) -> None:
        """Remember activations [n,d] and labels [n] of a loss that was computed with `weight`."""
        # A buffer of labels may be filled again before the step.
        batch = _Batch(activations.detach(), labels.clone(), activations._version)
        remembered = len(labels) > 0  # one of none is followed only for what its gradient does to the weight's
        if remembered and _backward() is None:
            self._batches.append(batch)

        def differentiated(_: Tensor) -> None:
            batch.backward, batch.before, batch.accumulated = _backward(), _mark(weight), False
            earlier = [each for each in self._batches if each.accumulated]
            if earlier and self._thrown_away(weight):
                # An overflow under gradient scaling, or a batch that the caller gave up: what those gradients were
                # computed of goes with them.
                self._batches = [each for each in self._batches if each not in earlier]
            if remembered and batch not in self._batches:
                self._batches.append(batch)
            Variable._execution_engine.queue_callback(lambda: self._ended(weight, batch.backward))

        loss.register_hook(differentiated)  # type: ignore[no-untyped-call]

    def _ended(self, weight: Tensor, backward: int | None) -> None:
        self._after = _mark(weight)
        for batch in self._batches:
            if batch.backward == backward:
                batch.accumulated = batch.before != self._after

    def _thrown_away(self, weight: Tensor) -> bool:
        """Whether the gradients of earlier backward passes are gone: they were replaced, or overwritten by zeros."""
        if weight.grad is None:
            return True
        # Unscaling and clipping write to them too: only then are the numbers themselves looked at.
        return _mark(weight) != self._after and not bool(weight.grad.any())

    def take(self, weight: Tensor, by: Literal["hand", "step"]) -> tuple[list[Tensor], list[Tensor]]:
        """Hand over the activations and labels, and forget them.

        Those whose losses have added to the weight's gradient; where there are none, those whose gradient was asked for
        otherwise (`torch.autograd.grad`); by hand, where there are neither, all.

        Raises:
            RuntimeError: activations were written over since their loss.
        """
        batches, self._batches = self._batches, []
        given_up = by == "step" and weight.grad is None
        if _backward() is not None:  # a step within the backward pass, whose end is not known yet
            for batch in batches:
                batch.accumulated = batch.accumulated or (batch.backward is not None and batch.before != _mark(weight))
        accumulated = [each for each in batches if each.accumulated and not given_up]
        asked_for = [each for each in batches if each.backward is not None and not each.accumulated and not given_up]
        batches = accumulated or asked_for or (batches if by == "hand" else [])
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


def _mark(weight: Tensor) -> _Mark:
    return None if weight.grad is None else (id(weight.grad), weight.grad._version)
