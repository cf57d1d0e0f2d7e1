"""A sum, a copy and a recall: where an LSTM is better than fast weights, and what mends them.

Three small tasks whose sequences are new at every step, and one network around every layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import nn
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Score, metric_key
from fastweights.tasks import associative_retrieval, holding

EXPERIMENT = "guides/when-an-lstm-is-better"
QUICK_MINUTES = 4
DATA = None

ModelName = Literal[
    "lstm",
    "irnn",
    "fast-weights",
    "papers-rate",
    "rate-per-unit",
    "gated-fast-weights",
    "no-rate",
    "low-rate",
    "no-layer-norm",
    "identity",
    "small-gain",
    "irnn-beside",
]
TITLES: dict[ModelName, str] = {
    "lstm": "LSTM",
    "irnn": "IRNN",
    "fast-weights": "FastWeightsRNN",
    "papers-rate": "rate=0.5",
    "rate-per-unit": "rate=0.5 / hidden_size",
    "gated-fast-weights": "GatedFastWeightsRNN",
    "no-rate": "rate=0: the layer norm alone",
    "low-rate": "rate=0.05",
    "no-layer-norm": "layer_norm=False, rate=0.001",
    "identity": "rate=0.5, identity_scale=1",
    "small-gain": "rate=0.5, gain of the layer norm starts at 1 / √hidden_size",
    "irnn-beside": "rate=0.5, an IRNN beside it",
}
FEATURES = 100  # of a symbol's embedding, and units of the readout
PAPERS_RATE, PAPERS_SCALE = 0.5, 0.05  # the scale is that of our experiments
SYMBOLS, COPIED, BLANKS = 8, 5, 10  # of the copy

TaskName = Literal["adding", "recall", "copy"]


@dataclass(frozen=True)
class Settings:
    """When an LSTM is better: add two marked numbers, find a digit by its letter, repeat five symbols."""

    models: tuple[ModelName, ...] = (
        "lstm", "irnn", "fast-weights", "papers-rate", "rate-per-unit", "gated-fast-weights"
    )  # fmt: skip
    """Layers to train and test, each a row of the table; after the first six, ways to mend the paper's rate."""
    tasks: tuple[TaskName, ...] = ("adding", "recall", "copy")
    """Tasks to learn."""
    hidden_sizes: tuple[int, ...] = (64,)
    """Units of the layers."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and the sequences: one training run for each."""
    scored: tuple[int, ...] = (300, 1000, 3000)
    """Steps after which a network is tested; training ends after the last."""
    batch_size: int = 64
    """Sequences of a step, which are new each time."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    clip_norm: float = 5.0
    """Largest norm of the gradient: a larger one is scaled down to it."""
    test_examples: int = 4000
    """Sequences of the test."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""


_WAYS = Settings(
    models=("fast-weights", "papers-rate", "rate-per-unit", "no-rate", "low-rate", "no-layer-norm", "identity",
            "small-gain", "irnn-beside"),
    tasks=("adding", "recall"),
    seeds=(1, 2),
)  # fmt: skip
PRESETS = {
    "quick": Settings(models=("lstm", "fast-weights")),
    "full": Settings(seeds=(1, 2)),
    "ways": _WAYS,
    "sizes": replace(_WAYS, models=_WAYS.models[:3], hidden_sizes=(16, 128)),
}


class Task(NamedTuple):
    """A task: how to draw `count` sequences [T,count] or [T,count,features] with their targets, and what is counted."""

    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    symbols: int | None  # None: the inputs are numbers
    answers: int
    counted: str
    unit: str
    floor: float  # the score of the best answer that does not depend on the sequence, or not on the letter asked for


def draw_sums(count: int, generator: torch.Generator, steps: int = 30) -> tuple[Tensor, Tensor]:
    """Draw adding problems [T,count,2]; the targets [count] are the sums."""
    inputs, targets = holding.sample_sums(count, steps, generator=generator)
    return inputs.transpose(0, 1), targets[:, -1]


def draw_recalls(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw four letter-digit pairs and a letter, symbols [11,count]; the target is its digit."""
    inputs, targets = associative_retrieval.sample(count, generator=generator)
    return inputs.T, targets


def draw_copies(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw five symbols, ten blanks and five requests, [20,count]; the targets [5,count] are the symbols in order."""
    inputs, targets = holding.sample_copies(count, COPIED, BLANKS, symbols=SYMBOLS, generator=generator)
    return inputs.T, targets[:, -COPIED:].T


TASKS: dict[TaskName, Task] = {
    "adding": Task(draw_sums, None, 1, "squared error", "", holding.SUM_VARIANCE),
    "recall": Task(
        draw_recalls,
        len(associative_retrieval.VOCABULARY),
        associative_retrieval.DIGITS,
        "digits wrong",
        ", %",
        associative_retrieval.floor().error,
    ),
    "copy": Task(draw_copies, SYMBOLS + 2, SYMBOLS, "symbols wrong", ", %", 100 - 100 / SYMBOLS),
}


class Beside(torch.nn.Module):
    """A fast-weights layer and an IRNN, side by side on the same inputs."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.fast = nn.FastWeightsRNN(features, units, rate=PAPERS_RATE, identity_scale=PAPERS_SCALE)
        self.slow = nn.IRNN(features, units)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.cat([self.fast(x)[0], self.slow(x)[0]], dim=2), None


def make_layer(model: ModelName, features: int, units: int) -> torch.nn.Module:
    """Return the layer of a row, by default or from the start of the paper's experiments."""
    if model == "lstm":
        return torch.nn.LSTM(features, units)
    if model == "irnn":
        return nn.IRNN(features, units)
    if model == "gated-fast-weights":
        return nn.GatedFastWeightsRNN(features, units)
    if model == "irnn-beside":
        return Beside(features, units)
    if model == "fast-weights":
        return nn.FastWeightsRNN(features, units)
    own: dict[str, dict[str, Any]] = {
        "rate-per-unit": {"rate": PAPERS_RATE / units},
        "no-rate": {"rate": 0.0},
        "low-rate": {"rate": 0.05},
        "no-layer-norm": {"rate": 0.001, "layer_norm": False},
        "identity": {"identity_scale": 1.0},
    }
    settings = {"rate": PAPERS_RATE, "identity_scale": PAPERS_SCALE} | own.get(model, {})
    layer: Any = nn.FastWeightsRNN(features, units, **settings)
    if model == "small-gain":  # hidden states start short, because the gain of the layer norm does
        torch.nn.init.constant_(layer.norm.weight, 1 / math.sqrt(units))
    return cast(torch.nn.Module, layer)


class Network(torch.nn.Module):
    """The same network around every layer: a table of symbols, the layer, and a readout of the last steps."""

    def __init__(self, task: Task, make: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        inputs, targets = task.draw(1, torch.Generator())
        self.embed = torch.nn.Identity() if task.symbols is None else torch.nn.Embedding(task.symbols, FEATURES)
        self.layer = make(inputs.shape[2] if task.symbols is None else FEATURES)
        self.answers_at = len(targets) if targets.dim() == 2 else 1  # so many of the last steps
        self.readout = torch.nn.Sequential(
            torch.nn.LazyLinear(FEATURES), torch.nn.ReLU(), torch.nn.Linear(FEATURES, task.answers)
        )
        self(inputs)  # the readout takes as many units as the layer has

    def forward(self, inputs: Tensor) -> Tensor:
        y, _ = self.layer(self.embed(inputs))
        answers: Tensor = self.readout(y[-self.answers_at :])
        return answers.flatten(0, 1)


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every task, size, layer and seed of the settings."""
    rows = [
        Row(model, size, name) for name in settings.tasks for size in settings.hidden_sizes for model in settings.models
    ]

    def measure(row: Row, seed: int) -> dict[str, float]:
        name: Any = row.task
        model: Any = row.model
        scores = train(TASKS[name], lambda features: make_layer(model, features, row.hidden_size or 1), seed, settings)
        return {metric_key(metric(name, step)): score for step, score in scores.items()}

    scores = [Score(metric(name, step), {}, TASKS[name].floor) for name in settings.tasks for step in settings.scored]
    return prepare_whole(settings, folder, rows, measure, scores, titles=TITLES, without=("tasks", "hidden_sizes"))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    sizes = ("hidden_sizes", "scored", "batch_size", "test_examples")
    check_settings(settings, sizes=sizes, lists=("models", "tasks", "hidden_sizes", "seeds", "scored"))
    if list(settings.scored) != sorted(settings.scored):
        raise ValueError(f"scored must ascend, got {settings.scored}")


def metric(name: TaskName, step: int) -> str:
    """Return what a task counts after some steps, as the table has it."""
    return f"{name}: {TASKS[name].counted} after {step} steps{TASKS[name].unit}"


def train(
    task: Task, make: Callable[[int], torch.nn.Module], seed: int, settings: Settings = Settings()
) -> dict[int, float]:
    """Train a network on sequences that are new at every step, and return its test score by the step."""
    torch.manual_seed(seed)
    network = Network(task, make).to(settings.device)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = task.draw(count, generator)
        return inputs.to(settings.device), targets.to(settings.device).flatten()

    test_inputs, test_targets = draw(settings.test_examples, torch.Generator().manual_seed(0))
    scores = {}
    for step in range(1, settings.scored[-1] + 1):
        inputs, targets = draw(settings.batch_size, generator)
        answers = network(inputs)
        loss = F.mse_loss(answers[:, 0], targets) if task.symbols is None else F.cross_entropy(answers, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip_norm)
        optimizer.step()
        if step in settings.scored:
            with torch.no_grad():
                answers = network(test_inputs)
            if task.symbols is None:
                scores[step] = float(F.mse_loss(answers[:, 0], test_targets))
            else:
                scores[step] = 100 * float((answers.argmax(1) != test_targets).double().mean())
    return scores
