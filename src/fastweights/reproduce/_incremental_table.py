"""Table 1 of Sprechmann et al. 2018: how well novel and pre-trained classes are answered early in a stream."""

import itertools
from collections.abc import Mapping
from typing import Any

from fastweights.reproduce._incremental_stream import ModelName
from fastweights.runs import Member

REPORTED = (0.1, 1.0, 3.0)  # passes over the stream
TITLES: dict[ModelName, str] = {
    "mbpa": "MbPA",
    "non-parametric": "Non-parametric",
    "mixture": "Mixture",
    "parametric": "Parametric",
}
# The paper's, on ImageNet: top-1 and the area under its curve after each of REPORTED.
PAPER: dict[tuple[str, ModelName], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("novel", "mbpa"): ((46.2, 64.5, 65.7), (27.4, 57.7, 63.0)),
    ("novel", "non-parametric"): ((40.0, 53.3, 52.9), (28.3, 47.9, 51.8)),
    ("novel", "mixture"): ((31.6, 56.0, 59.1), (18.6, 47.4, 54.7)),
    ("novel", "parametric"): ((16.2, 53.6, 57.9), (5.7, 41.7, 51.9)),
    ("pre-trained", "mbpa"): ((68.5, 70.9, 70.9), (71.4, 70.3, 70.3)),
    ("pre-trained", "non-parametric"): ((62.7, 69.4, 70.0), (45.9, 65.8, 68.7)),
    ("pre-trained", "mixture"): ((71.9, 70.3, 70.2), (74.8, 70.6, 70.1)),
    ("pre-trained", "parametric"): ((71.4, 68.1, 68.8), (76.0, 68.6, 68.3)),
}
_SUBSETS = {"novel": "novel_accuracy", "pre-trained": "pretrained_accuracy"}


def rows(
    members: list[Member], models: Mapping[str, ModelName], epochs: float, *, scarce: bool, paper: bool
) -> list[dict[str, Any]]:
    """The table's rows, subset by subset: of the finished members of each title, top-1 and area.

    With `paper` its numbers stand beside those of its own four methods.
    """
    found = []
    marks: dict[float, int | None] = {mark: index for index, mark in enumerate(REPORTED) if mark <= epochs}
    marks.setdefault(epochs, None)
    for subset, key in {**_SUBSETS, **({"scarce novel": "scarce_accuracy"} if scarce else {})}.items():
        for kind, name in enumerate(("top-1", "area under the curve")):
            for mark, index in marks.items():
                for title, model in models.items():
                    known = paper and index is not None and title == TITLES[model]
                    curves = _curves(members, title, key)
                    found.append(
                        {
                            "model": title,
                            "hidden_size": next((m.hidden_size for m in members if m.model == title), None),
                            "metric": f"{subset}, {name} after {mark:g} epochs, %",
                            "ours": [(area(curve, mark) if kind else dict(curve)[mark]) for curve in curves],
                            "paper": PAPER[subset, model][kind][index] if known and index is not None else None,
                            "floor": None,
                        }
                    )
    return found


def area(curve: list[tuple[float, float]], until: float) -> float:
    """The mean height of a curve of (epochs, score) from 0 to `until`, by trapezia.

    Examples:
        >>> from fastweights.reproduce._incremental_table import area
        >>> area([(0.0, 0.0), (1.0, 10.0), (3.0, 10.0)], until=3.0)
        8.333333333333334
    """
    inside = [point for point in curve if point[0] <= until]
    pairs = itertools.pairwise(inside)
    return sum((later - first) * (one + other) / 2 for (first, one), (later, other) in pairs) / until


def _curves(members: list[Member], title: str, key: str) -> list[list[tuple[float, float]]]:
    """The finished runs of a row by seed, each as (epochs, accuracy)."""
    finished = sorted((m for m in members if m.model == title and m.result), key=lambda member: member.seed or 0)
    return [[(point["passes"], point[key]) for point in member.epochs] for member in finished]
