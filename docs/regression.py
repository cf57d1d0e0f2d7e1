"""Measure MbPA on numbers to predict, beside nearest neighbours and fine-tuning: the progression of diabetes.

python docs/regression.py, then python docs/fill.py. It needs scikit-learn, which carries the data (Efron et al. 2004:
442 patients, ten measurements of each). A network learns from the three quarters of the patients with the lowest body
mass index; then 20 of the others are given, and the rest of them are asked for. Every method chooses its settings by
leaving out a fifth of the 20 in turn.
"""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.runs import describe_environment

RESULT = Path(__file__).parent / "results" / "regression" / "diabetes.json"
SPLITS = 20
GIVEN = 20
BODY_MASS = 2  # column

Examples = tuple[Tensor, Tensor]  # inputs [n,10] and targets [n,1]
Predict = Callable[[Tensor], Tensor]
Make = Callable[..., Predict]  # of the examples that were given, and settings


class Split(NamedTuple):
    """One network, and the patients that it learnt from, that are given, and that are asked for."""

    body: nn.Module
    head: nn.Linear
    train: Examples
    given: Examples
    old: Examples
    new: Examples


def make_split(seed: int) -> Split:
    torch.manual_seed(seed)
    data = load_diabetes()
    x, y = torch.tensor(data.data).float(), torch.tensor(data.target).float()[:, None]
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    heavy = x[:, BODY_MASS] > x[:, BODY_MASS].quantile(0.75)
    light, new = (mask.nonzero()[:, 0] for mask in (~heavy, heavy))
    light, new = light[torch.randperm(len(light))], new[torch.randperm(len(new))]
    test = len(light) // 5
    body, head = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()), nn.Linear(16, 1)
    network = nn.Sequential(body, head)
    train = x[light[test:]], y[light[test:]]
    fit(network, train, 0.001, 150)
    parts = [(x[rows], y[rows]) for rows in (new[:GIVEN], light[:test], new[GIVEN:])]
    return Split(body.requires_grad_(False), head.requires_grad_(False), train, *parts)


def fit(network: nn.Module, examples: Examples, lr: float, epochs: int) -> None:
    x, y = examples
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, weight_decay=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            loss = F.mse_loss(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# The methods: each is made from the examples that are given, and one point of its grid


def keep_network(split: Split, given: Examples) -> Predict:
    return lambda x: split.head(split.body(x))


def remember(split: Split, given: Examples) -> memory.EpisodicMemory:
    store = memory.EpisodicMemory(1000, 16, value_shape=(1,), value_dtype=torch.float32)
    for x, y in (split.train, given):
        store.write(split.body(x), y)
    return store


def adapt(split: Split, given: Examples, neighbours: int, steps: int, units: float) -> Predict:
    store = remember(split, given)
    unit = float(1 / store.keys.square().sum(1).mean())
    return memory.MbPA(split.body, split.head, store, neighbours=neighbours, steps=steps, lr=units * unit)


def average_neighbours(split: Split, given: Examples, neighbours: int) -> Predict:
    store = remember(split, given)

    def predict(x: Tensor) -> Tensor:
        found = store.search(split.body(x), neighbours)
        return (found.weights[..., None] * found.values).sum(1)

    return predict


def train_further(split: Split, given: Examples, lr: float, epochs: int) -> Predict:
    torch.manual_seed(0)
    network = copy.deepcopy(nn.Sequential(split.body, split.head)).requires_grad_(True)
    x, y = (torch.cat([old, new]) for old, new in zip(split.train, given, strict=True))
    with torch.enable_grad():
        fit(network, (x, y), lr, epochs)
    return network.requires_grad_(False)


METHODS: dict[str, tuple[Make, list[tuple[float, ...]]]] = {
    "the network alone": (keep_network, [()]),
    "MbPA": (adapt, list(itertools.product((5, 10, 20, 40), (1, 5, 20), (0.03, 0.1, 0.3)))),
    "nearest neighbours": (average_neighbours, [(3,), (5,), (10,), (20,), (40,)]),
    "trained further on old and new": (train_further, [(0.001, 10), (0.001, 50), (0.003, 20)]),
}


def score(predict: Predict, examples: Examples) -> float:
    return float(F.mse_loss(predict(examples[0]), examples[1]))


def choose(split: Split, make: Make, points: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the settings that answer each fifth of the given examples best from the others."""
    if len(points) == 1:
        return points[0]
    x, y = split.given
    folds = torch.arange(GIVEN).chunk(5)

    def loss(point: tuple[float, ...]) -> float:
        total = 0.0
        for left in folds:
            rest = ~torch.isin(torch.arange(GIVEN), left)
            total += len(left) * score(make(split, (x[rest], y[rest]), *point), (x[left], y[left]))
        return total

    return min(points, key=loss)


def main() -> None:
    errors: dict[str, dict[str, list[float]]] = {title: {"old": [], "new": []} for title in METHODS}
    for seed in range(SPLITS):
        with torch.enable_grad():
            split = make_split(seed)
        with torch.no_grad():
            for title, (make, points) in METHODS.items():
                predict = make(split, split.given, *choose(split, make, points))
                errors[title]["old"].append(score(predict, split.old))
                errors[title]["new"].append(score(predict, split.new))
        print(seed, {title: round(mean(one["new"]), 3) for title, one in errors.items()}, flush=True)
    scores = {
        title: {part: [mean(values), stdev(values)] for part, values in parts.items()}
        for title, parts in errors.items()
    }
    record = {"environment": describe_environment(), "splits": SPLITS, "given": GIVEN, "scores": scores}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
