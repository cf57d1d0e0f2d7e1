"""Measure the estimator of scikit-learn on its digits beside logistic regression, each digit in turn a new class.

python docs/digits.py, then python docs/fill.py. It needs scikit-learn, which carries the digits.

The first 1,200 digits are there to learn from, the other 597 to be asked. One digit is left out, and then learnt from
some of its examples, in several draws. Both have pixels as features, and their defaults; but logistic regression has
scaled pixels, counts classes alike, and may take the steps that it needs.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fastweights.integrations.sklearn import AdaptiveClassifier
from fastweights.runs import describe_environment

RESULT = Path(__file__).parent / "results" / "digits" / "digits.json"
TRAIN = 1200
SHOTS = (1, 5, 20)
DRAWS = 3


def rows() -> Iterator[dict[str, Any]]:
    x, y = load_digits(return_X_y=True)
    asked, right = x[TRAIN:], y[TRAIN:]
    x, y = x[:TRAIN], y[:TRAIN]
    for digit in range(10):
        old, new = y != digit, numpy.flatnonzero(y == digit)
        ours = AdaptiveClassifier().fit(x[old], y[old])
        before = ours.predict(asked) == right
        unknown = ours.predict_unknown(asked)
        for shots in SHOTS:
            for draw in range(DRAWS):
                few = numpy.random.default_rng(draw).permutation(new)[:shots]
                ours.partial_fit(x[few], y[few])
                both = numpy.concatenate([numpy.flatnonzero(old), few])
                rival = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, class_weight="balanced"))
                answers = {
                    "ours": ours.predict(asked),
                    "logistic regression": rival.fit(x[both], y[both]).predict(asked),
                }
                ours.adaptive_.forget(str(digit))
                row: dict[str, Any] = {"digit": digit, "shots": shots, "draw": draw}
                row |= {
                    "before": per_cent(before[right != digit]),
                    "unknown_old": per_cent(unknown[right != digit]),
                    "unknown_new": per_cent(unknown[right == digit]),
                }
                for title, answer in answers.items():
                    row[f"{title}, old"] = per_cent((answer == right)[right != digit])
                    row[f"{title}, new"] = per_cent((answer == right)[right == digit])
                yield row
        print(digit, flush=True)


def per_cent(right: Any) -> float:
    return 100 * float(right.mean())


def main() -> None:
    warnings.simplefilter("ignore")  # what partial_fit says of a class that is hard is in the table
    record = {"environment": describe_environment(), "rows": list(rows())}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
