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
import struct
import weakref
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.errors import MemoryFileError
from fastweights.files import write_files
from fastweights.memory._store import Entries, Ring, State, squared_lengths

SMALLEST_LOG = 2**24  # bytes that a log may have before it is folded into a smaller memory
FORMAT = "fastweights episodic memory 1"
START, OLD_START = struct.Struct("<8sQQI"), struct.Struct("<8sQI")
HEAD = struct.Struct("<4sQIQII")
MAGIC, OLD_MAGIC, MARK = b"fwmemlg2", b"fwmemlog", b"FWRC"
WHOLE_COPY = "put a good copy of the whole folder in its place"

logger = logging.getLogger(__name__)


class Folder:
    """The folder of one saved memory, to be read, replaced or appended to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.memory, self.log = self.path / "memory.safetensors", self.path / "memory.log"
        self._writer = self.path / ".writer"
        # Of the process, not of the thread that took it: the writer may be closed by another.
        self._lock = FileLock(self.path / ".lock", timeout=0, thread_local=False)
        self._generation = self._sequence = self._end = self._fold_at = 0
        self._log_is_current = True  # it goes on from this memory; changes in an older one would be lost
        self._log_is_good = True  # neither damaged nor of an older format
        self._descriptor: int | None = None
        self._closer: weakref.finalize[..., Any] | None = None
        self._process = os.getpid()  # a child of this one may read the memory, but not write to it

    # Reading

    def read(self, device: torch.device, repair: bool = False) -> State:
        """Return the memory as it is now, and note where the next record goes; repaired, up to the first damage."""
        if not self.memory.exists() and not self.log.exists():
            raise MemoryFileError(f"{self.path} holds no saved memory: save() or open() makes one")
        try:
            file = self.log.open("rb")
        except OSError as error:
            raise MemoryFileError(f"cannot read {self.log}: {error.strerror}; {WHOLE_COPY}") from error
        with file:
            start = _read_start(file, self.log)
            state, self._generation = _read_snapshot(self.memory, device)
            if start.generation > self._generation:
                raise MemoryFileError(
                    f"{self.log} is of generation {start.generation}, {self.memory.name} beside it of "
                    f"{self._generation}: they do not belong together; {WHOLE_COPY}"
                )
            self._end, self._sequence = start.size, 0
            self._log_is_current = start.generation == self._generation
            self._log_is_good = start.size == START.size
            if self._log_is_current:
                try:
                    self._replay(state, file, start)
                except _DamageError as damage:
                    if not repair:
                        raise MemoryFileError(
                            f"{self.log} {damage}. {WHOLE_COPY.capitalize()}, or keep its changes up to there "
                            f"({self._sequence}): EpisodicMemory.open({str(self.path)!r}, repair=True); nothing was "
                            "changed"
                        ) from damage
                    logger.warning("%s %s: keeping the changes up to there (%d)", self.log, damage, self._sequence)
                    self._log_is_good = False
        return state

    def _replay(self, state: State, file: BinaryIO, start: "_Start") -> None:
        """Make the changes of the log, one after another."""
        size = os.fstat(file.fileno()).st_size
        for description, data in _read_records(file, start, size):
            try:
                _apply(state, description, data)
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise _DamageError(f"is damaged at byte {self._end}: a record makes no sense ({error})") from error
            self._end = file.tell()
            self._sequence += 1
        if self._end < start.acknowledged:
            raise _DamageError(f"was cut short: changes after byte {self._end} of {start.acknowledged} are missing")

    # Writing

    def open(self, asked: dict[str, Any], device: torch.device, repair: bool) -> State:
        """Lock the memory and return it; make it where there is none."""
        # Bad sizes are refused before a folder is made.
        fresh = None if self.memory.exists() else _make_state(self.path, asked, device)
        self._acquire()
        try:
            for part in self.path.glob(".memory.*.part"):  # begun by a process that was killed
                part.unlink()
            if fresh is not None and not self.memory.exists():
                self._create(fresh)
            state = self.read(device, repair)
            _check_settings(self.path, asked, state)
            if not self._log_is_good:
                self._fold(state)
            self._open_log()
        except (OSError, SafetensorError) as error:
            self.close()
            raise self._unwritable(error) from error
        except BaseException:
            self.close()
            raise
        return state

    def save(self, state: State) -> None:
        """Write a memory in place of the one that is saved here."""
        self._acquire()
        try:
            if self.memory.exists():
                self.read(torch.device("cpu"))  # a damaged memory is not replaced
                self._fold(state)
            else:
                self._create(state)
        except (OSError, SafetensorError) as error:
            raise self._unwritable(error) from error
        finally:
            self.close()

    def append(self, description: dict[str, Any], tensors: list[Tensor]) -> None:
        """Put a change on the disk; on an error it is not there."""
        if self._descriptor is None:
            raise MemoryFileError(f"{self.path} is closed: open() it to change it, or load() it for a copy in memory")
        if self._process != os.getpid():
            raise MemoryFileError(
                f"{self.path} was opened by process {self._process}, this is {os.getpid()}: load() it"
            )
        try:
            if not self._log_is_current:  # the last folding could not begin a new log
                self._start_log()
                self._open_log()
            if os.fstat(self._descriptor).st_size != self._end:
                os.ftruncate(self._descriptor, self._end)  # begun by a write that was killed or failed
            position = self._end
            for piece in _record(self._sequence, description, [_raw(tensor) for tensor in tensors]):
                while len(piece):
                    done = os.pwrite(self._descriptor, piece, position)
                    position, piece = position + done, piece[done:]
            os.fsync(self._descriptor)
            # Not synchronised itself: the next change does that, and without it the log is read to its end.
            os.pwrite(self._descriptor, _start(self._generation, position), 0)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise self._unwritable(error) from error
        self._end = position
        self._sequence += 1

    def fold_if_large(self, state: State) -> None:
        """Fold the log into the memory when it has outgrown it; `state` has all that was appended."""
        if self._end < self._fold_at:
            return
        try:
            self._fold(state)
            self._open_log()
        except (OSError, SafetensorError) as error:
            # Nothing is lost: the changes are in the log, and there will be another time.
            logger.warning("cannot fold %s into %s yet: %s", self.log, self.memory, error)
            self._fold_at = 2 * self._end

    def close(self) -> None:
        """Give up the lock, so that others can write."""
        self._close_log()
        if self._lock.is_locked and self._process == os.getpid():  # a child has nothing to let go of
            with contextlib.suppress(OSError):
                self._writer.unlink()
            self._lock.release()

    def _acquire(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise MemoryFileError(
                f"{self.path} is being written by {self._name_writer()}: there is one writer at a time. Wait until it "
                "closes the memory, or load() it to read"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error
        with contextlib.suppress(OSError):  # only words in another's error
            self._writer.write_text(f"{os.getpid()}\n")

    def _name_writer(self) -> str:
        try:
            process = int(self._writer.read_text())
        except (OSError, ValueError):
            return "another process"
        return "this process already" if process == os.getpid() else f"process {process}"

    def _create(self, state: State) -> None:
        if self.log.exists() and self.log.stat().st_size > START.size:
            raise MemoryFileError(
                f"{self.path} has a {self.log.name} with changes, but no {self.memory.name}: put it back from a copy"
            )
        self._generation = 1
        self._start_log()
        _write_snapshot(self.memory, state, self._generation)

    def _fold(self, state: State) -> None:
        _write_snapshot(self.memory, state, self._generation + 1)
        self._generation, self._log_is_current = self._generation + 1, False
        self._start_log()

    def _start_log(self) -> None:
        write_files({self.log: _start(self._generation, START.size)})
        _sync(self.path)
        self._end, self._sequence, self._log_is_current = START.size, 0, True

    def _open_log(self) -> None:
        self._close_log()
        self._descriptor = os.open(self.log, os.O_RDWR)
        self._closer = weakref.finalize(self, os.close, self._descriptor)
        self._fold_at = max(SMALLEST_LOG, self.memory.stat().st_size)

    def _close_log(self) -> None:
        if self._closer is not None:
            self._closer()
        self._closer = self._descriptor = None

    def _unwritable(self, error: Exception) -> MemoryFileError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return MemoryFileError(
            f"cannot write to {self.path}: {reason}; what was saved before is whole, and the memory unchanged: make "
            "room or make the folder writable, and try again"
        )


def _make_state(path: Path, asked: dict[str, Any], device: torch.device) -> State:
    if "capacity" not in asked or "key_size" not in asked:
        raise ValueError(f"{path} holds no saved memory: give capacity and key_size to make one")
    defaults: dict[str, Any] = {"value_shape": (), "value_dtype": torch.long, "dtype": torch.float32}
    return State(Ring(**(defaults | asked), device=device))


def _settings(state: State) -> dict[str, Any]:
    """Return what cannot change in the life of a memory."""
    ring = state.ring
    return {
        "capacity": ring.capacity,
        "key_size": ring.keys.shape[1],
        "value_shape": list(ring.values.shape[1:]),
        "value_dtype": str(ring.values.dtype),
        "dtype": str(ring.keys.dtype),
    }


def _check_settings(path: Path, asked: dict[str, Any], state: State) -> None:
    saved = _settings(state)
    for name, option in asked.items():
        shown = option if name in ("capacity", "key_size") else list(option) if name == "value_shape" else str(option)
        if shown != saved[name]:
            raise MemoryFileError(
                f"{path} holds a memory with {name}={saved[name]}, not {shown}: leave {name} out, or choose another "
                "path"
            )


def _apply(state: State, description: dict[str, Any], data: bytes) -> None:
    """Make a logged change, as it was made when it was logged."""
    change = description["change"]
    if change == "write":
        ring, count = state.ring, description["count"]
        middle = count * ring.keys[0].nbytes
        keys = _tensor(data[:middle], ring.keys, count)
        state.write(keys, _tensor(data[middle:], ring.values, count), squared_lengths(keys), description["tag"])
    elif change == "remove":
        numbers = _tensor(data, torch.empty(1, dtype=torch.int64), description["count"])
        state.remove(numbers.numpy())
    elif change in ("undo", "keep"):
        getattr(state, change)(description["tag"])
    elif change == "clear":
        state.clear()
    else:
        raise ValueError(f"there is no change {change!r}")


# The log


class _Start(NamedTuple):
    """The beginning of a log: the generation of the memory whose changes it holds, and its acknowledged bytes."""

    generation: int
    acknowledged: int
    size: int  # bytes of the beginning itself: START.size, or OLD_START.size


class _DamageError(Exception):
    """A log lacks changes, or has others than were written; the message goes on from the name of the file."""


def _start(generation: int, acknowledged: int) -> bytes:
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
                file.seek(form.size)
                return _Start(generation, acknowledged[0] if acknowledged else form.size, form.size)
    raise MemoryFileError(
        f"{path} is damaged: it does not begin like the log of a memory. {WHOLE_COPY.capitalize()}; nothing was changed"
    )


def _record(sequence: int, description: dict[str, Any], data: list[memoryview]) -> list[memoryview]:
    """Return the pieces of a record, in order."""
    pieces = [memoryview(json.dumps(description).encode()), *data]
    checksum = 0
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    head = struct.pack("<4sQIQI", MARK, sequence, len(pieces[0]), sum(len(piece) for piece in data), checksum)
    return [memoryview(head + struct.pack("<I", zlib.crc32(head))), *pieces]


def _read_records(file: BinaryIO, start: _Start, size: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the description and the data of each record, up to the end or a record that the end cuts short."""
    position, sequence = start.size, 0
    while size - position >= HEAD.size:
        head = file.read(HEAD.size)
        mark, number, words, numbers, checksum, head_checksum = HEAD.unpack(head)
        if mark != MARK or head_checksum != zlib.crc32(head[:-4]):
            if not any(head) and not any(iter(lambda: file.read(2**20).strip(b"\0"), b"")):
                return  # a file that had grown when the machine stopped, without what was to be in it
            raise _DamageError(f"is damaged at byte {position}: the head of a record has wrong bytes")
        if number != sequence:
            raise _DamageError(f"is damaged at byte {position}: record {number} stands in the place of {sequence}")
        if size - position - HEAD.size < words + numbers:
            return
        body = file.read(words + numbers)
        if zlib.crc32(body) != checksum:
            raise _DamageError(f"is damaged at byte {position}: record {sequence} has wrong bytes")
        yield json.loads(body[:words]), body[words:]
        position = file.tell()
        sequence += 1


def _tensor(data: bytes, like: Tensor, count: int) -> Tensor:
    shape = (count, *like.shape[1:])
    if len(data) != prod(shape) * like.element_size():
        raise ValueError(f"{len(data)} bytes cannot be {list(shape)} {like.dtype}")
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(shape).to(like.device)


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, not copied where it is whole and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if len(flat) else memoryview(b"")


# The whole memory in one safetensors file, with a checksum over all of it


def _write_snapshot(path: Path, state: State, generation: int) -> None:
    """Write beside the place and rename; OSError or SafetensorError leaves the old file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _snapshot_tensors(state).items()}
    facts = _settings(state) | {
        "start_of_numbers": state.next_number,
        "next_tag": state.history.next_tag,
        "tags": [[tag, name] for tag, name in state.history.names.items()],
        "generation": generation,
    }
    facts["crc32"] = _checksum(facts, tensors)
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(tensors, part, metadata={"format": FORMAT, "memory": json.dumps(facts)})
        _sync(part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file that was written, or a folder in which one was renamed, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_snapshot(path: Path, device: torch.device) -> tuple[State, int]:
    """Return a memory and its generation."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise MemoryFileError(f"{path} is not an episodic memory, or one of another version: {metadata}")
            facts = json.loads(metadata["memory"])
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if facts.pop("crc32") != _checksum(facts, tensors):
            raise ValueError("its checksum is another")
        return _snapshot_state(facts, tensors, device), facts["generation"]
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise MemoryFileError(f"{path} is damaged ({error}): {WHOLE_COPY}; nothing was changed") from error


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


def _snapshot_entries(place: str, tensors: dict[str, Tensor], device: torch.device) -> Entries:
    keys, values = tensors[f"{place}.keys"].to(device), tensors[f"{place}.values"].to(device)
    numbers, tags = (tensors[f"{place}.{name}"].numpy().copy() for name in ("numbers", "tags"))
    return Entries(keys, values, numbers, tags)


def _checksum(facts: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    checksum = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        one = tensors[name]
        checksum = zlib.crc32(f"{name} {one.dtype} {list(one.shape)}".encode(), checksum)
        checksum = zlib.crc32(_raw(one), checksum)
    return checksum
