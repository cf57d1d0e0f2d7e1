"""Experiments of the guides: members that are measured in one go, and their table."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.processes import refuse_several
from fastweights.reproduce._experiment import settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Progress, Record, RunFolder, Score


class Row(NamedTuple):
    """A row of the table: a model, its size where it has one, and a task where there are several."""

    model: str
    hidden_size: int | None = None
    task: str | None = None


def prepare_whole(
    settings: Any,
    folder: Path,
    rows: Iterable[Row],
    measure: Callable[[Row, int], Record],
    scores: Sequence[Score],
    *,
    titles: Any,
    without: Collection[str] = (),
) -> Members:
    """Return the members of a run: every row for every seed. A member that was killed starts over.

    Args:
        settings: of the experiment, with `seeds`.
        folder: of the run.
        rows: what is measured for each seed.
        measure: returns the scores of a row and a seed.
        scores: the metrics of the table.
        titles: of the models, by their names.
        without: names of settings that choose rows.
    """
    refuse_several("an experiment of the guides")
    rows = list(rows)
    folders = {
        (row, seed): RunFolder(
            folder / f"{'-'.join(str(part) for part in row if part is not None)}-seed{seed}",
            {name: value for name, value in row._asdict().items() if value is not None}
            | {"model": titles[row.model], "seed": seed}
            | settings_of(settings, row.model, without=without),
        )
        for seed in settings.seeds  # outermost: the table is whole after the first
        for row in rows
    }

    def measure_member(row: Row, seed: int, member: RunFolder, progress: Progress) -> None:
        member.note_environment()
        start = time.perf_counter()
        result = measure(row, seed)
        member.append({"kind": "result", **result, "seconds": time.perf_counter() - start})

    requested = list(dict.fromkeys((titles[row.model], row.hidden_size) for row in rows))
    table: Record = {"requested": requested, "scores": scores}
    return Members(folders, measure_member, lambda: table, skip_finished=True)
