"""The table of a run, result.json: what its members have measured so far, beside the paper's numbers."""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastweights.errors import FolderError, RunError
from fastweights.files import encode_json, write_files
from fastweights.runs.records import Member, Record, read_json, read_members


@dataclass(frozen=True)
class Row:
    """One model of one size in result.json: a score for each finished seed, beside the paper's and the floor's.

    `settings` are what else its members have in common, where others of the same model and size have another row, such
    as `{"environment": "AutoencodeEasy"}`.
    """

    model: str
    hidden_size: int | None
    metric: str
    ours: tuple[float, ...]
    paper: float | None = None
    floor: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """A panel of the learning curves.

    `key` names the score in the records and `against` what it is drawn against; `label` is the title of the axis.
    With `spread` a band of two standard deviations stands in place of the seeds' own lines. With `best` only so many
    seeds of each model are shown, those with the least validation loss.
    """

    key: str
    label: str
    floor: float | None = None
    against: str = "step"
    spread: bool = False
    best: int | None = None


@dataclass(frozen=True)
class Bars:
    """A panel of bars: for each of `groups` a bar of each series, None where it has none.

    `label` is the title of the bars' axis, which is logarithmic with `log`, and `against` that of the groups'.
    """

    title: str
    label: str
    against: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    log: bool = False


@dataclass(frozen=True)
class Lines:
    """A panel of lines: the points (x, y) of each series, in the order in which they are joined.

    `label` is the title of the upright axis and `against` that of the other, which is logarithmic with `log`.
    """

    title: str
    label: str
    against: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = False
    floor: float | None = None


@dataclass(frozen=True)
class Score:
    """A metric of the table, with the paper's numbers by model and hidden size, and the floor.

    `models` are the models and sizes that have a row of it; None: all.
    """

    metric: str
    paper: Mapping[tuple[str, int | None], float]
    floor: float | None
    models: Collection[tuple[str, int | None]] | None = None


@dataclass(frozen=True)
class Run:
    """A run as it was when it was read."""

    folder: Path
    experiment: str
    preset: str
    rows: list[Row]
    members: list[Member]
    floor_log_likelihood: float | None = None
    command: str | None = None
    curves: tuple[Curve, ...] = ()  # none: test log likelihood after every epoch
    bars: tuple[Bars, ...] = ()
    lines: tuple[Lines, ...] = ()
    changes: Mapping[str, Record] = field(default_factory=dict)  # as `write_result` takes them

    @property
    def models(self) -> list[str]:
        """The models' names, in the order of the table."""
        return list(dict.fromkeys([*(row.model for row in self.rows), *(member.model for member in self.members)]))

    def members_of(self, row: Row) -> list[Member]:
        """Return the members of a row's model, size and settings, finished or not."""
        own = {"model": row.model, "hidden_size": row.hidden_size, **row.settings}.items()
        return [member for member in self.members if all(member.settings.get(name) == value for name, value in own)]


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run, finished or not, as it was trained or as it was published.

    Examples:
        >>> load_run("nowhere")
        Traceback (most recent call last):
            ...
        fastweights.errors.RunError: nowhere holds no result.json; give the folder that `fastweights reproduce` printed

    Raises:
        RunError: the folder holds no run, or a file in it is damaged.
    """
    folder = Path(folder)
    path = folder / "result.json"
    if not path.is_file():
        raise RunError(f"{folder} holds no result.json; give the folder that `fastweights reproduce` printed")
    result = read_json(path)
    members = read_members(folder)
    try:
        run = Run(
            folder=folder,
            experiment=result["experiment"],
            preset=result["preset"],
            rows=[Row(**{**row, "ours": tuple(row["ours"])}) for row in result["rows"]],
            members=members,
            floor_log_likelihood=result.get("floor_log_likelihood"),
            command=result.get("command"),
            curves=tuple(Curve(**curve) for curve in result.get("curves", ())),
            bars=tuple(Bars(**bars) for bars in result.get("bars", ())),
            lines=tuple(Lines(**lines) for lines in result.get("lines", ())),
            changes={name: dict(changes) for name, changes in dict(result.get("changes", {})).items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is not a result that a run wrote ({error}): put it back from a copy") from error
    order = {model: index for index, model in enumerate(run.models)}
    run.members.sort(key=lambda member: (order[member.model], member.hidden_size or 0, member.seed or 0, member.name))
    return run


def write_result(
    folder: str | os.PathLike[str],
    *,
    experiment: str,
    preset: str,
    command: str,
    changes: Mapping[str, Record] | None = None,
    requested: Sequence[tuple[str, int | None]],
    scores: Sequence[Score] = (),
    rows: Sequence[Record] = (),
    floor_log_likelihood: float | None = None,
    curves: Sequence[Curve] = (),
    bars: Sequence[Bars] = (),
    lines: Sequence[Lines] = (),
) -> None:
    """Write result.json from what the members of a run have measured so far: a row for each score, model and size.

    Rows that were not requested this time stay in the table when their members are there, with their changes. A metric
    names the key of its scores ("test error, %" is `test_error`).

    Args:
        folder: the run's folder, with its members in it.
        experiment: the name of the experiment, as `fastweights list` prints it.
        preset: the name of the settings that the run started from.
        command: the line that makes the run again.
        changes: for each member of this time, by the name of its folder, the settings that are not the preset's:
            `{"decay": [0.95, 0.9]}`, the value and the preset's.
        requested: the models and hidden sizes that were asked for this time.
        scores: the metrics of the table.
        rows: further rows, as they shall stand in the file.
        floor_log_likelihood: the test log likelihood (nats) of a model that ignores the query.
        curves: the panels of the learning curves.
        bars: the panels of the figure of bars, if there is to be one.
        lines: the panels of the figure of lines, if there is to be one.

    Raises:
        RunError: a member's files are damaged or the disk refuses.
    """
    members = read_members(folder)
    trained = [(member.model, member.hidden_size) for member in members]
    models = _by_size(list(dict.fromkeys([*requested, *trained])))
    result: Record = {"experiment": experiment, "preset": preset, "command": command}
    path = Path(folder, "result.json")
    if changes := {name: each for name, each in (_read_changes(path) | dict(changes or {})).items() if each}:
        result["changes"] = changes
    if floor_log_likelihood is not None:
        result["floor_log_likelihood"] = floor_log_likelihood
    if curves:
        result["curves"] = [vars(curve) for curve in curves]
    if bars:
        result["bars"] = [vars(panel) for panel in bars]
    if lines:
        result["lines"] = [vars(panel) for panel in lines]
    others = set(models) - set(requested)
    table = [
        (score, pair)
        for score in scores
        for pair in models
        if score.models is None or pair in score.models or (pair in others and _scores(members, score, *pair))
    ]
    result["rows"] = [_row(members, score, *pair) for score, pair in table] + list(rows)
    try:
        write_files({path: encode_json(result)})
    except OSError as error:
        raise FolderError(f"cannot write {path}: {error.strerror}; choose another folder") from error


def _read_changes(path: Path) -> Record:
    with contextlib.suppress(RunError):  # there is none yet, or it is written again
        changes = read_json(path).get("changes")
        return changes if isinstance(changes, dict) else {}
    return {}


def metric_key(metric: str) -> str:
    """Return the key of a metric in the records: "test error, %" is `test_error`."""
    return metric.split(",")[0].strip().replace(" ", "_")


def _by_size(models: list[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """Sort by hidden size, otherwise in the order given; a model that has none stands with the smallest."""
    least = min((size for _, size in models if size is not None), default=0)
    return sorted(models, key=lambda pair: least if pair[1] is None else pair[1])


def _scores(members: Sequence[Member], score: Score, model: str, hidden_size: int | None) -> list[tuple[int, float]]:
    """Return the score of each finished seed of a model; not every model of a table need have every score."""
    key = metric_key(score.metric)
    return [
        (member.seed or 0, member.result[key])
        for member in members
        if (member.model, member.hidden_size) == (model, hidden_size) and member.result and key in member.result
    ]


def _row(members: Sequence[Member], score: Score, model: str, hidden_size: int | None) -> Record:
    return {
        "model": model,
        "hidden_size": hidden_size,
        "metric": score.metric,
        "ours": [value for _, value in sorted(_scores(members, score, model, hidden_size))],
        "paper": score.paper.get((model, hidden_size)),
        "floor": score.floor,
    }
