"""New classes beside the old ones: what a class of a few examples is answered by, and what it costs the old ones."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.memory.classifier._densities import Densities, Gaussians, Model
from fastweights.memory.classifier._separation import SHARE, score_rows, separate
from fastweights.memory.classifier._statistics import (
    SHOTS,
    Scored,
    Statistics,
    choose_evidence,
    find_doubt,
    fold_of,
    points_of_folds,
    quantile,
    score_inputs,
    score_kept,
    shuffle,
    tail_quantile,
    weigh,
)

AT_ONCE = 32  # classes whose regressions are made together
OWN_FOLDS = 5  # how many parts a class's own examples are left out in
# How many of a class's own examples what other classes lacked counts for at most, in the mean and in the variance: a
# class that the network never saw lies apart from them.
PRIOR = 1.0
# By how many deviations an example may lack more than the median one of its class: one that lies far off must not make
# all that lies as far a part of the class.
MOST_APART = 4.0
# So many examples of a class say by themselves how much its inputs lack, where they lie together: no two of the first
# `PAIRED` are more than `MOST_SPREAD` times as far apart as the nearest two are, and none as far from their mean.
FEWEST_TRUSTED, PAIRED, MOST_SPREAD = 4, 64, 4.0
LEVELS = (torch.arange(20, dtype=torch.float64) + 0.5) / 20  # quantiles at which a class's unknown inputs are estimated
MOST_ASKED = 2000  # examples of new classes that all of them are asked about


class Old(NamedTuple):
    """The old classes as they are now: without those that were forgotten, with the examples that were added."""

    found: Statistics
    indices: Tensor  # [C] of the classes
    whole: Model
    folds: list[Model]
    here: Tensor  # [M] bool: the kept examples whose class is not forgotten
    scored: Scored  # the kept examples' scores
    right: Tensor  # [M] bool: whether the best answer is right
    background: Tensor  # [n,d] features: those of the kept examples, and of examples that were added


class Learnt(NamedTuple):
    """A new class."""

    points: Tensor  # [n,D+m] of its examples
    row: Tensor  # [D+1]: its regression
    odds: Tensor  # [M]: its log odds for the kept examples, without their folds
    lacks: Tensor  # [M]: what they lack
    own_odds: Tensor  # [n]: for its own examples, without each, or some of them; [0] where there is one alone
    own_best: Tensor  # [n]: log probability of the best old answer for each
    own_names: Tensor  # [n]: which of the old classes that is
    scored: Scored  # its own examples, as the old classes have them
    lack: float  # what its own inputs lack, in the mean
    spread: float  # the standard deviation of that
    tail: float  # what `unknown_rate` of them lack more than the mean, in such deviations


class NewClasses(NamedTuple):
    """All new classes together, worked out so that a batch of inputs costs few products."""

    gaussians: Gaussians
    rows: Tensor  # [D+1,K]
    evidence: float  # log odds that each needs
    lost: float  # the share of old answers that they cost together
    familiarity: Tensor  # [K]: how much an input of the class may lack
    shift: float  # added to log odds that an input is unknown: the more classes there are, the more resembles one

    def weigh_unknown(self, doubt: Tensor, lacks: Tensor) -> Tensor:
        """Return the log odds that inputs are unknown, from their threshold on.

        Args:
            doubt: [B], the same without new classes.
            lacks: [B,K] what they lack of each of these.
        """
        return _doubt_all(doubt, lacks, self.familiarity) + self.shift


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
    lacks = torch.empty_like(odds)
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
        rows = score_rows(model.scale_points(seen), rows)
        odds[here], lacks[here] = weigh(found.rates, densities, rows, scored)

    model = old.whole
    points, taught = model.points(old.background), [model.points(each) for each in examples]
    rows = _separate(model, points, weights, taught)
    # Each class again without some of its own examples at a time, to see whether those would be answered as it.
    groups = [torch.arange(len(each)) % min(len(each), OWN_FOLDS) for each in examples]
    cases = [(number, one) for number, each in enumerate(groups) if len(each) > 1 for one in range(int(each.max()) + 1)]
    rest = [taught[number][groups[number] != one] for number, one in cases]
    rows_of_rest = _separate(model, points, weights, rest) if rest else rows[:, :0]
    own_odds = [each.new_zeros(len(each) if len(each) > 1 else 0) for each in taught]
    own_lacks = [torch.empty_like(each) for each in own_odds]
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
        for of_own, found_now in zip((own_odds, own_lacks), weigh(found.rates, densities, row, scored), strict=True):
            of_own[number][away] = found_now[:, 0]

    learnt = []
    for number, own in enumerate(own_odds):
        best, names = scores[number].answers.max(1)
        lack, spread, tail = _expect_lack(found, examples[number], own_lacks[number])
        learnt.append(
            Learnt(
                points=taught[number],
                row=rows[:, number],
                odds=odds[:, number],
                lacks=lacks[:, number],
                own_odds=own,
                own_best=best,
                own_names=old.indices[names],
                scored=scores[number],
                lack=lack,
                spread=spread,
                tail=tail,
            )
        )
    return learnt


def _separate(model: Model, points: Tensor, weights: Tensor, taught: Sequence[Tensor]) -> Tensor:
    """Return the regressions of new classes, of points [n,D+m] of each, against others [N,D+m] of weights [N]."""
    count, total = len(points), len(points) + sum(map(len, taught))
    shares, new = points.new_zeros(total, len(taught)), torch.zeros(total, len(taught), dtype=torch.bool)
    shares[:count] = ((1 - SHARE) * weights / weights.sum())[:, None]
    first = count
    for column, each in enumerate(taught):
        shares[first : first + len(each), column] = SHARE / len(each)
        new[first : first + len(each), column] = True
        first += len(each)
    return separate(model.scale_points(torch.cat([points, *taught])), shares, new, model.outside)


def _gaussians(densities: Densities, taught: Sequence[Tensor]) -> Gaussians:
    """Return the densities of new classes, of the points [n,D+m] of the examples of each."""
    counts = torch.tensor([float(len(each)) for each in taught], dtype=torch.float64)
    return densities.gaussians(counts, densities.place(torch.stack([each.mean(0) for each in taught])))


def _expect_lack(found: Statistics, examples: Tensor, lacks: Tensor) -> tuple[float, float, float]:
    """Return mean, deviation and tail of what a class's own inputs lack, from what its examples [n,d] and others do."""
    knots, position = torch.tensor(SHOTS, dtype=torch.float64).log(), torch.tensor(float(len(examples))).double().log()
    columns = torch.tensor(found.rates.lacks, dtype=torch.float64).T
    others, between, within, tail = (_interpolate(knots, each, position) for each in columns)
    number = len(lacks)
    if not number:
        return others, math.hypot(between, within), tail
    most = float(lacks.median())
    most = most if _lie_together(examples) else min(most, others + between)
    lacks = lacks.clamp(max=most + MOST_APART * within)
    # The mean is normal and the variance of inverse gamma distribution.
    prior = min((within / between) ** 2, PRIOR)
    mean = float(lacks.mean())
    total = float((lacks - mean).square().sum()) + PRIOR * within**2
    total += prior * number / (prior + number) * (mean - others) ** 2
    degrees = number - 1 + PRIOR
    # Student's distribution has the longer tails the fewer its degrees of freedom.
    spread = math.sqrt(total / degrees * (1 + 1 / (prior + number)))
    return (number * mean + prior * others) / (prior + number), spread, tail


def _lie_together(examples: Tensor) -> bool:
    """Return whether examples [n,d] are enough, and none of them far off: what they lack is then their class's.

    One that lies far off moves the class, and so adds to what every other one lacks.
    """
    if len(examples) < FEWEST_TRUSTED:
        return False
    some = examples[:PAIRED]
    apart = torch.pdist(some)
    away = (examples - some.mean(0)).norm(dim=1)
    together = apart.max() <= MOST_SPREAD * apart.quantile(0.05)
    return bool(together and away.max() <= MOST_SPREAD * away.median())


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
        return NewClasses(gaussians, none.new_zeros(len(old.whole.scale) + 1, 0), 0.0, 0.0, none.new_zeros(0), 0.0)
    odds = torch.stack([one.odds for one in learnt], 1)[old.here]
    lacks = torch.stack([one.lacks for one in learnt], 1)[old.here]
    gains = odds.amax(1) - old.scored.answers.amax(1)[old.here]
    right, weights = old.right[old.here], old.found.kept.weights[old.here]
    evidence = choose_evidence(old.found.rates, gains, right, weights)
    gaussians = _gaussians(old.whole.densities, [one.points for one in learnt])
    rows = torch.stack([one.row for one in learnt], 1)
    familiarity = torch.tensor([one.lack + one.tail * one.spread for one in learnt], dtype=torch.float64)
    return NewClasses(
        gaussians,
        rows,
        evidence,
        float((weights * (right & (gains > evidence))).sum() / weights.sum()),
        familiarity,
        _find_shift(old, learnt, lacks, gaussians, rows, familiarity),
    )


def _doubt_all(doubt: Tensor, lacks: Tensor, familiarity: Tensor) -> Tensor:
    """Return the log odds [B] of the unknown against old and new classes, from those against the old ones [B].

    Args:
        doubt: [B]
        lacks: [B,K] what inputs lack of each new class.
        familiarity: [K] how much those of each may.
    """
    return -torch.cat([-doubt[:, None], familiarity - lacks], 1).logsumexp(1)


def _find_shift(
    old: Old, learnt: Sequence[Learnt], lacks: Tensor, gaussians: Gaussians, rows: Tensor, familiarity: Tensor
) -> float:
    """Return what is added to the log odds that inputs are unknown.

    Each new class takes what resembles it from the unknown, inputs of the old ones and of each other too. So the
    threshold falls until the share that is asked is called unknown again, of all inputs or of the old ones alone.

    Args:
        old: the old classes.
        learnt: K new classes.
        lacks: [M,K] of the kept examples.
        gaussians: K densities of the new classes.
        rows: [D+1,K] of their regressions.
        familiarity: [K]
    """
    rates, weights = old.found.rates, old.found.kept.weights[old.here]
    doubt = find_doubt(rates, old.scored.strangeness[old.here])
    before = float(tail_quantile(doubt, weights, rates.unknown_rate))
    of_old = _doubt_all(doubt, lacks, familiarity) - before
    # Examples of the new classes: what others have of each is seen, and what its own would have is to be expected.
    most = max(1, MOST_ASKED // len(learnt))
    names = torch.cat([torch.full((min(len(one.points), most),), number) for number, one in enumerate(learnt)])
    points = torch.cat([one.points[:most] for one in learnt])
    scored = Scored(
        *(torch.cat([part[:most] for part in parts]) for parts in zip(*(one.scored for one in learnt), strict=True))
    )
    densities = gaussians.log_densities(old.whole.densities.place(points))
    _, others = weigh(rates, densities, score_rows(old.whole.scale_points(points), rows), scored)
    others[torch.arange(len(names)), names] = math.inf
    lack = torch.tensor([one.lack for one in learnt], dtype=torch.float64)[names]
    spread = torch.tensor([one.spread for one in learnt], dtype=torch.float64)[names]
    doubt = find_doubt(rates, scored.strangeness)
    own = lack[:, None] + spread[:, None] * torch.special.ndtri(LEVELS) - familiarity[names, None]
    of_new = -torch.logaddexp(-_doubt_all(doubt, others, familiarity)[:, None], -own)
    weights = torch.cat(
        [
            weights * len(old.indices) / weights.sum(),
            (1 / (len(LEVELS) * torch.bincount(names)))[names, None].expand(own.shape).flatten().double(),
        ]
    )
    scores = torch.cat([of_old, of_new.flatten()])
    # No more than brings back what the old ones had: beside few of them, many new ones would decide alone.
    of_all = -float(quantile(scores, weights, 1 - rates.unknown_rate))
    return max(min(of_all, -float(tail_quantile(of_old, weights[: len(of_old)], rates.unknown_rate))), 0.0)
