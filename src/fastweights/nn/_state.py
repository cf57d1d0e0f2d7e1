"""What a fast-weights layer carries on, its fast matrix formed when it is asked for."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Pair(NamedTuple):
    hidden: Tensor
    memory: Any  # a tensor, or an Unformed


class Unformed:
    """A fast matrix that nobody has asked for yet: H^2 numbers an example, most often never wanted.

    `form` makes it from tensors that must still hold what they held: `sources`.
    """

    def __init__(self, form: Callable[[], Tensor], *sources: Tensor | None) -> None:
        self.form: Callable[[], Tensor] | None = form
        self.sources = [(tensor, tensor._version) for tensor in sources if tensor is not None]
        self.grad = torch.is_grad_enabled()
        self.formed: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.form is not None:
            if any(tensor._version != version for tensor, version in self.sources):
                raise RuntimeError(
                    "state.memory is formed when it is first asked for, from the layer's outputs and the state that it "
                    "began with, and one of them has been changed in place since: ask for it before, or change a copy"
                )
            with torch.set_grad_enabled(self.grad):
                self.formed = self.form()
            self.form, self.sources = None, []  # what it was made from is free again
        assert self.formed is not None
        return self.formed

    def map(self, function: Callable[[Tensor], Tensor]) -> "Unformed":
        return Unformed(lambda: function(self.tensor()))


class FastWeightsState(_Pair):
    """What a fast-weights layer carries from one piece of a sequence to the next.

    `memory` is the fast matrix A(t-1): everything before `hidden`, which the next step writes before it reads.
    With several layers both have a leading layer axis; for an unbatched sequence both lack the batch axis.
    A named pair of tensors: `hidden, memory = state`. The memory that a layer gives is formed from its outputs when it
    is first asked for; a RuntimeError says so if they have been changed in place before.

    Examples:
        >>> import torch
        >>> from fastweights.nn import FastWeightsState
        >>> state = FastWeightsState(hidden=torch.zeros(2, 5), memory=torch.zeros(2, 5, 5))
        >>> state.detach().memory.shape
        torch.Size([2, 5, 5])
    """

    @property
    def memory(self) -> Tensor:
        """The fast matrix, [B,H,H]."""
        memory = tuple.__getitem__(self, 1)
        return memory.tensor() if isinstance(memory, Unformed) else memory

    def detach(self) -> "FastWeightsState":
        """The same state, cut from the graph: for truncated backpropagation through time."""
        return FastWeightsState(self.hidden.detach(), map_memory(Tensor.detach, self))

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.hidden, self.memory))

    def __getitem__(self, index: Any) -> Any:
        return (self.hidden, self.memory)[index]

    def __repr__(self) -> str:
        return f"FastWeightsState(hidden={self.hidden!r}, memory={self.memory!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return FastWeightsState, (self.hidden, self.memory)


def map_memory(function: Callable[[Tensor], Tensor], state: FastWeightsState) -> Any:
    """The state's memory with a function applied to it, at once or when it is formed."""
    memory = tuple.__getitem__(state, 1)
    return memory.map(function) if isinstance(memory, Unformed) else function(memory)
