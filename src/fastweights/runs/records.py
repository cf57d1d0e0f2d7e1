"""The members of a run: what each of them measured, as training writes it and as it is published."""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.errors import RunError
from fastweights.files import write_files

Record = dict[str, Any]
"""Maps names to JSON values, as settings and the lines of `metrics.jsonl` do."""

MEMBERS = "members.jsonl"
SETTINGS = "settings.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Member:
    """One model, size and seed of a run; `result` is None until it has finished."""

    name: str
    settings: Record
    environment: Record
    epochs: list[Record]
    result: Record | None

    @property
    def model(self) -> str:
        return str(self.settings["model"])

    @property
    def hidden_size(self) -> int | None:
        return self.settings.get("hidden_size")

    @property
    def seed(self) -> int | None:
        return self.settings.get("seed")


def read_members(folder: str | os.PathLike[str]) -> list[Member]:
    """Read the members of a run, by name: their folders, and those that are published in `members.jsonl`.

    Raises:
        RunError: a file is damaged or cannot be read.
    """
    return [_member(line, path) for line, path in _read_lines(Path(folder))]


def publish(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write a run as it is published: its result.json, and `members.jsonl` with a line for each of its members.

    A line holds a member's name, settings, environment and metrics: all that a report needs, without the weights.

    Raises:
        RunError: the folder holds no run, a file in it is damaged, or the disk refuses.

    Examples:
        >>> import pathlib, tempfile
        >>> from fastweights.runs import RunFolder, load_run, publish, write_result
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> with RunFolder(run / "lstm-seed1", {"model": "LSTM", "seed": 1}) as member:
        ...     member.append({"kind": "result", "test_error": 2.5})
        >>> write_result(run, experiment="mine", preset="quick", command="python mine.py", requested=[("LSTM", None)])
        >>> publish(run, run / "published")
        >>> load_run(run / "published").members[0].result
        {'kind': 'result', 'test_error': 2.5}
    """
    folder, target = Path(folder), Path(target)
    members = b"".join(json.dumps(line).encode() + b"\n" for line, _ in _read_lines(folder))
    result = read_file(folder / "result.json")
    try:
        write_files({target / "result.json": result, target / MEMBERS: members})
    except OSError as error:
        raise RunError(f"cannot publish in {target}: {error.strerror}") from error


def read_json(path: Path) -> Record:
    """Read a JSON object from a file of a run.

    Raises:
        RunError: the file cannot be read or holds something else.
    """
    return _parse(read_file(path), str(path))


def read_file(path: Path) -> bytes:
    """Read a file of a run.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error


def _read_lines(folder: Path) -> list[tuple[Record, Path]]:
    """Return the members of a run by name, each as it is published, with the file that says what it measured."""
    lines = {line["name"]: (line, folder / MEMBERS) for line in _published(folder / MEMBERS)}
    try:
        # A folder without settings belongs to somebody else, or to a run killed before it had begun.
        folders = [path.parent for path in folder.glob(f"*/{SETTINGS}")]
    except OSError as error:
        raise RunError(f"cannot read {folder}: {error.strerror}") from error
    lines |= {path.name: (_read_folder(path), path / METRICS) for path in folders}
    return [lines[name] for name in sorted(lines)]


def _published(path: Path) -> list[Record]:
    lines = read_file(path).splitlines() if path.exists() else []
    records = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    for number, record in enumerate(records, start=1):
        if not {"name", "settings", "environment", "metrics"} <= record.keys():
            raise RunError(f"{path}, line {number} must have the name, settings, environment and metrics of a member")
    return records


def _read_folder(folder: Path) -> Record:
    environment, metrics = folder / ENVIRONMENT, folder / METRICS
    return {
        "name": folder.name,
        "settings": read_json(folder / SETTINGS),
        "environment": read_json(environment) if environment.exists() else {},
        "metrics": _read_metrics(metrics) if metrics.exists() else [],
    }


def _read_metrics(path: Path) -> list[Record]:
    """Read the records of a member; a last one that a kill cut short is left out, because it is repeated on resume."""
    *lines, last = read_file(path).split(b"\n")
    for number, line in enumerate([*lines, last], start=1):
        if not line.isascii():
            raise RunError(f"{path}, line {number} holds bytes that training never writes: put it back from a copy")
    records = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    with contextlib.suppress(RunError):
        records.append(_parse(last, str(path)))
    return records


def _parse(text: bytes, where: str) -> Record:
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where} is not valid JSON ({error}): put it back from a copy") from error
    if not isinstance(value, dict):
        raise RunError(f"{where} holds a JSON {type(value).__name__}, but must hold an object: put it back from a copy")
    return value


def _member(line: Record, where: Path) -> Member:
    # A run killed between its record and its checkpoint repeats the epoch: the later record is the one that training
    # went on from.
    try:
        epochs = {int(record["epoch"]): record for record in line["metrics"] if record.get("kind") == "epoch"}
        results = [record for record in line["metrics"] if record.get("kind") == "result"]
        line["settings"]["model"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{where}: the member {line['name']} has a record or settings without {error}") from error
    return Member(
        name=line["name"],
        settings=line["settings"],
        environment=line["environment"],
        epochs=[epochs[epoch] for epoch in sorted(epochs)],
        result=results[-1] if results else None,
    )
