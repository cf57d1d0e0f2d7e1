"""Files that are either the old or the new, never half written."""

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def encode_json(record: dict[str, Any]) -> bytes:
    """Return a record as the bytes of a file that a person can read."""
    return json.dumps(record, indent=2).encode() + b"\n"


def name_part(path: Path) -> Path:
    """Return a name beside a file's place that no other process uses: for writing it before it is renamed."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


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
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(files[path])
                file.flush()
                os.fsync(file.fileno())
        for part, path in parts.items():
            os.replace(part, path)
    except OSError:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink()
        raise


@contextlib.contextmanager
def replacing(path: Path, contents: bytes) -> Iterator[None]:
    """Write a file beside its place, and put it there when the block has ended: an error leaves the old one there.

    So the block can change what must change with it: a disk that has no room for the file refuses before the block.
    """
    part = name_part(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
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
