"""The folder of one member of a run: its settings, where it was trained, its records and its checkpoint."""

import contextlib
import functools
import io
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from filelock import FileLock, Timeout

from fastweights.errors import BusyError, FolderError
from fastweights.files import encode_json, remove_parts, write_files
from fastweights.processes import in_main
from fastweights.runs.records import ENVIRONMENT, METRICS, SETTINGS, Record

_CHECKPOINT = "checkpoint.pt"
_REMOVE = "remove the folder to start over"
_MEND = f"put it back from a copy, choose another folder, or {_REMOVE}"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _refuse_unwritable(
    method: Callable[Concatenate["RunFolder", _Arguments], _Result],
) -> Callable[Concatenate["RunFolder", _Arguments], _Result]:
    """Make what the disk refuses to a method of a folder an error that says what to do."""

    @functools.wraps(method)
    def call(folder: "RunFolder", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(folder, *args, **kwargs)
        except OSError as error:
            raise FolderError(
                f"cannot write into {folder.path}: {error.strerror}; make it writable and leave room on the disk, or "
                "choose another folder"
            ) from error

    return call


class RunFolder:
    """`settings.json`, `environment.json`, `metrics.jsonl` and `checkpoint.pt` of one model, size and seed.

    Open it with `with`: one training at a time writes into a folder. What is appended to `metrics.jsonl` after the last
    checkpoint is dropped on resume, because the resumed run writes it again. Where `torchrun` has started several
    processes, all call the same methods, the main one reads and writes, and all get what it found, or its error.

    Args:
        path: the folder; it is made when it is opened.
        settings: what decides the numbers of the run, a dict of plain JSON values without NaN.
        may_change: names of settings that may be others on resume: they decide how, not what, is computed.

    Raises:
        FolderError: the folder holds a run with other settings, is in use, or cannot be written.
        TypeError: settings are not a dict of plain JSON values.
        ValueError: a setting is NaN, or the path is empty.

    Examples:
        >>> import tempfile, pathlib
        >>> from fastweights.runs import RunFolder
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "lstm-50-seed1"
        >>> with RunFolder(path, {"model": "LSTM", "seed": 1}) as folder:
        ...     folder.append({"kind": "epoch", "epoch": 1})
        ...     folder.save({"step": 782})
        >>> RunFolder(path, {"model": "LSTM", "seed": 2}).check()
        Traceback (most recent call last):
            ...
        fastweights.errors.FolderError: ...seed was 1, now 2...
    """

    def __init__(self, path: str | os.PathLike[str], settings: Record, *, may_change: Collection[str] = ()) -> None:
        if not os.fspath(path):  # pathlib takes it for the current folder, which is hardly meant
            raise ValueError(f"path must name a folder, got {path!r}: '.' is the current one")
        self.path, self._may_change = Path(path), may_change
        if not isinstance(settings, dict):
            raise TypeError(f"settings must be a dict of plain JSON values, got {settings!r}")
        self.settings: Record = json.loads(json.dumps(settings))  # as JSON has them: tuples become lists
        for name, value in self.settings.items():
            if value != value:
                raise ValueError(f"the setting {name} is NaN, which equals nothing: its run could never be resumed")
        self._metrics = self.path / METRICS
        self._checkpoint = self.path / _CHECKPOINT
        self._lock = FileLock(self.path / ".lock", timeout=0)

    @in_main
    def check(self) -> None:
        """Refuse a folder that holds a run with other settings; nothing is changed."""
        path = self.path / SETTINGS
        try:
            settings = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            if self._exists():
                raise FolderError(f"{self.path} holds a run without its {path.name}: {_MEND}") from None
            return
        except (OSError, ValueError) as error:
            raise FolderError(f"cannot read {path} ({error}): {_MEND}") from error
        if not isinstance(settings, dict):
            raise FolderError(f"{path} holds a {type(settings).__name__}, not settings: {_MEND}")
        before, now = (
            {name: value for name, value in record.items() if name not in self._may_change}
            for record in (settings, self.settings)
        )
        if changes := describe_changes(before, now):
            raise FolderError(
                f"{self.path} holds a run with other settings: {changes}. Give the same settings to resume it, another "
                f"folder to keep both, or {_REMOVE}"
            )

    @in_main
    def read_result(self) -> Record | None:
        """Return the result of the run, None until it has finished; no checkpoint is needed."""
        try:
            last = json.loads(self._metrics.read_bytes().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return None  # begun, cut or damaged: resuming the run checks it further
        return last if isinstance(last, dict) and last.get("kind") == "result" else None

    @in_main
    def require_free(self) -> None:
        """Refuse a folder that another process trains in; nothing is changed."""
        if self._exists():
            self._acquire()
            self._lock.release()

    @in_main
    def remove(self) -> None:
        """Delete the run, if there is one, so that it starts over; a folder that holds no run is left alone."""
        if not self._exists():
            return
        self._acquire()
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            raise FolderError(f"cannot remove {self.path}: {error.strerror}") from error
        finally:
            self._lock.release()

    def __enter__(self) -> "RunFolder":
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    @in_main
    @_refuse_unwritable
    def _open(self) -> None:
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        self._acquire()
        try:
            self.check()  # another process may have been here before the lock was ours
            remove_parts(self.path)
            write_files({self.path / SETTINGS: encode_json(self.settings)})
        except BaseException:
            self._lock.release()
            raise

    @in_main
    @_refuse_unwritable
    def note_environment(self) -> None:
        """Write the environment of the run, when it begins and again when it is resumed."""
        write_files({self.path / ENVIRONMENT: encode_json(describe_environment())})

    def begin(self, first: Record) -> Record:
        """Return the last checkpoint; for a run that has none write `first` and where it is trained, and return it.

        Raises:
            FolderError: the disk refuses, or the checkpoint or the metrics are damaged or missing.
            ValueError: the folder is not open.
        """
        state = self._begin(first)
        return first if state is None else state

    @in_main
    @_refuse_unwritable
    def _begin(self, first: Record) -> Record | None:
        if not self._lock.is_locked:
            raise ValueError(f"the folder {self.path} is not open: with RunFolder(path, settings) as folder")
        state = self.load()
        if state is None:  # from now on, metrics without a checkpoint mean that it was lost
            checkpoint = _serialise(first | {"metrics_bytes": 0})
            environment = encode_json(describe_environment())
            write_files({self.path / ENVIRONMENT: environment, self._checkpoint: checkpoint})
        return state

    @in_main
    def load(self) -> Record | None:
        """Return the last checkpoint, None for a run that has none yet; nothing is changed.

        Raises:
            FolderError: the checkpoint or the metrics are damaged or missing; they are left as they are.
        """
        state = load_checkpoint(self._checkpoint)
        size = self._metrics_bytes()
        if state is None:
            if size:
                raise FolderError(
                    f"{self.path} has metrics.jsonl but no {self._checkpoint.name} to resume from: {_MEND}"
                )
            return None
        expected = state.get("metrics_bytes")
        if not isinstance(expected, int) or expected < 0:
            raise FolderError(f"{self._checkpoint} is not a checkpoint of a run: {_MEND}")
        if size < expected:
            raise FolderError(
                f"{self._metrics} has {size} bytes, the checkpoint beside it was written at {expected}: it was cut or "
                f"replaced: {_MEND}"
            )
        if expected and self._read_byte(expected - 1) != b"\n":  # such as the zeros of a disk that lost its last writes
            raise FolderError(
                f"{self._metrics} has no end of a line at byte {expected}, where the checkpoint beside it was written: "
                f"it is damaged: {_MEND}"
            )
        return state

    def _read_byte(self, place: int) -> bytes:
        with self._metrics.open("rb") as file:
            file.seek(place)
            return file.read(1)

    @in_main
    @_refuse_unwritable
    def rewind(self, state: Record) -> None:
        """Drop what was measured after a checkpoint: the resumed run measures it again.

        Raises:
            FolderError: the disk refuses.
        """
        if self._metrics_bytes() > state["metrics_bytes"]:
            os.truncate(self._metrics, state["metrics_bytes"])

    @in_main
    def save(self, state: Record, record: Record | None = None) -> None:
        """Write a checkpoint, after the record of what was measured before it, if there is one.

        Raises:
            FolderError: the disk refuses; the last good checkpoint is untouched.
        """
        if record is not None:
            self.append(record)
        save_checkpoint(self._checkpoint, state | {"metrics_bytes": self._metrics_bytes()})

    @in_main
    @_refuse_unwritable
    def append(self, record: Record) -> None:
        """Append one record to `metrics.jsonl`.

        Raises:
            FolderError: the disk refuses; the records before are whole, and others can be appended later.
        """
        size = self._metrics_bytes()
        try:
            with self._metrics.open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._metrics, size)  # a full disk takes a part of the line
            raise

    def _exists(self) -> bool:
        return any(os.path.exists(self.path / name) for name in (SETTINGS, METRICS, _CHECKPOINT))

    @_refuse_unwritable
    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise BusyError(
                f"another process is training in {self.path}: wait for it, or choose another folder"
            ) from None

    @_refuse_unwritable
    def _metrics_bytes(self) -> int:
        try:
            return self._metrics.stat().st_size
        except FileNotFoundError:
            return 0


def save_checkpoint(path: str | os.PathLike[str], state: Record) -> None:
    """Write a checkpoint beside its place and rename it, so that there is always a whole one.

    Raises:
        FolderError: the disk refuses; the checkpoint that was there before is still whole.

    Examples:
        >>> import tempfile, pathlib
        >>> from fastweights.runs import load_checkpoint, save_checkpoint
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.pt"
        >>> save_checkpoint(path, {"step": 3})
        >>> load_checkpoint(path)
        {'step': 3}
    """
    checkpoint = _serialise(state)
    try:
        write_files({Path(path): checkpoint})
    except OSError as error:
        raise FolderError(
            f"cannot write {path}: {error.strerror}; what was there before is untouched: make room and run it "
            "again, or choose another folder"
        ) from error


def _serialise(state: Record) -> bytes:
    """Return a checkpoint as the bytes of its file."""
    import torch  # here, because a report reads runs without it

    # In memory first: a full disk is then an OSError of one write, not a failure within torch's writer.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_checkpoint(path: str | os.PathLike[str]) -> Record | None:
    """Read a checkpoint, or return None where there is none yet. Nothing in it is executed (`weights_only`).

    Raises:
        FolderError: the file is damaged or is not a checkpoint; it is left as it is.
    """
    import torch

    try:
        data = Path(path).read_bytes()
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # nothing is there; a file in a folder's place is reported by the write
        return None
    except OSError as error:
        raise FolderError(f"cannot read {path}: {error.strerror}") from error
    try:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can fail anywhere within the unpickler, and torch's advice is unsafe
        raise FolderError(
            f"{path} is damaged, or no checkpoint of fastweights: put a good copy in its place, or {_REMOVE}"
        ) from error
    if not isinstance(state, dict):
        raise FolderError(
            f"{path} holds a {type(state).__name__}, not a checkpoint: put a good copy in its place, or {_REMOVE}"
        )
    return state


def describe_changes(before: Record, now: Record) -> str:
    """Return what differs between two settings, in words; empty where nothing does.

    Examples:
        >>> from fastweights.runs import describe_changes
        >>> describe_changes({"seed": 1, "epochs": 3}, {"seed": 2, "epochs": 3})
        'seed was 1, now 2'
    """
    keys = dict.fromkeys([*before, *now])
    pairs = ((key, before.get(key, "absent"), now.get(key, "absent")) for key in keys)
    return "; ".join(f"{key} was {old}, now {new}" for key, old, new in pairs if old != new)


def describe_environment() -> dict[str, Any]:
    """Return what this process runs with: versions, processor, threads, kernels and git commit.

    Examples:
        >>> from fastweights.runs import describe_environment
        >>> sorted(describe_environment())[:3]
        ['commit', 'device', 'fastweights']
    """
    # Imported here: whoever only reads runs needs neither torch nor numpy.
    import numpy
    import torch

    import fastweights
    from fastweights.ops import kernel_status

    environment = {
        "fastweights": fastweights.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processors": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": kernel_status(),
    }
    return {name: value for name, value in environment.items() if value is not None}  # an installed copy has no commit


def _commit() -> str | None:
    """Return the commit of the checkout that the package runs from, None for an installed copy."""
    source = Path(__file__).resolve().parents[3]
    if not (source / "pyproject.toml").exists() or not (source / ".git").exists():
        return None
    try:
        commit = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


def _processor() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
