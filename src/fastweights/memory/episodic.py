"""The episodic memory of Sprechmann et al. 2018: keys and values, the oldest overwritten, the nearest found."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.memory import _checks
from fastweights.memory._exact import nearest
from fastweights.memory._saved import Saved
from fastweights.memory._state import State
from fastweights.memory.neighbours import Neighbours, check_epsilon, kernel_weights


class EpisodicMemory(Saved):
    """The last `capacity` keys and their values, searched by exact Euclidean distance (Sprechmann et al. 2018, 2.1).

    The memory is a list in the order of writing: index 0 is the oldest entry, `write` appends and the oldest entries
    make room, `remove` closes the gap. Keys and values are copies that no gradient flows through.

    What is written under a tag can be undone: the memory is then as if it had never been written, so that entries that
    it overwrote are back. Until `keep` or `undo` closes a tag, the entries that its writes overwrote are held aside: at
    most as many as were written under it, and at most `capacity` (twice that between two clearances, and 1,024).

    In memory only, unless it was made by `open`: then every change is on the disk when the method returns.

    Args:
        capacity: N, the greatest number of entries.
        key_size: d.
        value_shape: of one value; () for a class.
        value_dtype: of the values; what is written must fit into it.
        dtype: of the keys: float16, bfloat16, float32 or float64. Distances are float32, or float64 for float64.
        device: of both.

    Raises:
        ValueError: a size that is not a positive integer, or keys that are not floating point.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> store = memory.EpisodicMemory(capacity=3, key_size=2)
        >>> store.write(torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]), torch.tensor([10, 11, 12]))
        >>> store.write(torch.tensor([[0.0, 1.0]]), torch.tensor([13]), tag="new")     # overwrites the oldest
        >>> found = store.search(torch.tensor([[0.0, 0.0]]), neighbours=2)             # queries [Q,d]
        >>> found.values.tolist(), found.distances.tolist()
        ([[11, 13]], [[1.0, 1.0]])
        >>> store.undo("new")                                                          # and it is back
        >>> store.search(torch.tensor([[0.0, 0.0]]), neighbours=2).values.tolist()
        [[10, 11]]
    """

    def __init__(
        self,
        capacity: int,
        key_size: int,
        *,
        value_shape: tuple[int, ...] = (),
        value_dtype: torch.dtype = torch.long,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        device = torch.get_default_device() if device is None else torch.device(device)
        self._state = State(capacity, key_size, tuple(value_shape), value_dtype, dtype, device)
        self._folder = None

    # Changes

    def write(self, keys: Any, values: Any, tag: str | None = None) -> None:
        """Append entries; the oldest make room, and of more than `capacity` the last ones stay.

        Args:
            keys: [n,d] floating point, finite.
            values: [n,*value_shape].
            tag: a name under which the entries can be undone; several writes may share it.

        Raises:
            ValueError: a wrong shape, a value that does not fit the memory's dtype, or a key or value that is NaN,
                infinite or overflows, with its row; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed, here or there.
        """
        if tag is not None and not isinstance(tag, str):
            raise ValueError(f"a tag is a string, got {tag!r}")
        cast, lengths = _checks.vectors("keys", keys, self.key_size, self.dtype, self.device)
        stored = _checks.stored_values(values, len(cast), self.value_shape, self.value_dtype, self.device)
        if not len(cast):
            return
        change = {"change": "write", "count": len(cast), "tag": tag}
        self._change(change, [cast, stored], lambda: self._state.write(cast, stored, lengths, tag))

    def remove(self, indices: Any) -> None:
        """Forget entries for good, whatever is undone later; an entry that they once overwrote does not come back.

        Args:
            indices: [n] integers, rows of `keys`; one entry may be named more than once.

        Raises:
            ValueError: an index that there is not; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        found = torch.as_tensor(indices).detach().cpu()
        if found.numel() == 0:
            return
        if found.dtype == torch.bool or found.is_floating_point() or found.is_complex() or found.dim() > 1:
            raise ValueError(f"indices must be [n] integers, got {list(found.shape)} {found.dtype}")
        wrong = found[(found < 0) | (found >= len(self))]
        if len(wrong):
            raise ValueError(f"there is no entry {int(wrong[0])}: the memory holds {len(self)}, counted from 0")
        numbers = self._state.ring.ordered_numbers()
        self._remove(np.unique(numbers[found.numpy().reshape(-1)]))

    def remove_class(self, value: Any) -> int:
        """Forget every entry of a value, also those that an undo would have brought back; how many were in the memory.

        Args:
            value: [*value_shape]

        Raises:
            ValueError: a wrong shape, or a value that the memory cannot hold.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        wanted = _checks.stored_values(torch.as_tensor(value)[None], 1, self.value_shape, self.value_dtype, self.device)
        before = len(self)
        self._remove(self._state.of_value(wanted))
        return before - len(self)

    def undo(self, tag: str) -> None:
        """Make the memory what it would be had nothing been written under a tag, and close the tag.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        self._state.history.find(tag)
        self._change({"change": "undo", "tag": tag}, [], lambda: self._state.undo(tag))

    def keep(self, tag: str) -> None:
        """Make what was written under a tag final, and close the tag: what it overwrote is held no longer.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        self._state.history.find(tag)
        self._change({"change": "keep", "tag": tag}, [], lambda: self._state.keep(tag))

    def clear(self) -> None:
        """Forget everything, and close all tags.

        Raises:
            MemoryFileError: the disk refuses; nothing was changed.
        """
        self._change({"change": "clear"}, [], self._state.clear)

    def _remove(self, numbers: np.ndarray) -> None:
        if not len(numbers):
            return
        change = {"change": "remove", "count": len(numbers)}
        self._change(change, [torch.from_numpy(numbers)], lambda: self._state.remove(numbers))

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> "EpisodicMemory":
        """Move the memory to another device, or its keys to another dtype, in place; the memory itself is returned.

        Raises:
            ValueError: a key that the dtype cannot hold, or a dtype that is not that of the saved memory.
        """
        if self._folder is not None and dtype not in (None, self.dtype):
            raise ValueError(f"the saved memory has keys of {self.dtype}: load() it to convert it to {dtype}")
        self._state.to(self.device if device is None else torch.device(device), dtype or self.dtype)
        return self

    # Search

    def search(self, queries: Any, neighbours: int, *, epsilon: float = 1e-3) -> Neighbours:
        """The nearest entries by Euclidean distance, exactly, with the kernel weights of Sprechmann et al. 2018.

        Distances are sums of squared differences in float64, and of equal ones the lowest index (the oldest entry)
        comes first: what a loop over `keys` finds. The memory is gone through in blocks of at most 2^21 scores (2^25 on
        a GPU); scores that rounding makes doubtful are computed again. ::

            w_k = (1 / (epsilon + |h_k - q|^2)) / sum_j (1 / (epsilon + |h_j - q|^2))

        Args:
            queries: [Q,d] floating point, finite; compared in the memory's dtype.
            neighbours: K; all entries where there are fewer.
            epsilon: of the kernel.

        Returns:
            `Neighbours`: indices [Q,K], squared distances [Q,K], weights [Q,K], keys [Q,K,d] and values
            [Q,K,*value_shape], all copies, on the memory's device.

        Raises:
            ValueError: an empty memory, queries of another width or not finite, `neighbours` less than 1.
        """
        self._require_entries()
        count = min(_checks.positive("neighbours", neighbours), len(self))
        check_epsilon(epsilon)
        with torch.no_grad():
            cast, _ = _checks.vectors("queries", queries, self.key_size, self.dtype, self.device)
            indices, distances = nearest(self._state.ring, cast, count)
            return self._found(indices, distances, epsilon)

    def _require_entries(self) -> None:
        if not len(self):
            raise ValueError("the memory is empty: write() keys and values to it before search()")

    def _found(self, indices: Tensor, distances: Tensor, epsilon: float) -> Neighbours:
        """distances [Q,K] in full precision."""
        ring = self._state.ring
        return Neighbours(
            indices,
            distances.to(ring.lengths.dtype),
            kernel_weights(distances, epsilon).to(ring.lengths.dtype),
            ring.keys_at(indices),
            ring.values_at(indices),
        )
