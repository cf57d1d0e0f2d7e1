"""What a memory is, and the changes it can undergo: the same whether a user makes them or a log is read."""

import numpy as np
import torch
from torch import Tensor

from fastweights.memory._checks import positive, squared_lengths
from fastweights.memory._ring import Entries, Ring
from fastweights.memory._undo import History

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class State:
    """A ring of entries and what it takes to undo writes; every change is checked before it comes here."""

    def __init__(
        self,
        capacity: int,
        key_size: int,
        value_shape: tuple[int, ...],
        value_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        positive("capacity", capacity)
        positive("key_size", key_size)
        for size in value_shape:
            positive("each of value_shape", size)
        if dtype not in FLOATS:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype}")
        self.ring = Ring(capacity, key_size, value_shape, value_dtype, dtype, device)
        self.history = History(capacity)
        self.next_number = 0

    def write(self, keys: Tensor, values: Tensor, lengths: Tensor, tag: str | None) -> None:
        ring, history = self.ring, self.history
        mark = 0 if tag is None else history.tag(tag, ring.ordered_numbers)
        first, written = self.next_number, len(keys)
        self.next_number += written
        history.wrote(first, self.next_number, mark)
        stay = min(written, ring.capacity)
        entries = Entries(
            keys[-stay:],
            values[-stay:],
            np.arange(self.next_number - stay, self.next_number),
            np.full(stay, mark, np.int64),
        )
        gone = max(0, ring.count + stay - ring.capacity)
        overwritten = ring.oldest(gone) if gone and history.names else None
        ring.drop_oldest(gone)
        ring.append(entries, lengths[-stay:])
        if overwritten is not None:
            history.overwrote(overwritten, ring.ordered_tags)

    def remove(self, numbers: np.ndarray) -> None:
        """Entries of these numbers, ascending, in the memory or overwritten."""
        self.history.removed(numbers)
        self.ring.keep(~np.isin(self.ring.ordered_numbers(), numbers))

    def of_value(self, value: Tensor) -> np.ndarray:
        """The numbers of all entries of a value [1,*value_shape], in the memory or overwritten."""
        ring = self.ring
        parts = [(ring.ordered(ring.values), ring.ordered_numbers())]
        if self.history.held:
            entries = self.history.overwritten()
            parts.insert(0, (entries.values, entries.numbers))
        return np.concatenate(
            [
                numbers[(values == value).reshape(len(values), value.numel()).all(1).cpu().numpy()]
                for values, numbers in parts
            ]
        )

    def undo(self, tag: str) -> None:
        mark = self.history.find(tag)
        back = self.history.without(mark)
        self.ring.keep(self.ring.ordered_tags() != mark)
        if back is not None:
            self.ring.prepend(back)
        self.history.prune(self.ring.ordered_tags())

    def keep(self, tag: str) -> None:
        mark = self.history.find(tag)
        self.ring.tags[self.ring.tags == mark] = 0
        self.history.kept(mark)
        self.history.prune(self.ring.ordered_tags())

    def clear(self) -> None:
        self.ring.clear()
        self.history.forget()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        ring = self.ring
        new = Ring(ring.capacity, ring.keys.shape[1], tuple(ring.values.shape[1:]), ring.values.dtype, dtype, device)
        entries = self.entries()
        keys = entries.keys.to(device, dtype)
        lengths = squared_lengths(keys)
        if not bool(lengths.isfinite().all()):
            row = int((~lengths.isfinite()).nonzero()[0])
            raise ValueError(f"key {row} becomes infinite in {dtype}; nothing was changed")
        self.history.to(device, dtype)
        new.append(entries._replace(keys=keys, values=entries.values.to(device)), lengths)
        self.ring = new

    def entries(self) -> Entries:
        """All in the memory, oldest first."""
        ring = self.ring
        return Entries(
            ring.ordered(ring.keys),
            ring.ordered(ring.values),
            ring.ordered_numbers(),
            ring.ordered_tags(),
        )
