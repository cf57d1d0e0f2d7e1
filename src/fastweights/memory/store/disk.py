"""A memory on the disk: `memory.safetensors`, and `memory.log` with the changes since.

The log is appended to and never rewritten; each change has its checksums::

    file    = b"fwmemlg2", generation u64, acknowledged bytes u64, crc32 of those u32, then records
    record  = b"FWRC", sequence u64, bytes of the description u32, bytes of the data u64, crc32 of both u32,
              crc32 of this head u32, then the description (JSON) and the data (tensors, one behind the other)

The acknowledged bytes are how long the log was when the last change returned. They are written after the change is on
the disk, so that a log that is shorter has lost something, and a record behind them that the end of the file cuts short
is a write that was never acknowledged. Everything else that is wrong is damage. Logs that begin with b"fwmemlog" are
older: they have no acknowledged bytes, are read, and are replaced when the memory is opened to be written.

Every moment of a kill leaves one of these: the log is renamed into place after the memory into which the old one was
folded, so that a log older than its memory is one whose changes are all in it. A reader opens the log first: whatever
the writer does meanwhile, the memory that it reads then has at least the changes up to that log.
"""

import contextlib
import json
import logging
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from math import prod
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.errors import MemoryFileError
from fastweights.files import find_marked, keep_mode, name_part, sync
from fastweights.memory.store.ring import Entries, Ring, State, squared_lengths
from fastweights.memory.store.saved import LOG, MEMORY

FORMAT = "fastweights episodic memory 1"
START, OLD_START = struct.Struct("<8sQQI"), struct.Struct("<8sQI")
HEAD = struct.Struct("<4sQIQII")
MAGIC, OLD_MAGIC, MARK = b"fwmemlg2", b"fwmemlog", b"FWRC"
WHOLE_COPY = "put a good copy of the whole folder in its place"

logger = logging.getLogger(__name__)


class Reader:
    """A saved memory, read once as a whole and then followed: what its writer appends is read on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.memory, self.log = self.path / MEMORY, self.path / LOG
        self._generation = self._log_generation = 0
        self.mark = ""  # of the files that were saved together with the memory
        self._sequence = self._end = 0  # the next record's number and place
        self._last = 0, b""  # where the last record begins, and its head
        self._files: tuple[int, ...] | None = None  # those that were read; None if there is no going on from here
        self._log_is_good = True  # neither damaged nor of an older format

    def find_beside(self, name: str) -> Path:
        """Return the path of a file that was saved together with the memory."""
        return find_marked(self.path / name, self.mark)

    @property
    def _log_is_current(self) -> bool:
        """Whether the log goes on from this memory; changes in an older one would be lost."""
        return self._log_generation == self._generation

    def read(self, device: torch.device, repair: bool = False) -> State:
        """Return the memory as it is now, and note where the next record goes; repaired, up to the first damage."""
        if not self.memory.exists() and not self.log.exists():
            raise MemoryFileError(f"{self.path} holds no saved memory: save() or open() makes one")
        self._files = None
        try:
            files = self._identify_files()  # before they are read: if they are replaced now, `follow` will see it
            file = self.log.open("rb", buffering=0)
        except OSError as error:
            raise MemoryFileError(f"cannot read {error.filename}: {error.strerror}; {WHOLE_COPY}") from error
        with file:
            start = _read_start(file, self.log)
            state, self._generation, self.mark = _read_snapshot(self.memory, device)
            if start.generation > self._generation:
                raise MemoryFileError(
                    f"{self.log} is of generation {start.generation}, {self.memory.name} beside it of "
                    f"{self._generation}: they do not belong together; {WHOLE_COPY}"
                )
            self._log_generation = start.generation
            self._end, self._sequence, self._last = start.size, 0, (0, b"")
            self._log_is_good = start.size == START.size
            if self._log_is_current:
                try:
                    self._replay(state, file, start)
                except _DamageError as damage:
                    if not repair:
                        raise self._damaged(damage, self._sequence) from damage
                    logger.warning("%s %s: keeping the changes up to there (%d)", self.log, damage, self._sequence)
                    self._log_is_good = False
        self._files = files
        return state

    def _replay(self, state: State, file: BinaryIO, start: "_Start") -> None:
        """Make the changes of the log, one after another."""
        for record in _read_records(file, self._end, 0):
            self._make(_decode(record, state.ring), state, record)
        _check_length(self._end, start)
        if os.fstat(file.fileno()).st_size > self._end:
            logger.warning(
                "%s ends inside a change that was never acknowledged, as when its writer is killed: the %d changes "
                "before it were found",
                self.log,
                self._sequence,
            )

    def follow(self, state: State) -> tuple[State, bool]:
        """Return the memory as it is now, and whether that is another content.

        It is `state` itself, with the changes since it was read, unless other files are in place. MemoryFileError
        leaves `state` as it was.
        """
        with contextlib.suppress(OSError):  # `read` says what is wrong
            if self._files is not None and self._files == self._identify_files():
                with self.log.open("rb", buffering=0) as file:
                    start = _read_start(file, self.log)
                    place, head = self._last
                    # The last record is another where the disk refused it to the writer after it was read here.
                    if start.generation == self._log_generation and _read_at(file, place, len(head)) == head:
                        return state, self._log_is_current and self._read_on(state, file, start)
        fresh = self.read(state.ring.keys.device)
        if not fresh.goes_on_from(state):
            return fresh, True
        fresh.ring.identity = state.ring.identity
        return fresh, fresh.has_changed_since(state)

    def _read_on(self, state: State, file: BinaryIO, start: "_Start") -> bool:
        """Make the changes since the last reading, all or none; return whether there are any."""
        changes, end = [], self._end
        try:
            for record in _read_records(file, self._end, self._sequence):
                changes.append((_decode(record, state.ring), record))
                end = record.end
            _check_length(end, start)
        except _DamageError as damage:
            raise self._damaged(damage, self._sequence + len(changes)) from damage
        files, self._files = self._files, None  # after an interruption everything is read again
        for change, record in changes:
            self._make(change, state, record)
        self._files = files
        return bool(changes)

    def _make(self, change: Callable[[State], object], state: State, record: "_Record") -> None:
        try:
            change(state)
        except _NONSENSE as error:
            raise _nonsense(record, error) from error
        self._last, self._end = (record.begin, record.head), record.end
        self._sequence += 1

    def _identify_files(self) -> tuple[int, ...]:
        """Return what is other once a file was replaced: nobody can set a file's time of change."""
        log, memory = self.log.stat(), self.memory.stat()
        return log.st_dev, log.st_ino, memory.st_dev, memory.st_ino, memory.st_ctime_ns

    def _damaged(self, damage: Exception, changes: int) -> MemoryFileError:
        return MemoryFileError(
            f"{self.log} {damage}. {WHOLE_COPY.capitalize()}, or keep its changes up to there ({changes}): "
            f"EpisodicMemory.open({str(self.path)!r}, repair=True); nothing was changed"
        )


def describe_settings(state: State) -> dict[str, Any]:
    """Return what cannot change in the life of a memory."""
    ring = state.ring
    return {
        "capacity": ring.capacity,
        "key_size": ring.keys.shape[1],
        "value_shape": list(ring.values.shape[1:]),
        "value_dtype": str(ring.values.dtype),
        "dtype": str(ring.keys.dtype),
    }


# The log


class _Start(NamedTuple):
    """The beginning of a log: the generation of the memory whose changes it holds, and its acknowledged bytes."""

    generation: int
    acknowledged: int
    size: int  # bytes of the beginning itself: START.size, or OLD_START.size


class _Record(NamedTuple):
    """A change in the log."""

    begin: int
    head: bytes
    description: dict[str, Any]
    data: bytes
    end: int


class _DamageError(Exception):
    """A log lacks changes, or has others than were written; the message goes on from the name of the file."""


_NONSENSE = (KeyError, TypeError, ValueError, RuntimeError)


def encode_start(generation: int, acknowledged: int) -> bytes:
    head = struct.pack("<8sQQ", MAGIC, generation, acknowledged)
    return head + struct.pack("<I", zlib.crc32(head))


def _read_start(file: BinaryIO, path: Path) -> _Start:
    for _ in range(3):  # more than once only while a writer is just there
        head = os.pread(file.fileno(), START.size, 0)
        form = OLD_START if head[:8] == OLD_MAGIC else START
        head = head[: form.size]
        if len(head) == form.size and head[:8] in (MAGIC, OLD_MAGIC):
            _, generation, *acknowledged, checksum = form.unpack(head)
            if checksum == zlib.crc32(head[:-4]):
                return _Start(generation, acknowledged[0] if acknowledged else form.size, form.size)
    raise MemoryFileError(
        f"{path} is damaged: it does not begin like the log of a memory. {WHOLE_COPY.capitalize()}; nothing was changed"
    )


def encode_record(sequence: int, description: dict[str, Any], data: list[memoryview]) -> list[memoryview]:
    """Return the pieces of a record, in order."""
    pieces = [memoryview(json.dumps(description).encode()), *data]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    head = struct.pack("<4sQIQI", MARK, sequence, len(pieces[0]), sum(len(piece) for piece in data), checksum)
    return [memoryview(head + struct.pack("<I", zlib.crc32(head))), *pieces]


def _read_records(file: BinaryIO, position: int, sequence: int) -> Iterator[_Record]:
    """Yield the records from one on, up to the end or a record that the end cuts short."""
    while True:
        for tries_left in (2, 1, 0):  # more than one only while a writer is just there
            try:
                record = _read_record(file, position, sequence)
                break
            except _DamageError:
                if not tries_left:
                    raise
        if record is None:
            return
        yield record
        position = record.end
        sequence += 1


def _read_record(file: BinaryIO, begin: int, sequence: int) -> _Record | None:
    head = _read_at(file, begin, HEAD.size)
    if len(head) < HEAD.size:
        return None
    mark, number, words, numbers, checksum, head_checksum = HEAD.unpack(head)
    if mark != MARK or head_checksum != zlib.crc32(head[:-4]):
        if _is_empty_from(file, begin):
            return None  # a file that had grown when the machine stopped, without what was to be in it
        raise _DamageError(f"is damaged at byte {begin}: the head of a record has wrong bytes")
    if number != sequence:
        raise _DamageError(f"is damaged at byte {begin}: record {number} stands in the place of {sequence}")
    end = begin + HEAD.size + words + numbers
    if os.fstat(file.fileno()).st_size < end:
        return None
    body = _read_at(file, begin + HEAD.size, words + numbers)
    if zlib.crc32(body) != checksum:
        raise _DamageError(f"is damaged at byte {begin}: record {sequence} has wrong bytes")
    return _Record(begin, head, json.loads(body[:words]), body[words:], end)


def _read_at(file: BinaryIO, position: int, size: int) -> bytes:
    """Return bytes of a file, fewer where it ends."""
    pieces = []
    while size and (piece := os.pread(file.fileno(), size, position)):
        pieces.append(piece)
        position, size = position + len(piece), size - len(piece)
    return b"".join(pieces)


def _is_empty_from(file: BinaryIO, position: int) -> bool:
    """Return whether all bytes from a place on are 0."""
    while piece := _read_at(file, position, 2**20):
        if piece.strip(b"\0"):
            return False
        position += len(piece)
    return True


def _check_length(end: int, start: _Start) -> None:
    if end < start.acknowledged:
        raise _DamageError(f"was cut short: changes after byte {end} of {start.acknowledged} are missing")


def _decode(record: _Record, ring: Ring) -> Callable[[State], object]:
    """Return the change of a record, to be made in a memory as it was made when it was logged."""
    description, data = record.description, record.data
    try:
        change = description["change"]
        if change == "write":
            count, tag = description["count"], description["tag"]
            middle = count * ring.keys[0].nbytes
            end = middle + count * ring.values[0].nbytes
            keys, values = _tensor(data[:middle], ring.keys, count), _tensor(data[middle:end], ring.values, count)
            removed = _numbers(data[end:], description.get("removed", 0))
            return lambda state: state.write(keys, values, squared_lengths(keys), tag, removed)
        if change == "remove":
            numbers = _numbers(data, description["count"])
            return lambda state: state.remove(numbers)
        if change == "rename":
            values = _tensor(data, ring.values, 2)
            return lambda state: state.rename(values[:1], values[1:])
        if change in ("undo", "keep"):
            return methodcaller(change, description["tag"])
        if change == "clear":
            return State.clear
        raise ValueError(f"there is no change {change!r}")
    except _NONSENSE as error:
        raise _nonsense(record, error) from error


def _nonsense(record: _Record, error: Exception) -> _DamageError:
    return _DamageError(f"is damaged at byte {record.begin}: a record makes no sense ({error})")


def _numbers(data: bytes, count: int) -> np.ndarray:
    if len(data) != 8 * count:
        raise ValueError(f"{len(data)} bytes cannot be {count} numbers")
    return np.frombuffer(data, np.int64)


def _tensor(data: bytes, like: Tensor, count: int) -> Tensor:
    shape = (count, *like.shape[1:])
    if len(data) != prod(shape) * like.element_size():
        raise ValueError(f"{len(data)} bytes cannot be {list(shape)} {like.dtype}")
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(shape).to(like.device)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, not copied where it is whole and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if len(flat) else memoryview(b"")


# The whole memory in one safetensors file, with a checksum over all of it


def write_snapshot(path: Path, state: State, generation: int, mark: str) -> None:
    """Write beside the place and rename; OSError or SafetensorError leaves the old file.

    `mark` names the files that were saved together with this memory.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _snapshot_tensors(state).items()}
    facts = describe_settings(state) | {
        "start_of_numbers": state.next_number,
        "next_tag": state.history.next_tag,
        "tags": [[tag, name] for tag, name in state.history.names.items()],
        "generation": generation,
        "mark": mark,
    }
    facts["crc32"] = checksum(facts, tensors)
    # A folder, because safetensors writes files of names of its own beside the one that it is given.
    folder = name_part(path)
    part = folder / path.name
    try:
        folder.mkdir()
        part.touch()
        mode = part.stat().st_mode  # as of any file: safetensors writes for the owner alone
        save_file(tensors, part, metadata={"format": FORMAT, "memory": json.dumps(facts)})
        with contextlib.suppress(OSError):  # a file system without permissions
            part.chmod(mode)
        keep_mode(part, path)
        sync(part)
        os.replace(part, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync(path.parent)


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file that a writer may replace at any moment, all of one file.

    safetensors opens a file twice, by its name: the header and the tensors could be of two files.
    """
    while True:
        with path.open("rb") as held:  # while it is open, no other file has its identity
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    found = file.metadata() or {}, {name: file.get_tensor(name) for name in sorted(file.keys())}
            except (SafetensorError, RuntimeError):
                if os.path.samestat(os.fstat(held.fileno()), path.stat()):
                    raise
                continue
            if os.path.samestat(os.fstat(held.fileno()), path.stat()):
                return found


def _mark_of(facts: dict[str, Any]) -> str:
    mark = str(facts.get("mark", ""))  # older files have none
    if mark and not mark.isalnum():  # it becomes a part of a file's name
        raise ValueError(f"its mark is {mark!r}")
    return mark


def read_mark(path: Path) -> str:
    """Return the mark of the memory in a file: that of the files that were saved together with it."""
    try:
        with safe_open(path, framework="pt") as file:
            return _mark_of(json.loads(file.metadata()["memory"]))
    except (OSError, *_UNREADABLE) as error:
        raise MemoryFileError(f"{path} is damaged ({error}): {WHOLE_COPY}; nothing was changed") from error


def _read_snapshot(path: Path, device: torch.device) -> tuple[State, int, str]:
    """Return a memory, its generation and its mark."""
    try:
        metadata, tensors = read_safetensors(path)
        if metadata.get("format") != FORMAT:
            raise MemoryFileError(f"{path} is not an episodic memory, or one of another version: {metadata}")
        facts = json.loads(metadata["memory"])
        if facts.pop("crc32") != checksum(facts, tensors):
            raise ValueError("its checksum is another")
        return _snapshot_state(facts, tensors, device), int(facts["generation"]), _mark_of(facts)
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror or error}") from error
    except _UNREADABLE as error:
        raise MemoryFileError(f"{path} is damaged ({error}): {WHOLE_COPY}; nothing was changed") from error


# A file of a stranger may hold anything.
_UNREADABLE = (
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


def _snapshot_tensors(state: State) -> dict[str, Tensor]:
    places, history = {"memory": state.entries()}, state.history
    if history.held:
        places["overwritten"] = history.overwritten()
    changes = [[0, *one[0], one[1]] if isinstance(one, tuple) else [1, len(one), 0, 0] for one in history.changes]
    removed = [one for one in history.changes if not isinstance(one, tuple)]
    return {
        "undo.initial": torch.tensor(history.initial, dtype=torch.int64).view(-1, 2),
        "undo.changes": torch.tensor(changes, dtype=torch.int64).view(-1, 4),
        "undo.removed": torch.from_numpy(np.concatenate([np.empty(0, np.int64), *removed])),
    } | {
        f"{place}.{name}": torch.as_tensor(one)
        for place, entries in places.items()
        for name, one in entries._asdict().items()
    }


def _snapshot_state(facts: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> State:
    value_dtype, dtype = (getattr(torch, facts[name].removeprefix("torch.")) for name in ("value_dtype", "dtype"))
    if not (isinstance(value_dtype, torch.dtype) and isinstance(dtype, torch.dtype)):
        raise ValueError(f"{facts['value_dtype']} or {facts['dtype']} is no dtype")
    state = State(Ring(facts["capacity"], facts["key_size"], tuple(facts["value_shape"]), value_dtype, dtype, device))
    entries = _snapshot_entries("memory", tensors, device)
    if len(entries.numbers) > state.ring.capacity:
        raise ValueError("it holds more entries than its capacity")
    _check_entries(entries, facts)
    state.ring.append(entries, squared_lengths(entries.keys))
    state.next_number = facts["start_of_numbers"]
    history = state.history
    history.next_tag = facts["next_tag"]
    history.names = dict(facts["tags"])
    history.initial = [(first, last) for first, last in tensors["undo.initial"].tolist()]
    removed, done = tensors["undo.removed"].numpy(), 0
    for kind, first, last, tag in tensors["undo.changes"].tolist():
        if kind:
            history.changes.append(removed[done : done + first].copy())
            done += first
        else:
            history.changes.append(((first, last), tag))
    if "overwritten.keys" in tensors:
        history.hold(_snapshot_entries("overwritten", tensors, device))
    return state


def _check_entries(entries: Entries, facts: dict[str, Any]) -> None:
    """Refuse what no writer has written."""
    numbers, next_number, tags = entries.numbers, facts["start_of_numbers"], facts["tags"]
    if len({len(part) for part in entries}) != 1 or numbers.dtype != np.int64 or entries.tags.dtype != np.int64:
        raise ValueError("its entries have not as many keys, values, numbers and tags")
    if not bool(entries.keys.isfinite().all()):
        raise ValueError("a key is NaN or infinite")
    if not isinstance(next_number, int) or (np.diff(numbers, append=next_number, prepend=-1) <= 0).any():
        raise ValueError("the numbers of its entries do not ascend")
    if any(not isinstance(tag, int) or not isinstance(name, str) for tag, name in tags):
        raise ValueError(f"its tags are {tags}")


def _snapshot_entries(place: str, tensors: dict[str, Tensor], device: torch.device) -> Entries:
    keys, values = tensors[f"{place}.keys"].to(device), tensors[f"{place}.values"].to(device)
    numbers, tags = (tensors[f"{place}.{name}"].numpy().copy() for name in ("numbers", "tags"))
    return Entries(keys, values, numbers, tags)


def checksum(facts: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Return the crc32 of all that a file holds."""
    found = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        one = tensors[name]
        found = zlib.crc32(f"{name} {one.dtype} {list(one.shape)}".encode(), found)
        found = zlib.crc32(raw_bytes(one), found)
    return found
