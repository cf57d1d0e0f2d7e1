"""The activations and labels that a head remembers between a loss and the step of the optimizer.

Two questions are asked of torch's private interface, for which it has no public one: which backward pass this thread is
in, and when that pass ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed
from torch.autograd import Variable

from fastweights.processes import exchange

# The gradient tensor that a weight has, by id, and how often it was written to; None where it has none.
_Mark = tuple[int, int] | None


@dataclass(eq=False)
class _Batch:
    activations: Tensor  # [n,d], detached
    labels: Tensor  # [n] int64, a copy
    version: int  # version of the activations: it changes when somebody writes into them
    backward: int | None = None  # the backward pass that the loss took part in
    before: _Mark = None  # the weight's gradient as that pass began
    accumulated: bool = False  # whether the pass has added to the weight's gradient


class Recorder:
    """The batches of the losses since the last step, each once, and only while its gradient is wanted.

    A batch counts from its loss on. Inside a backward pass, where activation checkpointing computes a loss again, it
    counts when that loss is differentiated: this happens in the form of checkpointing (reentrant) whose first loss was
    computed without gradients and so not recorded, and not in the other.
    """

    def __init__(self) -> None:
        self._batches: list[_Batch] = []
        self._after: _Mark = None  # the weight's gradient as the last backward pass ended

    def add(self, activations: Tensor, labels: Tensor, loss: Tensor, weight: Tensor) -> None:
        """Remember activations [n,d] and labels [n] of a loss that was computed with `weight`."""
        # A buffer of labels may be filled again before the step.
        batch = _Batch(activations.detach(), labels.clone(), activations._version)
        remembered = len(labels) > 0  # an empty batch is followed only because its pass may touch the weight's gradient
        if remembered and _current_pass() is None:
            self._batches.append(batch)

        def follow(_: Tensor) -> None:
            batch.backward, batch.before, batch.accumulated = _current_pass(), _mark(weight), False
            earlier = [other for other in self._batches if other.accumulated]
            if earlier and self._gradient_is_gone(weight):
                # An overflow under gradient scaling, or a batch that the caller gave up: the batches of those
                # gradients go with them.
                self._batches = [other for other in self._batches if other not in earlier]
            if remembered and batch not in self._batches:
                self._batches.append(batch)
            Variable._execution_engine.queue_callback(lambda: self._end_pass(weight, batch.backward))

        loss.register_hook(follow)  # type: ignore[no-untyped-call]

    def _end_pass(self, weight: Tensor, backward: int | None) -> None:
        self._after = _mark(weight)
        for batch in self._batches:
            if batch.backward == backward:
                batch.accumulated = batch.before != self._after

    def _gradient_is_gone(self, weight: Tensor) -> bool:
        """Return whether the gradients of earlier backward passes were replaced, or overwritten by zeros."""
        if weight.grad is None:
            return True
        # Unscaling and clipping write to them too: only then are the numbers themselves looked at.
        return _mark(weight) != self._after and not bool(weight.grad.any())

    def take(self, weight: Tensor, by: Literal["hand", "step"]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the activations and labels of the batches that count, and forget all.

        The batches that count are those whose losses have added to the weight's gradient; where there are none, those
        whose gradient was asked for otherwise (`torch.autograd.grad`); by hand, where there are neither, all.

        Raises:
            RuntimeError: activations were changed in place since their loss.
        """
        batches, self._batches = self._batches, []
        abandoned = by == "step" and weight.grad is None
        if _current_pass() is not None:  # a step within the backward pass, whose end is not known yet
            for batch in batches:
                batch.accumulated = batch.accumulated or (batch.backward is not None and batch.before != _mark(weight))
        differentiated = [batch for batch in batches if batch.backward is not None and not abandoned]
        accumulated = [batch for batch in differentiated if batch.accumulated]
        batches = accumulated or differentiated or (batches if by == "hand" else [])
        for batch in batches:
            if batch.activations._version != batch.version:
                raise RuntimeError(
                    f"activations of shape {tuple(batch.activations.shape)} were changed in place after their loss: "
                    "give head.loss a tensor that stays as it is until the optimizer's step"
                )
        return [batch.activations for batch in batches], [batch.labels for batch in batches]

    def clear(self) -> None:
        """Forget all batches."""
        self._batches = []


def _current_pass() -> int | None:
    """Return which backward pass this thread is in, None outside: as torch.utils.checkpoint itself asks."""
    task: int = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _mark(weight: Tensor) -> _Mark:
    return None if weight.grad is None else (id(weight.grad), weight.grad._version)


def gather_batches(
    activations: Sequence[Tensor], labels: Sequence[Tensor], weight: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Gather the batches of all processes, in their order; a single process keeps its own as they are."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return list(activations), list(labels)
    # Activations and labels, whose number is the batch's; sums of all classes would be V x d.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    rows = torch.cat([weight.new_empty((0, weight.shape[1]), dtype=dtype), *(batch.to(dtype) for batch in activations)])
    targets = torch.cat([rows.new_empty(0, dtype=torch.int64), *labels])
    sizes = [targets.new_zeros(1) for _ in range(distributed.get_world_size())]
    exchange(distributed.all_gather, sizes, targets.new_tensor([len(targets)]))
    counts = [int(size) for size in sizes]
    return _gather_rows(rows, counts), _gather_rows(targets, counts)


def _gather_rows(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Gather a tensor of each process, with as many rows as `counts` says; they are sent padded to one size."""
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    exchange(distributed.all_gather, parts, padded)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]
