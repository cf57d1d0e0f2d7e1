"""Numbers to predict: MbPA beside nearest neighbours and fine-tuning on the progression of diabetes.

The data of Efron et al. 2004, "Least angle regression": 442 patients, ten measurements of each. A network learns from
the three quarters of the patients with the lowest body mass index. Then some of the others are given, and the rest of
them are asked for. Every method chooses its settings by leaving out a fifth of the given patients in turn.
"""

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import memory
from fastweights.errors import RunError
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._fit import fit
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Score, metric_key

EXPERIMENT = "guides/regression"
QUICK_MINUTES = 1
DATA = None

ModelName = Literal["alone", "mbpa", "neighbours", "further"]
TITLES: dict[ModelName, str] = {
    "alone": "the network alone",
    "mbpa": "MbPA",
    "neighbours": "nearest neighbours",
    "further": "trained further on old and new",
}
METRIC = "error of {} patients, variances"  # mean squared errors, in units of the target's variance
BODY_MASS = 2  # column
DECAY = 0.01  # of the weights in training
LEAST, MOST = 5, 100  # patients that can be given: one for each fifth, and some that are left to ask for

Examples = tuple[Tensor, Tensor]  # inputs [n,10] and targets [n,1]
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """Numbers to predict: what has been learnt of light patients, and a few heavy ones to adapt to."""

    models: tuple[ModelName, ...] = ("alone", "mbpa", "neighbours", "further")
    """Methods to compare, each a row of the table."""
    seeds: tuple[int, ...] = tuple(range(5))
    """Seeds of the network and of the splits of the patients: one measurement for each."""
    given: int = 20
    """Heavy patients that are given."""
    epochs: int = 150
    """Passes of the network over the light patients."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(), "full": Settings(seeds=tuple(range(20)))}


class Split(NamedTuple):
    """One network, and the patients that it learnt from, that are given, and that are asked for."""

    body: nn.Module
    head: nn.Linear
    train: Examples
    given: Examples
    old: Examples
    new: Examples


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every method for every seed.

    Raises:
        RunError: scikit-learn, which carries the data, is not installed.
    """
    patients = load_patients()

    def measure(row: Row, seed: int) -> dict[str, float]:
        split = make_split(patients, seed, settings)
        make, points = METHODS[row.model]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a rate of the grid may be too large for some queries
            predict = make(split, split.given, *choose(split, make, points))
            return {metric_key(METRIC.format(part)): score(predict, getattr(split, part)) for part in ("old", "new")}

    scores = [Score(METRIC.format(part), {}, None) for part in ("old", "new")]
    return prepare_whole(settings, folder, map(Row, settings.models), measure, scores, titles=TITLES)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("given", "epochs"))
    if not LEAST <= settings.given <= MOST:
        raise ValueError(f"given must be {LEAST} to {MOST}, got {settings.given}")


def load_patients() -> Examples:
    """Return the measurements [442,10] and the progression [442,1], standardised.

    Raises:
        RunError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_diabetes
    except ImportError as error:
        raise RunError(f"the patients come with scikit-learn ({error}): `pip install scikit-learn`") from None
    data = load_diabetes()
    x, y = torch.tensor(data.data).float(), torch.tensor(data.target).float()[:, None]
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def make_split(patients: Examples, seed: int, settings: Settings) -> Split:
    """Train a network on light patients, and part the others; a fifth of the light ones is held out."""
    torch.manual_seed(seed)
    x, y = (part.to(settings.device) for part in patients)
    heavy = x[:, BODY_MASS] > x[:, BODY_MASS].quantile(0.75)
    light, new = (mask.nonzero()[:, 0] for mask in (~heavy, heavy))
    light, new = light[torch.randperm(len(light))], new[torch.randperm(len(new))]
    test = len(light) // 5
    body, head = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()), nn.Linear(16, 1)
    train = x[light[test:]], y[light[test:]]
    fit(
        nn.Sequential(body, head).to(settings.device),
        *train,
        epochs=settings.epochs,
        learning_rate=0.001,
        weight_decay=DECAY,
    )
    given, old, new_test = ((x[rows], y[rows]) for rows in (new[: settings.given], light[:test], new[settings.given :]))
    return Split(body.requires_grad_(False), head.requires_grad_(False), train, given, old, new_test)


# The methods: each is made from the examples that are given, and one point of its grid


def keep_network(split: Split, given: Examples) -> Predict:
    """Return the network as it is."""
    return nn.Sequential(split.body, split.head)


def remember(split: Split, given: Examples) -> memory.EpisodicMemory:
    """Return a memory of the network's own examples and the given ones."""
    store = memory.EpisodicMemory(1000, 16, value_shape=(1,), value_dtype=torch.float32)
    for x, y in (split.train, given):
        store.write(split.body(x), y)
    return store


def adapt(split: Split, given: Examples, neighbours: int, steps: int, units: float) -> Predict:
    """Return MbPA around the network, with a rate in units of one over the keys' mean squared length."""
    store = remember(split, given)
    unit = float(1 / store.keys.square().sum(1).mean())
    return memory.MbPA(split.body, split.head, store, neighbours=neighbours, steps=steps, lr=units * unit)


def average_neighbours(split: Split, given: Examples, neighbours: int) -> Predict:
    """Return the weighted mean of the nearest neighbours."""
    store = remember(split, given)

    def predict(x: Tensor) -> Tensor:
        found = store.search(split.body(x), neighbours)
        return (found.weights[..., None] * found.values).sum(1)

    return predict


def train_further(split: Split, given: Examples, lr: float, epochs: int) -> Predict:
    """Return the network after more training on all examples."""
    torch.manual_seed(0)
    network = copy.deepcopy(nn.Sequential(split.body, split.head)).requires_grad_(True)
    x, y = (torch.cat([old, new]) for old, new in zip(split.train, given, strict=True))
    fit(network, x, y, epochs=epochs, learning_rate=lr, weight_decay=DECAY)
    return network.requires_grad_(False)


METHODS: dict[str, tuple[Callable[..., Predict], list[tuple[Any, ...]]]] = {
    "alone": (keep_network, [()]),
    "mbpa": (adapt, list(itertools.product((5, 10, 20, 40), (1, 5, 20), (0.03, 0.1, 0.3)))),
    "neighbours": (average_neighbours, [(3,), (5,), (10,), (20,), (40,)]),
    "further": (train_further, [(0.001, 10), (0.001, 50), (0.003, 20)]),
}


def score(predict: Predict, examples: Examples) -> float:
    """Return the mean squared error."""
    return float(F.mse_loss(predict(examples[0]), examples[1]))


def choose(split: Split, make: Callable[..., Predict], points: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the settings that answer each fifth of the given examples best from the others."""
    if len(points) == 1:
        return points[0]
    x, y = split.given
    rows = torch.arange(len(x), device=x.device)

    def loss(point: tuple[Any, ...]) -> float:
        total = 0.0
        for left in rows.chunk(5):
            rest = ~torch.isin(rows, left)
            total += len(left) * score(make(split, (x[rest], y[rest]), *point), (x[left], y[left]))
        return total

    return min(points, key=loss)
