"""The episodic memory of Sprechmann et al. 2018: keys and values, written in order and searched by distance."""

import threading
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_positive, check_sizes
from fastweights.errors import MemoryFileError
from fastweights.hub import FOLDER, find_folder
from fastweights.memory.store.checks import check_values, check_vectors
from fastweights.memory.store.neighbours import Neighbours
from fastweights.memory.store.ring import Ring, State
from fastweights.memory.store.saved import FILES, NOTHING, Saved
from fastweights.memory.store.search import find_nearest

if TYPE_CHECKING:
    from fastweights.memory.store._writer import Writer
    from fastweights.memory.store.disk import Reader

Found = TypeVar("Found")


class EpisodicMemory(Saved):
    """The last `capacity` keys and their values, searched by exact Euclidean distance (Sprechmann et al. 2018, 2.1).

    The memory is a list in the order of writing: index 0 is the oldest entry, `write` appends and the oldest entries
    make room, `remove` closes the gap. Keys and values are copies that no gradient flows through.

    Writes under a tag can be undone: the memory is then as if they had never been made, so that entries that they
    overwrote are back. Until `keep` or `undo` closes a tag, the entries that its writes overwrote are held aside: at
    most as many as were written under it, and at most `capacity` (twice that between two clearances, and 1,024).

    The memory lives in this process only, unless it was made by `open`: then every change is on the disk when the
    method returns. A memory made by `load` follows the writer of another process by `refresh`.

    It is safe under threads: a method sees the memory before or after every change of another thread, never half of
    one. Hold `lock` where several calls are to see the same memory, also to copy or pickle it; the copy of a memory
    that was made by `open` lives in its process only.

    Args:
        capacity: N, the greatest number of entries.
        key_size: d.
        value_shape: the shape of one value; () for a class.
        value_dtype: the dtype of the values; what is written must fit into it.
        dtype: the dtype of the keys: float16, bfloat16, float32 or float64. Distances are float32, or float64 for
            float64.
        device: the device of both.

    Attributes:
        lock: a re-entrant lock that every method holds.

    Raises:
        ValueError: a size that is not a positive integer, or keys that are not floating point.
        MemoryError: there is no room for so many entries.

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
        self._state = State(Ring(capacity, key_size, tuple(value_shape), value_dtype, dtype, _device(device)))
        self._reader: Reader | None = None  # set while the memory is unchanged since it was loaded
        self._writer: Writer | None = None
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None, "lock": None}  # a copy is not a second writer

    def __setstate__(self, parts: dict[str, Any]) -> None:
        self.__dict__.update(parts)
        self.lock = threading.RLock()

    # Properties

    @property
    def capacity(self) -> int:
        """The greatest number of entries, N."""
        return self._state.ring.capacity

    @property
    def key_size(self) -> int:
        """The width of a key, d."""
        return self._state.ring.keys.shape[1]

    @property
    def value_shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return tuple(self._state.ring.values.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the keys."""
        return self._state.ring.keys.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._state.ring.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return self._state.ring.keys.device

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values, the room for more included."""
        ring = self._state.ring
        return ring.keys.nbytes + ring.values.nbytes

    def __len__(self) -> int:
        with self.lock:
            return self._state.ring.count

    @property
    def keys(self) -> Tensor:
        """A copy of the keys, [len,d], oldest first."""
        with self.lock:
            return self._state.ring.copy_ordered(self._state.ring.keys)

    @property
    def values(self) -> Tensor:
        """A copy of the values, [len,*value_shape], oldest first."""
        with self.lock:
            return self._state.ring.copy_ordered(self._state.ring.values)

    @property
    def numbers(self) -> Tensor:
        """The entries' sequence numbers, [len] int64 on the CPU, ascending: counted over all writes, never reused."""
        with self.lock:
            return torch.from_numpy(self._state.ring.ordered_numbers())

    def entries(self) -> Ring:
        """Return what the memory holds, as it lies and not copied: read it under `lock`, and change nothing.

        Its `keys_at` and `values_at` take places [n], 0 for the oldest entry. Another ring, by its `identity`, means
        that the entries were converted or read again.

        Examples:
            >>> import torch
            >>> from fastweights.memory import EpisodicMemory
            >>> store = EpisodicMemory(capacity=4, key_size=2)
            >>> store.write(torch.eye(2), torch.tensor([5, 6]))
            >>> with store.lock:
            ...     store.entries().values_at(torch.tensor([1])).tolist()
            [6]
        """
        return self._state.ring

    @property
    def tags(self) -> tuple[str, ...]:
        """The open tags, in the order in which they were opened."""
        with self.lock:
            return tuple(self._state.history.names.values())

    @property
    def is_writer(self) -> bool:
        """Whether changes reach the disk: those of a memory that `open` made in this process, until `close`."""
        with self.lock:
            return self._writer is not None and self._writer.is_open

    def writes_to(self, path: str | PathLike[str]) -> bool:
        """Return whether changes reach the disk, and in this folder."""
        with self.lock:
            return self.is_writer and self._writer is not None and self._writer.path.resolve() == Path(path).resolve()

    def __repr__(self) -> str:
        values = f"{list(self.value_shape)} " if self.value_shape else ""
        return (
            f"EpisodicMemory({len(self):,} of {self.capacity:,} entries, key_size={self.key_size}, {self.dtype}, "
            f"values {values}{self.value_dtype}, {self.device})"
        )

    # Changes

    def write(self, keys: Any, values: Any, tag: str | None = None, *, remove: Any = ()) -> None:
        """Append entries; the oldest make room, and of more than `capacity` the last ones stay.

        Args:
            keys: [n,d] floating point, finite.
            values: [n,*value_shape].
            tag: a name under which the entries can be undone; several writes may share it.
            remove: [m] integers, rows of `keys` that are forgotten first, as `remove` does: both changes or none.

        Raises:
            ValueError: a wrong shape, a value that does not fit the memory's dtype, a key or value that is NaN,
                infinite or overflows, with its row, or an index of no entry; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed, here or there.
        """
        if tag is not None and (not isinstance(tag, str) or not tag):
            raise ValueError(f"a tag is a string that is not empty, got {tag!r}")
        with self.lock:
            cast, lengths = check_vectors("keys", keys, self.key_size, self.dtype, self.device)
            stored = check_values(values, len(cast), self.value_shape, self.value_dtype, self.device)
            numbers = self._numbers_at(remove)
            if not len(cast):
                self._remove(numbers)
                return
            change = {"change": "write", "count": len(cast), "tag": tag}
            if len(numbers):
                change["removed"] = len(numbers)
            tensors = [cast, stored, torch.from_numpy(numbers)]
            self._change(change, tensors, lambda: self._state.write(cast, stored, lengths, tag, numbers))

    def remove(self, indices: Any) -> None:
        """Forget entries for good, whatever is undone later; an entry that they once overwrote does not come back.

        Args:
            indices: [n] integers, rows of `keys`; one entry may be named more than once.

        Raises:
            ValueError: an index of no entry; nothing was changed.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        with self.lock:
            self._remove(self._numbers_at(indices))

    def remove_class(self, value: Any) -> int:
        """Forget all entries of a value, also those that an undo would bring back; return how many the memory held.

        Args:
            value: [*value_shape]

        Raises:
            ValueError: a wrong shape, or a value that the memory cannot hold.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        with self.lock:
            wanted = check_values(torch.as_tensor(value)[None], 1, self.value_shape, self.value_dtype, self.device)
            before = len(self)
            self._remove(self._state.numbers_of(wanted))
            return before - len(self)

    def rename_class(self, value: Any, other: Any) -> int:
        """Give all entries of a value another one, also those that an undo would bring back; return how many there are.

        They keep their places, numbers and tags. Of those that an undo would bring back none is counted.

        Args:
            value: [*value_shape]
            other: [*value_shape], which entries may have already.

        Raises:
            ValueError: a wrong shape, or a value that the memory cannot hold.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        with self.lock:
            before, after = (
                check_values(torch.as_tensor(each)[None], 1, self.value_shape, self.value_dtype, self.device)
                for each in (value, other)
            )
            numbers = self._state.numbers_of(before)
            if len(numbers) and not torch.equal(before, after):
                self._change({"change": "rename"}, [before, after], lambda: self._state.rename(before, after))
            return int(np.isin(numbers, self._state.ring.ordered_numbers()).sum())

    def undo(self, tag: str) -> None:
        """Make the memory what it would be had nothing been written under a tag, and close the tag.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        with self.lock:
            self._state.history.find_tag(tag)
            self._change({"change": "undo", "tag": tag}, [], lambda: self._state.undo(tag))

    def keep(self, tag: str) -> None:
        """Make the writes under a tag final, and close the tag: the entries that they overwrote are held no longer.

        Raises:
            ValueError: nothing is open under the tag.
            MemoryFileError: the disk refuses; nothing was changed.
        """
        with self.lock:
            self._state.history.find_tag(tag)
            self._change({"change": "keep", "tag": tag}, [], lambda: self._state.keep(tag))

    def clear(self) -> None:
        """Forget everything, and close all tags.

        Raises:
            MemoryFileError: the disk refuses; nothing was changed.
        """
        with self.lock:
            self._change({"change": "clear"}, [], self._state.clear)

    def _numbers_at(self, indices: Any) -> np.ndarray:
        """Return the numbers of the entries at some rows of `keys`, ascending, each once."""
        rows = torch.as_tensor(indices).detach().cpu()
        if rows.numel() == 0:
            return np.empty(0, np.int64)
        if rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex() or rows.dim() > 1:
            raise ValueError(f"indices must be [n] integers, got {list(rows.shape)} {rows.dtype}")
        if len(wrong := rows[(rows < 0) | (rows >= len(self))].reshape(-1)):
            raise ValueError(f"there is no entry {int(wrong[0])}: the memory holds {len(self)}, counted from 0")
        return np.unique(self._state.ring.ordered_numbers()[rows.numpy().reshape(-1)])

    def _remove(self, numbers: np.ndarray) -> None:
        if len(numbers):
            change = {"change": "remove", "count": len(numbers)}
            self._change(change, [torch.from_numpy(numbers)], lambda: self._state.remove(numbers))

    def _change(self, description: dict[str, Any], tensors: list[Tensor], make: Callable[[], None]) -> None:
        """Put a change on the disk, then make it."""
        if self._writer is None:
            self._reader = None
            make()
            return
        self._writer.append(description, tensors)
        try:
            make()
        except BaseException:  # out of memory, or interrupted: no longer what the disk has
            self._writer.close()
            raise
        self._writer.fold_if_large(self._state)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Move the memory to another device, or its keys to another dtype, in place, and return the memory itself.

        Raises:
            ValueError: a key that the dtype cannot hold, here or for an undo to bring back, or a dtype that is not that
                of the saved memory; nothing was changed.
        """
        with self.lock:
            if self._writer is not None and dtype not in (None, self.dtype):
                raise ValueError(f"the saved memory has keys of {self.dtype}: load() it to convert it to {dtype}")
            before = self.dtype
            self._state.to(self.device if device is None else torch.device(device), dtype or before)
            if self.dtype != before:
                self._reader = None
        return self

    # Search

    def search(self, queries: Any, neighbours: int, *, epsilon: float = 1e-3) -> Neighbours:
        """Return the nearest entries by Euclidean distance, exactly, with the kernel weights of Sprechmann et al. 2018.

        Distances are sums of squared differences in float64, and of equal ones the lowest index (the oldest entry)
        comes first: the result of a loop over `keys`. The memory is gone through in blocks of at most 2^21 scores (2^25
        on a GPU); scores that rounding makes doubtful are computed again. ::

            w_k = (1 / (epsilon + |h_k - q|^2)) / sum_j (1 / (epsilon + |h_j - q|^2))

        Args:
            queries: [Q,d] floating point, finite; compared in the memory's dtype.
            neighbours: K; all entries where there are fewer.
            epsilon: of the kernel, a squared distance: neighbours that are all nearer than its root count alike. Keys
                of entries of 0.01 need one of a hundredth of the default or less.

        Returns:
            `Neighbours`: indices [Q,K], squared distances [Q,K], weights [Q,K], keys [Q,K,d] and values
            [Q,K,*value_shape], all copies, on the memory's device.

        Raises:
            ValueError: an empty memory, queries of another width or not finite, `neighbours` less than 1.
        """
        return self.search_with(queries, neighbours, epsilon, self.find_nearest)

    def find_nearest(self, ring: Ring, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return indices and squared distances [Q,count] of the entries nearest to queries [Q,d], as an index does."""
        return find_nearest(ring, queries, count)

    def search_with(
        self,
        queries: Any,
        neighbours: int,
        epsilon: float,
        find: Callable[[Ring, Tensor, int], tuple[Tensor, Tensor]],
    ) -> Neighbours:
        """Search as `search` does, by `find(ring, queries, count)`: an index's `find_nearest`."""
        check_sizes(neighbours=neighbours)
        check_positive(epsilon=epsilon)
        with self.lock, torch.no_grad():
            ring = self._state.ring
            if not ring.count:
                raise ValueError("the memory is empty: write() keys and values to it before search()")
            cast, _ = check_vectors("queries", queries, ring.keys.shape[1], ring.keys.dtype, ring.keys.device)
            indices, distances = find(ring, cast, min(neighbours, ring.count))
            kernel = 1 / (epsilon + distances)
            weights, dtype = kernel / kernel.sum(-1, keepdim=True), ring.lengths.dtype
            return Neighbours(
                indices, distances.to(dtype), weights.to(dtype), ring.keys_at(indices), ring.values_at(indices)
            )

    # On the disk

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        capacity: int | None = None,
        key_size: int | None = None,
        *,
        value_shape: tuple[int, ...] | None = None,
        value_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        repair: bool = False,
    ) -> Self:
        """Open a saved memory to write to it, or make one; one writer at a time, any number of readers (`load`).

        A change has reached the disk when its method returns, and a kill at any moment loses nothing that did: changes
        are appended to a log, which is folded into `memory.safetensors` when it has outgrown it. Use it in a `with`
        statement, or `close()` it. Open tags stay open from one writer to the next.

        Args:
            path: a folder.
            capacity: needed to make a memory; must be that of a saved one if given, like all sizes and dtypes.
            key_size: needed to make a memory.
            value_shape: () if not given.
            value_dtype: torch.long if not given.
            dtype: torch.float32 if not given.
            device: the device of the tensors here.
            repair: go on with the changes before the first that is damaged or missing; those after it are lost.

        Raises:
            MemoryFileError: the memory has another writer, is damaged, is of another size or dtype, or the disk
                refuses; what is there is left as it is.
            ValueError: there is none yet, and capacity or key_size is missing or wrong.

        Examples:
            >>> import tempfile, pathlib, torch
            >>> from fastweights import memory
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "store"
            >>> with memory.EpisodicMemory.open(path, capacity=100, key_size=4) as store:
            ...     store.write(torch.randn(8, 4), torch.arange(8))
            >>> len(memory.EpisodicMemory.load(path))
            8
        """
        from fastweights.memory.store._writer import Writer  # needs safetensors

        options = {
            "capacity": capacity,
            "key_size": key_size,
            "value_shape": value_shape,
            "value_dtype": value_dtype,
            "dtype": dtype,
        }
        asked = {name: option for name, option in options.items() if option is not None}
        writer = Writer(path)
        return cls._from_state(writer.open(asked, _device(device), repair), writer=writer)

    @classmethod
    def load(cls, path: str | PathLike[str], *, device: Any = None) -> Self:
        """Read a saved memory as it is now, also while another process writes to it; changes here stay here.

        `refresh` follows the writer.

        Args:
            path: the folder of `open` or `save`.
            device: the device of the tensors.

        Raises:
            MemoryFileError: there is no memory, or it is damaged; nothing in it is ever executed.
        """
        from fastweights.memory.store.disk import Reader  # needs safetensors

        reader = Reader(path)
        return cls._from_state(reader.read(_device(device)), reader=reader)

    @classmethod
    def _from_state(cls, state: State, reader: "Reader | None" = None, writer: "Writer | None" = None) -> Self:
        store = cls.__new__(cls)
        store.__setstate__({"_state": state, "_reader": reader, "_writer": writer})
        return store

    def refresh(self) -> bool:
        """Follow the writer of a memory that `load` has read: make the changes that it has made since.

        A call that finds none takes well under a millisecond; otherwise it takes as long as the changes themselves, or
        as `load` where the writer has folded its log into the memory, or another memory was put in place.

        Returns:
            True if anything has changed. A memory that was made by `open` is its own writer: False.

        Raises:
            MemoryFileError: the saved memory is damaged or gone; the memory here is as it was.
            ValueError: a memory that was not loaded, that was changed or converted here since, or that was closed.

        Examples:
            >>> import tempfile, pathlib, torch
            >>> from fastweights import memory
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "store"
            >>> with memory.EpisodicMemory.open(path, capacity=100, key_size=4) as writer:
            ...     reader = memory.EpisodicMemory.load(path)
            ...     writer.write(torch.randn(8, 4), torch.arange(8))
            >>> reader.refresh(), len(reader), reader.refresh()
            (True, 8, False)
        """
        with self.lock:
            if self.is_writer:
                return False
            if self._reader is None:
                raise ValueError(
                    "refresh() is for a memory that load() has read and that was not changed here since: load() the "
                    "saved one again"
                )
            self._state, changed = self._reader.follow(self._state)
            return changed

    def save(self, path: str | PathLike[str], *, beside: Mapping[str, bytes] = NOTHING) -> None:
        """Write the memory, open tags and all, to a folder; one that is saved there is replaced in one step.

        Args:
            path: a folder; it is made.
            beside: files of the folder, by name, which are replaced in the same step; `read_beside` reads them.

        Raises:
            MemoryFileError: the memory there has a writer or is damaged, or the disk refuses; what was there is whole.
        """
        from fastweights.memory.store._writer import Writer  # needs safetensors

        with self.lock:
            Writer(path).save(self._state, beside)

    def read_beside(self, name: str, read: Callable[[Path], Found]) -> tuple[Found, bool]:
        """Read a file that was saved together with a memory that `load` or `open` has read.

        The memory follows its writer, as by `refresh`, until it and the file are of one save.

        Args:
            name: of the file.
            read: makes of a path what is returned; MemoryFileError if it cannot.

        Returns:
            What `read` has made of it, and whether the memory has changed.

        Raises:
            MemoryFileError: as `read` and `refresh`.
            ValueError: a memory that was neither loaded nor opened, or was changed here since it was loaded.
        """
        with self.lock:
            place = self._writer or self._reader
            if place is None:
                raise ValueError("read_beside() is for a memory that load() or open() has read, unchanged here since")
            changed = False
            while True:
                mark, path = place.mark, place.find_beside(name)
                try:
                    found = read(path)
                except MemoryFileError:
                    if path == place.path / name or path.exists():
                        raise
                    continue  # it has got its name meanwhile
                changed |= self.refresh()
                if place.mark == mark:
                    return found, changed

    def _describe(self) -> tuple[str, str, str]:
        words = (
            f"A memory of {len(self):,} entries (at most {self.capacity:,}): keys of {self.key_size} numbers, "
            f"{self.dtype}, with values {list(self.value_shape)} of {self.value_dtype}. Whoever has it can read them."
        )
        code = f'from fastweights.memory import EpisodicMemory\n\nstore = EpisodicMemory.from_pretrained("{FOLDER}")'
        return "An episodic memory", words, code

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *, device: Any = None, **download: Any) -> Self:
        """Read what `save_pretrained` or `push_to_hub` has written; changes here stay here.

        Args:
            name: a folder, or "owner/name" on a hub.
            device: the device of the tensors.
            download: `revision`, `token`, `cache_dir` and `local_files_only` of a download.

        Raises:
            MemoryFileError: there is no memory, or it is damaged; nothing in it is ever executed.
            HubError: there is neither a folder nor a repository of that name, or the hub cannot be reached.

        Examples:
            >>> import tempfile, torch
            >>> from fastweights import memory
            >>> store, folder = memory.EpisodicMemory(capacity=3, key_size=2), tempfile.mkdtemp()
            >>> store.write(torch.rand(2, 2), torch.tensor([4, 5]))
            >>> store.save_pretrained(folder)
            >>> memory.EpisodicMemory.from_pretrained(folder).values.tolist()
            [4, 5]
        """
        return cls.load(find_folder(name, FILES, **download), device=device)

    def close(self) -> None:
        """Let another process write to the saved memory; this object can still be searched, and changed no more."""
        with self.lock:
            if self._writer is not None:
                self._writer.close()


def _device(device: Any) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
