"""The one writer of a memory on the disk: it appends changes to the log, and folds the log into the memory."""

import contextlib
import logging
import os
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import Tensor

from fastweights.errors import MemoryFileError
from fastweights.files import name_part, put_marked, sync, write_files, write_part
from fastweights.memory.store.disk import (
    START,
    Reader,
    describe_settings,
    encode_record,
    encode_start,
    raw_bytes,
    read_mark,
    write_snapshot,
)
from fastweights.memory.store.ring import Ring, State

SMALLEST_LOG = 2**24  # bytes that a log may have before it is folded into a smaller memory

logger = logging.getLogger(__name__)


class Writer(Reader):
    """The folder of one saved memory, to be made, appended to or replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._writer = self.path / ".writer"
        # Of the process, not of the thread that took it: the writer may be closed by another.
        self._lock = FileLock(self.path / ".lock", timeout=0, thread_local=False)
        self._fold_at = 0
        self._descriptor: int | None = None
        self._closer: weakref.finalize[..., Any] | None = None
        self._process = os.getpid()  # a child of this one may read the memory, but not write to it

    def open(self, asked: dict[str, Any], device: torch.device, repair: bool) -> State:
        """Lock the memory and return it; make it where there is none."""
        # Bad sizes are refused before a folder is made.
        fresh = None if self.memory.exists() else _make_state(self.path, asked, device)
        self._acquire()
        try:
            if fresh is not None and not self.memory.exists():
                self._create(fresh)
            state = self.read(device, repair)
            put_marked(self.path, self.mark)
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

    def save(self, state: State, beside: Mapping[str, bytes]) -> None:
        """Write a memory, and files that belong to it, in place of those that are saved here, in one step."""
        self._acquire()
        try:
            there = self.memory.exists()
            if there:
                self.read(torch.device("cpu"))  # a damaged memory is not replaced
                put_marked(self.path, self.mark)
            self.mark = uuid.uuid4().hex
            try:
                for name, contents in beside.items():
                    write_part(name_part(self.path / name, self.mark), self.path / name, contents)
                (self._fold if there else self._create)(state)
            except BaseException:
                with contextlib.suppress(OSError, MemoryFileError):  # which of the two memories is there?
                    put_marked(self.path, read_mark(self.memory) if self.memory.exists() else "")
                raise
            put_marked(self.path, self.mark)
        except (OSError, SafetensorError) as error:
            raise self._unwritable(error) from error
        finally:
            self.close()

    def append(self, description: dict[str, Any], tensors: list[Tensor]) -> None:
        """Put a change on the disk; on an error it is not there."""
        self.check_open()
        try:
            if not self._log_is_current:  # the last folding could not begin a new log
                self._start_log()
                self._open_log()
            assert self._descriptor is not None
            if os.fstat(self._descriptor).st_size != self._end:
                os.ftruncate(self._descriptor, self._end)  # begun by a write that was killed or failed
            position = self._end
            for piece in encode_record(self._sequence, description, [raw_bytes(tensor) for tensor in tensors]):
                while len(piece):
                    done = os.pwrite(self._descriptor, piece, position)
                    position, piece = position + done, piece[done:]
            os.fsync(self._descriptor)
            # Not synchronised itself: the next change does that, and without it the log is read to its end.
            os.pwrite(self._descriptor, encode_start(self._generation, position), 0)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.log, self._end)
            raise self._unwritable(error) from error
        self._end = position
        self._sequence += 1

    def check_open(self) -> None:
        """Refuse changes where they cannot be put on the disk: after `close`, and in a child of the writer."""
        if self._descriptor is None:
            raise MemoryFileError(f"{self.path} is closed: open() it to change it, or load() it for a copy in memory")
        if self._process != os.getpid():
            raise MemoryFileError(
                f"{self.path} was opened by process {self._process}, this is {os.getpid()}: load() it"
            )

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

    @property
    def is_open(self) -> bool:
        """Whether changes can be appended, which a child of the process that opened the memory cannot."""
        return self._descriptor is not None and self._process == os.getpid()

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
        write_snapshot(self.memory, state, self._generation, self.mark)

    def _fold(self, state: State) -> None:
        write_snapshot(self.memory, state, self._generation + 1, self.mark)
        self._generation += 1
        self._start_log()

    def _start_log(self) -> None:
        write_files({self.log: encode_start(self._generation, START.size)})
        sync(self.path)
        self._log_generation = self._generation
        self._end, self._sequence = START.size, 0

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


def _check_settings(path: Path, asked: dict[str, Any], state: State) -> None:
    saved = describe_settings(state)
    for name, option in asked.items():
        shown = option if name in ("capacity", "key_size") else list(option) if name == "value_shape" else str(option)
        if shown != saved[name]:
            raise MemoryFileError(
                f"{path} holds a memory with {name}={saved[name]}, not {shown}: leave {name} out, or choose another "
                "path"
            )
