"""MbPA's own learning rate beside the best number of a search: a curve with a bump, and digits that are turned.

Networks with three numbers of features, ten times apart, learn a curve, or digits. Then the world changes in one place,
or is turned by a quarter, and the memory holds some examples of it.
"""

import functools
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._fit import fit
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Record, Score, metric_key
from fastweights.tasks import mnist

EXPERIMENT = "guides/learning-rate"
QUICK_MINUTES = 1
DATA = "mnist"

ModelName = Literal["alone", "default", "searched", "paper", "longer"]
TITLES: dict[ModelName, str] = {
    "alone": "the network alone",
    "default": "MbPA",
    "searched": "MbPA, lr: the best number",
    "paper": "MbPA, lr=0.15",
    "longer": "MbPA, neighbours=32, steps=20",
}
PAPERS_RATE = 0.15
NUMBERS: list[float] = sorted({PAPERS_RATE, *(10.0 ** (power / 4) for power in range(-20, 5))})  # to search
LONGER = {"neighbours": 32, "steps": 20}

TaskName = Literal["bump", "turned-digits"]
METRICS: dict[TaskName, str] = {"bump": "a bump on a curve: squared error", "turned-digits": "turned digits: right, %"}
# What else is told of a number: which is best, and whether some steps would diverge with it.
NUMBERS_METRICS: dict[ModelName, str] = {
    "searched": "lr is 10 to the power of",
    "paper": "networks for which lr is too large, %",
}

Examples = tuple[Tensor, Tensor]  # inputs [n,...], and numbers [n,1] or classes [n]


@dataclass(frozen=True)
class Settings:
    """MbPA's own learning rate: a curve that gets a bump and digits that are turned, beside the best number."""

    models: tuple[ModelName, ...] = ("alone", "default", "searched", "paper", "longer")
    """Answers to compare, each a row of the table."""
    tasks: tuple[TaskName, ...] = ("bump", "turned-digits")
    """Changes of the world to adapt to."""
    hidden_sizes: tuple[int, ...] = (16, 160)
    """Features of the networks, which are the keys of the memory."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the networks and of the curve's points: one measurement for each."""
    curve_epochs: int = 100
    """Passes over the 1,000 points of the curve as it was."""
    given_points: int = 60
    """Noisy points of the curve with the bump that the memory holds."""
    train_images: int = 15_000
    """Upright digits to learn from."""
    digit_epochs: int = 4
    """Passes over the upright digits."""
    given_images: int = 20
    """Turned images of each digit that the memory holds."""
    test_images: int = 2_000
    """Turned images to answer."""
    data_dir: Path | None = None
    """Folder that has the folder of MNIST; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(), "full": Settings(hidden_sizes=(16, 160, 1600), seeds=(0, 1, 2))}


class Problem(NamedTuple):
    """A trained head, what the memory holds, and what is asked: features [n,d], and numbers [n,1] or classes [n]."""

    head: nn.Linear
    keys: Tensor
    values: Tensor
    queries: Tensor
    targets: Tensor

    def score(self, answers: Tensor) -> float:
        """Return the mean squared error, or how many of 100 are right."""
        if self.targets.is_floating_point():
            return float(F.mse_loss(answers, self.targets))
        return 100 * float((answers.argmax(1) == self.targets).double().mean())


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every task, size, model and seed of the settings.

    Raises:
        DataError: MNIST is needed and is missing or damaged.
    """
    digits = split_digits(mnist.load(settings.data_dir), settings) if "turned-digits" in settings.tasks else None
    rows = [
        Row(model, size, name) for name in settings.tasks for size in settings.hidden_sizes for model in settings.models
    ]

    @functools.lru_cache(maxsize=1)  # all models of a seed answer with the same network, which is trained once
    def make(task: TaskName, features: int, seed: int) -> Problem:
        torch.manual_seed(seed)
        if task == "bump":
            return make_bump(features, settings)
        assert digits is not None
        return make_turned(features, digits, settings)

    def measure(row: Row, seed: int) -> Record:
        task: Any = row.task
        with torch.no_grad():
            answer = measure_model(row.model, make(task, row.hidden_size or 1, seed))
        names = metrics_of(task, row.model)
        return {metric_key(name): value for name, value in zip(names, answer, strict=True)}

    scores = []
    for task in settings.tasks:
        scores.append(Score(METRICS[task], {}, None))
        for model in NUMBERS_METRICS:
            if model in settings.models:
                pairs = [(TITLES[model], size) for size in settings.hidden_sizes]
                scores.append(Score(metrics_of(task, model)[1], {}, None, pairs))
    return prepare_whole(settings, folder, rows, measure, scores, titles=TITLES, without=("tasks", "hidden_sizes"))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    most = {"train_images": 50_000, "given_images": 500, "test_images": 10_000}  # so many are there
    sizes = ("hidden_sizes", "curve_epochs", "given_points", "digit_epochs", *most)
    check_settings(settings, sizes=sizes, lists=("models", "tasks", "hidden_sizes", "seeds"))
    for name, images in most.items():
        if getattr(settings, name) > images:
            raise ValueError(f"{name} must be at most {images:,}, got {getattr(settings, name)}")


def metrics_of(task: TaskName, model: str) -> list[str]:
    """Return the metrics of a model: its score and, where its learning rate is a number, one about that."""
    title = METRICS[task].partition(":")[0]
    return [METRICS[task], *(f"{title}: {name}" for own, name in NUMBERS_METRICS.items() if own == model)]


# The changes of the world


def make_bump(features: int, settings: Settings) -> Problem:
    """Learn a sine; then a bump appears, of which noisy points are given."""
    body, head = nn.Sequential(nn.Linear(1, features), nn.Tanh()), nn.Linear(features, 1)
    x = 6 * torch.rand(1000, 1) - 3
    options = {"epochs": settings.curve_epochs, "learning_rate": 0.003, "batch_size": 50}
    learn(body, head, x, torch.sin(1.5 * x), settings, **options)
    points, queries = 6 * torch.rand(settings.given_points, 1) - 3, torch.linspace(-3, 3, 400)[:, None]
    values, targets = (torch.sin(1.5 * x) + 1.5 * torch.exp(-(((x - 1) / 0.5) ** 2)) for x in (points, queries))
    values = values + 0.05 * torch.randn(values.shape)
    return ask(body, head, (points, values), (queries, targets), settings)


def split_digits(data: mnist.MNIST, settings: Settings) -> tuple[Examples, Examples, Examples]:
    """Return the digits, upright, to learn from, those that the memory gets, and those to answer."""
    x, y, first = data.train_images.float() / 255, data.train_labels, settings.train_images
    given = [first + (y[first:] == digit).nonzero()[: settings.given_images, 0] for digit in range(mnist.CLASSES)]
    rows, test = torch.cat(given), slice(settings.test_images)
    return (x[:first], y[:first]), (x[rows], y[rows]), (data.test_images[test].float() / 255, data.test_labels[test])


def make_turned(features: int, digits: tuple[Examples, Examples, Examples], settings: Settings) -> Problem:
    """Learn digits; then they are turned by a quarter, and some of each are given."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, features))
    head = nn.Linear(features, mnist.CLASSES)
    train, given, asked = digits
    learn(body, head, *train, settings, epochs=settings.digit_epochs, learning_rate=0.001, batch_size=64)
    given, asked = ((torch.rot90(x, 1, (1, 2)), y) for x, y in (given, asked))
    return ask(body, head, given, asked, settings)


def learn(body: nn.Module, head: nn.Linear, x: Tensor, y: Tensor, settings: Settings, **options: Any) -> None:
    """Train a network, on the device."""
    network = nn.Sequential(body, head).to(settings.device)
    fit(network, x.to(settings.device), y.to(settings.device), **options)
    network.requires_grad_(False)


def ask(body: nn.Module, head: nn.Linear, given: Examples, asked: Examples, settings: Settings) -> Problem:
    """Return the problem of a trained network."""
    (keys, values), (queries, targets) = (tuple(part.to(settings.device) for part in each) for each in (given, asked))
    return Problem(head, body(keys), values, body(queries), targets)


# The answers


def measure_model(model: str, problem: Problem) -> tuple[float, ...]:
    """Return a model's score and, where its learning rate is a number, what `NUMBERS_METRICS` says of that."""
    if model == "alone":
        return (problem.score(problem.head(problem.queries)),)
    if model == "searched":
        answers = [(number, *answer(problem, number)) for number in NUMBERS]
        allowed = [(score, math.log10(number)) for number, score, too_large in answers if not too_large]
        return (min if problem.targets.is_floating_point() else max)(allowed)
    if model == "paper":
        score, too_large = answer(problem, PAPERS_RATE)
        return score, 100.0 * too_large
    return (answer(problem, **(LONGER if model == "longer" else {}))[0],)


def answer(problem: Problem, lr: float | None = None, **options: Any) -> tuple[float, bool]:
    """Return the score of MbPA, and whether it warns that some queries would diverge with the learning rate."""
    shape, dtype = problem.values.shape[1:], problem.values.dtype
    store = memory.EpisodicMemory(
        len(problem.keys),
        problem.keys.shape[1],
        value_shape=tuple(shape),
        value_dtype=dtype,
        device=problem.keys.device,
    )
    store.write(problem.keys, problem.values)
    model = memory.MbPA(nn.Identity(), problem.head, store, lr=lr, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return problem.score(model(problem.queries)), bool(caught)
