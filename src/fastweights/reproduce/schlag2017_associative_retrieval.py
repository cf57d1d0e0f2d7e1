"""Associative retrieval, tables and figure 2 of Schlag & Schmidhuber 2017: gated fast weights and three rivals.

Section 4 of "Gated fast weights for associative retrieval".
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.errors import RunError
from fastweights.report.blocks import Paragraph, Table
from fastweights.reproduce import command
from fastweights.reproduce._schlag2017 import (
    EPOCHS,
    OF_MODELS,
    PAPER_SIZES,
    PRESETS,
    TITLES,
    ModelName,
    Settings,
    StreamModel,
    hidden_size,
)
from fastweights.reproduce._settings import OF_THE_MACHINE, check_settings, make_ready, refused
from fastweights.reproduce._weights import published
from fastweights.runs import (
    Curve,
    Record,
    RunFolder,
    Score,
    describe_changes,
    load_checkpoint,
    metric_key,
    write_result,
)
from fastweights.tasks import gated_retrieval as task
from fastweights.training import StreamSchedule, evaluate_streams, show_progress, train_streams

__all__ = ["EXPERIMENT", "PRESETS", "Settings", "StreamModel", "check", "evaluate", "run", "splits", "trained"]

EXPERIMENT = "schlag2017/associative-retrieval"

# Table 1, of the test set, by the sizes that have its numbers of parameters.
PAPER = {
    "test partial accuracy": (0.5323, 0.6252, 0.7804, 0.9522),
    "test total accuracy": (0.9922, 0.9936, 0.9963, 0.9979),
    "test partial bits": (0.0063, 0.0061, 0.0031, 0.0016),
    "test total bits": (0.0274, 0.0267, 0.0137, 0.0149),
}

VALIDATION_STREAMS = 50  # a cut between a storage token and its query costs the query: few streams, few cuts
_OF_THE_TABLE = ("models", "seeds", "evaluate_only")


class Trained(NamedTuple):
    """A network with its weights, and where they are from."""

    model: ModelName
    folder: Path | None  # None: the package
    origin: str
    network: StreamModel


def run(settings: Settings, folder: Path, *, preset: str = "quick", fresh: bool = False) -> None:
    """Train every model and seed of the settings, and write the table after each.

    Raises:
        RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
        TrainingError: the numbers are not finite.
    """
    schedules = _to_train(settings)
    members = _members(settings, folder)
    streams = splits(settings)
    make_ready(EXPERIMENT, members.values(), fresh=fresh)
    torch.set_num_threads(settings.threads)
    _write_table(settings, folder, preset)
    with show_progress() as progress:
        for (model, seed), member in members.items():
            with member, torch.random.fork_rng():
                torch.manual_seed(seed)
                network = StreamModel(model, settings).to(settings.device)
                title = f"{TITLES[model]}, seed {seed}"
                train_streams(network, streams, schedules[model], member, seed=seed, title=title, progress=progress)
            _write_table(settings, folder, preset)


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range, or nothing is to be trained.
    """
    _to_train(settings)


def _to_train(settings: Settings) -> dict[ModelName, StreamSchedule]:
    if settings.evaluate_only:
        raise RunError("evaluate_only trains nothing: leave it out here, or call evaluate")
    return _checked(settings)


def evaluate(settings: Settings, folder: Path) -> list[Paragraph | Table]:
    """Score the weights in the run's folder on the test stream, or the published ones where it has none.

    Returns:
        For each model and seed where the weights are from, its scores beside the paper's, and those by distance.

    Raises:
        RunError: settings out of range, a damaged file, or no weights anywhere.
    """
    _checked(settings)
    torch.set_num_threads(settings.threads)
    test = splits(settings)["test"]
    blocks: list[Paragraph | Table] = []
    for model, _, origin, network in trained(settings, folder):
        scores = evaluate_streams(network.to(settings.device), test).record("test")
        size = (TITLES[model], hidden_size(model, settings))
        rows = []
        for score in _scores():
            numbers = (score.paper.get(size), scores[metric_key(score.metric)], score.floor)
            rows.append((score.metric, *("-" if number is None else f"{number:.4f}" for number in numbers)))
        spans = tuple(f"{first} to {last}" for first, last, *_ in scores["test_by_distance"])
        accuracies = tuple(f"{accuracy:.3f}" for _, _, accuracy, _ in scores["test_by_distance"])
        blocks += [
            Paragraph(f"{TITLES[model]}, {size[1]} units: {origin}"),
            Table("Test", ("metric", "paper", "ours", "floor"), rows, right=("paper", "ours", "floor")),
            Table("By distance", ("characters between", *spans), [("partial accuracy", *accuracies)], right=spans),
        ]
    for model in dict.fromkeys(settings.models):
        if not any(block.text.startswith(TITLES[model]) for block in blocks if isinstance(block, Paragraph)):
            blocks.append(Paragraph(f"{TITLES[model]}: no weights in {folder}, and none with the package: train first"))
    return blocks


def trained(settings: Settings, folder: Path) -> list[Trained]:
    """The models that have been trained: every one of the settings in the run's folder, else the published ones.

    Raises:
        RunError: a damaged file, weights of other sizes, or no weights anywhere.
    """
    networks = []
    for (model, _), member in _members(settings, folder).items():
        state = load_checkpoint(member.path / "checkpoint.pt")
        if state is not None and state.get("best"):
            member.check()
            network = StreamModel(model, settings)
            try:
                network.load_state_dict(state["best"])
            except RuntimeError as error:
                raise RunError(f"the weights in {member.path} are of other sizes than these settings") from error
            networks.append(Trained(model, member.path, f"the best pass of {member.path}", network))
    for model in dict.fromkeys(settings.models):
        if all(model != found.model for found in networks) and (shared := published(EXPERIMENT, model)) is not None:
            networks.append(_of_the_package(model, settings, *shared))
    if not networks:
        names = ", ".join(TITLES[model] for model in settings.models)
        raise RunError(f"{folder} holds no weights of {names}, and none come with the package: train first")
    return networks


def _of_the_package(model: ModelName, settings: Settings, weights: dict[str, Tensor], about: Record) -> Trained:
    origin = "the published weights: seed {seed}, {steps:,} steps, commit {commit}".format(**about)
    sizes = ("embedding_size", "hidden_size", *OF_MODELS[model][1:])
    own = {**vars(settings), "hidden_size": hidden_size(model, settings)}
    wrong = describe_changes(*({name: record[name] for name in sizes} for record in (about["settings"], own)))
    if wrong:
        raise RunError(f"{TITLES[model]}: {origin}, are of other sizes: {wrong}")
    network = StreamModel(model, settings)
    network.load_state_dict(weights)
    return Trained(model, None, origin, network)


def splits(settings: Settings) -> dict[str, task.Stream]:
    """The streams of training, validation and test, cut into pieces that are read side by side."""
    sizes = (settings.train_queries, settings.validation_queries, settings.test_queries)
    names = ("train", "validation", "test")
    try:
        drawn = dict(zip(names, task.splits(sizes, seed=settings.data_seed), strict=True))
        return {name: _cut(stream, name, settings) for name, stream in drawn.items()}
    except (RuntimeError, MemoryError) as error:  # torch raises the first where memory ends
        raise RunError(f"{sum(sizes):,} queries do not fit into memory; ask for fewer") from error


def _cut(stream: task.Stream, name: str, settings: Settings) -> task.Stream:
    if name == "train":
        count = settings.batch_size
    else:
        queries = settings.validation_queries if name == "validation" else settings.test_queries
        count = min(VALIDATION_STREAMS, max(1, queries // 10))  # of short streams fewer yet
    cut = task.streams(stream, min(count, len(stream.inputs)))
    return task.Stream(*(field.to(settings.device) for field in cut))


def _members(settings: Settings, folder: Path) -> dict[tuple[ModelName, int], RunFolder]:
    members = {}
    of_models = {name for names in OF_MODELS.values() for name in names} | set(EPOCHS.values())
    shared = {
        name: value
        for name, value in vars(settings).items()
        if name not in {*OF_THE_MACHINE, *_OF_THE_TABLE, *of_models}
    }
    for model in settings.models:
        for seed in settings.seeds:
            size = hidden_size(model, settings)
            own = {"model": TITLES[model], "hidden_size": size, "seed": seed, **shared}
            own |= {name: getattr(settings, name) for name in OF_MODELS[model][1:]}
            own["epochs"] = getattr(settings, EPOCHS[model])
            members[model, seed] = RunFolder(folder / f"{model}-{size}-seed{seed}", own)
    return members


def _checked(settings: Settings) -> dict[ModelName, StreamSchedule]:
    """The schedules, once everything that the settings ask for has been seen to be possible."""
    sizes = tuple(name for names in OF_MODELS.values() for name in names if name.endswith("size"))
    queries = ("train_queries", "validation_queries", "test_queries")
    with refused():
        positive = (*queries, "embedding_size", *sizes)
        check_settings(settings, positive=positive, not_empty=("models", "seeds"))
        for model in settings.models:
            StreamModel(model, settings)
        schedules = {
            model: StreamSchedule(
                epochs=getattr(settings, EPOCHS[model]),
                batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                annealing=settings.annealing,
                clip_norm=settings.clip_norm,
                patience=getattr(settings, EPOCHS[model]),
                checkpoint_seconds=settings.checkpoint_seconds,
                segment=settings.segment,
                reset=settings.reset,
            )
            for model in settings.models
        }
        shortest = 15 * settings.train_queries  # S(aa,b),Q(aa)b.
        if settings.batch_size > shortest:
            raise ValueError(f"batch_size must be at most {shortest}, got {settings.batch_size}")
    return schedules


def _write_table(settings: Settings, folder: Path, preset: str) -> None:
    floor = task.floor()
    write_result(
        folder,
        experiment=EXPERIMENT,
        preset=preset,
        command=command(EXPERIMENT, preset, PRESETS[preset], settings),
        requested=[(TITLES[model], hidden_size(model, settings)) for model in settings.models],
        scores=_scores(),
        curves=[
            Curve("validation_partial_accuracy", "partial accuracy", floor.accuracy),
            Curve("validation_partial_bits", "bits an answer", floor.bits),
        ],
    )


def _scores() -> list[Score]:
    floor = task.floor()
    floors = {
        "test partial accuracy": floor.accuracy,
        "test total accuracy": 1 - (1 - floor.accuracy) / task.QUERY_CHARACTERS,
        "test partial bits": floor.bits,
        "test total bits": floor.bits / task.QUERY_CHARACTERS,
    }
    sizes = [(TITLES[model], size) for model, size in PAPER_SIZES.items()]
    return [Score(metric, dict(zip(sizes, numbers, strict=True)), floors[metric]) for metric, numbers in PAPER.items()]
