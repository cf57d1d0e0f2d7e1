"""The gauntlet: nine problems of memory for every layer, and for one of your own, all with as many parameters.

Recall, state tracking, and holding what was seen, in the frame of `recall/mqar`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fastweights.checks import check_positive
from fastweights.reproduce._experiment import one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.recall._bench import (
    DELTA,
    SEARCHED,
    TITLES,
    DrawnSettings,
    ModelName,
    check_drawn,
    choose_rates,
    make_frame,
    tell_places,
    train_frame,
)
from fastweights.reproduce.recall._cells import CELLS, CellName, draw_problem
from fastweights.reproduce.recall._entrants import Entrant, Nothing, count_weights, enter, find_width
from fastweights.reproduce.recall._own_layer import check_layer
from fastweights.runs import Lines, Member, Progress, Record, RunFolder, read_members

EXPERIMENT = "recall/gauntlet"
QUICK_MINUTES = 25
DATA = None
METRICS = ("validation_accuracy",)

__all__ = [
    "CELLS",
    "DATA",
    "EXPERIMENT",
    "METRICS",
    "PRESETS",
    "QUICK_MINUTES",
    "TITLES",
    "Settings",
    "check",
    "draw_problem",
    "run",
]


@dataclass(frozen=True)
class Settings(DrawnSettings):
    """The gauntlet: recall, follow a state, hold what was seen, with equally many parameters."""

    models: tuple[ModelName, ...] = ("lstm", "delta")
    """Layers of the library to compare, each a row of the table."""
    layer: str | None = None
    """Layer of your own beside them, FILE.py:CLASS: it takes (input_size, hidden_size), and x [B,T,D] -> y [B,T,H]."""
    cells: tuple[CellName, ...] = ("mqar-4", "parity", "repeat-previous")
    """Problems to learn, each a column of the table."""
    learning_rates: tuple[float, ...] = (3e-3,)
    """Learning rates of AdamW: of each layer the best on validation counts, in each cell."""
    parameters: int = 100_000
    """Number of weights of each network, which sets its size: layers are compared at equal numbers."""
    effort: float = 1.0
    """Share of each cell's passes over the training sequences."""

    test_examples: int = 2000
    """Test sequences."""
    enough: float = 0.999
    """Validation accuracy at which training ends."""
    dropout: float = 0.0
    """Dropout of the embedding."""
    mlp_multiple: int = 2
    """Hidden units of a block's MLP for each feature; 0 leaves the MLPs out."""
    # 64 pairs of one sequence need as many features of a key as one head has.
    delta_heads: int = only((*DELTA, *SEARCHED), 1, "Heads.")
    # With the paper's 128 its smallest network has more weights than are given.
    hyper_hidden_size: int = only("hyper-lstm", 32, "Hidden units of the network that scales the weights.")


PRESETS = {
    "quick": Settings(effort=0.25),
    "full": Settings(models=tuple(TITLES), cells=tuple(CELLS), learning_rates=(1e-3, 3e-3, 1e-2), seeds=(1, 2, 3)),
}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every layer in every cell, with every learning rate and seed."""
    entrants = enter(settings, settings.layer)
    sizes = {name: find_widths(entrant, settings) for name, entrant in entrants.items()}
    members = {
        (name, cell, rate, seed): RunFolder(
            Path(folder, f"{name}-{cell}-{rate:g}-seed{seed}"),
            {"model": entrant.title, "hidden_size": sizes[name][cell], "seed": seed, "learning_rate": rate}
            | {"cell": cell, "epochs": count_epochs(cell, settings)}
            | entrant.about
            | settings_of(settings, name, without=("layer", "cells", "learning_rates", "effort")),
        )
        for seed in settings.seeds  # outermost: the table is whole after the first
        for cell in settings.cells
        for name, entrant in entrants.items()
        for rate in settings.learning_rates
    }

    def train_member(name: str, cell: CellName, rate: float, seed: int, member: RunFolder, progress: Progress) -> None:
        entrant, size = entrants[name], sizes[name][cell]
        problem = tell_places(draw_problem(cell, settings), name, settings)
        network = make_frame(functools.partial(entrant.mixer, size), size, settings, problem)
        title = f"{entrant.title}, {cell}, learning rate {rate:g}, {size} features, seed {seed}"
        train_frame(network, problem, settings, rate, seed, count_epochs(cell, settings), member, title, progress)

    return Members(members, train_member, lambda: table(read_members(folder)), skip_finished=True)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_positive(effort=settings.effort)
    check_drawn(settings, 1, sizes=("parameters",), lists=("cells",))
    for entrant in enter(settings, settings.layer).values():
        widths = sorted(set(find_widths(entrant, settings).values()))
        if entrant.own is not None:
            longest = max(CELLS[cell].steps for cell in settings.cells)
            for place, size in enumerate(widths):
                check_layer(entrant.own, size, longest if place == 0 else 2, settings.device)


def count_epochs(cell: CellName, settings: Settings) -> int:
    """Return the passes over the training sequences of a cell, at most."""
    return max(1, round(CELLS[cell].epochs * settings.effort))


def find_widths(entrant: Entrant, settings: Settings) -> dict[CellName, int]:
    """Return, for each cell, the features with which a network comes closest to `settings.parameters`.

    Raises:
        RunError: none comes near.
        ValueError: the layer cannot be made.
    """

    count_mixers = functools.cache(entrant.count)  # cells try the same sizes

    def count(cell: CellName, size: int) -> int:
        problem = tell_places(CELLS[cell].problem, entrant.name, settings)
        with torch.device("meta"):
            rest = make_frame(Nothing, size, replace(settings, device="meta"), problem)
        return count_mixers(size) + count_weights(rest)

    return {
        cell: find_width(f"{entrant.title} in {cell}", functools.partial(count, cell), settings.parameters)
        for cell in settings.cells
    }


def table(members: Sequence[Member]) -> dict[str, Any]:
    """Return the rows of each layer, its score and its accuracy in each cell, and the figures.

    A layer's accuracy is that of the learning rate that was the best on validation in the cell.
    """
    best = choose_rates(members, lambda member: (member.model, member.settings["cell"]))
    floors: dict[str, float] = {
        name: cell.floor() for name, cell in CELLS.items() if any(name == each for _, each in best)
    }
    titles = [title for title in TITLES.values() if any(title == each for each, _ in best)]
    titles += sorted({title for title, _ in best} - set(titles))  # of users' own
    of_title = {title: {cell: best[title, cell] for cell in floors if (title, cell) in best} for title in titles}
    scores = {title: _scores(of_cell, floors) for title, of_cell in of_title.items()}
    rows: list[Record] = []
    for title, of_cell in of_title.items():
        if scores[title]:
            metric = f"score, mean of {len(of_cell)} of {len(CELLS)} cells"
            rows.append({"model": title, "hidden_size": None, "metric": metric, "ours": scores[title], "floor": 0.0})
    for cell, floor in floors.items():
        for title, of_cell in of_title.items():
            if cell in of_cell:
                rows.append(_row(title, cell, of_cell[cell], floor))
    whole = {title: fmean(scores[title]) for title in titles if scores[title]}
    lines = [
        _against("Score", "score", of_title, whole, size, axis, floor=0.0)
        for size, axis in (("state_size", "numbers in the state"), ("milliseconds", "ms of a training pass"))
    ]
    for cell, floor in floors.items():
        reached = {title: {cell: of_cell[cell]} for title, of_cell in of_title.items() if cell in of_cell}
        accuracy = {title: fmean(_accuracies(of_cell[cell])) for title, of_cell in reached.items()}
        lines.append(_against(cell, "test accuracy", reached, accuracy, "state_size", "numbers in the state", floor))
    return {"requested": [], "rows": rows, "lines": [panel for panel in lines if panel.series]}


def _scores(of_cell: Mapping[str, Sequence[Member]], floors: Mapping[str, float]) -> list[float]:
    """Return the score of each seed that has finished in all of these cells: the mean of how far above the floor."""
    above: list[dict[int | None, float]] = []
    for cell, members in of_cell.items():
        floor = floors[cell]
        above.append(
            {
                member.seed: max(0.0, (accuracy - floor) / (1 - floor))
                for member, accuracy in zip(members, _accuracies(members), strict=True)
            }
        )
    seeds = set.intersection(*map(set, above))
    return [fmean(each[seed] for each in above) for seed in sorted(seeds, key=lambda seed: seed or 0)]


def _accuracies(members: Iterable[Member]) -> list[float]:
    return [(member.result or {})["test_accuracy"] for member in members]


def _row(title: str, cell: str, members: Sequence[Member], floor: float) -> Record:
    return {
        "model": title,
        "hidden_size": members[0].hidden_size,
        "metric": f"test accuracy, {cell}",
        "ours": _accuracies(members),
        "paper": None,
        "floor": floor,
        "settings": {"cell": cell, "learning_rate": members[0].settings["learning_rate"]},
    }


def _against(
    title: str,
    label: str,
    of_title: Mapping[str, Mapping[str, Sequence[Member]]],
    heights: Mapping[str, float],
    name: str,
    axis: str,
    floor: float | None = None,
) -> Lines:
    """Return a panel with a point for each layer: its height against the mean of a number of its members."""
    series = {}
    for model, height in heights.items():
        values = [(member.result or {}).get(name) for members in of_title[model].values() for member in members]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):  # not every layer of a user's own says how large its state is
            series[model] = [(fmean(known), height)]
    return Lines(title, label, axis, series, log=True, floor=floor)
