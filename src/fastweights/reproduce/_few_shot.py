"""What the few-shot experiments of Munkhdalai & Trischler 2018 share: settings, and the way through their runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn as torch_nn

from fastweights.report import Curve, Score, write_result
from fastweights.reproduce import command
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.tasks.episodes import Episodes, EpisodeSampler, Examples
from fastweights.training import (
    EpisodeSchedule,
    RunFolder,
    evaluate_episodes,
    held_out_episodes,
    shown,
    train_episodes,
)
from fastweights.training.episodes import Augment

Split = Literal["train", "validation", "test"]
Kind = tuple[int, int]  # of tasks: ways and shots
OF_EVERY_SCHEDULE = ("validation_tasks", "test_tasks", "learning_rate", "annealing")
_OF_THE_TABLE = ("models", "ways", "shots", "seeds", "data_dir")


@dataclass(frozen=True)
class EpisodicSettings:
    """What every few-shot experiment can be asked for."""

    ways: tuple[int, ...] = (5,)
    """Classes of a task; every model is trained for each number."""
    shots: tuple[int, ...] = (1, 5)
    """Described examples of a class; every model is trained for each number."""
    seeds: tuple[int, ...] = (1,)
    """One training run for each: of the weights and the tasks."""

    tasks: int = 64_000
    """To train on."""
    tasks_per_step: int = 64
    """Tasks in an update."""
    pool: int = 40
    """Classes that the tasks of an update are drawn from: each of their examples is encoded once. 0 draws every task by
    itself, as the paper does."""
    queries: int = 3
    """Of each class, in training."""
    validate_every: int = 3200
    """Tasks between two validations."""
    validation_tasks: int = 400
    """To validate on, the same each time."""
    test_tasks: int = 1000
    """To test on."""
    test_queries: int = 15
    """Of each class, in validation and test."""
    learning_rate: float = 1e-3
    """Of Adam."""
    annealing: Literal["none", "cosine"] = "cosine"
    """How the learning rate changes: not at all, as the paper's, or along a cosine to zero."""
    hidden_size: int = 288
    """Units of the layer under the softmax layer."""

    half: bool = False
    """Encode in bfloat16 where that is safe; several times as fast on processors with AMX."""
    data_dir: Path | None = None
    """The folder that has the folder of the data set; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""


class Data(NamedTuple):
    """Labelled examples of one split, and which of them never meet in a task."""

    examples: Examples  # [N,...]
    labels: torch.Tensor  # [N]
    groups: torch.Tensor | None = None  # [N]


def labelled(images: torch.Tensor) -> Data:
    """Images [classes,examples,channels,size,size] one after another, and the class of each."""
    classes, examples = images.shape[:2]
    return Data(images.flatten(0, 1), torch.arange(classes).repeat_interleave(examples))


class Row(NamedTuple):
    """One model trained for one kind of tasks."""

    model: str
    ways: int
    shots: int
    seed: int


class Table(NamedTuple):
    """What sets one experiment apart from the others; `settings` are its own, with the `models` of its rows."""

    experiment: str
    presets: Mapping[str, Any]
    titles: Mapping[Any, str]  # of the models
    paper: Mapping[str, Mapping[tuple[str, int, int], float]]  # per cent, of each test by model, ways and shots
    load: Callable[[Any], dict[Split, Data]]
    network: Callable[[Any, Row, dict[Split, Data]], torch_nn.Module]
    hidden_size: Callable[[Any, Row], int | None]
    schedule: Callable[[Any, str], EpisodeSchedule]  # of settings and a model
    foreign: Callable[[str], set[str]]  # settings that a model has nothing to do with
    augment: Callable[[Any], Augment | None] = lambda settings: None
    further: Callable[[EpisodeSampler, int], dict[str, Episodes]] = lambda *_: {}  # by the test's sampler and a seed
    untrained: Callable[[], torch_nn.Module] | None = None  # one that learns nothing, to compare with


def run_table(table: Table, settings: Any, folder: Path, *, preset: str, fresh: bool) -> None:
    """Train every model for every kind of tasks and every seed, and write the table after each."""
    members = {row: _member(table, settings, folder, row) for row in _rows(settings)}
    with refused():
        data = table.load(settings)
        of_kind = _samplers(settings, data)
    make_ready(members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    untrained = _untrained(table, settings, of_kind)
    _write_table(table, settings, folder, preset, untrained)
    with shown() as progress:
        for row, member in members.items():
            with member, torch.random.fork_rng():
                torch.manual_seed(row.seed)
                samplers = of_kind[row.ways, row.shots]
                train_episodes(
                    table.network(settings, row, data).to(settings.device),
                    samplers,
                    table.schedule(settings, row.model),
                    member,
                    seed=row.seed,
                    augment=table.augment(settings),
                    further=table.further(samplers["test"], row.seed),
                    title=f"{table.titles[row.model]}, {row.ways}-way {row.shots}-shot, seed {row.seed}",
                    progress=progress,
                )
            _write_table(table, settings, folder, preset, untrained)


def check_few_shot(table: Table, settings: Any, *, positive: tuple[str, ...] = ()) -> None:
    """Refuse settings that cannot run, before anything is trained or written; call it inside `refused`.

    Raises:
        ValueError: a setting is out of range.
    """
    lists = ("models", "ways", "shots", "seeds")
    tasks = ("tasks", "tasks_per_step", "validate_every", "validation_tasks", "test_tasks")
    positive = ("ways", "shots", "queries", "test_queries", *tasks, "hidden_size", *positive)
    check_settings(settings, positive=positive, not_empty=lists)
    if min(settings.ways) < 2:
        raise ValueError(f"ways must be at least 2, got {settings.ways}")
    if settings.pool and settings.pool < max(settings.ways):
        raise ValueError(f"pool must be 0 or at least the {max(settings.ways)} ways, got {settings.pool}")
    for model in settings.models:
        table.schedule(settings, model)


def shared_schedule(settings: Any, model: str) -> EpisodeSchedule:
    """The schedule of a model whose tasks share their examples.

    Raises:
        ValueError: numbers of tasks that do not go into one another, or a learning rate out of range.
    """
    names = ("tasks", "tasks_per_step", "validate_every", *OF_EVERY_SCHEDULE)
    return EpisodeSchedule(pool=settings.pool or None, **{name: getattr(settings, name) for name in names})


def _rows(settings: Any) -> list[Row]:
    """Seed by seed, so that a table of all models stands as early as can be."""
    return [
        Row(model, ways, shots, seed)
        for seed in settings.seeds
        for ways in settings.ways
        for shots in settings.shots
        for model in settings.models
    ]


def _samplers(settings: Any, data: dict[Split, Data]) -> dict[Kind, dict[str, EpisodeSampler]]:
    """What draws the tasks of each kind, for each split."""
    return {
        (ways, shots): {
            split: EpisodeSampler(
                examples,
                labels,
                groups=groups,
                ways=ways,
                shots=shots,
                queries=settings.queries if split == "train" else settings.test_queries,
            )
            for split, (examples, labels, groups) in data.items()
        }
        for ways in settings.ways
        for shots in settings.shots
    }


def _member(table: Table, settings: Any, folder: Path, row: Row) -> RunFolder:
    elsewhere = {*OF_THE_MACHINE, *_OF_THE_TABLE, *table.foreign(row.model)}
    own = {"model": table.titles[row.model], "seed": row.seed, "ways": row.ways, "shots": row.shots}
    own |= {name: value for name, value in vars(settings).items() if name not in elsewhere}
    own["hidden_size"] = table.hidden_size(settings, row)
    return RunFolder(folder / f"{row.model}-{row.ways}way-{row.shots}shot-seed{row.seed}", own)


def _write_table(table: Table, settings: Any, folder: Path, preset: str, untrained: Sequence[dict[str, Any]]) -> None:
    rows = _rows(settings)
    kinds = dict.fromkeys((row.ways, row.shots) for row in rows)
    named = {row: (table.titles[row.model], table.hidden_size(settings, row)) for row in rows}

    def score(test: str, ways: int, shots: int) -> Score:
        known = table.paper[test]
        of_kind = {named[row]: (row.model, ways, shots) for row in rows if row[1:3] == (ways, shots)}
        paper = {name: known[key] for name, key in of_kind.items() if key in known}
        return Score(accuracy_name(ways, shots, test), paper, 100 / ways, models=list(of_kind))

    write_result(
        folder,
        experiment=table.experiment,
        preset=preset,
        command=command(table.experiment, preset, table.presets[preset], settings),
        requested=list(named.values()),
        scores=[score(test, *kind) for kind in kinds for test in table.paper],
        rows=untrained,
        curves=[
            Curve(
                f"{ways}-way_{shots}-shot_validation_accuracy",
                f"{ways}-way {shots}-shot, validation, %",
                100 / ways,
                against="tasks",
            )
            for ways, shots in kinds
        ],
    )


def _untrained(table: Table, settings: Any, of_kind: dict[Kind, dict[str, EpisodeSampler]]) -> list[dict[str, Any]]:
    """The rows of what learns nothing, on the tasks that the others are tested on."""
    if table.untrained is None:
        return []
    network, found = table.untrained(), []
    for (ways, shots), samplers in of_kind.items():
        scores: dict[str, list[float]] = {test: [] for test in table.paper}
        for seed in settings.seeds:
            sampler = samplers["test"]
            tests = {"test": held_out_episodes(sampler, settings.test_tasks, seed)} | table.further(sampler, seed)
            for test, episodes in tests.items():
                scores[test].append(evaluate_episodes(network, episodes).accuracy)
        for test, ours in scores.items():
            metric = accuracy_name(ways, shots, test)
            title = table.titles["untrained"]
            found.append(
                {
                    "model": title,
                    "hidden_size": None,
                    "metric": metric,
                    "ours": ours,
                    "paper": None,
                    "floor": 100 / ways,
                }
            )
    return found


def accuracy_name(ways: int, shots: int, test: str) -> str:
    return f"{ways}-way {shots}-shot {test} accuracy, %"
