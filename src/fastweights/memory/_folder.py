"""The folder of a saved memory: `memory.safetensors`, and `memory.log` with what has changed since.

Every moment of a kill leaves one of these: the log is renamed into place after the memory into which the old one was
folded, so that a log older than its memory is one whose changes are all in it. A reader opens the log first: whatever
the writer does meanwhile, the memory that it reads then has at least the changes up to that log.
"""

import contextlib
import logging
import os
import weakref
from math import prod
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from fastweights.errors import MemoryFileError
from fastweights.files import write_files
from fastweights.memory import _log, _snapshot
from fastweights.memory._checks import squared_lengths
from fastweights.memory._state import State

SMALLEST_LOG = 2**24  # bytes that a log may have before it is folded into a smaller memory

logger = logging.getLogger(__name__)


class Folder:
    """One saved memory, to be read, replaced or appended to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.memory, self.log = self.path / "memory.safetensors", self.path / "memory.log"
        self._writer = self.path / ".writer"
        # Of the process, not of the thread that took it: the writer may be closed by another.
        self._lock = FileLock(self.path / ".lock", timeout=0, thread_local=False)
        self._generation = self._sequence = self._good = self._fold_at = 0
        self._own = True  # the log goes on from this memory; what an older one is given would be lost
        self._descriptor: int | None = None
        self._closer: weakref.finalize[..., Any] | None = None
        self._process = os.getpid()  # a child of this one may read the memory, but not write to it

    # Reading

    def load(self, device: torch.device) -> State:
        """The memory as it is now."""
        return self._read(device)

    def _read(self, device: torch.device) -> State:
        """The memory; where the next record goes is noted."""
        if not self.memory.exists() and not self.log.exists():
            raise MemoryFileError(f"{self.path} holds no saved memory: save() or open() makes one")
        try:
            file = self.log.open("rb")
        except OSError as error:
            raise MemoryFileError(
                f"cannot read {self.log}: {error.strerror}; put back the whole folder from a copy"
            ) from error
        with file:
            generation = _log.generation(file, self.log)
            state, self._generation = _snapshot.read(self.memory, device)
            if generation > self._generation:
                raise MemoryFileError(
                    f"{self.log} is of generation {generation}, {self.memory.name} beside it of {self._generation}: "
                    "they do not belong together; put back the whole folder from a copy"
                )
            self._good, self._sequence, self._own = file.tell(), 0, generation == self._generation
            if not self._own:
                return state
            for record in _log.records(file, self.log):
                try:
                    _apply(state, record)
                except (KeyError, TypeError, ValueError, RuntimeError) as error:
                    raise _log.damaged(self.log, self._good, f"a record makes no sense ({error})") from error
                self._good = record.end
                self._sequence += 1
        return state

    # Writing

    def open(self, given: dict[str, Any], device: torch.device) -> State:
        """The memory, locked; made where there is none."""
        new = not self.memory.exists()
        fresh = _fresh(self.path, given, device) if new else None  # bad sizes are refused before a folder is made
        self._acquire()
        try:
            for part in self.path.glob(".memory.*.part"):  # what a killed process had begun to write
                part.unlink()
            if fresh is not None and not self.memory.exists():
                self._create(fresh)
            state = self._read(device)
            _require(self.path, given, state)
            self._open_log()
        except OSError as error:
            self.close()
            raise self._unwritable(error) from error
        except BaseException:
            self.close()
            raise
        return state

    def save(self, state: State) -> None:
        """Write a memory in place of whatever is saved here."""
        self._acquire()
        try:
            if self.memory.exists():
                self._read(torch.device("cpu"))  # a damaged memory is not replaced
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
            if not self._own:  # the last folding could not begin a new log
                self._write_log()
                self._open_log()
            if os.fstat(self._descriptor).st_size != self._good:
                os.ftruncate(self._descriptor, self._good)  # what a killed or failed write had begun
            position = self._good
            for piece in _log.record(self._sequence, description, [_snapshot.raw(tensor) for tensor in tensors]):
                while len(piece):
                    done = os.pwrite(self._descriptor, piece, position)
                    position, piece = position + done, piece[done:]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._good)
            raise self._unwritable(error) from error
        self._good = position
        self._sequence += 1

    def applied(self, state: State) -> None:
        """Fold the log into the memory when it has outgrown it; `state` has all that was appended."""
        if self._good < self._fold_at:
            return
        try:
            self._fold(state)
            self._open_log()
        except (OSError, SafetensorError) as error:
            # Nothing is lost: the changes are in the log, and there will be another time.
            logger.warning("cannot fold %s into %s yet: %s", self.log, self.memory, error)
            self._fold_at = 2 * self._good

    def close(self) -> None:
        """Let others write."""
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
                f"{self.path} is being written by {self._who()}: there is one writer at a time. Wait until it closes "
                "the memory, or load() it to read"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from error
        with contextlib.suppress(OSError):  # only words in another's error
            self._writer.write_text(f"{os.getpid()}\n")

    def _who(self) -> str:
        try:
            process = int(self._writer.read_text())
        except (OSError, ValueError):
            return "another process"
        return "this process already" if process == os.getpid() else f"process {process}"

    def _create(self, state: State) -> None:
        if self.log.exists() and self.log.stat().st_size > _log.START.size:
            raise MemoryFileError(
                f"{self.path} has a {self.log.name} with changes, but no {self.memory.name}: put it back from a copy"
            )
        self._generation = 1
        self._write_log()
        _snapshot.write(self.memory, state, self._generation)

    def _fold(self, state: State) -> None:
        _snapshot.write(self.memory, state, self._generation + 1)
        self._generation, self._own = self._generation + 1, False
        self._write_log()

    def _write_log(self) -> None:
        write_files({self.log: _log.start(self._generation)})
        _snapshot.sync(self.path)
        self._good, self._sequence, self._own = _log.START.size, 0, True

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


def _fresh(path: Path, given: dict[str, Any], device: torch.device) -> State:
    if "capacity" not in given or "key_size" not in given:
        raise ValueError(f"{path} holds no saved memory: give capacity and key_size to make one")
    defaults: dict[str, Any] = {"value_shape": (), "value_dtype": torch.long, "dtype": torch.float32}
    return State(**(defaults | given), device=device)


def _require(path: Path, given: dict[str, Any], state: State) -> None:
    found = _snapshot.settings(state)
    for name, asked in given.items():
        said = asked if name in ("capacity", "key_size") else list(asked) if name == "value_shape" else str(asked)
        if said != found[name]:
            raise MemoryFileError(
                f"{path} holds a memory with {name}={found[name]}, not {said}: leave {name} out, or choose another path"
            )


def _apply(state: State, record: _log.Record) -> None:
    """Make a logged change, as it was made when it was logged."""
    description, data = record.description, record.data
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


def _tensor(data: bytes, like: Tensor, count: int) -> Tensor:
    shape = (count, *like.shape[1:])
    if len(data) != prod(shape) * like.element_size():
        raise ValueError(f"{len(data)} bytes cannot be {list(shape)} {like.dtype}")
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(shape).to(like.device)
