"""New classes beside the old ones: what a class of a few examples is answered by, and what it costs the old ones."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.memory._class_densities import Densities, Gaussians, Model
from fastweights.memory._class_statistics import (
    SHOTS,
    Scored,
    Statistics,
    choose_evidence,
    find_doubt,
    fold_of,
    points_of_folds,
    score_inputs,
    score_kept,
    shuffle,
    weigh_odds,
)
from fastweights.memory._separation import SHARE, score_rows, separate

AT_ONCE = 32  # classes whose regressions are made together
OWN_FOLDS = 5  # of a class's own examples
# How many examples of its own what other classes needed counts for, where a class says how much it is like the unknown.
PRIOR = 2.0


class Old(NamedTuple):
    """The old classes as they are now: without those that were forgotten, with the examples that were added."""

    found: Statistics
    indices: Tensor  # [C] of the classes
    whole: Model
    folds: list[Model]
    here: Tensor  # [M] bool: the kept examples whose class is not forgotten
    scored: Scored  # of the kept examples
    right: Tensor  # [M] bool: whether the best answer is right
    background: Tensor  # [n,d] features: those of the kept examples, and of examples that were added


class Learnt(NamedTuple):
    """A new class."""

    points: Tensor  # [n,D] of its examples
    row: Tensor  # [D+1]: its regression
    odds: Tensor  # [M]: its log odds for the kept examples, without their folds
    own_odds: Tensor  # [n]: for its own examples, without each, or some of them; [0] where there is one alone
    own_best: Tensor  # [n]: log probability of the best old answer for each
    own_names: Tensor  # [n]: which of the old classes that is
    familiarity: float  # what is added to its log odds before they are weighed against the unknown


class NewClasses(NamedTuple):
    """All new classes together, worked out so that a batch of inputs costs few products."""

    gaussians: Gaussians
    rows: Tensor  # [D+1,K]
    evidence: float  # log odds that each needs
    lost: float  # the share of old answers that they cost together
    familiarity: Tensor  # [K]


def view_old(found: Statistics, index: Sequence[int], added: Mapping[int, Tensor]) -> Old:
    """Return the old classes of some indices, with the features [n,d] of what was added to some of them."""

    def grow(model: Model) -> Model:
        densities = model.densities
        counts, means = densities.counts.clone(), densities.means.clone()
        for one, features in added.items():
            total = densities.place(model.points(features)).sum(0) + counts[one] * means[one]
            counts[one] += len(features)
            means[one] = total / counts[one]
        return model._replace(densities=densities._replace(counts=counts, means=means))

    old, labels = torch.tensor(index), found.kept.labels
    folds = [grow(each) for each in found.folds]
    scored = score_kept(found, old, [model.densities for model in folds], points_of_folds(found))
    right = old[scored.answers.argmax(1)] == labels
    background = torch.cat([found.kept.features, *added.values()])
    return Old(found, old, grow(found.whole), folds, torch.isin(labels, old), scored, right, background)


def learn_classes(old: Old, examples: Sequence[Tensor], logits: Sequence[Tensor]) -> list[Learnt]:
    """Learn new classes, each of the features [n,d] of its examples, and their logits [n,V] or of no columns.

    None depends on the others, so that they can be learnt in any order.
    """
    return [
        learnt
        for first in range(0, len(examples), AT_ONCE)
        for learnt in _learn(old, examples[first : first + AT_ONCE], logits[first : first + AT_ONCE])
    ]


def _learn(old: Old, examples: Sequence[Tensor], logits: Sequence[Tensor]) -> list[Learnt]:
    found, kept = old.found, old.found.kept
    fold = fold_of(len(kept.labels))
    orders = [shuffle(each) for each in examples]
    examples = [each[order] for each, order in zip(examples, orders, strict=True)]
    logits = [each[order] for each, order in zip(logits, orders, strict=True)]
    weights = torch.cat([kept.weights * old.here, kept.weights.new_ones(len(old.background) - len(fold))])

    odds = kept.weights.new_empty(len(fold), len(examples))
    for number, model in enumerate(old.folds):
        here = fold == number
        others = weights.clone()
        others[: len(fold)][here] = 0
        points = model.points(old.background)
        taught = [model.points(each) for each in examples]
        rows = _separate(model, points, others, taught)
        gaussians = _gaussians(model.densities, taught)
        scored = Scored(*(part[here] for part in old.scored))
        seen = points[: len(fold)][here]
        densities = gaussians.log_densities(model.densities.place(seen))
        odds[here] = weigh_odds(found.rates, densities, score_rows(model.scale_points(seen), rows), scored)

    model = old.whole
    points, taught = model.points(old.background), [model.points(each) for each in examples]
    rows = _separate(model, points, weights, taught)
    # Each class again without some of its own examples at a time, to see whether those would be answered as it.
    groups = [torch.arange(len(each)) % min(len(each), OWN_FOLDS) for each in examples]
    cases = [(number, one) for number, each in enumerate(groups) if len(each) > 1 for one in range(int(each.max()) + 1)]
    rest = [taught[number][groups[number] != one] for number, one in cases]
    rows_of_rest = _separate(model, points, weights, rest) if rest else rows[:, :0]
    own_odds = [each.new_zeros(len(each) if len(each) > 1 else 0) for each in taught]
    scores = [
        score_inputs(found.rates, model.densities, old.indices, each, logit)
        for each, logit in zip(taught, logits, strict=True)
    ]
    for case, (number, one) in enumerate(cases):
        away = groups[number] == one
        seen = taught[number][away]
        gaussians = _gaussians(model.densities, [rest[case]])
        densities = gaussians.log_densities(model.densities.place(seen))
        row = score_rows(model.scale_points(seen), rows_of_rest[:, case : case + 1])
        scored = Scored(*(part[away] for part in scores[number]))
        own_odds[number][away] = weigh_odds(found.rates, densities, row, scored)[:, 0]

    learnt = []
    for number, own in enumerate(own_odds):
        best, names = scores[number].answers.max(1)
        lacks = find_doubt(found.rates, scores[number].strangeness)[: len(own)] - own
        familiarity = _find_familiarity(found, len(taught[number]), lacks)
        learnt.append(
            Learnt(taught[number], rows[:, number], odds[:, number], own, best, old.indices[names], familiarity)
        )
    return learnt


def _separate(model: Model, points: Tensor, weights: Tensor, taught: Sequence[Tensor]) -> Tensor:
    """Return the regressions of new classes, of the points [n,D] of each, against others [N,D] of some weights [N]."""
    count, total = len(points), len(points) + sum(map(len, taught))
    shares, new = points.new_zeros(total, len(taught)), torch.zeros(total, len(taught), dtype=torch.bool)
    shares[:count] = ((1 - SHARE) * weights / weights.sum())[:, None]
    first = count
    for column, each in enumerate(taught):
        shares[first : first + len(each), column] = SHARE / len(each)
        new[first : first + len(each), column] = True
        first += len(each)
    return separate(model.scale_points(torch.cat([points, *taught])), shares, new)


def _gaussians(densities: Densities, taught: Sequence[Tensor]) -> Gaussians:
    """Return the densities of new classes, of the points [n,D] of the examples of each."""
    counts = torch.tensor([float(len(each)) for each in taught], dtype=torch.float64)
    return densities.gaussians(counts, densities.place(torch.stack([each.mean(0) for each in taught])))


def _find_familiarity(found: Statistics, count: int, lacks: Tensor) -> float:
    """Return what is added to a class's log odds: what others needed, moved and widened as its own examples need it."""
    knots, position = torch.tensor(SHOTS, dtype=torch.float64).log(), torch.tensor(float(count)).double().log()
    columns = torch.tensor(found.rates.familiarity, dtype=torch.float64).T
    mean, deviation, quantile = (_interpolate(knots, each, position) for each in columns)
    number = len(lacks)
    center = (float(lacks.sum()) + PRIOR * mean) / (number + PRIOR)
    square = (float((lacks - center).square().sum()) + PRIOR * deviation**2) / (number + PRIOR)
    return max(center + (quantile - mean) * max(math.sqrt(square) / deviation, 1.0), 0.0)


def _interpolate(knots: Tensor, values: Tensor, position: Tensor) -> float:
    """Return the value at a position, linear between the knots, and that of the nearest outside of them."""
    position = position.clamp(knots[0], knots[-1])
    above = int(torch.searchsorted(knots, position).clamp(1, len(knots) - 1))
    share = (position - knots[above - 1]) / (knots[above] - knots[above - 1])
    return float(torch.lerp(values[above - 1], values[above], share))


def weigh_classes(old: Old, learnt: Sequence[Learnt]) -> NewClasses:
    """Return new classes together, with the evidence that they need so that they cost no more than they may."""
    if not learnt:
        none = old.whole.densities.means[:0]
        gaussians = old.whole.densities.gaussians(none.new_zeros(0), none)
        return NewClasses(gaussians, none.new_zeros(none.shape[1] + 1, 0), 0.0, 0.0, none.new_zeros(0))
    gains = torch.stack([one.odds for one in learnt]).amax(0) - old.scored.answers.amax(1)
    gains, right, weights = gains[old.here], old.right[old.here], old.found.kept.weights[old.here]
    evidence = choose_evidence(old.found.rates, gains, right, weights)
    return NewClasses(
        _gaussians(old.whole.densities, [one.points for one in learnt]),
        torch.stack([one.row for one in learnt], 1),
        evidence,
        float((weights * (right & (gains > evidence))).sum() / weights.sum()),
        torch.tensor([one.familiarity for one in learnt], dtype=torch.float64),
    )
