"""The base class of memories that are saved to a folder: a model card, an upload, an end with a `with` statement."""

from abc import abstractmethod
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from fastweights.hub import CARD, Shared, find_card, write_card

MEMORY, LOG = FILES = "memory.safetensors", "memory.log"  # what every saved memory has
NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Saved(Shared):
    """A base class for memories that are saved to a folder."""

    @abstractmethod
    def save(self, path: str | PathLike[str], *, beside: Mapping[str, bytes] = NOTHING) -> None:
        """Write it to a folder, and other files by their names; what is saved there is replaced in one step."""

    @abstractmethod
    def close(self) -> None:
        """Let another process write to the folder."""

    @abstractmethod
    def _describe(self) -> tuple[str, str, str]:
        """Return a title, sentences on what it is, and the lines of Python that load it, for a model card."""

    def save_pretrained(self, folder: str | PathLike[str], *, card: str | None = None) -> None:
        """Write it to a folder as `save` does, with a model card, to be shared.

        Args:
            folder: it is made; what `save` replaces there is replaced, and the card with it, in one step.
            card: the model card, `README.md`; None is a plain one, and leaves another that is there.

        Raises:
            ValueError: as `save`.
            MemoryFileError: as `save`.
        """
        chosen = find_card(Path(folder), card, write_card(*self._describe()))
        self.save(folder, beside=NOTHING if chosen is None else {CARD: chosen.encode()})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
