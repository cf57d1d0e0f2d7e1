"""New characters from a few drawings: the published few-shot classifier as a user has it, and what it costs.

The tasks are of characters of Omniglot that the weights have not seen, neither in training nor in validation. In a
plain sum over the examples a class with more of them would win too often, so `FewShotClassifier` counts each class with
the mean of its examples; the plain sum stands beside it.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.few_shot import FewShotClassifier
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Record, Score, metric_key
from fastweights.tasks import omniglot
from fastweights.timing import measure_processor_seconds, medians

EXPERIMENT = "guides/few-shot-classifier"
QUICK_MINUTES = 2
DATA = "omniglot"

ModelName = Literal["evened", "summed"]
TITLES: dict[ModelName, str] = {"evened": "FewShotClassifier", "summed": "the plain sum"}
KindName = Literal["5-way-1-shot", "5-way-5-shot", "5-way-1-to-5-shot", "5-way-10-and-1-shot", "20-way-1-shot", "times"]
EXAMPLES: dict[str, tuple[int, ...]] = {  # of each class
    "5-way-1-shot": (1,) * 5,
    "5-way-5-shot": (5,) * 5,
    "5-way-1-to-5-shot": (1, 2, 3, 4, 5),
    "5-way-10-and-1-shot": (10, 1, 1, 1, 1),
    "20-way-1-shot": (1,) * 20,
}
DESCRIBED = ("5-way-1-shot", "5-way-5-shot", "20-way-1-shot")  # what is timed
MOST_QUERIES = 10  # a character has 20 drawings, and up to ten are described


@dataclass(frozen=True)
class Settings:
    """Bind new characters with the weights that come with the package: what is right, and how long it takes."""

    models: tuple[ModelName, ...] = ("evened", "summed")
    """Ways to count the examples, each a row of the tables: every class alike, or every example."""
    kinds: tuple[KindName, ...] = get_args(KindName)
    """Kinds of tasks, by their classes and the examples of each; times are measured on noise."""
    seeds: tuple[int, ...] = (1,)
    """Seeds that draw the tasks."""
    tasks: int = 200
    """Tasks of each kind."""
    queries: int = 5
    """Drawings of each class to recognise."""
    rounds: int = 50
    """Rounds in which the timed calls take turns; the median counts."""
    data_dir: Path | None = None
    """Folder that has the folder of Omniglot; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(), "full": Settings(seeds=(1, 2, 3, 4, 5))}


class Task(NamedTuple):
    """Described drawings [N,1,28,28] with their classes [N], and queries with theirs."""

    described: Tensor
    labels: Tensor
    queries: Tensor
    targets: Tensor


class Evened:
    """The classifier as it is."""

    def __init__(self, classifier: FewShotClassifier) -> None:
        self.classifier = classifier

    def describe(self, images: Tensor, labels: Tensor) -> None:
        self.classifier.describe(images, labels)

    def predict(self, images: Tensor) -> Tensor:
        return self.classifier.predict(images).probabilities.log()


class Summed:
    """Its network, where every example counts alike, however many its class has."""

    def __init__(self, classifier: FewShotClassifier) -> None:
        self.network = classifier.network.eval()

    def describe(self, images: Tensor, labels: Tensor) -> None:
        self.memory = self.network.describe(images[None], labels[None])
        self.classes = int(labels.max()) + 1

    def predict(self, images: Tensor) -> Tensor:
        return self.network.predict(images[None], self.memory)[0, :, : self.classes].log_softmax(-1)


MODELS: dict[str, Callable[[FewShotClassifier], Evened | Summed]] = {"evened": Evened, "summed": Summed}


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: both ways to count for every kind of task and seed.

    Raises:
        DataError: Omniglot is missing or damaged.
    """
    data = omniglot.load(settings.data_dir)
    images = data.images[omniglot.few_shot_split(data).test].to(settings.device)
    classifier = FewShotClassifier.load("omniglot").to(settings.device)

    def measure(row: Row, seed: int) -> Record:
        model = MODELS[row.model](classifier)
        with torch.no_grad():
            scores = measure_times(model, settings) if row.task == "times" else answer(model, images, row, seed)
        return {"parameters": sum(parameter.numel() for parameter in classifier.network.parameters()), **scores}

    def answer(model: Evened | Summed, images: Tensor, row: Row, seed: int) -> Record:
        generator = torch.Generator().manual_seed(seed)
        right, losses = [], []
        for _ in range(settings.tasks):
            task = draw_task(images, EXAMPLES[str(row.task)], settings.queries, generator)
            model.describe(task.described, task.labels)
            answers = model.predict(task.queries)
            right.append(100 * float((answers.argmax(-1) == task.targets).double().mean()))
            losses.append(float(F.nll_loss(answers, task.targets)))
        scores = zip(metrics(str(row.task)), (statistics.fmean(right), statistics.fmean(losses)), strict=True)
        return {metric_key(metric): score for metric, score in scores}

    rows = [Row(model, task=kind) for kind in settings.kinds for model in settings.models]
    kinds = [kind for kind in settings.kinds if kind != "times"]
    scores = [Score(metrics(kind)[0], {}, 100 / len(EXAMPLES[kind])) for kind in kinds]
    scores += [Score(metrics(kind)[1], {}, math.log(len(EXAMPLES[kind]))) for kind in kinds]
    scores += [Score(metric, {}, None) for metric in TIMES if "times" in settings.kinds]
    members = prepare_whole(settings, folder, rows, measure, scores, titles=TITLES, without=("kinds",))
    return members._replace(alone="times" in settings.kinds)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("tasks", "queries", "rounds"), lists=("models", "kinds", "seeds"))
    if settings.queries > MOST_QUERIES:
        raise ValueError(f"queries must be at most {MOST_QUERIES}, got {settings.queries}")


def title(kind: str) -> str:
    """Return the name of a kind of tasks as a heading."""
    return kind.replace("way-", "way ")


def metrics(kind: str) -> tuple[str, str]:
    """Return the metrics of a kind of tasks, as the tables have them."""
    return f"right: {title(kind)}, %", f"cross entropy: {title(kind)}, nats"


TIMES = tuple(
    f"milliseconds of processor time: {call}"
    for call in (*(f"describe {title(kind)}" for kind in DESCRIBED), "predict one", "predict 100 at once")
)


def draw_task(images: Tensor, examples: Sequence[int], queries: int, generator: torch.Generator) -> Task:
    """Draw classes from [classes,20,28,28], and of each so many examples, and queries."""
    classes = torch.randperm(len(images), generator=generator)[: len(examples)].tolist()
    described, asked = [], []
    for index, count in zip(classes, examples, strict=True):
        order = torch.randperm(images.shape[1], generator=generator).to(images.device)
        described.append(images[index, order[:count]])
        asked.append(images[index, order[count : count + queries]])
    labels = torch.arange(len(examples), device=images.device)
    counts = torch.tensor(examples, device=images.device)
    return Task(
        torch.cat(described)[:, None],
        labels.repeat_interleave(counts),
        torch.cat(asked)[:, None],
        labels.repeat_interleave(queries),
    )


def measure_times(model: Evened | Summed, settings: Settings) -> Record:
    """Return the median times of the calls that a user makes, which take turns; the drawings are noise."""
    noise = (torch.rand(100, 1, 28, 28) < 0.2).float().to(settings.device)

    def describe(examples: Sequence[int]) -> Callable[[], Any]:
        labels = torch.arange(len(examples)).repeat_interleave(torch.tensor(examples)).to(settings.device)
        return lambda: model.describe(noise[: len(labels)], labels)

    calls = [describe(EXAMPLES[name]) for name in DESCRIBED]
    calls += [lambda: model.predict(noise[:1]).cpu(), lambda: model.predict(noise).cpu()]
    times = medians(dict(zip(TIMES, calls, strict=True)), settings.rounds, measure=measure_processor_seconds)
    return {metric_key(metric): time.milliseconds for metric, time in times.items()}
