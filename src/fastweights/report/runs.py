"""Reads what a run wrote: result.json, and the settings, environment and metrics of each of its members."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.errors import RunError

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One model of one size in result.json: a score a finished seed, beside the paper's and the floor's."""

    model: str
    hidden_size: int | None
    metric: str
    ours: tuple[float, ...]
    paper: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Member:
    """One model, size and seed of a run: what its folder holds; `result` is None until it has finished."""

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
        return whole(self.settings.get("hidden_size"))

    @property
    def seed(self) -> int | None:
        return whole(self.settings.get("seed"))


@dataclass(frozen=True)
class Curve:
    """A panel of the learning curves: a key of the records, what it is called, the floor, and the key it is drawn
    against; with `spread` a band of two standard deviations stands in place of the seeds' own lines."""

    key: str
    label: str
    floor: float | None = None
    against: str = "step"
    spread: bool = False


@dataclass(frozen=True)
class Run:
    """A run's folder as it was when it was read."""

    folder: Path
    experiment: str
    preset: str
    rows: list[Row]
    members: list[Member]
    floor_log_likelihood: float | None = None
    command: str | None = None
    curves: tuple[Curve, ...] = ()  # none: test log likelihood after every epoch

    @property
    def models(self) -> list[str]:
        """The models' names, in the order of the table."""
        return list(dict.fromkeys([*(row.model for row in self.rows), *(member.model for member in self.members)]))


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run's folder, finished or not.

    Examples:
        >>> load_run("nowhere")
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: nowhere holds no result.json; give the folder that `fastweights reproduce` printed

    Raises:
        RunError: the folder is not a run's or a file in it is damaged.
    """
    folder = Path(folder)
    path = folder / "result.json"
    if not path.is_file():
        raise RunError(f"{folder} holds no result.json; give the folder that `fastweights reproduce` printed")
    result = _read_object(path)
    rows = _expect(result, "rows", list, path)
    run = Run(
        folder=folder,
        experiment=_expect(result, "experiment", str, path),
        preset=_expect(result, "preset", str, path),
        rows=[_row(row, f"{path}, row {index}") for index, row in enumerate(rows, start=1)],
        members=read_members(folder),
        floor_log_likelihood=number(result.get("floor_log_likelihood")),
        command=_expect(result, "command", str, path) if "command" in result else None,
        curves=tuple(
            _curve(curve, f"{path}, curve {index}")
            for index, curve in enumerate(_expect({"curves": [], **result}, "curves", list, path), start=1)
        ),
    )
    order = {model: index for index, model in enumerate(run.models)}
    run.members.sort(key=lambda member: (order[member.model], member.hidden_size or 0, member.seed or 0, member.name))
    return run


def metric_key(metric: str) -> str:
    """The key of a metric in the records: "test error, %" is `test_error`."""
    return metric.split(",")[0].strip().replace(" ", "_")


def number(value: object) -> float | None:
    """The value as a float, or None where it is absent or no number: a record may lack any key."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def whole(value: object) -> int | None:
    """The value where it is an int, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_members(folder: Path) -> list[Member]:
    """The members of a run's folder, by name.

    Raises:
        RunError: a file in it is damaged.
    """
    members = []
    try:
        # A folder without settings belongs to somebody else, or to a run killed before it had begun.
        folders = sorted(path.parent for path in folder.glob("*/settings.json"))
    except OSError as error:
        raise RunError(f"cannot read {folder}: {error.strerror}") from error
    for member in folders:
        settings = _read_object(member / "settings.json")
        _expect(settings, "model", str, member / "settings.json")
        environment = member / "environment.json"
        epochs, result = _read_metrics(member / "metrics.jsonl")
        members.append(
            Member(
                name=member.name,
                settings=settings,
                environment=_read_object(environment) if environment.exists() else {},
                epochs=epochs,
                result=result,
            )
        )
    return members


def _read_metrics(path: Path) -> tuple[list[Record], Record | None]:
    """The epochs' records in order, and the result's if the member has finished."""
    lines = _read(path).split(b"\n") if path.exists() else []
    while lines and not lines[-1].strip():
        lines.pop()
    epochs: dict[int, Record] = {}
    result = None
    for line_number, line in enumerate(lines, start=1):
        where = f"{path}, line {line_number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line_number == len(lines):
                break  # The run was killed while it wrote this line; the epoch is repeated when it resumes.
            raise RunError(f"{where} is not valid JSON ({error}); restore it or run the experiment again") from error
        if not isinstance(record, dict):
            raise RunError(f"{where} is {line[:40]!r}; it must be a JSON object, one a line")
        if record.get("kind") == "epoch":
            # A run killed between its record and its checkpoint repeats the epoch: the later record is the one
            # that the training went on from.
            epochs[_expect(record, "epoch", int, where)] = record
        elif record.get("kind") == "result":
            result = record
    return [epochs[epoch] for epoch in sorted(epochs)], result


def _row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise RunError(f"{where} is {value!r}; it must be an object with model, hidden_size, metric and ours")
    ours = [number(score) for score in _expect(value, "ours", list, where)]
    if None in ours:
        raise RunError(f"{where}: ours is {value['ours']!r}; it must be a list of numbers, one a finished seed")
    return Row(
        model=_expect(value, "model", str, where),
        hidden_size=whole(value.get("hidden_size")),
        metric=_expect(value, "metric", str, where),
        ours=tuple(score for score in ours if score is not None),
        paper=number(value.get("paper")),
        floor=number(value.get("floor")),
    )


def _curve(value: object, where: str) -> Curve:
    if not isinstance(value, dict):
        raise RunError(f"{where} is {value!r}; it must be an object with key, label and floor")
    key, label = _expect(value, "key", str, where), _expect(value, "label", str, where)
    against = _expect({"against": "step", **value}, "against", str, where)
    spread = _expect({"spread": False, **value}, "spread", bool, where)
    return Curve(key, label, number(value.get("floor")), against, spread)


def _expect(record: Record, key: str, kind: type, where: object) -> Any:
    value = record.get(key)
    if not isinstance(value, kind):
        found = repr(value) if key in record else "missing"
        raise RunError(f"{where}: {key} is {found}; it must be of type {kind.__name__}")
    if isinstance(value, str) and not value.isprintable():
        # It would go to the terminal, where control characters are commands, and to the figure, which has no glyph.
        raise RunError(f"{where}: {key} is {value!r}; it must hold printable characters only")
    return value


def _read_object(path: Path) -> Record:
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not valid JSON ({error}); restore it or run the experiment again") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds a JSON {type(value).__name__}; it must be an object, as the run wrote it")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
