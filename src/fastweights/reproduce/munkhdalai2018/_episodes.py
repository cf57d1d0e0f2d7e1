"""The few-shot tables of Munkhdalai & Trischler 2018: their settings, their rivals, and the way to their numbers."""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn as torch_nn

from fastweights import few_shot
from fastweights.errors import DataError
from fastweights.reproduce._experiment import check_settings, except_for, one_line_errors, only, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Curve, Record, RunFolder, Score
from fastweights.tasks.episodes import Episodes, EpisodeSampler, Examples
from fastweights.training import (
    Augment,
    EpisodeSchedule,
    Progress,
    evaluate_episodes,
    held_out_episodes,
    kind_of_tasks,
    train_episodes,
)

ModelName = Literal["hebbian", "gradient", "matching", "prototypical", "maml", "maml-first-order", "fine-tuning"]
TITLES: dict[str, str] = {
    "hebbian": "Fast weights, Hebbian",
    "gradient": "Fast weights, gradient",
    "matching": "Matching Networks",
    "prototypical": "Prototypical Networks",
    "maml": "MAML",
    "maml-first-order": "MAML, first order",
    "fine-tuning": "Fine-tuning",
}
# They answer only tasks with as many classes as in training: each column of their softmax layer learns its start.
MAMLS = ("maml", "maml-first-order")
TRAINING_WAYS = (
    "Classes of a task in training: one network answers tasks of up to this many. One of MAML's answers those of "
    "one number, and is trained for each of `ways`."
)
COMPARING = ("matching", "prototypical", "fine-tuning")  # have no hidden layer

Split = Literal["train", "validation", "test"]
Kind = tuple[Split, int, int]  # a kind of tasks: split, ways and shots


@dataclass(frozen=True)
class EpisodicSettings:
    """The settings of every few-shot experiment."""

    ways: tuple[int, ...] = (5,)
    """Classes of a task in the tests; the largest of them in validation."""
    training_ways: int = 5
    """Classes of a task in training: one network answers tasks of up to this many classes."""
    shots: tuple[int, ...] = (1, 5)
    """Described examples of a class in the tests."""
    training_shots: int = 1
    """Described examples of a class in training and validation: one network serves every number of shots."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and the tasks: one training run for each."""

    tasks: int = 64_000
    """Training tasks."""
    tasks_per_step: int = 64
    """Training tasks in an update."""
    pool: int = 40
    """Classes that the tasks of an update share, so that each example is encoded once; 0: none, as in the paper."""
    queries: int = 3
    """Queries of each class in training."""
    validate_every: int = 3200
    """Tasks between two validations."""
    validation_tasks: int = 400
    """Validation tasks, the same each time."""
    test_tasks: int = 1000
    """Test tasks."""
    test_queries: int = 15
    """Queries of each class in validation and test."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    annealing: Literal["none", "cosine"] = "cosine"
    """Schedule of the learning rate: none (constant), as in the paper, or a cosine that falls to zero."""
    averaging: float = 0.999
    """Decay of the running mean of the weights, which is validated and tested; 0: no mean, as in the paper."""
    weight_decay: float = 0.0
    """Decay of the weights in an update, as a multiple of the learning rate."""
    hidden_size: int = 288
    """Units of the layer under the softmax layer."""

    half: bool = False
    """Encode in bfloat16 where that is safe; several times as fast on processors with AMX."""
    data_dir: Path | None = None
    """Folder that has the folder of the data set; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""


@dataclass(frozen=True)
class RivalSettings(EpisodicSettings):
    """The settings of a table of rivals."""

    training_ways: int = except_for(MAMLS, 5, TRAINING_WAYS)
    tasks: int = except_for(MAMLS, 64_000, "Training tasks.")
    tasks_per_step: int = except_for(MAMLS, 64, "Training tasks in an update.")
    pool: int = except_for(
        MAMLS,
        40,
        "Classes that the tasks of an update share, so that each of their examples is encoded once. 0 draws every "
        "task by itself, as the paper does.",
    )
    validate_every: int = except_for(MAMLS, 3200, "Tasks between two validations.")
    hidden_size: int = except_for(COMPARING, 288, "Units of the layer under the softmax layer.", null=True)

    models: tuple[ModelName, ...] = ("hebbian", "gradient", "matching", "prototypical", "maml", "fine-tuning")
    """Models to train and test, each a row of the table."""
    matching_scale: float = only("matching", 10.0, "Factor of the cosines in the softmax; 1 in Vinyals et al. 2016.")
    label_noise: float = only("hebbian", 0.0, "Largest uniform noise added to the labels in training.")
    second_order: bool = only("gradient", False, "Differentiate through the error gradients too.")
    gradient_tasks_per_step: int = only(
        "gradient",
        16,
        "Training tasks in an update, in place of `tasks_per_step`; the number of updates stays. Smaller, because a "
        "fast weight for each task costs more than the encoder.",
    )
    maml_tasks: int = only(MAMLS, 16_000, "Training tasks, in place of `tasks`; they cannot share examples.")
    maml_tasks_per_step: int = only(MAMLS, 4, "Training tasks in an update.")
    maml_validate_every: int = only(MAMLS, 800, "Tasks between two validations.")
    maml_steps: int = only(MAMLS, 1, "Gradient steps on the description of a task.")
    maml_rate: float = only(MAMLS, 0.1, "Learning rate of those steps.")


class Data(NamedTuple):
    """Labelled examples of one split, and which of them never meet in a task."""

    examples: Examples  # [N,...]
    labels: torch.Tensor  # [N]
    groups: torch.Tensor | None = None  # [N]


class TasksRow(NamedTuple):
    """One model trained on one kind of tasks."""

    model: str
    ways: int  # in training
    shots: int  # in training
    tests: tuple[tuple[int, int], ...] = ()  # ways and shots of the test tasks; the hardest is the last

    @property
    def kinds(self) -> list[Kind]:
        """The tasks that the row takes; the last is its main test."""
        tests: list[Kind] = [("test", ways, shots) for ways, shots in self.tests]
        return [("train", self.ways, self.shots), ("validation", self.tests[-1][0], self.shots), *tests]


Network = Callable[[Any, TasksRow, dict[Split, Data]], torch_nn.Module]


def label_classes(images: torch.Tensor) -> Data:
    """Return images [classes,examples,channels,size,size] one after another, and the class of each."""
    classes, examples = images.shape[:2]
    return Data(images.flatten(0, 1), torch.arange(classes).repeat_interleave(examples))


def make_rival(settings: Any, row: TasksRow, encoder: torch_nn.Module, data: dict[Split, Data]) -> torch_nn.Module:
    """Return the model of a row on an encoder; fine-tuning learns to tell the classes of the training data."""
    model, ways = row.model, row.ways
    features: Any = encoder.features
    if model in ("hebbian", "gradient"):
        head = few_shot.FastWeightsHead(
            features,
            ways,
            hidden_size=settings.hidden_size,
            rule="hebbian" if model == "hebbian" else "gradient",
            label_noise=settings.label_noise if model == "hebbian" else 0.0,
            second_order=settings.second_order and model == "gradient",
        )
        return few_shot.FewShotNetwork(encoder, head)
    if model == "matching":
        return few_shot.FewShotNetwork(encoder, few_shot.MatchingHead(ways, scale=settings.matching_scale))
    if model == "prototypical":
        return few_shot.FewShotNetwork(encoder, few_shot.PrototypeHead(ways))
    if model == "fine-tuning":
        return few_shot.FineTuning(encoder, 1 + int(data["train"].labels.max()), ways)
    return few_shot.MAML(
        encoder,
        ways,
        hidden_size=settings.hidden_size,
        steps=settings.maml_steps,
        lr=settings.maml_rate,
        second_order=model == "maml",
    )


def schedule(settings: Any, model: str) -> EpisodeSchedule:
    """Return how a model is trained.

    Raises:
        ValueError: numbers of tasks that do not go into one another, or a learning rate out of range.
    """
    shared = ("validation_tasks", "test_tasks", "learning_rate", "annealing", "averaging", "weight_decay")
    rest = {name: getattr(settings, name) for name in shared}
    if model in MAMLS:
        try:
            return EpisodeSchedule(
                tasks=settings.maml_tasks,
                tasks_per_step=settings.maml_tasks_per_step,
                validate_every=settings.maml_validate_every,
                **rest,
            )
        except ValueError as error:
            raise ValueError(f"maml_tasks, maml_tasks_per_step and maml_validate_every do not fit: {error}") from None
    usual = EpisodeSchedule(
        tasks=settings.tasks,
        tasks_per_step=settings.tasks_per_step,
        validate_every=settings.validate_every,
        pool=settings.pool or None,
        **rest,
    )
    if model != "gradient":
        return usual
    several = settings.gradient_tasks_per_step
    tasks, every = (count // usual.tasks_per_step * several for count in (usual.tasks, usual.validate_every))
    return replace(usual, tasks=tasks, validate_every=every, tasks_per_step=several)


def check_rivals(settings: Any, *, sizes: Collection[str] = ()) -> None:
    """Refuse settings of a table of rivals that cannot run, before anything is trained or written.

    Raises:
        ValueError: a setting is out of range.
    """
    mamls = ("maml_tasks", "maml_tasks_per_step", "maml_validate_every", "maml_steps")
    check_episodes(settings, sizes=(*sizes, *mamls, "gradient_tasks_per_step"))
    if not 0 < settings.maml_rate < 100:
        raise ValueError(f"maml_rate must be more than 0 and less than 100, got {settings.maml_rate}")
    if not 0 < settings.matching_scale < 1000:
        raise ValueError(f"matching_scale must be more than 0 and less than 1000, got {settings.matching_scale}")


def check_episodes(settings: Any, *, sizes: Collection[str] = ()) -> None:
    """Refuse few-shot settings that cannot run, before anything is trained or written.

    Raises:
        ValueError: a setting is out of range.
    """
    shared = ("ways", "shots", "training_shots", "queries", "test_queries", "tasks", "tasks_per_step", "validate_every")
    check_settings(settings, sizes=(*shared, "hidden_size", *sizes), lists=("models", "ways", "shots", "seeds"))
    if min(settings.ways) < 2:
        raise ValueError(f"ways must be at least 2, got {settings.ways}")
    ways = settings.training_ways
    if ways < max(settings.ways):
        raise ValueError(f"training_ways must be at least the {max(settings.ways)} ways of the tests, got {ways}")
    if settings.pool and settings.pool < ways:
        raise ValueError(f"pool must be 0 or at least the {ways} ways of training, got {settings.pool}")
    dropout = getattr(settings, "dropout", 0.0)  # some encoders have no dropout
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
    if not 0 <= settings.label_noise < 100:
        raise ValueError(f"label_noise must be at least 0 and less than 100, got {settings.label_noise}")
    for model in settings.models:
        schedule(settings, model)


def prepare_episodes(
    settings: Any,
    folder: Path,
    load: Callable[[Any], dict[Split, Data]],
    network: Network,
    paper: Mapping[str, Mapping[tuple[str, int, int], float]],
    *,
    titles: Mapping[Any, str] = TITLES,
    without: Collection[str] = (),
    augment: Augment | None = None,
    further: Callable[[EpisodeSampler, int], dict[str, Episodes]] | None = None,
    untrained: tuple[str, torch_nn.Module] | None = None,
) -> Members:
    """Return the members of a run on tasks: every model for every seed.

    Args:
        settings: with which the experiment is run.
        folder: of the run.
        load: returns the data of each split.
        network: returns the model of a row.
        paper: the paper's per cent of each test by model, ways and shots.
        titles: of the models.
        without: names of settings that concern no member of this run.
        augment: changes the examples of an update.
        further: returns other tests by name, from a test's sampler and a seed.
        untrained: title and network of a rival that learns nothing.
    """
    rows = list_rows(settings)
    with one_line_errors():
        data = load(settings)
        samplers = {kind: _make_sampler(settings, data, *kind) for row in rows for kind in row.kinds}
        with torch.random.fork_rng():
            for row in rows:
                network(settings, row, data).to(
                    settings.device
                )  # built first, so that a network that is too large leaves no folder
    members = {
        (row, seed): _open_folder(settings, folder, row, seed, titles, without)
        for seed in settings.seeds  # seed by seed, so that a table of all models stands as early as can be
        for row in rows
    }

    def further_tests(ways: int, shots: int, seed: int) -> dict[str, Episodes]:
        return further(samplers["test", ways, shots], seed) if further else {}

    def train_member(row: TasksRow, seed: int, member: RunFolder, progress: Progress) -> None:
        tests: dict[str, Episodes] = {}
        for ways, shots in row.tests:
            if (ways, shots) != row.tests[-1]:
                episodes = held_out_episodes(samplers["test", ways, shots], settings.test_tasks, seed)
                tests[kind_of_tasks(ways, shots, "test")] = episodes
            for test, episodes in further_tests(ways, shots, seed).items():
                tests[kind_of_tasks(ways, shots, test)] = episodes
        train_episodes(
            network(settings, row, data).to(settings.device),
            {kind[0]: samplers[kind] for kind in row.kinds},
            schedule(settings, row.model),
            member,
            seed=seed,
            augment=augment,
            further=tests,
            title=f"{titles[row.model]}, {row.ways}-way {row.shots}-shot, seed {seed}",
            progress=progress,
        )

    @functools.cache
    def untrained_rows() -> list[Record]:
        """Return the rows of the models that learn nothing, on the tasks that the others are tested on."""
        if untrained is None:
            return []
        title, rival = untrained
        records = []
        for _, ways, shots in sorted(kind for kind in samplers if kind[0] == "test"):
            scores: dict[str, list[float]] = {test: [] for test in paper}
            for seed in settings.seeds:
                tests = {"test": held_out_episodes(samplers["test", ways, shots], settings.test_tasks, seed)}
                for test, episodes in (tests | further_tests(ways, shots, seed)).items():
                    scores[test].append(evaluate_episodes(rival, episodes).accuracy)
            for test, ours in scores.items():
                metric, floor = _metric(ways, shots, test), 100 / ways
                about = {"model": title, "hidden_size": None, "paper": None}
                records.append(about | {"metric": metric, "ours": ours, "floor": floor})
        return records

    def table() -> Record:
        return _table(settings, rows, titles, paper) | {"rows": untrained_rows()}

    return Members(members, train_member, table, skip_finished=True)


def list_rows(settings: Any) -> list[TasksRow]:
    """Return the table's rows: a model that answers tasks of one number of classes has one for each of `ways`."""
    of_any = {settings.training_ways: settings.ways}
    of_one = {ways: (ways,) for ways in settings.ways}
    return [
        TasksRow(model, trained, settings.training_shots, _order_tests(tests, settings.shots))
        for model in settings.models
        for trained, tests in (of_one if model in MAMLS else of_any).items()
    ]


def _order_tests(ways: Iterable[int], shots: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return all pairs of ways and shots, the hardest last."""
    return tuple(sorted(product(ways, shots), key=lambda kind: (kind[0], -kind[1])))


def _make_sampler(settings: Any, data: dict[Split, Data], split: Split, ways: int, shots: int) -> EpisodeSampler:
    examples, labels, groups = data[split]
    queries = settings.queries if split == "train" else settings.test_queries
    try:
        return EpisodeSampler(examples, labels, groups=groups, ways=ways, shots=shots, queries=queries)
    except DataError as error:
        raise DataError(f"the {split} data are too few for {ways}-way {shots}-shot tasks: {error}") from None


def _open_folder(
    settings: Any,
    folder: str | os.PathLike[str],
    row: TasksRow,
    seed: int,
    titles: Mapping[Any, str],
    without: Collection[str],
) -> RunFolder:
    own = {"model": titles[row.model], "seed": seed} | settings_of(settings, row.model, without=("shots", *without))
    own |= {"ways": sorted({ways for ways, _ in row.tests}), "training_ways": row.ways}
    own["shots"] = sorted(set(settings.shots))
    # Not named by the ways of training where one network is for all: a folder holds one that answers a test.
    ways = f"{row.ways}way-" if row.model in MAMLS else ""
    # Which of two precisions is the faster depends on the processor, and the numbers are the same up to rounding.
    return RunFolder(Path(folder, f"{row.model}-{ways}seed{seed}"), own, may_change=("half",))


def _table(
    settings: Any,
    rows: list[TasksRow],
    titles: Mapping[Any, str],
    paper: Mapping[str, Mapping[tuple[str, int, int], float]],
) -> Record:
    def name(model: str) -> tuple[str, int | None]:
        return titles[model], settings_of(settings, model)["hidden_size"]

    def score(test: str, ways: int, shots: int) -> Score:
        # The paper's numbers are of all models: others may have been trained into the folder before.
        known = {name(model): number for (model, *kind), number in paper[test].items() if kind == [ways, shots]}
        asked = dict.fromkeys(name(row.model) for row in rows if (ways, shots) in row.tests)
        return Score(_metric(ways, shots, test), known, 100 / ways, models=list(asked))

    validated = dict.fromkeys((row.tests[-1][0], row.shots) for row in rows)
    return {
        "requested": [name(row.model) for row in rows],
        "scores": [score(test, ways, shots) for ways in settings.ways for shots in settings.shots for test in paper],
        "curves": [
            Curve(
                f"{kind_of_tasks(ways, shots, 'validation')}_accuracy",
                f"{ways}-way {shots}-shot, validation, %",
                100 / ways,
                against="tasks",
            )
            for ways, shots in validated
        ],
    }


def _metric(ways: int, shots: int, test: str) -> str:
    return f"{ways}-way {shots}-shot {test} accuracy, %"
