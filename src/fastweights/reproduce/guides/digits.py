"""The estimator for scikit-learn on its digits: each in turn is a new class, learnt from 1, 5 and 20 examples.

The first 1,200 digits are there to learn from, the other 597 to be asked; these are by other writers. Pixels are the
features, and all settings are the defaults. Logistic regression gets scaled pixels and balanced
classes, is trained until it converges, and is trained again with the old examples and the few new ones.
"""

import importlib.util
import statistics
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fastweights.errors import RunError
from fastweights.reproduce._experiment import check_settings, one_line_errors, run_of
from fastweights.reproduce._members import Members
from fastweights.reproduce.guides._whole import Row, prepare_whole
from fastweights.runs import Record, Score, metric_key

EXPERIMENT = "guides/digits"
QUICK_MINUTES = 1
DATA = None

ModelName = Literal["adaptive-classifier", "logistic-regression"]
TITLES: dict[ModelName, str] = {
    "adaptive-classifier": "AdaptiveClassifier",
    "logistic-regression": "logistic regression",
}
TRAIN = 1200
DIGITS = 10
BEFORE = "old before, %"
OLD, NEW = "old after {}, %", "new after {}, %"
UNKNOWN_OLD, UNKNOWN_NEW = "unknown of old, %", "unknown of new, %"

Examples = tuple[Any, Any]  # pixels [n,64] and digits [n]


@dataclass(frozen=True)
class Settings:
    """The estimator for scikit-learn: a new digit from 1, 5 and 20 examples."""

    models: tuple[ModelName, ...] = tuple(TITLES)
    """Classifiers to compare, each a row of the table."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the examples that are drawn of the new digit."""
    shots: tuple[int, ...] = (1, 5, 20)
    """Examples of the new digit: one measurement for each number."""
    threads: int = 1
    """Threads to compute with."""


PRESETS = {"quick": Settings(), "full": Settings(seeds=(1, 2, 3))}

run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Return the members of a run: every classifier and seed."""
    train, test = load()

    def measure(row: Row, seed: int) -> Record:
        learn = learn_digit if row.model == "adaptive-classifier" else train_anew
        found: dict[str, list[float]] = defaultdict(list)
        for digit in range(DIGITS):
            few = np.random.default_rng(seed).permutation(np.flatnonzero(train[1] == digit))
            for metric, value in learn(digit, few, train, test, settings).items():
                found[metric_key(metric)].append(value)
        return {metric: statistics.mean(values) for metric, values in found.items()}

    ours = [(TITLES["adaptive-classifier"], None)]
    scores = [Score(BEFORE, {}, None)]
    scores += [Score(what.format(shots), {}, None) for shots in settings.shots for what in (OLD, NEW)]
    scores += [Score(what, {}, None, ours) for what in (UNKNOWN_OLD, UNKNOWN_NEW)]
    return prepare_whole(settings, folder, map(Row, settings.models), measure, scores, titles=TITLES)


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    check_settings(settings, sizes=("shots",), lists=("models", "seeds", "shots"))
    if importlib.util.find_spec("sklearn") is None:
        raise RunError("the digits come with scikit-learn: `pip install scikit-learn`")


def load() -> tuple[Examples, Examples]:
    """Return the digits to learn from, and those to be asked."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])


def learn_digit(digit: int, few: Any, train: Examples, test: Examples, settings: Settings) -> dict[str, float]:
    """Return the scores of our estimator, which learns a digit from the first of some examples, and forgets it."""
    from fastweights.integrations.sklearn import AdaptiveClassifier

    (x, y), (asked, right) = train, test
    old, new = right != digit, right == digit
    classifier = AdaptiveClassifier().fit(x[y != digit], y[y != digit])
    unknown = classifier.predict_unknown(asked)
    found = {
        BEFORE: per_cent(classifier.predict(asked)[old] == right[old]),
        UNKNOWN_OLD: per_cent(unknown[old]),
        UNKNOWN_NEW: per_cent(unknown[new]),
    }
    for shots in settings.shots:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it tells that a digit is hard, as the table does
            classifier.partial_fit(x[few[:shots]], y[few[:shots]])
        found |= score(classifier.predict(asked) == right, old, shots)
        classifier.adaptive_.forget(str(digit))
    return found


def train_anew(digit: int, few: Any, train: Examples, test: Examples, settings: Settings) -> dict[str, float]:
    """Return the scores of logistic regression, trained with all examples of the old digits and some of the new."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    (x, y), (asked, right) = train, test
    old = right != digit

    def answer(chosen: Any) -> Any:
        network = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, class_weight="balanced"))
        return network.fit(x[chosen], y[chosen]).predict(asked) == right

    others = np.flatnonzero(y != digit)
    found = {BEFORE: per_cent(answer(others)[old])}
    for shots in settings.shots:
        found |= score(answer(np.concatenate([others, few[:shots]])), old, shots)
    return found


def score(right: Any, old: Any, shots: int) -> dict[str, float]:
    """Return the accuracies on old digits and the new one, of which answers are right [n] and which are old [n]."""
    return {OLD.format(shots): per_cent(right[old]), NEW.format(shots): per_cent(right[~old])}


def per_cent(right: Any) -> float:
    """Return the share of what is true."""
    return 100 * float(right.mean())
