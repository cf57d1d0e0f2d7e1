"""The way of the few-shot experiments of Munkhdalai & Trischler 2018 through their runs, to their tables."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn as torch_nn

from fastweights.errors import DataError
from fastweights.reproduce import command
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.runs import Curve, RunFolder, Score, write_result
from fastweights.tasks.episodes import Episodes, EpisodeSampler, Examples
from fastweights.training import (
    Augment,
    EpisodeSchedule,
    evaluate_episodes,
    held_out_episodes,
    kind_of_tasks,
    show_progress,
    train_episodes,
)

Split = Literal["train", "validation", "test"]
Kind = tuple[Split, int, int]  # of tasks: ways and shots
_OF_THE_PROCESSOR = ("half",)  # which of two is the faster, and the numbers the same but for rounding
_OF_THE_TABLE = ("models", "shots", "seeds", "data_dir")


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
    """One model trained on one kind of tasks."""

    model: str
    ways: int  # in training
    shots: int  # in training
    seed: int
    tests: tuple[tuple[int, int], ...] = ()  # ways and shots of what it is tested on; the hardest is the last


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
    of_one_number: Collection[str] = ()  # models that answer tasks of as many classes as they were trained on


def run_table(table: Table, settings: Any, folder: Path, *, preset: str, fresh: bool) -> None:
    """Train every model for every seed, and write the table after each."""
    members = {row: _member(table, settings, folder, row) for row in _rows(table, settings)}
    with refused():
        data = table.load(settings)
        samplers = {kind: _sampler(settings, data, *kind) for row in members for kind in _kinds(row)}
        with torch.random.fork_rng():
            for row in members:
                if row.seed == settings.seeds[0]:
                    _network(table, settings, row, data)  # so that one which is too large leaves no folder behind
    make_ready(table.experiment, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    untrained = _untrained(table, settings, samplers)
    _write_table(table, settings, folder, preset, untrained)
    with show_progress() as progress:
        for row, member in members.items():
            if member.read_result() is not None:
                continue
            with member, torch.random.fork_rng():
                train_episodes(
                    _network(table, settings, row, data),
                    {kind[0]: samplers[kind] for kind in _kinds(row)},
                    table.schedule(settings, row.model),
                    member,
                    seed=row.seed,
                    augment=table.augment(settings),
                    further=_further(table, settings, row, samplers),
                    title=f"{table.titles[row.model]}, {row.ways}-way {row.shots}-shot, seed {row.seed}",
                    progress=progress,
                )
            _write_table(table, settings, folder, preset, untrained)


def _network(table: Table, settings: Any, row: Row, data: dict[Split, Data]) -> torch_nn.Module:
    torch.manual_seed(row.seed)
    return table.network(settings, row, data).to(settings.device)


def check_few_shot(table: Table, settings: Any, *, positive: tuple[str, ...] = ()) -> None:
    """Refuse settings that cannot run, before anything is trained or written; call it inside `refused`.

    Raises:
        ValueError: a setting is out of range.
    """
    lists = ("models", "ways", "shots", "seeds")
    tasks = ("tasks", "tasks_per_step", "validate_every")
    positive = ("ways", "shots", "training_shots", "queries", "test_queries", *tasks, "hidden_size", *positive)
    check_settings(settings, positive=positive, not_empty=lists)
    if min(settings.ways) < 2:
        raise ValueError(f"ways must be at least 2, got {settings.ways}")
    trained = settings.training_ways
    if trained < max(settings.ways):
        raise ValueError(f"training_ways must be at least the {max(settings.ways)} ways of the tests, got {trained}")
    if settings.pool and settings.pool < trained:
        raise ValueError(f"pool must be 0 or at least the {trained} ways of training, got {settings.pool}")
    dropout = getattr(settings, "dropout", 0.0)  # not every encoder has it
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
    for model in settings.models:
        table.schedule(settings, model)


def _rows(table: Table, settings: Any) -> list[Row]:
    """Seed by seed, so that a table of all models stands as early as can be."""
    of_any = {settings.training_ways: settings.ways}
    of_one = {ways: (ways,) for ways in settings.ways}
    return [
        Row(model, trained, settings.training_shots, seed, _hardest_last(tests, settings.shots))
        for seed in settings.seeds
        for model in settings.models
        for trained, tests in (of_one if model in table.of_one_number else of_any).items()
    ]


def _hardest_last(ways: Iterable[int], shots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(product(ways, shots), key=lambda kind: (kind[0], -kind[1])))


def _kinds(row: Row) -> list[Kind]:
    """The tasks that a row takes; the last is what it is foremost tested on."""
    tests: list[Kind] = [("test", ways, shots) for ways, shots in row.tests]
    return [("train", row.ways, row.shots), ("validation", row.tests[-1][0], row.shots), *tests]


def _sampler(settings: Any, data: dict[Split, Data], split: Split, ways: int, shots: int) -> EpisodeSampler:
    examples, labels, groups = data[split]
    queries = settings.queries if split == "train" else settings.test_queries
    try:
        return EpisodeSampler(examples, labels, groups=groups, ways=ways, shots=shots, queries=queries)
    except DataError as error:
        raise DataError(f"the {split} data have not enough for {ways}-way {shots}-shot tasks: {error}") from None


def _further(table: Table, settings: Any, row: Row, samplers: Mapping[Kind, EpisodeSampler]) -> dict[str, Episodes]:
    """What a row is tested on beside the hardest tasks, by name."""
    found: dict[str, Episodes] = {}
    for ways, shots in row.tests:
        sampler = samplers["test", ways, shots]
        if (ways, shots) != row.tests[-1]:
            found[kind_of_tasks(ways, shots, "test")] = held_out_episodes(sampler, settings.test_tasks, row.seed)
        for test, episodes in table.further(sampler, row.seed).items():
            found[kind_of_tasks(ways, shots, test)] = episodes
    return found


def _member(table: Table, settings: Any, folder: Path, row: Row) -> RunFolder:
    elsewhere = {*OF_THE_MACHINE, *_OF_THE_TABLE, *table.foreign(row.model)}
    own = {"model": table.titles[row.model], "seed": row.seed}
    own |= {name: value for name, value in vars(settings).items() if name not in elsewhere}
    own |= {"ways": sorted({ways for ways, _ in row.tests}), "training_ways": row.ways}
    own["shots"] = sorted(set(settings.shots))
    own["hidden_size"] = table.hidden_size(settings, row)
    # Not named by the ways of training where one network is for all: a folder holds one that answers a test.
    ways = f"{row.ways}way-" if row.model in table.of_one_number else ""
    return RunFolder(folder / f"{row.model}-{ways}seed{row.seed}", own, may_change=_OF_THE_PROCESSOR)


def _write_table(table: Table, settings: Any, folder: Path, preset: str, untrained: Sequence[dict[str, Any]]) -> None:
    rows = _rows(table, settings)

    def name(row: Row) -> tuple[str, int | None]:
        return table.titles[row.model], table.hidden_size(settings, row)

    def score(test: str, ways: int, shots: int) -> Score:
        known = {model: number for (model, *kind), number in table.paper[test].items() if kind == [ways, shots]}
        # Of all models: others may have been trained into the folder before.
        paper = {name(Row(model, ways, shots, 0)): number for model, number in known.items()}
        asked = dict.fromkeys(name(row) for row in rows if (ways, shots) in row.tests)
        return Score(_metric(ways, shots, test), paper, 100 / ways, models=list(asked))

    validated = dict.fromkeys((row.tests[-1][0], row.shots) for row in rows)
    write_result(
        folder,
        experiment=table.experiment,
        preset=preset,
        command=command(table.experiment, preset, table.presets[preset], settings),
        requested=[name(row) for row in rows],
        scores=[score(test, ways, shots) for ways in settings.ways for shots in settings.shots for test in table.paper],
        rows=untrained,
        curves=[
            Curve(
                f"{kind_of_tasks(ways, shots, 'validation')}_accuracy",
                f"{ways}-way {shots}-shot, validation, %",
                100 / ways,
                against="tasks",
            )
            for ways, shots in validated
        ],
    )


def _untrained(table: Table, settings: Any, samplers: Mapping[Kind, EpisodeSampler]) -> list[dict[str, Any]]:
    """The rows of what learns nothing, on the tasks that the others are tested on."""
    if table.untrained is None:
        return []
    network, found = table.untrained(), []
    for (split, ways, shots), sampler in sorted(samplers.items(), key=lambda item: item[0]):
        if split != "test":
            continue
        scores: dict[str, list[float]] = {test: [] for test in table.paper}
        for seed in settings.seeds:
            tests = {"test": held_out_episodes(sampler, settings.test_tasks, seed)} | table.further(sampler, seed)
            for test, episodes in tests.items():
                scores[test].append(evaluate_episodes(network, episodes).accuracy)
        for test, ours in scores.items():
            named = {"model": table.titles["untrained"], "hidden_size": None, "paper": None}
            found.append(named | {"metric": _metric(ways, shots, test), "ours": ours, "floor": 100 / ways})
    return found


def _metric(ways: int, shots: int, test: str) -> str:
    return f"{ways}-way {shots}-shot {test} accuracy, %"
