"""Arrays made of a data set's archives once, and read from the user's cache from then on."""

import hashlib
import io
import logging
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastweights.errors import DataError, one_line
from fastweights.files import write_files
from fastweights.tasks._archives import DAMAGED
from fastweights.tasks.datasets import user_cache

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]


def load_or_make(name: str, fields: tuple[str, ...], sources: Sequence[Path], make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `make` makes of the sources, from the user's cache once they were made.

    `name` stands for all that the arrays depend on besides the content of the sources: a change of how they are made
    changes it. A cache that cannot be read or written costs time and a warning in the log, nothing else.

    Raises:
        DataError: a source cannot be read. What `make` raises comes through.
    """
    path = _place(name, sources)
    arrays = _read(path, fields) if path else None
    if arrays is None:
        arrays = make()
        if path:
            _write(path, arrays)
    return arrays


def _place(name: str, sources: Sequence[Path]) -> Path | None:
    """Return the file of these sources, named by their content: a copy or a new date changes nothing."""
    try:
        # Not beside the downloads: a folder with a data set's name would look like one that somebody has begun.
        folder = user_cache() / "packed"
    except ModuleNotFoundError as error:
        logger.warning("%s: %s is made each time, without a cache", error, name)
        return None
    key = hashlib.sha256()
    for source in sources:
        try:
            with source.open("rb") as stream:
                key.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"{source}: cannot be read: {one_line(error)}") from error
    return folder / f"{name}-{key.hexdigest()[:32]}.npz"


def _read(path: Path, fields: tuple[str, ...]) -> Arrays | None:
    try:
        with zipfile.ZipFile(path) as archive:
            if sorted(archive.namelist()) != sorted(f"{field}.npy" for field in fields):
                raise ValueError(f"it holds {', '.join(archive.namelist()) or 'nothing'}")
            # Read whole before NumPy sees any of it, which is when zipfile compares the checksum.
            data = {field: archive.read(f"{field}.npy") for field in fields}
        return {field: np.load(io.BytesIO(data[field]), allow_pickle=False) for field in fields}
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGED) as error:
        logger.warning("%s cannot be used and is made again: %s", path, one_line(error))
        return None


def _write(path: Path, arrays: Arrays) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for field, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            archive.writestr(f"{field}.npy", member.getvalue())
    try:
        write_files({path: buffer.getvalue()})
    except OSError as error:
        logger.warning("%s cannot be written, so that it is made each time: %s", path, one_line(error))
