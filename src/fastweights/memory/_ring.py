"""A ring buffer of keys and values whose entries stand in the order in which they were written."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.memory._checks import compute_dtype, squared_lengths

BLOCK = 2**22  # numbers that are moved at once


class Entries(NamedTuple):
    """Some entries, oldest first."""

    keys: Tensor  # [n,d]
    values: Tensor  # [n,*value_shape]
    numbers: np.ndarray  # [n] int64: the how manyth that was ever written
    tags: np.ndarray  # [n] int64: 0 for none

    def at(self, chosen: np.ndarray) -> "Entries":
        """Those at given places, or under a mask."""
        rows = torch.as_tensor(chosen, device=self.keys.device)
        return Entries(self.keys[rows], self.values[rows], self.numbers[chosen], self.tags[chosen])


def joined(parts: list[Entries]) -> Entries:
    keys, values, numbers, tags = zip(*parts, strict=True)
    return Entries(torch.cat(keys), torch.cat(values), np.concatenate(numbers), np.concatenate(tags))


class Ring:
    """Entry i of `count` (0 is the oldest) lies in slot (start + i) % capacity; there are never holes."""

    def __init__(
        self,
        capacity: int,
        key_size: int,
        value_shape: tuple[int, ...],
        value_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity, self.start, self.count = capacity, 0, 0
        self.made = object()  # tells its entries from those of the same numbers that it was converted from
        # Not touched before it is written: the system gives a large memory its pages as it fills. And made so that what
        # begins under inference mode can go on outside of it.
        with torch.inference_mode(False):
            self.keys = torch.empty(capacity, key_size, dtype=dtype, device=device)
            self.values = torch.empty(capacity, *value_shape, dtype=value_dtype, device=device)
            self.lengths = torch.empty(capacity, dtype=compute_dtype(dtype), device=device)  # squared
        self.numbers = np.empty(capacity, np.int64)
        self.tags = np.empty(capacity, np.int64)

    def slots(self, first: int, last: int) -> Iterator[slice]:
        """The one or two runs of slots that hold entries first to last - 1."""
        begin, size = (self.start + first) % self.capacity, last - first
        head = min(size, self.capacity - begin)
        if head > 0:
            yield slice(begin, begin + head)
        if size > head:
            yield slice(0, size - head)

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index of the first entry, keys [n,d], squared lengths [n]) of at most `size` entries at a time."""
        first = 0
        for run in self.slots(0, self.count):
            for begin in range(run.start, run.stop, size):
                end = min(begin + size, run.stop)
                yield first, self.keys[begin:end], self.lengths[begin:end]
                first += end - begin

    def keys_at(self, indices: Tensor) -> Tensor:
        """[...] -> [...,d]"""
        return self._rows(self.keys, indices)

    def values_at(self, indices: Tensor) -> Tensor:
        """[...] -> [...,*value_shape]"""
        return self._rows(self.values, indices)

    def _rows(self, buffer: Tensor, indices: Tensor) -> Tensor:
        slots = (indices.reshape(-1) + self.start) % self.capacity
        return buffer.index_select(0, slots).view(*indices.shape, *buffer.shape[1:])  # several times as fast as [slots]

    def ordered(self, buffer: Tensor) -> Tensor:
        """A buffer's rows, oldest first: a view, or a copy where the ring has wrapped."""
        runs = [buffer[run] for run in self.slots(0, self.count)]
        return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else buffer[:0]

    def ordered_numbers(self) -> np.ndarray:
        """A copy, [count]."""
        found: np.ndarray = self.numbers[self._order()]
        return found

    def ordered_tags(self) -> np.ndarray:
        """A copy, [count]."""
        found: np.ndarray = self.tags[self._order()]
        return found

    def _order(self) -> np.ndarray:
        """The slots, oldest first."""
        return (self.start + np.arange(self.count)) % self.capacity

    def oldest(self, count: int) -> Entries:
        """A copy of the oldest entries."""
        places = (self.start + np.arange(count)) % self.capacity
        rows = torch.as_tensor(places, device=self.keys.device)
        return Entries(self.keys[rows], self.values[rows], self.numbers[places], self.tags[places])

    def drop_oldest(self, count: int) -> None:
        self.start = (self.start + count) % self.capacity
        self.count -= count

    def append(self, entries: Entries, lengths: Tensor) -> None:
        """Add entries for which there is room, at the young end."""
        self._put(self.count, entries, lengths)
        self.count += len(entries.numbers)

    def prepend(self, entries: Entries) -> None:
        """Add entries for which there is room, at the old end."""
        added = len(entries.numbers)
        self.start = (self.start - added) % self.capacity
        self.count += added
        self._put(0, entries, squared_lengths(entries.keys))

    def _put(self, index: int, entries: Entries, lengths: Tensor) -> None:
        done = 0
        for run in self.slots(index, index + len(entries.numbers)):
            part = slice(done, done + run.stop - run.start)
            self.keys[run], self.values[run], self.lengths[run] = (
                entries.keys[part],
                entries.values[part],
                lengths[part],
            )
            self.numbers[run], self.tags[run] = entries.numbers[part], entries.tags[part]
            done = part.stop

    def keep(self, mask: np.ndarray) -> None:
        """Leave only the entries under a mask [count]; a block at a time, so that it needs no second memory."""
        kept = np.flatnonzero(mask)
        same = int((kept == np.arange(len(kept))).sum())  # the first ones stay where they are
        width = max(1, self.keys[0].numel(), self.values[0].numel())
        step = max(1, BLOCK // width)
        for first in range(same, len(kept), step):
            source = (self.start + kept[first : first + step]) % self.capacity
            target = (self.start + np.arange(first, first + len(source))) % self.capacity
            rows, places = (torch.as_tensor(found, device=self.keys.device) for found in (source, target))
            for buffer in (self.keys, self.values, self.lengths):
                buffer[places] = buffer[rows]
            for array in (self.numbers, self.tags):
                array[target] = array[source]
        self.count = len(kept)

    def clear(self) -> None:
        self.start = self.count = 0
