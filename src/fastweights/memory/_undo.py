"""What an undo needs: what happened since the oldest open tag was opened, and the entries that may come back.

A memory is a list of at most `capacity` entries: a write appends and drops the oldest, a removal deletes. Undoing a tag
has to give the list that the same history without the tag's writes would have given. Only numbers are replayed for
that; entries are kept while there is a set of open tags whose undoing would bring them back.
"""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch

from fastweights.memory._ring import Entries, joined

Span = tuple[int, int]  # numbers from the first to before the second


def spans(numbers: np.ndarray) -> list[Span]:
    """The runs of ascending numbers.

    Examples:
        >>> spans(np.array([3, 4, 5, 9]))
        [(3, 6), (9, 10)]
    """
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, breaks)]


class History:
    """The open tags, the changes since the first of them, and what those overwrote."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.names: dict[int, str] = {}  # of open tags
        self.next_tag = 1
        self.forget()

    def forget(self) -> None:
        """Close all tags: nothing can be undone any more."""
        self.names.clear()
        self.initial: list[Span] = []
        self.changes: list[tuple[Span, int] | np.ndarray] = []  # written numbers and their tag, or removed numbers
        self._overwritten: list[Entries] = []
        self._held = 0
        self._prune_at = 0

    def tag(self, name: str, memory: Callable[[], np.ndarray]) -> int:
        """The tag of a name, opened now if it is not open; `memory` tells the numbers of the entries there are."""
        for tag, known in self.names.items():
            if known == name:
                return tag
        if not self.names:
            self.initial = spans(memory())
        tag = self.next_tag
        self.next_tag += 1
        self.names[tag] = name
        return tag

    def find(self, name: str) -> int:
        for tag, known in self.names.items():
            if known == name:
                return tag
        known = ", ".join(map(repr, self.names.values())) or "none"
        raise ValueError(f"nothing can be undone or kept under the tag {name!r}; open tags: {known}")

    def wrote(self, first: int, last: int, tag: int) -> None:
        if not self.names:
            return
        before = self.changes[-1] if self.changes else None
        if isinstance(before, tuple) and before[1] == tag and before[0][1] == first:
            self.changes[-1] = ((before[0][0], last), tag)
        else:
            self.changes.append(((first, last), tag))

    def removed(self, numbers: np.ndarray) -> None:
        """Numbers, ascending, are in no memory any more, whatever is undone."""
        if not self.names:
            return
        self.changes.append(numbers)
        if self._held:
            entries = self.overwritten()
            self.hold(entries.at(~np.isin(entries.numbers, numbers)))

    def overwrote(self, entries: Entries, memory_tags: Callable[[], np.ndarray]) -> None:
        """Hold entries that no longer fit; `memory_tags` tells the tags of those that do."""
        if not self.names or not len(entries.numbers):
            return
        self._overwritten.append(entries)
        self._held += len(entries.numbers)
        if self._held > self._prune_at:
            self.prune(memory_tags())

    def overwritten(self) -> Entries:
        """All that may come back, oldest first; only while `held`."""
        if len(self._overwritten) > 1:
            self._overwritten = [joined(self._overwritten)]
        return self._overwritten[0]

    @property
    def held(self) -> int:
        return self._held

    def hold(self, entries: Entries) -> None:
        """Hold these, and no others."""
        self._held = len(entries.numbers)
        self._overwritten = [entries] if self._held else []

    def prune(self, memory_tags: np.ndarray) -> None:
        """Drop what no undo can bring back.

        An entry is gone for good once `capacity` entries follow it that are there whenever it is: those under no open
        tag, and those under its own.
        """
        if self._held:
            entries = self.overwritten()
            permanent = _after(entries.tags == 0) + int((memory_tags == 0).sum())
            follow = permanent.copy()
            for tag in np.unique(entries.tags[entries.tags > 0]):
                own = entries.tags == tag
                follow[own] = (permanent + _after(own) + int((memory_tags == tag).sum()))[own]
            if not bool((follow < self.capacity).all()):
                self.hold(entries.at(follow < self.capacity))
        self._prune_at = max(1024, 2 * self._held)  # so that the pruning of many small writes costs little

    def kept(self, tag: int) -> None:
        """Close a tag; its writes are like those under none."""
        del self.names[tag]
        if not self.names:
            self.forget()
            return
        self.changes = [(one[0], 0) if isinstance(one, tuple) and one[1] == tag else one for one in self.changes]
        if self._held:
            entries = self.overwritten()
            entries.tags[entries.tags == tag] = 0

    def without(self, tag: int) -> Entries | None:
        """Drop a tag's writes, and return the overwritten entries that are back then, if any."""
        self.changes = [one for one in self.changes if not (isinstance(one, tuple) and one[1] == tag)]
        del self.names[tag]
        back = None
        if self._held:
            entries = self.overwritten()
            now = self._replayed()
            wanted = np.zeros(len(entries.numbers), bool)
            for first, last in now:
                wanted |= (entries.numbers >= first) & (entries.numbers < last)
            wanted &= entries.tags != tag
            back = entries.at(wanted) if wanted.any() else None
            self.hold(entries.at(~wanted & (entries.tags != tag)))
        if not self.names:
            self.forget()
        return back

    def _replayed(self) -> Iterable[Span]:
        """The numbers that the memory would hold, had the changes been these."""
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
                now = deque(_less(now, change))
                count = sum(last - first for first, last in now)
        return now

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self._overwritten = [
            part._replace(keys=part.keys.to(device, dtype), values=part.values.to(device)) for part in self._overwritten
        ]


def _after(mask: np.ndarray) -> np.ndarray:
    """How many are true after each."""
    following: np.ndarray = mask[::-1].cumsum()[::-1] - mask
    return following


def _less(runs: Iterable[Span], numbers: np.ndarray) -> Iterable[Span]:
    for first, last in runs:
        begin = first
        for number in numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, last)].tolist():
            if number > begin:
                yield begin, number
            begin = number + 1
        if begin < last:
            yield begin, last
