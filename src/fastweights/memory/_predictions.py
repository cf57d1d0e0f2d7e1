"""What an affine output gives at every entry of a memory, computed again when the weights change."""

import math

import numpy as np
import torch
from torch import Tensor

from fastweights.memory.episodic import EpisodicMemory

PART = 64  # classes, of which some thousand entries stay near the processor
_LOGITS = 2**24  # computed at once


class Predictions:
    """Rows that stay where they are while entries come and go around them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.stored = torch.empty(0, 0, 0)  # [parts,rows,width]
        self._of: tuple[object, ...] = ()  # what they are of, but for the numbers in the weights
        self._weights: list[Tensor] = []  # copies of those
        self._numbers = np.empty(0, np.int64)  # of the entries that have a row, ascending
        self._rows = np.empty(0, np.int64)  # of each of those
        self._at = torch.empty(0, dtype=torch.int64)

    # Made so that what begins under inference mode can go on outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def rows(self, store: EpisodicMemory, weight: Tensor, bias: Tensor | None, *, softmax: bool) -> Tensor | None:
        """The row of every entry of the memory, [entries] in their order; None where there is no room for them.

        Of the softmax, in parts of 64 classes, or of the outputs as they are, in one part.
        """
        width = PART if softmax else len(weight)
        shape = -(-len(weight) // width), store.capacity, width
        if math.prod(shape) * weight.element_size() > self.most_bytes:
            return None
        weights = [weight] if bias is None else [weight, bias]
        now = (store, store._state.ring.made, softmax, weight.dtype, weight.device, weight.shape)
        if now != self._of or not _equal(weights, self._weights):
            self._of = now
            self._weights = [tensor.clone() for tensor in weights]
            self.stored = weight.new_zeros(shape)
            self._numbers = self._rows = np.empty(0, np.int64)
        numbers = store.numbers.numpy()
        if not np.array_equal(numbers, self._numbers):
            self._follow(store, numbers, weight, bias, softmax)
        return self._at

    def _follow(
        self, store: EpisodicMemory, numbers: np.ndarray, weight: Tensor, bias: Tensor | None, softmax: bool
    ) -> None:
        stays = np.isin(self._numbers, numbers, assume_unique=True)
        kept, rows = self._numbers[stays], self._rows[stays]
        new = ~np.isin(numbers, kept, assume_unique=True)
        free = np.ones(self.stored.shape[1], bool)
        free[rows] = False
        chosen = np.flatnonzero(free)[: int(new.sum())]
        placed = np.empty(len(numbers), np.int64)
        placed[~new], placed[new] = rows, chosen
        keys = store._state.ring.keys_at(torch.as_tensor(np.flatnonzero(new), device=store.device)).to(weight.dtype)
        size = max(1, _LOGITS // len(weight))
        for first in range(0, len(keys), size):
            part = torch.as_tensor(chosen[first : first + size], device=weight.device)
            found = torch.nn.functional.linear(keys[first : first + size], weight, bias)
            self.stored.index_copy_(1, part, self._in_parts(found.softmax(1) if softmax else found))
        self._numbers, self._rows = numbers, placed
        self._at = torch.as_tensor(placed, device=weight.device)

    def _in_parts(self, found: Tensor) -> Tensor:
        """[n,V] -> [parts,n,width]"""
        parts, _, width = self.stored.shape
        padded = torch.nn.functional.pad(found, (0, parts * width - found.shape[1]))
        return padded.view(len(found), parts, width).transpose(0, 1)


def _equal(weights: list[Tensor], copies: list[Tensor]) -> bool:
    """Number by number: torch does not count writes through `.data`, and they may keep any sum."""
    return len(weights) == len(copies) and all(map(torch.equal, weights, copies))
