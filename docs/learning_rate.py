"""Measure MbPA's own learning rate beside the best number of a search: a curve with a bump, and digits that are turned.

python docs/learning_rate.py, then python docs/fill.py. FASTWEIGHTS_DATA has MNIST.

Networks with three numbers of features, ten times apart, learn a curve, or digits. Then the world changes in one place,
or is turned by a quarter, and the memory holds some examples of it.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.runs import describe_environment
from fastweights.tasks import mnist

RESULT = Path(__file__).parent / "results" / "learning-rate" / "problems.json"
FEATURES = (16, 160, 1600)
SEEDS = 3
PAPER = 0.15
NUMBERS = sorted({PAPER, *(10.0 ** (power / 4) for power in range(-20, 5))})
LONGER = {"neighbours": 32, "steps": 20}


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
        return 100 * float((answers.argmax(1) == self.targets).float().mean())


@torch.enable_grad()
def train(body: nn.Module, head: nn.Linear, x: Tensor, y: Tensor, epochs: int, batch: int, lr: float) -> None:
    network = nn.Sequential(body, head)
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            answers = network(x[rows])
            loss = F.mse_loss(answers, y[rows]) if y.is_floating_point() else F.cross_entropy(answers, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.requires_grad_(False)


def bump(features: int) -> Problem:
    """Learn a sine; then a bump appears, of which 60 noisy points are given."""
    body, head = nn.Sequential(nn.Linear(1, features), nn.Tanh()), nn.Linear(features, 1)
    x = 6 * torch.rand(1000, 1) - 3
    train(body, head, x, torch.sin(1.5 * x), epochs=100, batch=50, lr=0.003)
    points, queries = 6 * torch.rand(60, 1) - 3, torch.linspace(-3, 3, 400)[:, None]
    values, targets = (torch.sin(1.5 * x) + 1.5 * torch.exp(-(((x - 1) / 0.5) ** 2)) for x in (points, queries))
    return Problem(head, body(points), values + 0.05 * torch.randn(60, 1), body(queries), targets)


def turned(features: int) -> Problem:
    """Learn digits; then they are turned by a quarter, and 20 of each are given."""
    data = mnist.load()
    body = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, features))
    head = nn.Linear(features, 10)
    x, y = data.train_images.float() / 255, data.train_labels
    train(body, head, x[:15_000].flatten(1), y[:15_000], epochs=4, batch=64, lr=0.001)
    rows = torch.cat([15_000 + (y[15_000:] == digit).nonzero()[:20, 0] for digit in range(10)])
    given, asked = (
        torch.rot90(part, 1, (1, 2)).flatten(1) for part in (x[rows], data.test_images[:2000].float() / 255)
    )
    return Problem(head, body(given), y[rows], body(asked), data.test_labels[:2000])


PROBLEMS = {"a bump on a curve": bump, "turned digits": turned}


def answer(problem: Problem, lr: float | None = None, **options: int) -> float | None:
    """Return the score of MbPA, or None where it warns that the number is too large."""
    shape, dtype = problem.values.shape[1:], problem.values.dtype
    store = memory.EpisodicMemory(len(problem.keys), problem.keys.shape[1], value_shape=tuple(shape), value_dtype=dtype)
    store.write(problem.keys, problem.values)
    model = memory.MbPA(nn.Identity(), problem.head, store, lr=lr, **options)
    with warnings.catch_warnings(record=True) as caught:
        score = problem.score(model(problem.queries))
    return None if caught else score


def measure(problem: Problem) -> dict[str, float | None]:
    """Return the scores of the network, of MbPA by its defaults, with more steps, and with each number."""
    scores = {"alone": problem.score(problem.head(problem.queries)), "default": answer(problem)}
    scores["longer"] = answer(problem, **LONGER)
    return scores | {f"{number:.2g}": answer(problem, number) for number in NUMBERS}


def rows() -> Iterator[dict[str, object]]:
    for name, make in PROBLEMS.items():
        for features in FEATURES:
            scores = []
            for seed in range(SEEDS):
                torch.manual_seed(seed)
                problem = make(features)
                scores.append(measure(problem))
            found: dict[str, float | None] = {}
            for title in scores[0]:
                values = [each[title] for each in scores]
                found[title] = None if None in values else mean(value for value in values if value is not None)
            print(name, features, found, flush=True)
            squared = problem.targets.is_floating_point()
            yield {"problem": name, "features": features, "squared": squared, "scores": found}


def main() -> None:
    with torch.no_grad():
        record = {"environment": describe_environment(), "seeds": SEEDS, "rows": list(rows())}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
