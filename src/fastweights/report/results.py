"""Writes result.json: what an experiment has measured so far, beside the paper's numbers."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastweights.errors import RunError
from fastweights.files import write_files
from fastweights.report.runs import Curve, Member, Record, metric_key, read_members


@dataclass(frozen=True)
class Score:
    """What the table shows of every model, or of some of those that were asked for: a metric, the paper's numbers by
    model and hidden size, and the floor."""

    metric: str
    paper: Mapping[tuple[str, int | None], float]
    floor: float | None
    models: Collection[tuple[str, int | None]] | None = None  # none: all


def write_result(
    folder: Path,
    *,
    experiment: str,
    preset: str,
    command: str,
    requested: Sequence[tuple[str, int | None]],
    scores: Sequence[Score] = (),
    rows: Sequence[Record] = (),
    floor_log_likelihood: float | None = None,
    curves: Sequence[Curve] = (),
) -> None:
    """Write result.json from what the members of a run have measured so far: a row for each score, model and size.

    Rows that were not requested this time stay in the table when their members are there. A score is the one that its
    metric names ("test error, %" is `test_error`). `rows` are further ones, as they shall stand in the file.

    Raises:
        RunError: a member's files are damaged or the disk refuses.
    """
    members = read_members(folder)
    found = [(member.model, member.hidden_size) for member in members]
    models = _by_size(list(dict.fromkeys([*requested, *found])))
    result: Record = {"experiment": experiment, "preset": preset, "command": command}
    if floor_log_likelihood is not None:
        result["floor_log_likelihood"] = floor_log_likelihood
    if curves:
        result["curves"] = [vars(curve) for curve in curves]
    others = set(models) - set(requested)
    shown = [
        (score, pair)
        for score in scores
        for pair in models
        if score.models is None or pair in score.models or (pair in others and _scored(members, score, *pair))
    ]
    result["rows"] = [_result_row(members, score, *pair) for score, pair in shown] + list(rows)
    path = folder / "result.json"
    try:
        write_files({path: json.dumps(result, indent=2).encode() + b"\n"})
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; choose another --output") from error


def _by_size(models: list[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """As they come among those of one size; one that has no hidden layer stands with the smallest."""
    least = min((size for _, size in models if size is not None), default=0)
    return sorted(models, key=lambda pair: least if pair[1] is None else pair[1])


def _scored(members: Sequence[Member], score: Score, model: str, hidden_size: int | None) -> list[tuple[int, float]]:
    """What each seed of a model has scored."""
    key = metric_key(score.metric)
    return [
        (member.seed or 0, (member.result or {})[key])
        for member in members
        # Not every model of a table need have every score.
        if (member.model, member.hidden_size) == (model, hidden_size) and key in (member.result or ())
    ]


def _result_row(members: Sequence[Member], score: Score, model: str, hidden_size: int | None) -> Record:
    return {
        "model": model,
        "hidden_size": hidden_size,
        "metric": score.metric,
        "ours": [value for _, value in sorted(_scored(members, score, model, hidden_size))],
        "paper": score.paper.get((model, hidden_size)),
        "floor": score.floor,
    }
