"""A memory on the disk: opened, read, saved and closed; what lies there is in `_folder`."""

from collections.abc import Callable
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from fastweights.memory._described import Described
from fastweights.memory._state import State

if TYPE_CHECKING:
    from fastweights.memory._folder import Folder


class Saved(Described):
    """A memory whose changes are put on the disk before they are made, where it has a folder."""

    _folder: "Folder | None"

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
    ) -> Self:
        """Open a saved memory to write to it, or make one; one writer at a time, any number of readers (`load`).

        A change has reached the disk when its method returns, and a kill at any moment loses nothing that did: changes
        are appended to a log, which is folded into `memory.safetensors` when it has outgrown it. Use it in a `with`
        statement, or `close()` it. Open tags stay open from one writer to the next.

        Args:
            path: a folder.
            capacity: needed to make a memory; must be that of a saved one if given, like all that follow.
            key_size: needed to make a memory.
            value_shape: () if not given.
            value_dtype: torch.long if not given.
            dtype: torch.float32 if not given.
            device: of the tensors here.

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
        from fastweights.memory._folder import Folder

        folder = Folder(path)
        asked = {
            "capacity": capacity,
            "key_size": key_size,
            "value_shape": value_shape,
            "value_dtype": value_dtype,
            "dtype": dtype,
        }
        given = {name: one for name, one in asked.items() if one is not None}
        state = folder.open(given, _device(device))
        return cls._of(state, folder)

    @classmethod
    def load(cls, path: str | PathLike[str], *, device: Any = None) -> Self:
        """Read a saved memory as it is now, also while another process writes to it; changes here stay here.

        Args:
            path: the folder of `open` or `save`.
            device: of the tensors.

        Raises:
            MemoryFileError: there is no memory, or it is damaged; nothing in it is ever executed.
        """
        from fastweights.memory._folder import Folder

        return cls._of(Folder(path).load(_device(device)), None)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the memory, open tags and all, to a folder; one that is saved there is replaced in one step.

        Args:
            path: a folder; it is made.

        Raises:
            MemoryFileError: the memory there has a writer or is damaged, or the disk refuses; what was there is whole.
        """
        from fastweights.memory._folder import Folder

        Folder(path).save(self._state)

    @classmethod
    def _of(cls, state: State, folder: "Folder | None") -> Self:
        store = cls.__new__(cls)
        store._state, store._folder = state, folder
        return store

    def close(self) -> None:
        """Let another process write to the saved memory; this object can still be searched, and changed no more."""
        if self._folder is not None:
            self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _change(self, description: dict[str, Any], tensors: list[Tensor], make: Callable[[], None]) -> None:
        """Put a change on the disk, then make it."""
        if self._folder is None:
            make()
            return
        self._folder.append(description, tensors)
        try:
            make()
        except BaseException:  # out of memory, or interrupted: no longer what the disk has
            self._folder.close()
            raise
        self._folder.applied(self._state)


def _device(device: Any) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)
