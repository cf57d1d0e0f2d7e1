"""Train recurrent layers on a sum, a copy and a recall: where an LSTM is better than fast weights, and why.

python docs/when_an_lstm_is_better.py, then python docs/fill.py. Every run is written when it ends, and the same command
goes on with those that are missing: after a change to this file, remove what it wrote.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import nn
from fastweights.runs import describe_environment
from fastweights.tasks import associative_retrieval

RESULT = Path(__file__).parent / "results" / "when-an-lstm-is-better" / "measured.json"
HIDDEN_SIZE = 64
BATCH_SIZE = 64
FEATURES = 100  # of a symbol's embedding, and units of the readout
TEST = 4000  # sequences
SCORED = (300, 1000, 3000)  # the steps after which a network is tested
SEEDS = (1, 2)
PAPERS_RATE, PAPERS_SCALE = 0.5, 0.05  # the scale is that of our experiments
SYMBOLS, COPIED, BLANKS = 8, 5, 10  # of the copy


class Task(NamedTuple):
    """A task: how to draw `count` sequences [T,count] or [T,count,features] with their targets, and what is counted."""

    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    symbols: int | None  # None: the inputs are numbers
    answers: int
    metric: str
    floor: float  # the score of the best answer that does not depend on the sequence, or not on the letter asked for


def draw_sums(count: int, generator: torch.Generator, steps: int = 30) -> tuple[Tensor, Tensor]:
    """Draw adding problems: numbers [T,count,2] with a mark beside one of each half, and the sum of the marked two."""
    numbers = torch.rand(steps, count, generator=generator)
    marks = torch.zeros(steps, count)
    half = steps // 2
    for first, places in ((0, half), (half, steps - half)):
        marks[first + torch.randint(places, (count,), generator=generator), torch.arange(count)] = 1
    return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(0)


def draw_recalls(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw four letter-digit pairs and a letter, symbols [11,count]; the target is its digit."""
    inputs, targets = associative_retrieval.sample(count, generator=generator)
    return inputs.T, targets


def draw_copies(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw five symbols, ten blanks and five requests, [20,count]; the targets [5,count] are the symbols in order."""
    symbols = torch.randint(SYMBOLS, (COPIED, count), generator=generator)
    blanks, requests = torch.full((BLANKS, count), SYMBOLS), torch.full((COPIED, count), SYMBOLS + 1)
    return torch.cat([symbols, blanks, requests]), symbols


TASKS = {
    "adding": Task(draw_sums, None, 1, "mean squared error", 1 / 6),
    "recall": Task(
        draw_recalls,
        len(associative_retrieval.VOCABULARY),
        associative_retrieval.DIGITS,
        "digits wrong, %",
        associative_retrieval.floor().error,
    ),
    "copy": Task(draw_copies, SYMBOLS + 2, SYMBOLS, "symbols wrong, %", 100 - 100 / SYMBOLS),
}


def with_small_gain(features: int) -> torch.nn.Module:
    """Return a fast-weights layer whose hidden states start short, because the gain of its layer norm does."""
    layer = nn.FastWeightsRNN(features, HIDDEN_SIZE, rate=PAPERS_RATE, identity_scale=PAPERS_SCALE)
    torch.nn.init.constant_(layer.norm.weight, 1 / math.sqrt(HIDDEN_SIZE))
    return layer


class Beside(torch.nn.Module):
    """A fast-weights layer and an IRNN, side by side on the same inputs."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fast = nn.FastWeightsRNN(features, HIDDEN_SIZE, rate=PAPERS_RATE, identity_scale=PAPERS_SCALE)
        self.slow = nn.IRNN(features, HIDDEN_SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.cat([self.fast(x)[0], self.slow(x)[0]], dim=2), None


def fast_weights(hidden_size: int = HIDDEN_SIZE, **settings: Any) -> Callable[[int], torch.nn.Module]:
    """Return how to make a layer, by default, or from the start of the paper's experiments."""
    if settings:
        settings = {"identity_scale": PAPERS_SCALE} | settings
    return lambda features: nn.FastWeightsRNN(features, hidden_size, **settings)


DEFAULT, PAPERS = "`FastWeightsRNN`", "`FastWeightsRNN`, `rate=0.5`"
SMALL = "`FastWeightsRNN`, `rate=0.5 / hidden_size`"
NORM_ALONE = "`rate=0`: the layer norm alone"
GATED = "`GatedFastWeightsRNN`"
LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "`torch.nn.LSTM`": lambda features: torch.nn.LSTM(features, HIDDEN_SIZE),
    "`IRNN`": lambda features: nn.IRNN(features, HIDDEN_SIZE),
    DEFAULT: fast_weights(),
    PAPERS: fast_weights(rate=PAPERS_RATE),
    SMALL: fast_weights(rate=0.5 / HIDDEN_SIZE),
    GATED: lambda features: nn.GatedFastWeightsRNN(features, HIDDEN_SIZE),
}
# To find why the paper's rate does not learn the sum, other ways to mend it, and other sizes.
WAYS: dict[str, Callable[[int], torch.nn.Module]] = {
    NORM_ALONE: fast_weights(rate=0.0),
    "`rate=0.05`": fast_weights(rate=0.05),
    "`layer_norm=False, rate=0.001`": fast_weights(rate=0.001, layer_norm=False),
    "`rate=0.5, identity_scale=1`": fast_weights(rate=PAPERS_RATE, identity_scale=1.0),
    "`rate=0.5`, gain of the layer norm starts at 1 / √hidden_size": with_small_gain,
    "`rate=0.5`, an `IRNN` beside it": Beside,
}
for units in (16, 128):
    WAYS[f"default, {units} units"] = fast_weights(units)
    WAYS[f"`rate=0.5`, {units} units"] = fast_weights(units, rate=PAPERS_RATE)
    WAYS[f"`rate=0.5 / hidden_size`, {units} units"] = fast_weights(units, rate=0.5 / units)


class Network(torch.nn.Module):
    """The same network around every layer: a table of symbols, the layer, and a readout of the last steps."""

    def __init__(self, task: Task, layer: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        inputs, targets = task.draw(1, torch.Generator())
        self.embed = torch.nn.Identity() if task.symbols is None else torch.nn.Embedding(task.symbols, FEATURES)
        self.layer = layer(inputs.shape[2] if task.symbols is None else FEATURES)
        self.answers_at = len(targets) if targets.dim() == 2 else 1  # so many of the last steps
        self.readout = torch.nn.Sequential(
            torch.nn.LazyLinear(FEATURES), torch.nn.ReLU(), torch.nn.Linear(FEATURES, task.answers)
        )
        self(inputs)  # the readout takes as many units as the layer has

    def forward(self, inputs: Tensor) -> Tensor:
        y, _ = self.layer(self.embed(inputs))
        return self.readout(y[-self.answers_at :])


def train(
    task: Task, layer: Callable[[int], torch.nn.Module], seed: int, scored: tuple[int, ...] = SCORED
) -> dict[int, float]:
    """Train a network on sequences that are new at every step, and return its test score after each of `scored`."""
    torch.manual_seed(seed)
    network = Network(task, layer)
    generator = torch.Generator().manual_seed(seed)
    test_inputs, test_targets = task.draw(TEST, torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    scores = {}
    for step in range(1, scored[-1] + 1):
        inputs, targets = task.draw(BATCH_SIZE, generator)
        answers = network(inputs).flatten(0, 1)
        if task.symbols is None:
            loss = F.mse_loss(answers.squeeze(1), targets)
        else:
            loss = F.cross_entropy(answers, targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        if step in scored:
            with torch.no_grad():
                answers = network(test_inputs).flatten(0, 1)
            if task.symbols is None:
                scores[step] = float(F.mse_loss(answers.squeeze(1), test_targets))
            else:
                scores[step] = 100 * float((answers.argmax(1) != test_targets.flatten()).double().mean())
    return scores


@torch.no_grad()
def length_of_reading(hidden_size: int, rate: float | None) -> float:
    """Return how long A h_0 is beside z in an untrained layer, at the last step of an adding problem."""
    torch.manual_seed(0)
    x, _ = draw_sums(1000, torch.Generator().manual_seed(0))
    layer: Any = fast_weights(hidden_size, **({} if rate is None else {"rate": rate}))(2)
    _, (hidden, memory) = layer(x[:-1])
    drive = F.linear(x[-1], layer.weight_ih, layer.bias) + F.linear(hidden, layer.weight_hh)
    memory = layer.constants.decay * memory + layer.rates()[0] * hidden.unsqueeze(2) * hidden.unsqueeze(1)
    reading = (memory @ drive.relu().unsqueeze(2)).squeeze(2)
    return float((reading.norm(dim=1) / drive.norm(dim=1)).mean())


def main() -> None:
    torch.set_num_threads(1)
    runs = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    done = {(run["task"], run["layer"], run["seed"]) for run in runs}
    record = {
        "environment": describe_environment(),
        "hidden_size": HIDDEN_SIZE,
        "batch_size": BATCH_SIZE,
        "test": TEST,
        "tasks": {name: {"metric": task.metric, "floor": task.floor} for name, task in TASKS.items()},
        "layers": list(LAYERS),
        "ways": [DEFAULT, PAPERS, SMALL, *WAYS],
        "reading": {
            size: [length_of_reading(size, rate) for rate in (0.5, 0.5 / size, None)] for size in (16, 64, 256)
        },
        "runs": runs,
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    for task, title, seed in list_members():
        if (task, title, seed) in done:
            continue
        scores = train(TASKS[task], (LAYERS | WAYS)[title], seed)
        runs.append({"task": task, "layer": title, "seed": seed, "scores": scores})
        RESULT.write_text(json.dumps(record, indent=1) + "\n")
        print(task, title, seed, scores, flush=True)


def list_members() -> list[tuple[str, str, int]]:
    """Return the task, layer and seed of every run, so that what ends early has one seed of each."""
    titles = [*(title for title in LAYERS | WAYS if title != GATED), GATED]
    return [
        (task, title, seed)
        for seed in SEEDS
        for title in titles
        for task in (TASKS if title in LAYERS else ("adding", "recall"))
        if seed == SEEDS[0] or title != GATED  # a step of the gated layer takes several times as long
    ]


if __name__ == "__main__":
    main()
