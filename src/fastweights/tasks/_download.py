"""Downloads that leave what is there alone until they are known to be right."""

import contextlib
import uuid
from pathlib import Path

from fastweights.errors import DataError
from fastweights.tasks._archives import DataFile, check_file, one_line


def download(file: DataFile, folder: Path) -> None:
    """Put a file into its folder, which is made, once its content is known to be right.

    Raises:
        DataError: it could not be fetched, has other content, or cannot be written.
    """
    import pooch  # type: ignore[import-untyped]

    # Beside its place, so that the move is one step, and under a name that no other process uses.
    part = folder / f".{file.name}.{uuid.uuid4().hex}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pooch.HTTPDownloader(chunk_size=2**16)(file.url, part, None)
        result = check_file(part, file)
        if not result.ok:
            raise DataError(f"download of {file.url} refused: {result.found}; expected {file.expected}")
        part.replace(folder / file.name)
    except (OSError, ValueError) as error:
        raise DataError(f"download of {file.url} into {folder} failed: {one_line(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
