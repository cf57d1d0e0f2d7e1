"""The folder of one training run: its settings, where it ran, what it measured, and its checkpoint."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch
from filelock import FileLock, Timeout

import fastweights
from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.ops import kernel_status
from fastweights.training import checkpoint

Record = dict[str, Any]


_MEND = "put it back from a copy, choose another --output, or start over with --fresh"


class RunFolder:
    """`settings.json`, `environment.json`, `metrics.jsonl` and `checkpoint.pt` of one model, size and seed.

    Open it with `with`: one process at a time trains in a folder. What is appended to `metrics.jsonl` after the last
    checkpoint is dropped on resume, because the resumed run writes it again.

    Args:
        path: the folder; it is made when it is opened.
        settings: what decides the numbers of the run, as plain JSON values.
        may_change: names of settings that may be others on resume: they decide how, not what, is computed.

    Raises:
        RunError: the folder holds a run with other settings, is in use, or cannot be written.

    Examples:
        >>> import tempfile, pathlib
        >>> from fastweights.training import RunFolder
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "lstm-50-seed1"
        >>> with RunFolder(path, {"model": "LSTM", "seed": 1}) as folder:
        ...     folder.append({"kind": "epoch", "epoch": 1})
        ...     folder.save({"step": 782})
        >>> RunFolder(path, {"model": "LSTM", "seed": 2}).check()
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: ...seed was 1, now 2...
    """

    def __init__(self, path: Path, settings: Record, *, may_change: Collection[str] = ()) -> None:
        self.path, self._may_change = path, may_change
        self.settings: Record = json.loads(json.dumps(settings))  # as they will be read back: tuples are lists
        self._metrics = path / "metrics.jsonl"
        self._checkpoint = path / "checkpoint.pt"
        self._lock = FileLock(path / ".lock", timeout=0)

    def check(self) -> None:
        """Refuse a folder that holds a run with other settings; nothing is changed."""
        path = self.path / "settings.json"
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            if self._exists():
                raise RunError(f"{self.path} holds a run without its {path.name}: {_MEND}") from None
            return
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {path} ({error}): {_MEND}") from error
        if not isinstance(found, dict):
            raise RunError(f"{path} holds a {type(found).__name__}, not settings: {_MEND}")
        kept = {name: value for name, value in self.settings.items() if name not in self._may_change}
        changed = differences({name: found[name] for name in found if name not in self._may_change}, kept)
        if changed:
            raise RunError(
                f"{self.path} holds a run with other settings: {changed}. Give the same settings to resume it, another "
                "--output to keep both, or --fresh to start over"
            )

    def result(self) -> Record | None:
        """What the run has measured, None until it has finished; it needs no checkpoint for that."""
        try:
            last = json.loads(self._metrics.read_bytes().splitlines()[-1])
        except (OSError, ValueError, IndexError):
            return None  # begun, cut or damaged: what resumes it looks closer
        return last if isinstance(last, dict) and last.get("kind") == "result" else None

    def require_free(self) -> None:
        """Refuse a folder that another process trains in; nothing is changed."""
        if not self._exists():
            return
        try:
            with self._lock:
                pass
        except Timeout:
            raise self._in_use() from None
        except OSError as error:
            raise self._unwritable(error) from error

    def remove(self) -> None:
        """Delete the run, if there is one, so that it starts over; a folder that holds no run is left alone."""
        if not self._exists():
            return
        try:
            with self._lock:
                shutil.rmtree(self.path)
        except Timeout:
            raise self._in_use() from None
        except OSError as error:
            raise RunError(f"cannot remove {self.path}: {error.strerror}") from error

    def _exists(self) -> bool:
        return any(os.path.exists(self.path / name) for name in ("settings.json", "metrics.jsonl", "checkpoint.pt"))

    def __enter__(self) -> "RunFolder":
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise self._in_use() from None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self.check()  # another process may have been here before the lock was ours
            for part in self.path.glob(".*.part"):  # what a killed process had begun to write
                part.unlink()
            self._write("settings.json", self.settings)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def note_environment(self) -> None:
        """Write where the run is trained: when it begins, and again when it is resumed."""
        self._write("environment.json", environment())

    def load(self) -> Record | None:
        """The last checkpoint, None for a run that has none yet; nothing is changed.

        Raises:
            RunError: the checkpoint or the metrics are damaged or missing; they are left as they are.
        """
        state = checkpoint.load(self._checkpoint)
        size = self._metrics_bytes()
        if state is None:
            if size:
                raise RunError(f"{self.path} has metrics.jsonl but no {self._checkpoint.name} to go on from: {_MEND}")
            return None
        expected = state.get("metrics_bytes")
        if not isinstance(expected, int) or expected < 0:
            raise RunError(f"{self._checkpoint} is no checkpoint of a run: {_MEND}")
        if size < expected:
            raise RunError(
                f"{self._metrics} has {size} bytes, the checkpoint beside it was written at {expected}: it was cut or "
                f"replaced: {_MEND}"
            )
        return state

    def rewind(self, state: Record) -> None:
        """Drop what was measured after a checkpoint: the resumed run measures it again.

        Raises:
            RunError: the disk refuses.
        """
        try:
            if self._metrics_bytes() > state["metrics_bytes"]:
                os.truncate(self._metrics, state["metrics_bytes"])
        except OSError as error:
            raise self._unwritable(error) from error

    def _metrics_bytes(self) -> int:
        try:
            return self._metrics.stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise self._unwritable(error) from error

    def save(self, state: Record) -> None:
        """Write a checkpoint.

        Raises:
            RunError: the disk refuses; the last good checkpoint is untouched.
        """
        checkpoint.save(self._checkpoint, state | {"metrics_bytes": self._metrics_bytes()})

    def append(self, record: Record) -> None:
        """Append one record to `metrics.jsonl`.

        Raises:
            RunError: the disk refuses.
        """
        try:
            with self._metrics.open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def _write(self, name: str, record: Record) -> None:
        try:
            write_files({self.path / name: json.dumps(record, indent=2).encode() + b"\n"})
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write into {self.path}: {error.strerror}; make it writable and leave room on the disk, or choose "
            "another --output"
        )

    def _in_use(self) -> RunError:
        return RunError(f"another process is training in {self.path}: wait for it, or choose another --output")


def differences(before: Record, now: Record) -> str:
    """What differs between two settings, in words; empty where nothing does.

    Examples:
        >>> differences({"seed": 1, "epochs": 3}, {"seed": 2, "epochs": 3})
        'seed was 1, now 2'
    """
    keys = dict.fromkeys([*before, *now])
    pairs = ((key, before.get(key, "absent"), now.get(key, "absent")) for key in keys)
    return "; ".join(f"{key} was {old}, now {new}" for key, old, new in pairs if old != new)


def environment() -> Record:
    """Where and with what this process runs: versions, processor, threads, kernels and git commit.

    Examples:
        >>> from fastweights.training import environment
        >>> sorted(environment())[:3]
        ['commit', 'device', 'fastweights']
    """
    return {
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


def _commit() -> str | None:
    """The commit of the checkout that the package runs from, None for an installed copy."""
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
