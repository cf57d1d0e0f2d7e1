"""The softmax of an affine output at every entry of a memory, computed again when the weights change."""

import numpy as np
import torch
from torch import Tensor

from fastweights.memory.episodic import EpisodicMemory

_LOGITS = 2**24  # computed at once


class Predictions:
    """Rows that stay where they are while entries come and go around them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.stored = torch.empty(0, 0)  # [rows,V]
        self._of: tuple[object, ...] = ()  # the weights that they are of
        self._numbers = np.empty(0, np.int64)  # of the entries that have a row, ascending
        self._rows = np.empty(0, np.int64)  # of each of those
        self._at = torch.empty(0, dtype=torch.int64)

    def rows(self, store: EpisodicMemory, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The row of every entry of the memory, [entries] in their order; None where there is no room for them."""
        needed = store.capacity * len(weight) * weight.element_size()
        if needed > self.most_bytes:
            return None
        now = (store, weight.dtype, weight.device, _marks(weight), None if bias is None else _marks(bias))
        if now != self._of:
            self._of = now
            self.stored = weight.new_zeros(store.capacity, len(weight))
            self._numbers = self._rows = np.empty(0, np.int64)
        numbers = store.numbers.numpy()
        if not np.array_equal(numbers, self._numbers):
            self._follow(store, numbers, weight, bias)
        return self._at

    def _follow(self, store: EpisodicMemory, numbers: np.ndarray, weight: Tensor, bias: Tensor | None) -> None:
        stays = np.isin(self._numbers, numbers, assume_unique=True)
        kept, rows = self._numbers[stays], self._rows[stays]
        new = ~np.isin(numbers, kept, assume_unique=True)
        free = np.ones(len(self.stored), bool)
        free[rows] = False
        chosen = np.flatnonzero(free)[: int(new.sum())]
        placed = np.empty(len(numbers), np.int64)
        placed[~new], placed[new] = rows, chosen
        keys = store._state.ring.keys_at(torch.as_tensor(np.flatnonzero(new), device=store.device)).to(weight.dtype)
        size = max(1, _LOGITS // len(weight))
        for first in range(0, len(keys), size):
            part = torch.as_tensor(chosen[first : first + size], device=weight.device)
            logits = torch.nn.functional.linear(keys[first : first + size], weight, bias)
            self.stored[part] = logits.softmax(1)
        self._numbers, self._rows = numbers, placed
        self._at = torch.as_tensor(placed, device=weight.device)


def _marks(tensor: Tensor) -> tuple[object, ...]:
    """What tells that a tensor was written to: its place, the writes that torch counts, and for others its sum."""
    return tensor.data_ptr(), tensor._version, tuple(tensor.shape), float(tensor.sum(dtype=torch.float64))
