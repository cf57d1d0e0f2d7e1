"""Associative retrieval, tables and figure 2 of Schlag & Schmidhuber 2017: gated fast weights and three rivals.

Section 4 of "Gated fast weights for associative retrieval".
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from fastweights import processes
from fastweights.errors import RunError
from fastweights.nn import FastWeightsRNN, GatedFastWeightsRNN, HyperLSTM
from fastweights.pretrained import Pretrained, find_published
from fastweights.report.blocks import Paragraph, Table
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._members import Members, set_threads
from fastweights.runs import Curve, Progress, Record, RunFolder, Score, load_checkpoint, metric_key
from fastweights.tasks import gated_retrieval as task
from fastweights.training import StreamSchedule, evaluate_streams, train_streams

EXPERIMENT = "schlag2017/associative-retrieval"
QUICK_MINUTES = 9  # docs/results/schlag2017-associative-retrieval: a fifth of its passes, of one seed
DATA = None

ModelName = Literal["attention", "lstm", "hyper-lstm", "gated"]

TITLES: dict[ModelName, str] = {
    "attention": "AttentionFW",
    "lstm": "LSTM",
    "hyper-lstm": "HyperLSTM",
    "gated": "Gated fast weights",
}

# The units that have the paper's numbers of parameters; of a HyperLSTM nearly, for the paper does not say how it is
# made.
PAPER_SIZES: dict[ModelName, int] = {"attention": 300, "lstm": 600, "hyper-lstm": 874, "gated": 40}

# Table 1, of the test set, by those sizes.
PAPER = {
    "test partial accuracy": (0.5323, 0.6252, 0.7804, 0.9522),
    "test total accuracy": (0.9922, 0.9936, 0.9963, 0.9979),
    "test partial bits": (0.0063, 0.0061, 0.0031, 0.0016),
    "test total bits": (0.0274, 0.0267, 0.0137, 0.0149),
}

_CLIPPED = "Largest norm of the gradient: a larger one is scaled down to it."

VALIDATION_STREAMS = 50  # a cut between a storage token and its query costs the query: few streams, few cuts


@dataclass(frozen=True)
class Settings:
    """Associative retrieval of Schlag & Schmidhuber 2017: a long stream of keys, values and queries."""

    models: tuple[ModelName, ...] = ("gated",)
    """Models to train and test, each a row of the table."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of the restarts of the streams: one training run for each."""

    train_queries: int = task.SIZES[0]
    """Queries in the stream of training, each with 1 to 10 storage tokens before it."""
    validation_queries: int = task.SIZES[1]
    """Queries in the stream that chooses the best pass."""
    test_queries: int = task.SIZES[2]
    """Queries in the test stream, whose scores the table shows."""
    data_seed: int = 0
    """Seed of the streams, which all runs share."""

    epochs: int = only("gated", 10, "Passes over the training stream.", recorded_as="epochs")
    attention_epochs: int = only("attention", 4, "Passes over the training stream.", recorded_as="epochs")
    lstm_epochs: int = only(
        "lstm",
        4,
        "Passes over the training stream; one takes several times as long as one of gated fast weights.",
        recorded_as="epochs",
    )
    hyper_lstm_epochs: int = only(
        "hyper-lstm",
        2,
        "Passes over the training stream; one takes many times as long as one of gated fast weights.",
        recorded_as="epochs",
    )
    batch_size: int = 256
    """Pieces of the stream that are read side by side."""
    segment: int = 32
    """Characters over which the gradient is propagated back."""
    reset: float = 0.02
    """Probability that a piece's state is reset to zeros at a segment."""
    optimizer: Literal["nadam", "adam"] = "nadam"
    """Optimizer: Nadam, which the paper has, or Adam, which converges more slowly there."""
    learning_rate: float = only("gated", 1e-3, "Learning rate.", recorded_as="learning_rate")
    attention_learning_rate: float = only("attention", 1e-3, "Learning rate.", recorded_as="learning_rate")
    lstm_learning_rate: float = only("lstm", 1e-3, "Learning rate.", recorded_as="learning_rate")
    hyper_lstm_learning_rate: float = only("hyper-lstm", 1e-3, "Learning rate.", recorded_as="learning_rate")
    annealing: Literal["none", "cosine"] = "cosine"
    """Schedule of the learning rate: none (constant), or a cosine that falls to zero at the last pass."""
    clip_norm: float = only("gated", 0.1, _CLIPPED, recorded_as="clip_norm")
    attention_clip_norm: float = only("attention", 0.1, _CLIPPED, recorded_as="clip_norm")
    lstm_clip_norm: float = only("lstm", 0.1, _CLIPPED, recorded_as="clip_norm")
    hyper_lstm_clip_norm: float = only("hyper-lstm", 0.1, _CLIPPED, recorded_as="clip_norm")

    embedding_size: int = 15
    """Features of a character."""
    hidden_size: int = only(
        "gated", 40, "Units of the fast network and of the slow network's state.", recorded_as="hidden_size"
    )
    slow_inner_size: int = only("gated", 100, "Units of the slow network's inner layer.")
    layer_norm: Literal["after", "before", "both", "none"] = only(
        "gated", "after", "Place of the layer norms, of tanh; all but after are many times slower."
    )
    attention_hidden_size: int = only("attention", 300, "Recurrent units.", recorded_as="hidden_size")
    attention_decay: float = only("attention", 0.95, "Fraction of the fast matrix kept after each step.")
    attention_rate: float = only("attention", 0.5, "Strength of each write of a hidden state.")
    lstm_hidden_size: int = only("lstm", 600, "Recurrent units.", recorded_as="hidden_size")
    hyper_lstm_hidden_size: int = only("hyper-lstm", 874, "Units of the large LSTM.", recorded_as="hidden_size")
    hyper_lstm_small_size: int = only("hyper-lstm", 128, "Units of the small LSTM.")
    hyper_lstm_embedding_size: int = only("hyper-lstm", 16, "Features between the two LSTMs.")

    evaluate_only: bool = False
    """Test without training: the weights in the run's folder, or the published weights if it has none."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    "paper": Settings(models=("attention", "lstm", "hyper-lstm", "gated"), epochs=50),
    # The sizes of table 2, about 50,000 parameters each, and the same number of steps: smaller batches, so that four
    # passes have enough of them.
    "equal": Settings(
        models=("attention", "lstm", "hyper-lstm", "gated"),
        seeds=(1, 2),
        batch_size=64,
        epochs=4,
        attention_epochs=4,
        lstm_epochs=4,
        hyper_lstm_epochs=4,
        # Each model's best of six, after two passes (docs/papers/schlag2017.md).
        learning_rate=1e-3,
        clip_norm=0.1,
        attention_learning_rate=5e-3,
        attention_clip_norm=0.1,
        lstm_learning_rate=5e-3,
        lstm_clip_norm=1.0,
        hyper_lstm_learning_rate=5e-3,
        hyper_lstm_clip_norm=1.0,
        attention_hidden_size=207,
        lstm_hidden_size=100,
        hyper_lstm_hidden_size=80,
        hyper_lstm_small_size=24,
        hyper_lstm_embedding_size=4,
    ),
}


class StreamModel(Pretrained, nn.Module):
    """Embedding, a recurrent layer and a projection: inputs [T,B] and a state -> logits [T,B,15] and the next state.

    `options` has the sizes and constants of the model, by the names under which a run records them.
    """

    def __init__(self, model: ModelName, options: Record) -> None:
        super().__init__()
        features, size = options["embedding_size"], options["hidden_size"]
        self.embedding = nn.Embedding(len(task.VOCABULARY), features)
        self.core: nn.Module
        if model == "attention":
            decay, rate = options["attention_decay"], options["attention_rate"]
            self.core = FastWeightsRNN(features, size, decay=decay, rate=rate, identity_scale=0.05)  # as in ba2016
        elif model == "lstm":
            self.core = nn.LSTM(features, size)
            # torch has two bias vectors where one is enough and the paper counts one: the other stays zero.
            self.core.get_parameter("bias_hh_l0").requires_grad_(False).zero_()
        elif model == "hyper-lstm":
            self.core = HyperLSTM(
                features,
                size,
                hyper_hidden_size=options["hyper_lstm_small_size"],
                hyper_embedding_size=options["hyper_lstm_embedding_size"],
            )
            # As published the features between the two LSTMs start alike and stay so.
            nn.init.normal_(self.core.embedding_weight, std=0.01)
        else:
            self.core = GatedFastWeightsRNN(
                features,
                size,
                slow_inner_size=options["slow_inner_size"],
                layer_norm=options.get("layer_norm", "after"),  # weights of before this setting
            )
        self.output = nn.Linear(size, len(task.VOCABULARY))

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.embedding(inputs)
        if isinstance(self.core, nn.LSTM):  # its state has an axis of layers in front
            y, state = self.core(x, None if state is None else tuple(tensor.unsqueeze(0) for tensor in state))
            return self.output(y), tuple(tensor.squeeze(0) for tensor in state)
        y, state = self.core(x, state)
        return self.output(y), state


def make_model(model: ModelName, settings: Settings) -> StreamModel:
    """Return a model with weights that are not trained."""
    return StreamModel(model, settings_of(settings, model))


class TrainedNetwork(NamedTuple):
    """A network with its weights, and their origin in words."""

    model: ModelName
    folder: Path | None  # None: the package
    origin: str
    network: StreamModel


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every model and seed of the settings."""
    streams = draw_splits(settings)

    def train_member(model: ModelName, seed: int, member: RunFolder, progress: Progress) -> None:
        network = make_model(model, settings).to(settings.device)
        title = f"{TITLES[model]}, seed {seed}"
        train_streams(network, streams, schedule(settings, model), member, seed=seed, title=title, progress=progress)

    members = member_folders(settings, folder)
    return Members(members, train_member, lambda: table(settings))


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range, or nothing is to be trained.
    """
    if settings.evaluate_only:
        raise RunError("evaluate_only trains nothing: leave it out here, or call evaluate")
    _check_numbers(settings)


@one_line_errors()
def _check_numbers(settings: Settings) -> None:
    queries = ("train_queries", "validation_queries", "test_queries")
    sizes = [name for name in vars(settings) if name.endswith(("_size", "epochs"))]
    check_settings(settings, sizes=(*queries, *sizes))
    for model in settings.models:
        make_model(model, settings)
        processes.check_divisible(batch_size=schedule(settings, model).batch_size)
    shortest = 15 * settings.train_queries  # S(aa,b),Q(aa)b.
    if settings.batch_size > shortest:
        raise ValueError(f"batch_size must be at most {shortest}, got {settings.batch_size}")


def evaluate(settings: Settings, folder: str | os.PathLike[str]) -> list[Paragraph | Table]:
    """Score the weights in the run's folder on the test stream, or the published ones where it has none.

    Returns:
        For each model and seed the origin of its weights, its scores beside the paper's, and its scores by distance.

    Raises:
        RunError: settings out of range, a damaged file, or no weights anywhere.
    """
    _check_numbers(settings)
    blocks: list[Paragraph | Table] = []
    with set_threads(settings.threads):
        test = draw_splits(settings)["test"]
        for model, _, origin, network in load_trained(settings, folder):
            record = evaluate_streams(network.to(settings.device), test).record("test")
            size = (TITLES[model], network.output.in_features)
            rows = []
            for score in scores():
                numbers = (score.paper.get(size), record[metric_key(score.metric)], score.floor)
                rows.append((score.metric, *("-" if number is None else f"{number:.4f}" for number in numbers)))
            spans = tuple(f"{first} to {last}" for first, last, *_ in record["test_by_distance"])
            accuracies = tuple(f"{accuracy:.3f}" for _, _, accuracy, _ in record["test_by_distance"])
            blocks += [
                Paragraph(f"{TITLES[model]}, {size[1]} units: {origin}"),
                Table("Test", ("metric", "paper", "ours", "floor"), rows, right=("paper", "ours", "floor")),
                Table("By distance", ("characters between", *spans), [("partial accuracy", *accuracies)], right=spans),
            ]
    for model in dict.fromkeys(settings.models):
        if not any(block.text.startswith(TITLES[model]) for block in blocks if isinstance(block, Paragraph)):
            blocks.append(Paragraph(f"{TITLES[model]}: no weights in {folder}, and none with the package: train first"))
    return blocks


def load_trained(settings: Settings, folder: str | os.PathLike[str]) -> list[TrainedNetwork]:
    """Load the models that have been trained: each of the settings in the run's folder, else the published ones.

    The published ones have the sizes that they were trained with, whatever the settings say.

    Raises:
        RunError: a damaged file, weights of other sizes, or no weights anywhere.
    """
    networks = []
    for (model, _), member in member_folders(settings, folder).items():
        state = load_checkpoint(member.path / "checkpoint.pt")
        if state is not None and state.get("best"):
            member.check()
            network = make_model(model, settings)
            try:
                network.load_state_dict(state["best"])
            except RuntimeError as error:
                raise RunError(f"the weights in {member.path} have other sizes than these settings give") from error
            networks.append(TrainedNetwork(model, member.path, f"the best pass of {member.path}", network))
    for model in dict.fromkeys(settings.models):
        name = f"schlag2017-{model}"
        if find_published(name) and all(model != network.model for network in networks):
            network = StreamModel.from_pretrained(name)
            origin = "the published weights: seed {seed}, {steps:,} steps, commit {commit}".format(**network.about)
            networks.append(TrainedNetwork(model, None, origin, network))
    if not networks:
        names = ", ".join(TITLES[model] for model in settings.models)
        raise RunError(f"{folder} holds no weights of {names}, and the package has none either: train first")
    return networks


def draw_splits(settings: Settings) -> dict[str, task.Stream]:
    """Draw the streams of training, validation and test, cut into pieces that are read side by side: [steps,B]."""
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
        count = min(VALIDATION_STREAMS, max(1, queries // 10))  # still fewer of short streams
    cut = task.streams(stream, min(count, len(stream.inputs)))
    return task.Stream(*(field.to(settings.device) for field in cut))


def member_folders(settings: Settings, folder: str | os.PathLike[str]) -> dict[tuple[ModelName, int], RunFolder]:
    """Return the folder of each model and seed."""
    members = {}
    for model in settings.models:
        own = settings_of(settings, model, without=("evaluate_only",))
        for seed in settings.seeds:
            numbers = {"model": TITLES[model], "hidden_size": own["hidden_size"], "seed": seed} | own
            members[model, seed] = RunFolder(Path(folder, f"{model}-{own['hidden_size']}-seed{seed}"), numbers)
    return members


def schedule(settings: Settings, model: ModelName) -> StreamSchedule:
    """Return how long and how fast a model is trained.

    Raises:
        ValueError: a number out of range.
    """
    own = settings_of(settings, model)
    return StreamSchedule(
        epochs=own["epochs"],
        batch_size=settings.batch_size,
        learning_rate=own["learning_rate"],
        annealing=settings.annealing,
        clip_norm=own["clip_norm"],
        optimizer=settings.optimizer,
        patience=own["epochs"],
        checkpoint_seconds=settings.checkpoint_seconds,
        segment=settings.segment,
        reset=settings.reset,
    )


def table(settings: Settings) -> dict[str, Any]:
    """Return the table's rows, scores and curves."""
    floor = task.floor()
    return {
        "requested": [(TITLES[model], settings_of(settings, model)["hidden_size"]) for model in settings.models],
        "scores": scores(),
        "curves": [
            Curve("validation_partial_accuracy", "partial accuracy", floor.accuracy),
            Curve("validation_partial_bits", "bits an answer", floor.bits),
        ],
    }


def scores() -> list[Score]:
    """Return the metrics of table 1, each with the paper's numbers and its floor."""
    floor = task.floor()
    floors = {
        "test partial accuracy": floor.accuracy,
        "test total accuracy": 1 - (1 - floor.accuracy) / task.QUERY_CHARACTERS,
        "test partial bits": floor.bits,
        "test total bits": floor.bits / task.QUERY_CHARACTERS,
    }
    sizes = [(TITLES[model], size) for model, size in PAPER_SIZES.items()]
    return [Score(metric, dict(zip(sizes, numbers, strict=True)), floors[metric]) for metric, numbers in PAPER.items()]
