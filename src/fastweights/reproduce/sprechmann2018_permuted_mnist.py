"""Permuted MNIST, figure 3 of Sprechmann et al. 2018: forgetting, EWC, and adaptation to memories at test time.

Section 4.1 of "Memory-based parameter adaptation".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fastweights.reproduce import command
from fastweights.reproduce._permuted_mnist import Adapting, ModelName, Settings, Tasks, Training, network
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.runs import Curve, RunFolder, Score, write_result
from fastweights.tasks import mnist
from fastweights.training import Progress, show_progress

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "check", "run"]

EXPERIMENT = "sprechmann2018/permuted-mnist"

PRESETS = {"quick": Settings(), "paper": Settings(seeds=(1, 2, 3), tasks=20, strength=1.0, queries=250)}

TITLES: dict[ModelName, str] = {
    "mlp": "MLP",
    "ewc": "EWC",
    "mbpa": "MbPA",
    "random": "MbPA, memories at random",
    "mbpa+ewc": "MbPA + EWC",
}
_OF_THE_TABLE = ("models", "seeds", "memories", "data_dir")
_OF_EWC = ("strength", "fisher_examples")
_OF_MEMORIES = ("rate", "tested")
_OF_MBPA = ("neighbours", "steps")
_OF_RANDOM = ("random_neighbours", "random_steps")


class Row(NamedTuple):
    """A row of the table: a network as it was trained, or adapted to so many memories a task."""

    model: ModelName
    memories: int | None

    @property
    def title(self) -> str:
        return TITLES[self.model] if self.memories is None else f"{TITLES[self.model]}, {self.memories:,} a task"

    @property
    def consolidates(self) -> bool:
        return self.model in ("ewc", "mbpa+ewc")


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train the networks of every seed, adapt them to memories, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        DataError: MNIST is missing or damaged.
        TrainingError: the numbers are not finite.
    """
    check(settings)
    members = {(row, seed): _member(settings, folder, row, seed) for seed in settings.seeds for row in _rows(settings)}
    data = mnist.load(settings.data_dir)
    make_ready(EXPERIMENT, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    _write_table(settings, folder, preset)
    with show_progress() as progress:
        for seed in settings.seeds:
            trained: dict[bool, Training] = {}
            for row in _rows(settings):
                with members[row, seed] as member, torch.random.fork_rng():
                    torch.manual_seed(seed)
                    _run_row(row, Tasks(data, settings, seed), member, progress, trained)
                _write_table(settings, folder, preset)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range.
    """
    with refused():
        sizes = ("tasks", "examples", "hidden_size", "epochs", "batch_size", "memories", "queries", "tested")
        lists = ("models", "seeds", "memories", "tested")
        positive = (*sizes, "fisher_examples", *_OF_MBPA, *_OF_RANDOM)
        check_settings(settings, positive=positive, not_empty=lists)
        for name, most in (("examples", 50_000), ("queries", 10_000)):
            if getattr(settings, name) > most:
                raise ValueError(f"{name} must be at most {most:,}, got {getattr(settings, name)}")
        if max(settings.memories) > settings.examples:
            raise ValueError(f"memories must be at most the {settings.examples} examples, got {settings.memories}")
        for name in ("learning_rate", "strength", "rate"):
            if not 0 <= getattr(settings, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(settings, name)}")
        network(settings)


def _rows(settings: Settings) -> list[Row]:
    """Those of the networks first: the others start from what they have learnt."""
    asked = dict.fromkeys(settings.models)
    rows = []
    if {"mlp", "mbpa", "random"} & asked.keys():
        rows.append(Row("mlp", None))
    if {"ewc", "mbpa+ewc"} & asked.keys():
        rows.append(Row("ewc", None))
    for model in asked:
        if model == "random":
            rows.append(Row(model, max(settings.memories)))  # more of them make no difference to what chance finds
        elif model not in ("mlp", "ewc"):
            rows += [Row(model, memories) for memories in settings.memories]
    return rows


def _run_row(row: Row, tasks: Tasks, member: RunFolder, progress: Progress, trained: dict[bool, Training]) -> None:
    title = f"{row.title}, seed {tasks.seed}"
    if row.memories is None:
        every = range(1, tasks.settings.tasks + 1)
        training = Training(tasks, member, title, progress, every, consolidate=row.consolidates)
        training.run()
        trained[row.consolidates] = training
    else:
        own = trained[row.consolidates]
        tested = list(_tested(tasks.settings))
        at_random = row.model == "random"
        Adapting(tasks, member, title, progress, tested, trained=own, memories=row.memories, at_random=at_random).run()


def _tested(settings: Settings) -> Iterator[int]:
    """The numbers of tasks after which MbPA is tested."""
    yield from sorted({count for count in settings.tested if count < settings.tasks})
    yield settings.tasks


def _member(settings: Settings, folder: Path, row: Row, seed: int) -> RunFolder:
    elsewhere = {*OF_THE_MACHINE, *_OF_THE_TABLE}
    elsewhere |= set() if row.consolidates else {*_OF_EWC}
    elsewhere |= set() if row.memories is not None else {*_OF_MEMORIES}
    elsewhere |= set() if row.model in ("mbpa", "mbpa+ewc") else {*_OF_MBPA}
    elsewhere |= set() if row.model == "random" else {*_OF_RANDOM}
    own = {"model": row.title, "hidden_size": settings.hidden_size, "seed": seed}
    own |= {name: value for name, value in vars(settings).items() if name not in elsewhere}
    name = row.model if row.memories is None else f"{row.model}-{row.memories}"
    return RunFolder(folder / f"{name}-seed{seed}", own)


def _write_table(settings: Settings, folder: Path, preset: str) -> None:
    accuracy = f"{settings.split} accuracy"
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[(row.title, settings.hidden_size) for row in _rows(settings)],
        scores=[Score(accuracy, {}, None), Score("milliseconds a query", {}, None)],
        curves=[Curve(accuracy.replace(" ", "_"), accuracy, against="tasks", spread=True)],
    )
