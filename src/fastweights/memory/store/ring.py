"""The entries of a memory and the changes they undergo: a ring of keys and values, and what an undo needs.

A memory is a list of at most `capacity` entries: a write appends and drops the oldest, a removal deletes. Undoing a tag
has to give the list that the same history without the tag's writes would have given. Only numbers are replayed for
that; entries are kept while there is a set of open tags whose undoing would bring them back.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_sizes

BLOCK = 2**22  # numbers that are moved at once
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Span = tuple[int, int]  # numbers from the first to before the second


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which distances of keys of a dtype are given."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which differences are squared and summed."""
    return torch.float32 if device.type == "mps" else torch.float64  # the one device without float64


def squared_lengths(vectors: Tensor) -> Tensor:
    """Return the squared lengths of vectors, [n,d] -> [n], rounded once."""
    out = vectors.new_empty(len(vectors), dtype=compute_dtype(vectors.dtype))
    step = max(1, 2**20 // max(1, vectors.shape[1]))
    for first in range(0, len(vectors), step):
        piece = vectors[first : first + step].to(exact_dtype(vectors.device))
        out[first : first + step] = piece.square().sum(1)
    return out


class Entries(NamedTuple):
    """Some entries, oldest first."""

    keys: Tensor  # [n,d]
    values: Tensor  # [n,*value_shape]
    numbers: np.ndarray  # [n] int64: the sequence number of each entry, counted over all writes and never reused
    tags: np.ndarray  # [n] int64: 0 for none

    def at(self, chosen: np.ndarray) -> "Entries":
        """Return the entries at given places, or under a mask."""
        rows = torch.as_tensor(chosen, device=self.keys.device)
        return Entries(self.keys[rows], self.values[rows], self.numbers[chosen], self.tags[chosen])


class Ring:
    """A ring buffer: entry i of `count` (0 is the oldest) lies in slot (start + i) % capacity; there are no holes."""

    def __init__(
        self,
        capacity: int,
        key_size: int,
        value_shape: tuple[int, ...],
        value_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_sizes(capacity=capacity, key_size=key_size)
        for size in value_shape:
            check_sizes(**{"each of value_shape": size})
        if dtype not in FLOATS:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype}")
        self.capacity, self.start, self.count = int(capacity), 0, 0  # a plain one, which a file of JSON has
        self.identity = object()  # tells its entries from those of the same numbers that it was converted from
        # Not touched before it is written: the system gives a large memory its pages as it fills. And made so that what
        # begins under inference mode can go on outside of it.
        with torch.inference_mode(False):
            key = torch.empty(key_size, dtype=dtype, device=device)  # a wrong dtype or device is refused here
            value = torch.empty(value_shape, dtype=value_dtype, device=device)
            length = torch.empty((), dtype=compute_dtype(dtype), device=device)  # squared
            try:
                self.keys, self.values, self.lengths = (
                    one.new_empty(capacity, *one.shape) for one in (key, value, length)
                )
                self.numbers, self.tags = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
            except (RuntimeError, TypeError, ValueError, MemoryError) as error:
                entry = key.nbytes + value.nbytes + length.nbytes + 16
                raise MemoryError(
                    f"a memory of {capacity:,} entries needs {capacity * entry:,} bytes, {entry:,} for each, and there "
                    f"is no room for them ({device}): choose a smaller capacity"
                ) from error
        self.exact_dtype = exact_dtype(self.keys.device)

    def slots(self, first: int, last: int) -> list[slice]:
        """Return the one or two runs of slots that hold entries first to last - 1."""
        begin, size = (self.start + first) % self.capacity, last - first
        head = min(size, self.capacity - begin)
        runs = [slice(begin, begin + head), slice(0, size - head)]
        return [run for run in runs if run.stop > run.start]

    def blocks(self, size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index of the first entry, keys [n,d], squared lengths [n]) of at most `size` entries at a time."""
        first = 0
        for run in self.slots(0, self.count):
            for begin in range(run.start, run.stop, size):
                end = min(begin + size, run.stop)
                yield first, self.keys[begin:end], self.lengths[begin:end]
                first += end - begin

    def longest_key(self) -> float:
        """Return the greatest squared length of a key."""
        return max((float(self.lengths[run].max()) for run in self.slots(0, self.count)), default=0.0)

    def keys_at(self, indices: Tensor) -> Tensor:
        """Return the keys of entries, [...] -> [...,d]."""
        return self._rows(self.keys, indices)

    def values_at(self, indices: Tensor) -> Tensor:
        """Return the values of entries, [...] -> [...,*value_shape]."""
        return self._rows(self.values, indices)

    def _rows(self, buffer: Tensor, indices: Tensor) -> Tensor:
        slots = (indices.reshape(-1) + self.start) % self.capacity
        return buffer.index_select(0, slots).view(*indices.shape, *buffer.shape[1:])  # several times as fast as [slots]

    def ordered(self, buffer: Tensor) -> Tensor:
        """Return a buffer's rows, oldest first: a view, or a copy where the ring has wrapped."""
        runs = [buffer[run] for run in self.slots(0, self.count)]
        return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else buffer[:0]

    def copy_ordered(self, buffer: Tensor) -> Tensor:
        """Return a copy of a buffer's rows, oldest first."""
        return torch.cat([buffer[run] for run in self.slots(0, self.count)] or [buffer[:0]])

    def ordered_numbers(self) -> np.ndarray:
        """Return a copy of the numbers of all entries, [count]."""
        return np.asarray(self.numbers[self._places(self.count)])

    def ordered_tags(self) -> np.ndarray:
        """Return a copy of the tags of all entries, [count]."""
        return np.asarray(self.tags[self._places(self.count)])

    def _places(self, count: int) -> np.ndarray:
        """Return the slots of the oldest entries."""
        return (self.start + np.arange(count)) % self.capacity

    def oldest(self, count: int) -> Entries:
        """Return a copy of the oldest entries."""
        places = self._places(count)
        rows = torch.as_tensor(places, device=self.keys.device)
        return Entries(self.keys[rows], self.values[rows], self.numbers[places], self.tags[places])

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest entries."""
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
            self.keys[run], self.values[run] = entries.keys[part], entries.values[part]
            self.lengths[run] = lengths[part]
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
            rows, places = (torch.as_tensor(slots, device=self.keys.device) for slots in (source, target))
            for buffer in (self.keys, self.values, self.lengths):
                buffer[places] = buffer[rows]
            for array in (self.numbers, self.tags):
                array[target] = array[source]
        self.count = len(kept)


class History:
    """The open tags, the changes since the first of them was opened, and the entries that those overwrote."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.names: dict[int, str] = {}  # the open tags' names
        self.next_tag = 1
        self.forget()

    def forget(self) -> None:
        """Close all tags: nothing can be undone any more."""
        self.names.clear()
        self.initial: list[Span] = []
        self.changes: list[tuple[Span, int] | np.ndarray] = []  # written numbers and their tag, or removed numbers
        self._overwritten: list[Entries] = []
        self.held = 0  # entries in those
        self._prune_at = 0

    def open_tag(self, name: str, numbers: Callable[[], np.ndarray]) -> int:
        """Return the tag of a name, opened now if it is not open; `numbers()` are those of the memory's entries."""
        for tag, known in self.names.items():
            if known == name:
                return tag
        if not self.names:
            self.initial = find_spans(numbers())
        tag = self.next_tag
        self.next_tag += 1
        self.names[tag] = name
        return tag

    def find_tag(self, name: str) -> int:
        """Return the open tag of a name."""
        for tag, known in self.names.items():
            if known == name:
                return tag
        known = ", ".join(map(repr, self.names.values())) or "none"
        raise ValueError(f"nothing can be undone or kept under the tag {name!r}; open tags: {known}")

    def add_write(self, first: int, last: int, tag: int) -> None:
        """Note that the numbers from `first` to before `last` were written under a tag, or under none."""
        if not self.names:
            return
        before = self.changes[-1] if self.changes else None
        if isinstance(before, tuple) and before[1] == tag and before[0][1] == first:
            self.changes[-1] = ((before[0][0], last), tag)
        else:
            self.changes.append(((first, last), tag))

    def add_removal(self, numbers: np.ndarray) -> None:
        """Note that the entries of these numbers, ascending, are gone for good, whatever is undone."""
        if not self.names:
            return
        self.changes.append(numbers)
        if self.held:
            entries = self.overwritten()
            self.hold(entries.at(~np.isin(entries.numbers, numbers)))

    def add_overwritten(self, entries: Entries, memory_tags: Callable[[], np.ndarray]) -> None:
        """Hold entries that no longer fit; `memory_tags()` are the tags of those that do."""
        if not self.names or not len(entries.numbers):
            return
        self._overwritten.append(entries)
        self.held += len(entries.numbers)
        if self.held > self._prune_at:
            self.prune(memory_tags())

    def overwritten(self) -> Entries:
        """Return all entries that may come back, oldest first; only while there are any (`held`)."""
        if len(self._overwritten) > 1:
            keys, values, numbers, tags = zip(*self._overwritten, strict=True)
            joined = Entries(torch.cat(keys), torch.cat(values), np.concatenate(numbers), np.concatenate(tags))
            self._overwritten = [joined]
        return self._overwritten[0]

    def hold(self, entries: Entries) -> None:
        """Hold these entries, and no others."""
        self.held = len(entries.numbers)
        self._overwritten = [entries] if self.held else []

    def prune(self, memory_tags: np.ndarray) -> None:
        """Drop the entries that no undo can bring back.

        An entry is gone for good once `capacity` entries follow it that are there whenever it is: those under no open
        tag, and those under its own.
        """
        if self.held:
            entries = self.overwritten()
            permanent = _count_after(entries.tags == 0) + int((memory_tags == 0).sum())
            follow = permanent.copy()
            for tag in np.unique(entries.tags[entries.tags > 0]):
                same = entries.tags == tag
                follow[same] = (permanent + _count_after(same) + int((memory_tags == tag).sum()))[same]
            if not bool((follow < self.capacity).all()):
                self.hold(entries.at(follow < self.capacity))
        self._prune_at = max(1024, 2 * self.held)  # so that the pruning of many small writes costs little

    def keep_tag(self, tag: int) -> None:
        """Close a tag; its writes are from now on like those under none."""
        del self.names[tag]
        if not self.names:
            self.forget()
            return
        self.changes = [(one[0], 0) if isinstance(one, tuple) and one[1] == tag else one for one in self.changes]
        if self.held:
            entries = self.overwritten()
            entries.tags[entries.tags == tag] = 0

    def drop_tag(self, tag: int) -> Entries | None:
        """Close a tag, drop its writes, and return the overwritten entries that are back then, if any."""
        self.changes = [one for one in self.changes if not (isinstance(one, tuple) and one[1] == tag)]
        del self.names[tag]
        back = None
        if self.held:
            entries = self.overwritten()
            wanted = np.zeros(len(entries.numbers), bool)
            for first, last in self._replay():
                wanted |= (entries.numbers >= first) & (entries.numbers < last)
            wanted &= entries.tags != tag
            back = entries.at(wanted) if wanted.any() else None
            self.hold(entries.at(~wanted & (entries.tags != tag)))
        if not self.names:
            self.forget()
        return back

    def _replay(self) -> Iterable[Span]:
        """Return the numbers that the memory would hold, had the changes been these."""
        now = deque(self.initial)
        count = sum(last - first for first, last in now)
        for change in self.changes:
            if isinstance(change, tuple):
                now.append(change[0])
                count += change[0][1] - change[0][0]
                while count > self.capacity:
                    first, last = now.popleft()
                    cut = min(last - first, count - self.capacity)
                    count -= cut
                    if first + cut < last:
                        now.appendleft((first + cut, last))
            else:
                now = deque(_subtract(now, change))
                count = sum(last - first for first, last in now)
        return now

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Convert the entries that are held, all or none."""
        parts = [
            part._replace(keys=part.keys.to(device, dtype), values=part.values.to(device)) for part in self._overwritten
        ]
        if not all(bool(squared_lengths(part.keys).isfinite().all()) for part in parts):
            raise ValueError(f"a key that an undo would bring back becomes infinite in {dtype}; nothing was changed")
        self._overwritten = parts


def _equals(values: Tensor, value: Tensor) -> Tensor:
    """Return which of some values [n,*value_shape] are equal to one [1,*value_shape]."""
    return (values == value).reshape(len(values), value.numel()).all(1)


def find_spans(numbers: np.ndarray) -> list[Span]:
    """Return the runs of ascending numbers.

    Examples:
        >>> find_spans(np.array([3, 4, 5, 9]))
        [(3, 6), (9, 10)]
    """
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, breaks)]


def _count_after(mask: np.ndarray) -> np.ndarray:
    """Return how many are true after each place."""
    following: np.ndarray = mask[::-1].cumsum()[::-1] - mask
    return following


def _subtract(spans: Iterable[Span], numbers: np.ndarray) -> Iterator[Span]:
    """Yield what is left of spans without some numbers, ascending."""
    for first, last in spans:
        begin = first
        for number in numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, last)].tolist():
            if number > begin:
                yield begin, number
            begin = number + 1
        if begin < last:
            yield begin, last


class State:
    """A ring of entries and its history; every change is checked before it comes here.

    The changes are the same whether a user makes them or a log is read.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.history = History(ring.capacity)
        self.next_number = 0

    def write(
        self, keys: Tensor, values: Tensor, lengths: Tensor, tag: str | None, removed: np.ndarray | None = None
    ) -> None:
        """Append entries, after those of some numbers are removed; the oldest make room."""
        if removed is not None and len(removed):
            self.remove(removed)
        ring, history = self.ring, self.history
        mark = 0 if tag is None else history.open_tag(tag, ring.ordered_numbers)
        first, written = self.next_number, len(keys)
        self.next_number += written
        history.add_write(first, self.next_number, mark)
        stay = min(written, ring.capacity)
        numbers = np.arange(self.next_number - stay, self.next_number)
        entries = Entries(keys[-stay:], values[-stay:], numbers, np.full(stay, mark, np.int64))
        gone = max(0, ring.count + stay - ring.capacity)
        overwritten = ring.oldest(gone) if gone and history.names else None
        ring.drop_oldest(gone)
        ring.append(entries, lengths[-stay:])
        if overwritten is not None:
            history.add_overwritten(overwritten, ring.ordered_tags)

    def remove(self, numbers: np.ndarray) -> None:
        """Forget the entries of some numbers, ascending, in the memory or overwritten."""
        self.history.add_removal(numbers)
        self.ring.keep(~np.isin(self.ring.ordered_numbers(), numbers))

    def rename(self, before: Tensor, after: Tensor) -> None:
        """Give all entries of a value [1,*value_shape], in the memory or overwritten, another one."""
        ring, history = self.ring, self.history
        for run in ring.slots(0, ring.count):
            values = ring.values[run]
            values[_equals(values, before)] = after
        if history.held:
            entries = history.overwritten()
            values = entries.values.clone()
            values[_equals(values, before)] = after
            history.hold(entries._replace(values=values))
        ring.identity = object()

    def numbers_of(self, value: Tensor) -> np.ndarray:
        """Return the numbers of all entries of a value [1,*value_shape], in the memory or overwritten."""
        ring = self.ring
        parts = [(ring.ordered(ring.values), ring.ordered_numbers())]
        if self.history.held:
            entries = self.history.overwritten()
            parts.insert(0, (entries.values, entries.numbers))
        return np.concatenate([numbers[_equals(values, value).cpu().numpy()] for values, numbers in parts])

    def undo(self, tag: str) -> None:
        """Make the memory what it would be without the writes of a tag."""
        mark = self.history.find_tag(tag)
        back = self.history.drop_tag(mark)
        self.ring.keep(self.ring.ordered_tags() != mark)
        if back is not None:
            self.ring.prepend(back)
        self.history.prune(self.ring.ordered_tags())

    def keep(self, tag: str) -> None:
        """Make the writes of a tag final."""
        mark = self.history.find_tag(tag)
        self.ring.tags[self.ring.tags == mark] = 0
        self.history.keep_tag(mark)
        self.history.prune(self.ring.ordered_tags())

    def clear(self) -> None:
        """Forget all entries and close all tags."""
        self.ring.start = self.ring.count = 0
        self.history.forget()

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the entries to a device, and the keys to a dtype that can hold them."""
        ring = self.ring
        new = Ring(ring.capacity, ring.keys.shape[1], tuple(ring.values.shape[1:]), ring.values.dtype, dtype, device)
        entries = self.entries()
        keys = entries.keys.to(device, dtype)
        lengths = squared_lengths(keys)
        if not bool(lengths.isfinite().all()):
            row = int((~lengths.isfinite()).nonzero()[0])
            raise ValueError(f"key {row} becomes infinite in {dtype}; nothing was changed")
        self.history.prune(self.ring.ordered_tags())  # what no undo can bring back refuses nothing
        self.history.to(device, dtype)
        new.append(entries._replace(keys=keys, values=entries.values.to(device)), lengths)
        self.ring = new

    def entries(self) -> Entries:
        """Return all entries in the memory, oldest first."""
        ring = self.ring
        return Entries(ring.ordered(ring.keys), ring.ordered(ring.values), ring.ordered_numbers(), ring.ordered_tags())

    def goes_on_from(self, before: "State") -> bool:
        """Return whether this is the same memory at a later time: entries of the same number are the same ones."""
        ring, other = self.ring, before.ring
        buffers = (ring.keys, other.keys), (ring.values, other.values)
        if any(one.shape != two.shape or one.dtype != two.dtype for one, two in buffers):
            return False
        numbers = ring.ordered_numbers(), other.ordered_numbers()
        _, *places = np.intersect1d(*numbers, assume_unique=True, return_indices=True)
        if not len(places[0]) or self.next_number < before.next_number:
            return False
        step = max(1, BLOCK // max(ring.keys[0].numel(), ring.values[0].numel()))
        for first in range(0, len(places[0]), step):
            here, there = (torch.as_tensor(part[first : first + step], device=ring.keys.device) for part in places)
            pairs = (ring.keys_at(here), other.keys_at(there)), (ring.values_at(here), other.values_at(there))
            if not all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in pairs):
                return False  # bytes, because torch compares not every dtype
        return True

    def has_changed_since(self, before: "State") -> bool:
        """Return whether the same memory had other entries or other tags at an earlier time."""
        same = (
            np.array_equal(self.ring.ordered_numbers(), before.ring.ordered_numbers())
            and np.array_equal(self.ring.ordered_tags(), before.ring.ordered_tags())
            and self.history.names == before.history.names
        )
        return not same
