"""Files that are either the old or the new, never half written."""

import contextlib
import json
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def encode_json(record: dict[str, Any]) -> bytes:
    """Return a record as the bytes of a file that a person can read."""
    return json.dumps(record, indent=2).encode() + b"\n"


def name_part(path: Path, mark: str | None = None) -> Path:
    """Return a name beside a file's place, for writing it before it is renamed; without a mark, nobody else's."""
    return path.with_name(f".{path.name}.{mark or uuid.uuid4().hex}.part")


# Several files that are replaced in one step: all but one are written beside their places under a mark that the last
# one tells, then the last one is put in its place, and then the others. Who has read a mark in the last one looks for
# the others under it first: they are there if the process that wrote them was killed between the two.


def find_marked(path: Path, mark: str) -> Path:
    """Return where a file lies that was written under a mark: in its place, or still beside it."""
    part = name_part(path, mark)
    return part if part.exists() else path


def put_marked(folder: Path, mark: str) -> None:
    """Put the files that lie beside their places under a mark in their places, and delete those of killed processes."""
    end = f".{mark}.part"
    for part in folder.glob(f".*{end}"):
        os.replace(part, part.with_name(part.name.removeprefix(".").removesuffix(end)))
    remove_parts(folder)


def remove_parts(folder: Path, *, seconds: float = 0.0) -> None:
    """Delete what killed processes had begun to write into a folder, if it was written at least so many seconds ago."""
    for part in folder.glob(".*.part"):
        written = max(path.stat().st_mtime for path in (part, *part.glob("*")))  # a folder's own: when a file was added
        if not seconds or time.time() - written >= seconds:
            shutil.rmtree(part) if part.is_dir() else part.unlink()


def write_files(files: dict[Path, bytes]) -> None:
    """Write all files beside their places, then rename them into place; OSError leaves every old file whole."""
    parts = {name_part(path): path for path in files}
    try:
        for part, path in parts.items():
            write_part(part, path, files[path])
        for part, path in parts.items():
            os.replace(part, path)
    except OSError:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink()
        raise


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for a folder, so that its parts may be removed as those of a kill.

    The lock is the folder's own, so that no file stays there. Windows has none.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_part(part: Path, path: Path, contents: bytes) -> None:
    """Write a file that is to be renamed into the place of another, with that one's permissions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as file:
        keep_mode(part, path)
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def keep_mode(part: Path, path: Path) -> None:
    """Give a file the permissions of the one that it is to replace, if there is one: a private file stays private."""
    with contextlib.suppress(OSError):  # no such file, or a file system without permissions
        part.chmod(stat.S_IMODE(path.stat().st_mode))


@contextlib.contextmanager
def replacing(path: Path, contents: bytes) -> Iterator[None]:
    """Write a file beside its place, and put it there when the block has ended: an error leaves the old one there.

    So the block can change what must change with it: a disk that has no room for the file refuses before the block.
    """
    part = name_part(path)
    try:
        write_part(part, path, contents)
        yield
        os.replace(part, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file that was written, or a folder in which one was renamed, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
