"""The log of a saved memory: one record a change, each with its checksums, appended and never rewritten.

    file    = b"fwmemlog", generation u64, crc32 of those u32, then records
    record  = b"FWRC", sequence u64, bytes of the description u32, bytes of the data u64, crc32 of both u32,
              crc32 of this head u32, then the description (JSON) and the data (tensors, one behind the other)

A head has its own checksum, so that its lengths can be trusted: a record that the end of the file cuts short is a write
that was never acknowledged, and everything else that is wrong is damage.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fastweights.errors import MemoryFileError

START = struct.Struct("<8sQI")
HEAD = struct.Struct("<4sQIQII")
MAGIC, MARK = b"fwmemlog", b"FWRC"


class Record(NamedTuple):
    description: dict[str, Any]
    data: bytes
    end: int  # where the next record starts


def start(generation: int) -> bytes:
    """What a log begins with."""
    head = struct.pack("<8sQ", MAGIC, generation)
    return head + struct.pack("<I", zlib.crc32(head))


def record(sequence: int, description: dict[str, Any], data: list[memoryview]) -> list[memoryview]:
    """The pieces of a record, in order."""
    pieces = [memoryview(json.dumps(description).encode()), *data]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    head = struct.pack("<4sQIQI", MARK, sequence, len(pieces[0]), sum(len(piece) for piece in data), checksum)
    return [memoryview(head + struct.pack("<I", zlib.crc32(head))), *pieces]


def generation(file: BinaryIO, path: Path) -> int:
    """Read the beginning of a log: the generation of the memory whose changes it holds."""
    head = file.read(START.size)
    if len(head) < START.size or head[:8] != MAGIC or struct.unpack("<I", head[-4:])[0] != zlib.crc32(head[:-4]):
        raise MemoryFileError(
            f"{path} is damaged: it does not begin like the log of a memory. Put a good copy of the whole folder in "
            "its place; nothing was changed"
        )
    found: int = START.unpack(head)[1]
    return found


def records(file: BinaryIO, path: Path) -> Iterator[Record]:
    """The records from here on, up to the end or a record that it cuts short."""
    size = os.fstat(file.fileno()).st_size
    position, sequence = file.tell(), 0
    while size - position >= HEAD.size:
        head = file.read(HEAD.size)
        mark, found, words, numbers, checksum, own = HEAD.unpack(head)
        if mark != MARK or own != zlib.crc32(head[:-4]):
            if not any(head) and not any(iter(lambda: file.read(2**20).strip(b"\0"), b"")):
                return  # a file that had grown when the machine stopped, without what was to be in it
            raise damaged(path, position, "the head of a record has wrong bytes")
        if found != sequence:
            raise damaged(path, position, f"record {sequence} is missing, {found} stands in its place")
        if size - position - HEAD.size < words + numbers:
            return
        body = file.read(words + numbers)
        if zlib.crc32(body) != checksum:
            raise damaged(path, position, f"record {sequence} has wrong bytes")
        position += HEAD.size + words + numbers
        sequence += 1
        yield Record(json.loads(body[:words]), body[words:], position)


def damaged(path: Path, position: int, reason: str) -> MemoryFileError:
    return MemoryFileError(
        f"{path} is damaged at byte {position}: {reason}. Put a good copy of the whole folder in its place, or cut the "
        f"file there (`truncate --size {position}`) to go on without this record and those after it; nothing was "
        "changed"
    )
