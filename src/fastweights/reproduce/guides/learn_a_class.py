"""A new character from five drawings: MbPA beside the classifier alone, its nearest neighbour and further training.

What the guide "Adapt to each query" does, for the first character of each alphabet of Omniglot that the classifier has
never seen. The settings of MbPA are chosen for each character: each of the five is answered from the other four, and
drawings of the old classes that were held out are answered too.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.evaluation import compare
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides import _characters as characters
from fastweights.reproduce.guides._characters import Examples
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Record, Score, metric_key
from fastweights.tasks import omniglot
from fastweights.tasks.omniglot import Omniglot
from fastweights.timing import measure_processor_seconds, medians

EXPERIMENT = "guides/learn-a-class"
QUICK_MINUTES = 2
DATA = "omniglot"

ModelName = Literal["alone", "mbpa", "mbpa-of-the-new", "nearest", "further"]
TITLES: dict[ModelName, str] = {
    "alone": "the classifier",
    "mbpa": "MbPA",
    "mbpa-of-the-new": "MbPA, the five alone in memory",
    "nearest": "nearest neighbour alone",
    "further": "last layer trained further",
}
METRICS = (
    "old classes right, %",
    "new class right, %",
    "calibration error, %",
    "milliseconds a query of 100",
    "milliseconds a query alone",
)
FEW = 5  # drawings of the new character that are given; the other 15 are asked for
TRAINING, TEST = 12, 5  # drawings of each old character; the other three are for validation
GRID = tuple(itertools.product((10, 20, 40), (5, 20)))  # neighbours and steps

Answer = Callable[[Tensor], Tensor]  # inputs -> logits, or log probabilities


@dataclass(frozen=True)
class Settings:
    """Learn a class from five examples with a memory: the first characters of unseen alphabets, one at a time."""

    models: tuple[ModelName, ...] = ("alone", "mbpa", "mbpa-of-the-new", "nearest", "further")
    """Ways to answer, each a row of the table."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Numbers of the alphabets whose first character is learnt, from 0; all have the same classifier."""
    epochs: int = 20
    """Passes over the old drawings, of the classifier and of the layer that is trained further."""
    rounds: int = 20
    """Rounds of the timed answers, the median of which counts."""
    data_dir: Path | None = None
    """Folder that has the folder of Omniglot; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(), "full": Settings(seeds=tuple(range(characters.ALPHABETS)))}


class Known(NamedTuple):
    """A classifier, and drawings of the classes that it knows."""

    body: nn.Module
    head: nn.Linear
    train: Examples
    validation: Examples
    test: Examples

    @property
    def new(self) -> int:
        """The index of a class that comes after them."""
        return len(self.head.weight)


class Character(NamedTuple):
    """A new character: drawings that are given, drawings that are asked for, and MbPA's settings for it."""

    given: Examples
    asked: Examples
    neighbours: int
    steps: int


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every way to answer for every character.

    Raises:
        DataError: Omniglot is missing or damaged.
    """
    data = omniglot.load(settings.data_dir)
    know = functools.cache(lambda: train_classifier(data, settings))  # whatever the first member is
    meet = functools.lru_cache(1)(lambda seed: choose(know(), *split_character(data, seed, know().new, settings)))

    def measure(row: Row, seed: int) -> Record:
        known, character = know(), meet(seed)
        with torch.no_grad():
            answer = METHODS[row.model](known, character, settings)
            before = nn.Sequential(known.body, known.head)
            (x, y), (new_x, new_y) = known.test, character.asked
            split = torch.cat([x, new_x]), torch.cat([y, new_y])
            scores = compare(before, answer, split, [known.new]).after
            many, one = x[:100], x[:1]
            calls: dict[str, Callable[[], object]] = {
                "many": lambda: answer(many).cpu(),
                "one": lambda: answer(one).cpu(),
            }
            times = medians(calls, settings.rounds, measure=measure_processor_seconds)
        found = (
            *(scores.old.accuracy, scores.new.accuracy, scores.all.calibration_error),
            *(times["many"].milliseconds / len(many), times["one"].milliseconds),
        )
        return {metric_key(metric): value for metric, value in zip(METRICS, found, strict=True)}

    table = [Score(metric, {}, None) for metric in METRICS]
    return prepare_whole(settings, folder, map(Row, settings.models), measure, table, titles=TITLES)._replace(
        alone=True
    )


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("epochs", "rounds"))
    if max(settings.seeds) >= characters.ALPHABETS:
        raise ValueError(f"seeds must be at most {characters.ALPHABETS - 1}, an alphabet each; got {settings.seeds}")


def train_classifier(data: Omniglot, settings: Settings) -> Known:
    """Train the classifier on the old characters."""
    drawings = characters.learnt(data).to(settings.device)
    parts = drawings[:, :TRAINING], drawings[:, TRAINING:-TEST], drawings[:, -TEST:]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body, head = characters.make_network(len(drawings))
        train, validation, test = map(characters.number, parts)
        network = nn.Sequential(body, head).to(settings.device)
        characters.train(network, train, epochs=settings.epochs, batch_size=32)
    return Known(body, head, train, validation, test)


def split_character(data: Omniglot, seed: int, label: int, settings: Settings) -> tuple[Examples, Examples]:
    """Return the given drawings of an alphabet's first character, and the others."""
    drawings = characters.drawings_of(data)[characters.unseen(data)[seed]].to(settings.device)
    labels = torch.full((len(drawings),), label, device=drawings.device)
    return (drawings[:FEW], labels[:FEW]), (drawings[FEW:], labels[FEW:])


@torch.no_grad()
def choose(known: Known, given: Examples, asked: Examples) -> Character:
    """Choose the neighbours and steps that answer each given drawing from the others, and held-out old ones, best."""
    store, head = fill(known, known.train), memory.widen_output(known.head)
    validation, (five, labels) = known.body(known.validation[0]), (known.body(given[0]), given[1])

    def loss(point: tuple[int, int]) -> float:
        total, rows = 0.0, torch.arange(len(five), device=five.device)
        trial = memory.MbPA(nn.Identity(), head, store, neighbours=point[0], steps=point[1])
        for one in rows.split(1):  # type: ignore[no-untyped-call]
            trial.write(five[rows != one], labels[rows != one], tag="trial")
            total += float(F.cross_entropy(trial(five[one]), labels[one]))
            total += float(F.cross_entropy(trial(validation), known.validation[1]))
            store.undo("trial")
        return total

    return Character(given, asked, *min(GRID, key=loss))


def fill(known: Known, *parts: Examples) -> memory.EpisodicMemory:
    """Return a memory of drawings."""
    store = memory.EpisodicMemory(10_000, known.head.in_features, device=known.head.weight.device)
    for x, y in parts:
        store.write(known.body(x), y)
    return store


# The ways to answer


def keep(known: Known, character: Character, settings: Settings) -> Answer:
    """Return the classifier as it is, which never answers with the new class."""
    return lambda x: F.pad(known.head(known.body(x)), (0, 1), value=-torch.inf)


def adapt(known: Known, character: Character, settings: Settings) -> Answer:
    """Return MbPA with old and new drawings in its memory."""
    return make_mbpa(known, character, fill(known, known.train, character.given))


def adapt_to_the_new(known: Known, character: Character, settings: Settings) -> Answer:
    """Return MbPA with the new drawings alone in its memory."""
    return make_mbpa(known, character, fill(known, character.given))


def make_mbpa(known: Known, character: Character, store: memory.EpisodicMemory) -> Answer:
    """Return MbPA around the classifier, with the settings that were chosen for the character."""
    head = memory.widen_output(known.head)
    return memory.MbPA(known.body, head, store, neighbours=character.neighbours, steps=character.steps)


def copy_nearest(known: Known, character: Character, settings: Settings) -> Answer:
    """Return the nearest neighbour's class."""
    store = fill(known, known.train, character.given)
    return lambda x: memory.attend(store.search(known.body(x), 1), known.new + 1).log()


def train_further(known: Known, character: Character, settings: Settings) -> Answer:
    """Return the classifier with its last layer trained on the old and the new drawings, as before."""
    store = fill(known, known.train, character.given)
    head = memory.widen_output(known.head).requires_grad_(True)
    characters.train(head, (store.keys, store.values), epochs=settings.epochs, batch_size=32)
    return nn.Sequential(known.body, head)


METHODS: dict[str, Callable[[Known, Character, Settings], Answer]] = {
    "alone": keep,
    "mbpa": adapt,
    "mbpa-of-the-new": adapt_to_the_new,
    "nearest": copy_nearest,
    "further": train_further,
}
