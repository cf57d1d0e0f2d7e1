"""The base class of memories that are saved to a folder: a model card, an upload, an end with a `with` statement."""

from abc import abstractmethod
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

from fastweights.errors import MemoryFileError
from fastweights.files import write_files
from fastweights.hub import CARD, Shared, find_card, write_card


class Saved(Shared):
    """A base class for memories that are saved to a folder."""

    @abstractmethod
    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a folder; what is saved there of the same kind is replaced."""

    @abstractmethod
    def close(self) -> None:
        """Let another process write to the folder."""

    @abstractmethod
    def _describe(self) -> tuple[str, str, str]:
        """Return a title, sentences on what it is, and the lines of Python that load it, for a model card."""

    def save_pretrained(self, folder: str | PathLike[str], *, card: str | None = None) -> None:
        """Write it to a folder as `save` does, with a model card, to be shared.

        Args:
            folder: it is made; what `save` replaces there is replaced.
            card: the model card, `README.md`; None is a plain one, and leaves another that is there.

        Raises:
            ValueError: as `save`.
            MemoryFileError: as `save`.
        """
        self.save(folder)
        place = Path(folder) / CARD
        chosen = find_card(Path(folder), card, write_card(*self._describe()))
        if chosen is None:
            return
        try:
            write_files({place: chosen.encode()})
        except OSError as error:
            raise MemoryFileError(f"cannot write {place}: {error.strerror}; the memory is saved") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
