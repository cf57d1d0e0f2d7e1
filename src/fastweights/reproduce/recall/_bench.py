"""Trains mixers in the frame, for every bench of recall, and sweeps over learning rates and sizes."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import processes
from fastweights.checks import check_between, check_integers, check_not_negative
from fastweights.errors import TrainingError
from fastweights.nn import (
    IRNN,
    AssociativeLSTM,
    DeltaFastWeightsRNN,
    FastWeightProgrammer,
    FastWeightsRNN,
    GatedFastWeightsRNN,
    HyperLSTM,
)
from fastweights.nn.modes import evaluating
from fastweights.reproduce._experiment import check_settings, only, settings_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.recall._searched import ReadingRecurrence
from fastweights.reproduce.recall.frame import STD_OUT, Attention, Frame, Mixer, Recurrence, linear, start_as_zoology
from fastweights.runs import Curve, Lines, Member, Progress, Record, RunFolder, Score, read_members
from fastweights.tasks.recall import IGNORED
from fastweights.timing import measure_processor_seconds, measure_seconds, medians
from fastweights.training import Schedule, epoch_order, train_epochs
from fastweights.training.loop import count_steps, hash_tensors

ModelName = Literal[
    "attention",
    "lstm",
    "gru",
    "irnn",
    "associative-lstm",
    "hyper-lstm",
    "fast-weights",
    "gated",
    "sum",
    "decay",
    "delta",
    "gated-delta",
    "kda",
    "gated-delta-2",
    "rwkv7",
    "delta-lstm",
    "delta-fast-weights",
    "hidden-delta",
]
TITLES: dict[ModelName, str] = {
    "attention": "Softmax attention",
    "lstm": "LSTM",
    "gru": "GRU",
    "irnn": "IRNN",
    "associative-lstm": "Associative LSTM",
    "hyper-lstm": "HyperLSTM",
    "fast-weights": "Fast weights",
    "gated": "Gated fast weights",
    "sum": "Linear attention",
    "decay": "Linear attention with decay",
    "delta": "Delta rule",
    "gated-delta": "Gated delta rule",
    "kda": "Kimi delta attention",
    "gated-delta-2": "Gated DeltaNet-2's rule",
    "rwkv7": "RWKV-7's rule",
    "delta-lstm": "LSTM that reads a delta rule",
    "delta-fast-weights": "Fast weights that read a delta rule",
    "hidden-delta": "Delta rule of the hidden state",
}
FAST_WEIGHTS: tuple[ModelName, ...] = ("fast-weights", "delta-fast-weights")
CORRECTING: tuple[ModelName, ...] = ("delta", "gated-delta", "kda", "gated-delta-2", "rwkv7")
DELTA: tuple[ModelName, ...] = ("sum", "decay", *CORRECTING)
SEARCHED: tuple[ModelName, ...] = ("delta-lstm", "delta-fast-weights", "hidden-delta")
# The layers of the search, beside one that follows a state and one that recalls.
BOTH: tuple[ModelName, ...] = ("lstm", "delta", *SEARCHED)

_BY_RATE = ", learning rate "  # between a model's title and its rate
TIMED = 5  # training passes that a member is timed with

T = TypeVar("T")
Split = tuple[Tensor, Tensor]  # inputs [N,T], or numbers [N,T,D], and targets [N,T], IGNORED where no answer is due


class Problem(NamedTuple):
    """A task for networks in the frame: its sequences, and how answers are counted."""

    splits: Mapping[str, Split]
    """Sequences of training and validation, and of the test, each of whose splits is a row."""
    floors: Mapping[str, float]
    """The accuracy of a model that ignores the query, of each split of the test."""
    vocabulary_size: int = 0
    """Tokens and answers that there are."""
    numbers: int = 0
    """Numbers D of a step in place of a token: inputs are [N,T,D], and answers [N,T] are numbers too."""
    positions: int = 0
    """Places that attention may be told; 0 where the test has more of them."""
    guess: float | None = None
    """The accuracy of a guess, where the sequences of training grow."""
    redraw: Callable[[int, float], Split] | None = None
    """Draws the sequences of training for a pass after the first, by its number from 0 and the last accuracy on
    validation; None: all passes have the same."""
    variance: float = 1.0
    """The squared error of always answering the mean of the numbers, by which errors are divided."""


@dataclass(frozen=True)
class FrameSettings:
    """The settings of every experiment in the frame, whatever else it compares."""

    models: tuple[ModelName, ...] = ("attention", "delta")
    """Mixers to compare in the frame, each a line of the figures."""
    learning_rates: tuple[float, ...] = (3e-3,)
    """Learning rates of AdamW, a row for each and one for the best on validation: the ranking depends on them."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of the order of the examples: one training run for each."""

    batch_size: int = 64
    """Sequences in a step."""
    annealing: Literal["none", "cosine"] = "cosine"
    """Schedule of the learning rate: none (constant), or a cosine that falls to zero at the last epoch."""
    weight_decay: float = 0.1
    """Decay of the weights in a step, as a multiple of the learning rate."""
    clip_norm: float = 1.0
    """Largest norm of the gradient: a larger one is scaled down to it."""
    dropout: float = 0.1
    """Dropout of the embedding."""
    mlp_multiple: int = 4
    """Hidden units of a block's MLP for each feature; 0 leaves the MLPs out."""

    attention_heads: int = only("attention", 1, "Heads.")
    delta_heads: int = only((*DELTA, *SEARCHED), 2, "Heads.")
    convolution: int = only(
        ("attention", *DELTA, *SEARCHED),
        4,
        "Width, in steps, of the short convolutions of queries, keys and values, and in hidden-delta of all products; "
        "0 leaves them out.",
    )
    negative_eigenvalues: bool = only(
        CORRECTING, False, "Allow write strengths up to 2, so that a write can flip a stored value."
    )
    hyper_hidden_size: int = only("hyper-lstm", 128, "Hidden units of the network that scales the weights.")
    decay: float = only(FAST_WEIGHTS, 0.95, "Fraction of the fast matrix kept after each step.")
    rate: float | None = only(FAST_WEIGHTS, None, "Strength of each write of a hidden state; None: it is learnt.")

    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


@dataclass(frozen=True)
class DrawnSettings(FrameSettings):
    """The settings of every experiment whose sequences are drawn."""

    train_examples: int = 20_000
    """Training sequences."""
    validation_examples: int = 1000
    """Validation sequences: they choose the best epoch and the learning rate."""
    test_examples: int = 3000
    """Test sequences."""
    data_seed: int = 0
    """Seed of the sequences, which all runs share."""

    enough: float = 0.99
    """Validation accuracy at which training ends."""


@dataclass(frozen=True)
class BenchSettings(DrawnSettings):
    """The settings of a sweep over sizes and learning rates."""

    embedding_sizes: tuple[int, ...] = (64,)
    """Features of a step, and units of a mixer."""
    epochs: int = 16
    """Passes over the training sequences, at most."""
    renew: bool = False
    """Draw other training sequences for each pass, so that none is learnt by heart."""


Key = tuple[ModelName, int, float, int]  # a member's model, features, learning rate and seed


def redraw_from(
    settings: DrawnSettings, sample: Callable[[int, torch.Generator, float], Split]
) -> Callable[[int, float], Split]:
    """Return what draws the training sequences of a pass, by its number and the last accuracy on validation.

    Args:
        settings: of an experiment.
        sample: draws so many sequences, [N,T] each, with a generator, by that accuracy.
    """

    def redraw(epoch: int, accuracy: float) -> Split:
        seed = int(numpy.random.SeedSequence([settings.data_seed, epoch]).generate_state(1)[0])
        inputs, targets = sample(settings.train_examples, torch.Generator().manual_seed(seed), accuracy)
        return inputs.to(settings.device), targets.to(settings.device)

    return redraw


def check_bench(settings: BenchSettings) -> None:
    """Refuse settings that cannot run.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: torch has no such device.
    """
    check_drawn(settings, settings.epochs, sizes=("embedding_sizes",), lists=("embedding_sizes",))
    for model in settings.models:
        for embedding_size in settings.embedding_sizes:
            make_mixer(model, embedding_size, settings)


def check_drawn(
    settings: DrawnSettings, epochs: int, *, sizes: tuple[str, ...] = (), lists: tuple[str, ...] = ()
) -> None:
    """Refuse settings with which no network in the frame learns sequences that are drawn: as `check_frame`.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: torch has no such device.
    """
    examples = ("train_examples", "validation_examples", "test_examples")
    check_frame(settings, epochs, sizes=(*examples, *sizes), lists=lists)
    check_between(0, 1, enough=settings.enough)


def check_frame(
    settings: FrameSettings, epochs: int, *, sizes: tuple[str, ...] = (), lists: tuple[str, ...] = ()
) -> None:
    """Refuse settings with which no network in the frame can be trained for so many epochs.

    Args:
        settings: of an experiment.
        epochs: passes over what is trained on.
        sizes: names of its own settings that are sizes.
        lists: names of its own settings that are lists.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: torch has no such device.
    """
    alone = getattr(settings, "layer", None) is not None  # a layer of the user's own needs no other beside it
    check_settings(
        settings,
        sizes=("attention_heads", "delta_heads", "hyper_hidden_size", *sizes),
        lists=(*([] if alone else ["models"]), "learning_rates", "seeds", *lists),
    )
    check_integers(0, mlp_multiple=settings.mlp_multiple, convolution=settings.convolution)
    check_not_negative(weight_decay=settings.weight_decay)
    check_between(0, 1, dropout=settings.dropout)
    names = [f"{learning_rate:g}" for learning_rate in settings.learning_rates]  # they name folders and rows
    if len(set(names)) < len(names):
        raise ValueError(f"learning_rates must differ in their first six digits, got {settings.learning_rates}")
    for learning_rate in settings.learning_rates:
        schedule(settings, learning_rate, epochs)


def make_mixer(model: ModelName, embedding_size: int, settings: FrameSettings) -> Mixer:
    """Return the mixer of a block, with as many units as there are features.

    Raises:
        ValueError: a size that the layer cannot have.
    """
    size = embedding_size
    if model == "attention":
        return Attention(size, settings.attention_heads, settings.convolution)
    if model in (*DELTA, *SEARCHED) and size % settings.delta_heads:
        raise ValueError(f"delta_heads must divide the {size} features, got {settings.delta_heads}")
    if model in DELTA:
        return Recurrence(_make_delta(model, size, settings), nn.Identity(), size)

    def make_fast_weights(inputs: int) -> nn.Module:
        return FastWeightsRNN(inputs, size, decay=settings.decay, rate=settings.rate, batch_first=True)

    def read(recurrence: nn.Module) -> nn.Module:
        return ReadingRecurrence(_make_delta("delta", size, settings), recurrence)

    make: dict[str, Callable[[], nn.Module]] = {
        "lstm": lambda: nn.LSTM(size, size, batch_first=True),
        "gru": lambda: nn.GRU(size, size, batch_first=True),
        "irnn": lambda: IRNN(size, size, batch_first=True),
        "associative-lstm": lambda: AssociativeLSTM(size, size, batch_first=True),
        "hyper-lstm": lambda: HyperLSTM(size, size, hyper_hidden_size=settings.hyper_hidden_size, batch_first=True),
        "fast-weights": lambda: make_fast_weights(size),
        "gated": lambda: GatedFastWeightsRNN(size, size, batch_first=True),
        "delta-lstm": lambda: read(nn.LSTM(2 * size, size, batch_first=True)),
        "delta-fast-weights": lambda: read(make_fast_weights(2 * size)),
        "hidden-delta": lambda: DeltaFastWeightsRNN(
            size, size, settings.delta_heads, convolution=settings.convolution, batch_first=True
        ),
    }
    return Recurrence(make[model](), linear(size, size, std=STD_OUT), size)


def _make_delta(model: ModelName, embedding_size: int, settings: FrameSettings) -> FastWeightProgrammer:
    layer = FastWeightProgrammer(
        embedding_size,
        settings.delta_heads,
        rule=model.replace("-", "_"),
        convolution=settings.convolution,
        output_gate=False,
        negative_eigenvalues=settings.negative_eigenvalues and model in CORRECTING,
        batch_first=True,
    )
    return start_as_zoology(layer)


def schedule(settings: FrameSettings, learning_rate: float, epochs: int) -> Schedule:
    """Return how long and how fast a member is trained.

    Raises:
        ValueError: a number out of range.
    """
    return Schedule(
        epochs=epochs,
        batch_size=settings.batch_size,
        learning_rate=learning_rate,
        annealing=settings.annealing,
        clip_norm=settings.clip_norm,
        patience=epochs,
        checkpoint_seconds=settings.checkpoint_seconds,
    )


def prepare_bench(settings: BenchSettings, folder: Path, problem: Problem) -> Members:
    """Return the members of a run, checked: every model, size, learning rate and seed."""
    sweep = ("embedding_sizes", "learning_rates")
    members: dict[Key, RunFolder] = {
        (model, size, rate, seed): RunFolder(
            Path(folder, f"{model}-{size}-{rate:g}-seed{seed}"),
            {"model": title_of(TITLES[model], rate), "hidden_size": size, "seed": seed, "learning_rate": rate}
            | settings_of(settings, model, without=sweep),
        )
        for size in settings.embedding_sizes
        for model in settings.models
        for rate in settings.learning_rates
        for seed in settings.seeds
    }

    def train_member(
        model: ModelName, size: int, rate: float, seed: int, member: RunFolder, progress: Progress
    ) -> None:
        mixers = partial(make_mixer, model, size, settings)
        network = make_frame(mixers, size, settings, tell_places(problem, model, settings))
        title = f"{title_of(TITLES[model], rate)}, {size} features, seed {seed}"
        train_frame(network, problem, settings, rate, seed, settings.epochs, member, title, progress)

    return Members(members, train_member, lambda: table(settings, problem.floors, read_members(folder)))


def tell_places(problem: Problem, model: str, settings: FrameSettings) -> Problem:
    """Return a problem with places for attention that no convolution tells the order, and without them for others."""
    told = model == "attention" and settings.convolution == 0
    return problem if told else problem._replace(positions=0)


def make_frame(mixers: Callable[[], Mixer], embedding_size: int, settings: FrameSettings, problem: Problem) -> Frame:
    """Return a network for a problem, on the device of the settings."""
    return Frame(
        mixers,
        vocabulary_size=problem.vocabulary_size,
        numbers=problem.numbers,
        embedding_size=embedding_size,
        positions=problem.positions,
        mlp_multiple=settings.mlp_multiple,
        dropout=settings.dropout,
    ).to(settings.device)


def train_frame(
    network: Frame,
    problem: Problem,
    settings: DrawnSettings,
    rate: float,
    seed: int,
    epochs: int,
    member: RunFolder,
    title: str,
    progress: Progress,
) -> None:
    """Train a network on a problem, or go on where a killed process was.

    A member whose numbers become infinite has no result where others have another learning rate.

    Args:
        network: in the frame.
        problem: to learn.
        settings: of the experiment.
        rate: the learning rate.
        seed: of the order of the examples.
        epochs: passes over the training sequences, at most.
        member: the open folder.
        title: of the member for the user.
        progress: receives how far it is.

    Raises:
        TrainingError: the numbers are not finite, and there is no other learning rate.
    """
    with rates_may_fail(settings, progress):
        train_epochs(
            _Recaller(network, problem, settings, rate, seed),
            schedule(settings, rate, epochs),
            member,
            steps_per_epoch=count_steps(len(problem.splits["train"][0]), settings.batch_size),
            seed=seed,
            identity={"data": hash_tensors(problem.splits)},
            shared=True,
            title=title,
            progress=progress,
        )


@contextlib.contextmanager
def rates_may_fail(settings: FrameSettings, progress: Progress) -> Iterator[None]:
    """Tell of a training whose numbers become infinite, and go on where there are other learning rates.

    Raises:
        TrainingError: there are none.
    """
    try:
        yield
    except TrainingError as error:
        if len(settings.learning_rates) == 1:
            raise
        progress.note(f"{error}")  # too fast a rate is a part of a sweep


class _Recaller:
    """A frame and its problem: batches in a shuffled order, scores of the answers that are due."""

    def __init__(
        self, model: Frame, problem: Problem, settings: DrawnSettings, learning_rate: float, seed: int
    ) -> None:
        self.model: nn.Module = model
        self.scored: nn.Module = model
        self.problem, self.splits, self.train = problem, problem.splits, problem.splits["train"]
        self.state_size = model.state_size(self.splits["test"][0].shape[1])
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, weight_decay=settings.weight_decay, fused=True
        )
        self.batch_size, self.enough, self.seed = settings.batch_size, settings.enough, seed
        self.carried: float | None = None  # the last accuracy on validation
        self.ordered, self.order = -1, torch.empty(0, dtype=torch.int64)  # an epoch, and the order of its examples

    @property
    def complete(self) -> bool:
        return self.carried is not None and self.carried >= self.enough

    @property
    def length(self) -> int:
        """The steps to train on: where sequences grow, half as many again as validation shows to be followed."""
        steps = self.train[0].shape[1]
        if (guess := self.problem.guess) is None:
            return steps
        followed = 0.0 if self.carried is None else (self.carried - guess) / (1 - guess) * steps
        return min(max(math.ceil(1.5 * followed), 2), steps)

    def loss(self, epoch: int, index: int) -> Tensor:
        if epoch != self.ordered:
            if epoch > 0 and self.problem.redraw is not None:
                self.train = self.problem.redraw(epoch, self.carried or 0.0)
            targets = self.train[1]
            self.ordered, self.order = epoch, epoch_order(len(targets), self.seed, epoch).to(targets.device)
        batch = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return self._loss(self.train, batch, self.length)

    def _loss(self, split: Split, batch: Tensor, steps: int) -> Tensor:
        """Return this process's share of the loss of some examples, whose first steps are taken."""
        inputs, targets = (field[:, :steps] for field in split)
        own = batch[processes.own_rows(len(batch))]
        marked = targets[own] != IGNORED
        weight = int(marked.sum()) / int((targets[batch] != IGNORED).sum())  # answers are counted, not sequences
        return weight * _error(self.model(inputs[own], marked), targets[own][marked])

    def score(self, step: int) -> tuple[Record, str]:
        scores = self._score("validation")
        self.carried = scores["validation_accuracy"]
        return scores, f"epoch {self.ordered + 1}: validation accuracy {self.carried:.4f}"

    def test(self, step: int) -> Record:
        names = [name for name in self.splits if name not in ("train", "validation")]
        scores = {name: score for split in names for name, score in self._score(split).items()}
        return scores | {"state_size": self.state_size, "milliseconds": self._time_pass()}

    def _time_pass(self) -> float:
        """Return the milliseconds of a training pass over a batch: of the processor, on a GPU by the clock."""
        targets = self.splits["validation"][1]  # those of training may not have grown to their whole length
        batch = torch.arange(min(self.batch_size, len(targets)), device=targets.device)

        def run() -> None:
            self.model.zero_grad()
            loss = self._loss(self.splits["validation"], batch, targets.shape[1])
            loss.backward()  # type: ignore[no-untyped-call]
            loss.item()  # which waits for a GPU

        measure = measure_processor_seconds if targets.device.type == "cpu" else measure_seconds
        return medians({"pass": run}, TIMED, 1.0, measure)["pass"].milliseconds

    @processes.in_main
    def _score(self, split: str) -> Record:
        inputs, targets = self.splits[split]
        loss, right, count = 0.0, 0, 0
        with evaluating(self.model), torch.no_grad():
            for x, y in zip(torch.split(inputs, self.batch_size), torch.split(targets, self.batch_size), strict=True):
                marked = y != IGNORED
                logits, answers = self.model(x, marked), y[marked]
                loss += _error(logits, answers, reduction="sum").item()
                right += 0 if answers.is_floating_point() else int((logits.argmax(1) == answers).sum())
                count += len(answers)
        accuracy = 1 - loss / count / self.problem.variance if self.problem.numbers else right / count
        return {
            f"{split}_loss": loss / count,
            f"{split}_error": 100 * (1 - accuracy),
            f"{split}_accuracy": accuracy,
        }


def _error(outputs: Tensor, answers: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of tokens, in nats, or the squared error of numbers."""
    if answers.is_floating_point():
        return F.mse_loss(outputs[:, 0], answers, reduction=reduction)
    return F.cross_entropy(outputs, answers, reduction=reduction)


def title_of(model: str, learning_rate: float) -> str:
    """Return the name of a row of the sweep: a model's title and its learning rate."""
    return f"{model}{_BY_RATE}{learning_rate:g}"


def model_of(title: str) -> str:
    """Return the title of the model of such a row."""
    return title.partition(_BY_RATE)[0]


def table(settings: BenchSettings, floors: Mapping[str, float], members: Sequence[Member]) -> dict[str, Any]:
    """Return the rows of the sweep, those of the best learning rates, the curves and the figures."""
    best = choose(members)
    return {
        "requested": [
            (title_of(TITLES[model], rate), size)
            for size in settings.embedding_sizes
            for model in settings.models
            for rate in settings.learning_rates
        ],
        "scores": [Score(f"{_words(split)} accuracy", {}, floor) for split, floor in floors.items()],
        "rows": [row for split, floor in floors.items() for row in _best_rows(best, split, floor)],
        "curves": [Curve("validation_accuracy", "validation accuracy", floors["test"])],
        "lines": [
            *(_against_state(best, split, floor) for split, floor in floors.items()),
            *(_against_rates(members, size, floors["test"]) for size in sorted({size for _, size in best})),
        ],
    }


def choose(members: Sequence[Member]) -> dict[tuple[str, int], list[Member]]:
    """Return, for each model and size, the finished seeds of the learning rate that is the best on validation."""
    sized = [member for member in members if member.hidden_size is not None]
    return _in_order(choose_rates(sized, lambda member: (model_of(member.model), member.hidden_size or 0)))


def choose_rates(members: Sequence[Member], key: Callable[[Member], T]) -> dict[T, list[Member]]:
    """Return, for each key, the finished seeds of the learning rate that is the best on validation."""
    rates: dict[T, dict[float, list[Member]]] = {}
    for member in members:
        if member.result is not None:
            rates.setdefault(key(member), {}).setdefault(rate_of(member), []).append(member)
    return {name: max(of_name.values(), key=_validation) for name, of_name in rates.items()}


def _validation(seeds: list[Member]) -> tuple[float, float]:
    results = [member.result or {} for member in seeds]
    return -fmean(result.get("validation_error", 0.0) for result in results), -fmean(
        result["validation_loss"] for result in results
    )


def _in_order(models: dict[tuple[str, int], T]) -> dict[tuple[str, int], T]:
    titles = list(TITLES.values())
    return dict(sorted(models.items(), key=lambda item: (titles.index(item[0][0]), item[0][1])))


def _best_rows(best: Mapping[tuple[str, int], list[Member]], split: str, floor: float) -> list[Record]:
    rows = []
    for (model, size), seeds in best.items():
        metric = f"{_words(split)} accuracy, at the best learning rate on validation, {rate_of(seeds[0]):g}"
        ours = [(member.result or {})[f"{split}_accuracy"] for member in seeds]
        rows.append({"model": model, "hidden_size": size, "metric": metric, "ours": ours, "floor": floor})
    return rows


def _against_state(best: Mapping[tuple[str, int], list[Member]], split: str, floor: float) -> Lines:
    series: dict[str, list[tuple[float, float]]] = {}
    for (model, _), seeds in best.items():
        results = [member.result or {} for member in seeds]
        accuracy = fmean(result[f"{split}_accuracy"] for result in results)
        series.setdefault(model, []).append((results[0]["state_size"], accuracy))
    title = "Each model's best learning rate"
    return Lines(title, f"{_words(split)} accuracy", "numbers in the state", series, log=True, floor=floor)


def _against_rates(members: Sequence[Member], size: int, floor: float) -> Lines:
    rates: dict[tuple[str, int], dict[float, list[float]]] = {}
    for member in members:
        if member.result is not None and member.hidden_size == size:
            of_model = rates.setdefault((model_of(member.model), size), {})
            of_model.setdefault(rate_of(member), []).append(member.result["test_accuracy"])
    series = {
        model: [(rate, fmean(of_model[rate])) for rate in sorted(of_model)]
        for (model, _), of_model in _in_order(rates).items()
    }
    return Lines(f"{size} features", "test accuracy", "learning rate", series, log=True, floor=floor)


def rate_of(member: Member) -> float:
    """Return the learning rate of a member."""
    return float(member.settings["learning_rate"])


def _words(split: str) -> str:
    return split.replace("_", " ")
