"""What a classifier keeps of its old classes, and every rate and threshold, chosen on examples that were left out.

The examples are parted into folds. Each is scored by densities and regressions that were made without its fold, so that
its scores are those of an input that was never seen, however many features there are for each example.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.memory.classifier._densities import (
    Densities,
    Model,
    class_weights,
    count_axes,
    fit_models,
)
from fastweights.memory.classifier._separation import SHARE, score_rows, separate

FOLDS = 5
LEAST, MIDDLE = 5, 21  # examples of a class that say what lies far from it, and those that say where it is
MOST_KEPT = 2000  # examples of the old classes that are scored, and kept to score new classes by
SHRINKAGES = (0.1, 0.3, 0.6, 0.9)  # candidates for the covariance within classes
# The factor of regressions beside densities, and how much the lead of the network's best answer counts against a new
# class.
MIXTURE = (1.0, 0.5)
# On few axes densities alone can be better, and classes that are left out and learnt again tell. On more they say so
# too, but wrongly: of digits that a network of 384 features never saw, 74 % are right then from five examples, not 82.
FEW_AXES = 8
MIXTURES_OF_FEW = (MIXTURE, (1.0, 0.25), (1.0, 0.0), (0.0, 0.5), (0.0, 0.25), (0.0, 0.0))
# The share of old examples that are less certain than any input may count as: the network is surer still of inputs that
# are out of all proportion, such as pixels from 0 to 255 where it has learnt 0 to 1.
MOST_CERTAIN = 0.9
SHOTS = (1, 5, 20)  # examples of a class that is left out and learnt again
MOST_LEFT_OUT = 20  # classes
# How often axes and covariances are made again without a class, in all; at least in two folds for each class. With the
# axis that a class makes for itself, it would look far easier to learn, and to tell from strangers, than a new one: of
# 21 classes with 384 features one learnt from one example then left 26 % of strangers unknown, and now leaves all.
MADE_AGAIN = 20
# An input of a new class is far from all old ones, and the fewer these are, the less does it say by how much: with so
# many, what it lacks is told half through them and half by the densities of the new class and of nobody's. Of 3 classes
# of requests a class learnt from one example then leaves 83 % of strangers unknown, and through the old ones alone
# 58 %; of 6 to 40 classes the one way is as good as the other, or they are best together.
FEW_CLASSES = 10
TRIED = 25  # examples of each: a fold of them less are as many as the most shots
# A new class may be answered at this much less than even odds where that costs few old answers: a class that the
# network never saw has lower odds than those that are left out.
SLACK = 2.0
TAIL = 0.05  # the share of scores above which their distribution is taken to fall off exponentially
FEWEST = 20  # scores above it, where there are five times as many
ENOUGH = 10  # scores in a share that are counted, and tell it without any distribution
MOST_VANISHED = 0.3  # share of classes that may have all their examples in one fold
STEPS = 24  # steps of a bisection, or of Newton's method
MOST_SCORES = 1_000_000  # a scale is fitted to no more scores than these
MOST_SCALE = 100.0  # the largest factor for logits that are too small
FEWEST_WRONG = 5
# Where the same input was read twice, features differ by so little of their size, root mean square.
ROUNDING = 1e-5
NEAR = 0.1  # and by so little of how much they vary, root mean square
NEIGHBOURS = 8  # examples after each that may equal it
AT_ONCE = 4096  # pairs that are compared together
MOST_MIXED = 0.1  # share of the groups of equal examples that are of several classes, where inputs were given twice


class Kept(NamedTuple):
    """Examples of the old classes. Example i is of fold i modulo `FOLDS`."""

    features: Tensor  # [M,d] float32
    labels: Tensor  # [M]
    logits: Tensor  # [M,V] float32, of no columns where there is no output layer
    weights: Tensor  # [M]: less than one for those of classes that have many


class Lacks(NamedTuple):
    """What must be added to the log odds of a class so that its own inputs are not called unknown.

    For one of `SHOTS`, of inputs of the classes that were left out and learnt again.
    """

    mean: float
    between: float  # the standard deviation of the means of classes
    within: float  # the standard deviation of inputs about the mean of their class
    tail: float  # what `unknown_rate` of them lie above it, in such deviations


class Rates(NamedTuple):
    """How scores are weighed, and what was asked."""

    unknown_rate: float
    old_loss: float
    shrinkage: float  # how far the covariance within classes is drawn towards a sphere
    density: float  # the factor of log densities: features are not quite Gaussian
    logit: float = 1.0  # the factor of the network's logits
    certainty: float = math.inf  # the greatest lead of the best answer that counts
    response: float = math.inf  # the greatest log-sum-exp of the logits that counts
    expected: tuple[float, ...] = (0.0, 0.0, 0.0)  # means of the parts of the strangeness
    deviations: tuple[float, ...] = (1.0, 1.0, 1.0)  # their standard deviations
    threshold: float = 0.0  # strangeness above which an input is unknown
    slope: float = 1.0  # how fast the log odds of an unknown input rise with its strangeness
    offset: float = -3.0  # the log odds of an unknown input at the threshold
    odds: float = 0.6  # the factor of the log odds of new classes
    separation: float = MIXTURE[0]  # the factor of regressions in them, beside densities
    confidence: float = MIXTURE[1]  # how much the lead of the network's best answer counts against a new class
    least_evidence: float = -5.0  # log odds that a new class must have at least
    # How much the way through the old classes counts in what an input of a new class lacks: 1 in files that have none.
    through_old: float = 1.0
    lacks: tuple[Lacks, ...] = (Lacks(5.0, 2.0, 2.0, 1.6), Lacks(2.5, 2.0, 2.0, 1.6), Lacks(1.0, 2.0, 2.0, 1.6))


class Statistics(NamedTuple):
    """All that answers are made of but for the new classes' examples."""

    whole: Model  # made of all examples
    folds: list[Model]  # each made of all examples but those of a fold
    kept: Kept
    rates: Rates

    def with_rates(self, **rates: Any) -> "Statistics":
        """Return the same with other rates."""
        return self._replace(rates=self.rates._replace(**rates))


class Scored(NamedTuple):
    """Inputs as the old classes have them."""

    known: Tensor  # [B]: the scaled log density of all old classes together
    answers: Tensor  # [B,C]: log probabilities among the old classes
    lead: Tensor  # [B]: by how much the best of them leads, as far as it counts
    strange_parts: Tensor  # [B,3] of the strangeness, or [B,1] where there is no output layer
    strangeness: Tensor  # [B]: how little an input is like those of old classes


def fit_statistics(
    features: Tensor, labels: Tensor, logits: Tensor | None, unknown_rate: float, old_loss: float
) -> tuple[Statistics, "Trials"]:
    """Return the statistics of the old classes, and what classes that were left out and learnt again came to.

    Args:
        features: [N,d]
        labels: [N], at least one example of each of C classes, and more examples than classes.
        logits: [N,C] of the network, or None where there is no output layer.
        unknown_rate: the share of old examples that may be called unknown.
        old_loss: the share of old answers that new classes may cost.

    Raises:
        ValueError: the examples of each class have equal features.
    """
    classes = int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=classes)
    order = shuffle(features)
    order = order[labels[order].argsort(stable=True)]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    # The first of each class, then the second of each, until there are enough; then class by class again. Before them
    # those that classes which are left out are learnt again from and tried on.
    order = (rank * classes + labels).argsort()
    tried = torch.isin(labels, torch.tensor(_left_out(classes))) & (rank < TRIED)
    chosen = torch.cat([order[tried[order]], order[~tried[order]]])[:MOST_KEPT]
    chosen = chosen[labels[chosen].argsort(stable=True)]
    kept = Kept(
        features[chosen],
        labels[chosen],
        torch.zeros(len(chosen), 0) if logits is None else logits[chosen].float(),
        class_weights(torch.bincount(labels[chosen], minlength=classes), labels[chosen])[labels[chosen]],
    )
    fold = torch.full((len(labels),), -1)
    fold[chosen] = fold_of(len(chosen))
    axes = count_axes(len(labels) - -(-len(chosen) // FOLDS), features.shape[1])
    shrinkage, density, folds = _choose_shrinkage(features[order], labels[order], classes, axes, fold[order], kept)
    whole = fit_models(features[order], labels[order], classes, axes, (shrinkage,))[0]
    rates = Rates(unknown_rate, old_loss, shrinkage, density, through_old=classes / (classes + FEW_CLASSES))
    found = Statistics(whole, folds, kept, rates)
    if logits is not None:
        found = found.with_rates(logit=_fit_logit_scale(kept.logits.double(), kept.labels, kept.weights))
    densities = [model.densities for model in folds]
    scored = score_kept(found, torch.arange(classes), densities, points_of_folds(found))
    parts = scored.strange_parts
    found = found.with_rates(certainty=float(quantile(scored.lead, kept.weights, MOST_CERTAIN)))
    if logits is not None:
        found = found.with_rates(response=float(quantile(-parts[:, 1], kept.weights, MOST_CERTAIN)))
        parts = torch.maximum(parts, parts.new_tensor([-math.inf, -found.rates.response, -found.rates.certainty]))
    found = found.with_rates(
        expected=tuple(parts.mean(0).tolist()), deviations=tuple(parts.std(0, correction=0).clamp(min=1e-9).tolist())
    )
    strangeness = weigh_strangeness(found.rates, parts)
    found = found.with_rates(threshold=float(tail_quantile(strangeness, kept.weights, unknown_rate)))
    right = scored.answers.argmax(1) == kept.labels
    odds = parts[:, 0]
    del scored  # large where classes are many
    found, trials = _learn_left_out(found, features[order], labels[order], fold[order], strangeness, right)
    shift = _extrapolate(found, features[order], labels[order], fold[order], odds)
    return found.with_rates(expected=(found.rates.expected[0] + shift, *found.rates.expected[1:])), trials


def _extrapolate(found: Statistics, features: Tensor, labels: Tensor, fold: Tensor, odds: Tensor) -> float:
    """Return by how much new inputs are less strange to what is made of all examples than to what is made of folds.

    As much less as the kept examples are to what is made without one fold than without two, in the inverse of the
    number of examples. Where these are much fewer than features this is more than the differences between inputs.

    Args:
        found: what is known of the old classes.
        features: [N,d]
        labels: [N]
        fold: [N], -1 for those that are in none.
        odds: [M] the kept examples' log odds of a class that nobody has seen.
    """
    classes, axes = len(found.whole.densities.counts), found.whole.space.axes.shape[1]
    fewer, sizes, compared = odds.clone(), [], torch.zeros_like(odds, dtype=torch.bool)
    for number in range(FOLDS):
        rest = (fold != number) & (fold != (number + 1) % FOLDS)
        sizes.append(int(rest.sum()))
        if axes > sizes[-1] or int(torch.bincount(labels[rest]).max()) < 2:
            return 0.0
        before, after = (int(torch.bincount(labels[some]).gt(0).sum()) for some in (fold != number, rest))
        if before - after >= max(1.0, MOST_VANISHED * before):  # what differs is which classes there are
            continue
        compared[number::FOLDS] = True
        model = fit_models(features[rest], labels[rest], classes, axes, (found.rates.shrinkage,))[0]
        places = model.densities.place(model.points(found.kept.features[number::FOLDS]))
        known = (found.rates.density * model.densities.old(places)).logsumexp(1)
        fewer[number::FOLDS] = found.rates.density * model.densities.nobody(places) - known
    two, one, none = 1 / (sum(sizes) / FOLDS), 1 / (len(labels) - len(odds) / FOLDS), 1 / len(labels)
    weights = found.kept.weights * compared
    return float((weights * (odds - fewer)).sum() / weights.sum().clamp(min=1e-30)) * (one - none) / (two - one)


def spread_classes(found: Statistics, columns: Tensor, classes: int) -> Statistics:
    """Return the statistics of some classes as those of more, of which the others have no examples.

    Args:
        found: the statistics of C classes.
        columns: [C] which of all classes they are.
        classes: how many there are.
    """

    def widen(model: Model) -> Model:
        densities = model.densities
        counts = densities.counts.new_zeros(classes).index_copy_(0, columns, densities.counts)
        means = densities.means.new_zeros(classes, densities.means.shape[1]).index_copy_(0, columns, densities.means)
        return model._replace(densities=densities._replace(counts=counts, means=means))

    kept, logits = found.kept, found.kept.logits
    if logits.shape[1]:
        logits = logits.new_zeros(len(logits), classes).index_copy_(1, columns, logits)
    kept = kept._replace(labels=columns[kept.labels], logits=logits)
    return found._replace(whole=widen(found.whole), folds=list(map(widen, found.folds)), kept=kept)


def fold_of(count: int) -> Tensor:
    """Return the fold of each of the kept examples, [M]."""
    return torch.arange(count) % FOLDS


def shuffle(points: Tensor) -> Tensor:
    """Return an order of points [n,D] that depends on them alone, and not on the order in which they come."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(points.shape[1], generator=generator, dtype=torch.float64)
    values = points.double() @ direction
    values = values / values.abs().mean().clamp(min=1e-30)
    return (values * 1e5 % 1).argsort(stable=True)


def find_farthest(features: Tensor, labels: Tensor) -> tuple[int, float]:
    """Return the example of [N,d] that lies farthest from its class, and how many times as far as most of it do.

    Distances are from the middle of some examples, which a far one does not move. Classes of fewer than `LEAST` tell
    nothing, and a class is not taken for narrower than the median one, nor than a tenth of what all differ by.
    """
    rows = torch.split(labels.argsort(stable=True), torch.bincount(labels).tolist())
    parts = [part for part in rows if len(part) >= LEAST]
    if not parts:
        return 0, 0.0
    away = [(features[part] - features[part[:MIDDLE]].median(0)[0]).norm(dim=1) for part in parts]
    usual = torch.stack([each.median() for each in away])
    least = 0.1 * (features - features.mean(0)).norm(dim=1).median()
    usual = usual.clamp(min=float(torch.maximum(usual.median(), least).clamp(min=1e-30)))
    times = torch.cat([each / of_class for each, of_class in zip(away, usual, strict=True)])
    found = int(times.argmax())
    return int(torch.cat(parts)[found]), float(times[found])


def find_distinct(features: Tensor, labels: Tensor) -> Tensor:
    """Return an example of each group of one class with equal features, up to rounding, [N,d] -> [M] in order.

    Features that vary by little more than their rounding are not equal for that: equal examples must also be far nearer
    to one another than examples usually are. All of them where features of few values are equal by chance: equal ones
    are then of several classes too.
    """
    usual, mean = features.abs().median(0)[0], features.abs().mean(0, dtype=torch.float64)
    weights = torch.randn(len(mean), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights / mean.clamp(min=1e-30)
    keys, order = (features.double() @ weights).sort(stable=True)
    # Equal examples are neighbours in the order of their keys, or nearly so, and these differ by no more than this.
    reach = (
        ROUNDING * math.sqrt(len(mean)) * ((torch.maximum(features.abs(), usual).double() * weights).norm(dim=1))[order]
    )
    spread = features.double().std(0).float()
    spread = torch.where(spread > 0, spread, 1.0)
    firsts, seconds = [order[:0]], [order[:0]]
    for step in range(1, min(NEIGHBOURS + 1, len(keys))):
        for near in torch.split((keys[step:] - keys[:-step] <= reach[step:]).nonzero()[:, 0], AT_ONCE):
            one, other = features[order[near]], features[order[near + step]]
            apart = (one - other).abs()
            size = torch.maximum(other.abs(), usual)
            shares = torch.where(apart > 0, apart / size, 0.0)  # nothing of nothing is nothing
            equal = shares.square().mean(1) <= ROUNDING**2
            near = near[equal & ((apart / spread).square().mean(1) <= NEAR**2)]
            firsts.append(near)
            seconds.append(near + step)
    first, second, group = torch.cat(firsts), torch.cat(seconds), torch.arange(len(keys))
    while not torch.equal(group[first], group[second]):
        # Marks travel both ways, until all of a group have its smallest.
        group = group.scatter_reduce(0, second, group[first], "amin")
        group = group.scatter_reduce(0, first, group[second], "amin")
        group = group[group]
    pairs, member = torch.unique(torch.stack([group, labels[order]], 1), dim=0, return_inverse=True)
    once = torch.full((len(pairs),), len(keys)).scatter_reduce(0, member, order, "amin")
    sizes, classes = torch.bincount(group), torch.bincount(pairs[:, 0])
    if int((classes > 1).sum()) > MOST_MIXED * int((sizes > 1).sum()):
        return torch.arange(len(keys))
    return once.sort()[0]


# Scores of inputs


def score_inputs(rates: Rates, densities: Densities, old: Tensor, points: Tensor, logits: Tensor) -> Scored:
    """Score inputs by some of the old classes.

    Args:
        rates: how scores are weighed.
        densities: those of the classes.
        old: [C] indices of the classes.
        points: [B,D+m]
        logits: [B,V] of the network, or of no columns.
    """
    places = densities.place(points)
    return _score(rates, densities.old(places)[:, old], densities.nobody(places), _columns(logits, old))


def score_kept(found: Statistics, old: Tensor, folds: list[Densities], points: list[Tensor]) -> Scored:
    """Score the kept examples by some of the old classes, each by what was made without its fold.

    Args:
        found: what is known of the old classes.
        old: [C] indices of the classes.
        folds: the densities without each fold.
        points: [n,D+m] of each fold, in the space that was made without it.
    """
    own, nobody = _densities_of_kept(len(found.kept.labels), folds, points)
    return _score(found.rates, own[:, old], nobody, _columns(found.kept.logits, old))


def _score(rates: Rates, own: Tensor, nobody: Tensor, logits: Tensor) -> Scored:
    """Score inputs from log densities [B,C] and [B], and logits [B,C] or of no columns."""
    own, logits = own * rates.density, logits * rates.logit
    known, answers = own.logsumexp(1), F.log_softmax(logits if logits.shape[1] else own, 1)
    lead = _lead(answers).clamp(max=rates.certainty)
    parts = [nobody * rates.density - known]
    if logits.shape[1]:  # how little the network answers at all, and how little its best answer leads
        parts += [-logits.logsumexp(1).clamp(max=rates.response), -lead]
    if logits.shape[1] == 1:  # there is nothing to lead
        parts[2] = parts[2] + rates.expected[2]
    both = torch.stack(parts, 1)
    return Scored(known, answers, lead, both, weigh_strangeness(rates, both))


def weigh_strangeness(rates: Rates, parts: Tensor) -> Tensor:
    """Return how little inputs are like those of old classes: the sum of its parts [B,3] or [B,1], in their units."""
    expected, deviations = (parts.new_tensor(each[: parts.shape[1]]) for each in (rates.expected, rates.deviations))
    return ((parts - expected) / deviations).sum(1)


def _columns(logits: Tensor, old: Tensor) -> Tensor:
    return logits[:, old].double() if logits.shape[1] else logits.double()


def _densities_of_kept(count: int, folds: list[Densities], points: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log densities of the kept examples under the old classes [M,C], and under one that is nobody's [M]."""
    own = points[0].new_empty(count, len(folds[0].counts))
    nobody = points[0].new_empty(count)
    for number, (densities, each) in enumerate(zip(folds, points, strict=True)):
        places = densities.place(each)
        own[number::FOLDS], nobody[number::FOLDS] = densities.old(places), densities.nobody(places)
    return own, nobody


def points_of_folds(found: Statistics) -> list[Tensor]:
    """Return the points [n,D+m] of the kept examples of each fold, in the space that was made without it."""
    return [model.points(found.kept.features[number::FOLDS]) for number, model in enumerate(found.folds)]


def _lead(answers: Tensor) -> Tensor:
    """Return by how much the best answer leads; there is nothing to lead where there is one class."""
    if answers.shape[1] == 1:
        return answers.new_zeros(len(answers))
    best, second = answers.topk(2, 1).values.unbind(1)
    return best - second


# Choices


def _choose_shrinkage(
    features: Tensor, labels: Tensor, classes: int, axes: int, fold: Tensor, kept: Kept
) -> tuple[float, float, list[Model]]:
    """Return the shrinkage that is best at telling the old classes, the scale of its densities, and models of folds."""
    choices, points = [], []
    for number in range(FOLDS):
        rest = fold != number
        if int(torch.bincount(labels[rest]).max()) < 2:  # nothing would tell how a class spreads
            rest = torch.ones_like(rest)
        choices.append(fit_models(features[rest], labels[rest], classes, axes, SHRINKAGES))
        points.append(choices[-1][0].points(kept.features[number::FOLDS]))
    tried = []
    for shrinkage, folds in zip(SHRINKAGES, zip(*choices, strict=True), strict=True):
        own, _ = _densities_of_kept(len(kept.labels), [model.densities for model in folds], points)
        scale = fit_scale(own, kept.labels, kept.weights)
        loss = (kept.weights * F.cross_entropy(own * scale, kept.labels, reduction="none")).sum()
        tried.append((float(loss), shrinkage, scale, list(folds)))
    return min(tried, key=lambda one: one[0])[1:]


def fit_scale(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Return the factor that makes scores the best log probabilities, by bisecting the slope of the loss.

    Never more than 1 where hardly any of them is wrong: no factor is too great for answers that are all right, as those
    of a network to its own training set.
    """
    some = slice(None, None, -(-scores.numel() // MOST_SCORES))
    scores, labels, weights = scores[some], labels[some], weights[some]
    wrong = int((scores.argmax(1) != labels).sum())
    low, high = math.log(1e-3), math.log(MOST_SCALE) if wrong >= FEWEST_WRONG else 0.0
    right = scores.gather(1, labels[:, None])[:, 0]
    for _ in range(STEPS):
        middle = (low + high) / 2
        expected = ((scores * math.exp(middle)).softmax(1) * scores).sum(1)
        if float((weights * (expected - right)).sum()) < 0:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _fit_logit_scale(logits: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Return the factor of a network's logits: what `fit_scale` says, but more where they are timid and hardly wrong.

    There they grow until they are as sure of their best answers, in the mean, as these are right.
    """
    scale = fit_scale(logits, labels, weights)
    wrong = int((logits.argmax(1) != labels).sum())
    if wrong >= FEWEST_WRONG:
        return scale
    right = 1 - (wrong + 1) / (len(labels) + 2)
    low, high = math.log(scale), math.log(MOST_SCALE)
    for _ in range(STEPS):
        middle = (low + high) / 2
        sure = (logits * math.exp(middle)).softmax(1).amax(1)
        if float((weights * sure).sum() / weights.sum()) < right:
            low = middle
        else:
            high = middle
    return math.exp(low)


def quantile(numbers: Tensor, weights: Tensor, share: float) -> Tensor:
    """Return the least number that has at least this share of the weight at or below it."""
    ordered, order = numbers.sort()
    below = weights[order].cumsum(0)
    place = int(torch.searchsorted(below, share * below[-1]))
    return ordered[min(place, len(ordered) - 1)]


def tail_quantile(numbers: Tensor, weights: Tensor, share: float) -> Tensor:
    """Return the number that a share of the weight lies above.

    A share of one in a hundred of a hundred numbers is one number, by chance any. Where the share is of few of them,
    their distribution is taken to fall off exponentially, which all of the highest tell.
    """
    if share <= 0:
        return numbers.max()
    if share * len(numbers) >= ENOUGH:
        return quantile(numbers, weights, 1 - share)
    ordered, order = numbers.sort(descending=True)
    above = weights[order].cumsum(0) / weights.sum()
    top = max(TAIL, min(FEWEST / len(numbers), 0.2), 2 * share)
    count = min(max(int((above <= top).sum()), 5), len(ordered) - 1)
    if not count:
        return ordered[0]
    heights = ordered[:count] - ordered[count]
    mean = (weights[order[:count]] * heights).sum() / weights[order[:count]].sum()
    # The mean is an estimate: the next number exceeds count * mean * ((a / share) ** (1 / count) - 1) in that share.
    found = ordered[count] + mean * count * (torch.pow(above[count - 1] / share, 1 / count) - 1)
    # The highest of n numbers is exceeded by the next in one case of n + 1.
    return found.clamp(max=ordered[0]) if share * (len(numbers) + 1) >= 0.9 else found


# Classes that are left out and learnt again


class Trial(NamedTuple):
    """The results of a fold's kept examples once a class was left out and learnt again from a few others."""

    left: int  # the class
    shots: int
    parts: Tensor  # [m,3] of the log odds of the class: by densities, by a regression, and the lead of the best answer
    odds: Tensor  # [m]: those log odds
    best: Tensor  # [m]: log probability of the best other answer
    right: Tensor  # [m] bool: whether that answer was right
    own: Tensor  # [m] bool: the class's own examples
    strangeness: Tensor  # [m]
    nobody: Tensor  # [m]: scaled log odds of a class that nobody has seen against the other old ones
    weights: Tensor  # [m]


class Trials(NamedTuple):
    """What all of them say of inputs to come, as shares."""

    right: float  # share of old answers that are right
    unknown: float  # share of old inputs that are called unknown
    told: float  # share of the inputs of a class nobody learnt that are called unknown
    lost: tuple[float, ...]  # share of old answers that a class costs, for each of `SHOTS`
    new: tuple[float, ...]  # share of the class's inputs that are answered as it, for each of `SHOTS`


def _learn_left_out(
    found: Statistics, features: Tensor, labels: Tensor, fold: Tensor, strangeness: Tensor, right: Tensor
) -> tuple[Statistics, Trials]:
    """Leave some classes out, learn each again from a few examples, and choose what depends on that.

    Args:
        found: what is known of the old classes.
        features: [N,d]
        labels: [N]
        fold: [N], -1 for those that are in none.
        strangeness: [M] of the kept examples.
        right: [M] bool: whether they are answered rightly.
    """
    tried = list(_try_classes(found, features, labels, fold))
    trials: list[Trial] = []
    if tried:
        mixtures = MIXTURES_OF_FEW if found.whole.space.axes.shape[1] <= FEW_AXES else (MIXTURE,)
        mixed = [_mix_odds(found, tried, *mixture) for mixture in mixtures]
        found, trials = mixed[0] if len(mixed) == 1 else max(mixed, key=lambda one: _count_wins(*one))
        first = [one for one in trials if one.shots == trials[0].shots]
        slope, offset = _fit_logistic(
            torch.cat([one.strangeness for one in first]) - found.rates.threshold,
            torch.cat([one.own for one in first]),
            torch.cat([one.weights for one in first]),
            min(max(found.rates.unknown_rate, 1e-3), 0.5),
        )
        found = found.with_rates(slope=slope, offset=offset)
        lacks: list[Lacks] = []
        for shots in SHOTS:
            some = [one for one in trials if one.shots == shots]
            # Where no class has as many examples, what fewer gave.
            lacks.append(_fit_lacks(found.rates, some) if some else lacks[-1])
        found = found.with_rates(lacks=tuple(lacks))
    return found, _sum_up(found, trials, strangeness, right)


def _mix_odds(
    found: Statistics, tried: list[Trial], separation: float, confidence: float
) -> tuple[Statistics, list[Trial]]:
    """Return the rates and the trials with log odds of which each part counts so much."""
    factors = tried[0].parts.new_tensor([1.0, separation, -confidence])
    odds = [one.parts @ factors for one in tried]
    slope, offset = _fit_logistic(
        torch.cat(odds),
        torch.cat([one.own for one in tried]),
        torch.cat([one.weights for one in tried]),
        1 / len(found.whole.densities.counts),
    )
    found = found.with_rates(separation=separation, confidence=confidence, odds=slope, least_evidence=-offset - SLACK)
    return found, [one._replace(odds=slope * each) for one, each in zip(tried, odds, strict=True)]


def _count_wins(found: Statistics, trials: list[Trial]) -> float:
    """Return the mean share of a class's inputs that are answered as it."""
    _, wins, _ = _judge(found.rates, trials)
    return _mean([_mean(each) for each in wins])


def _left_out(classes: int) -> list[int]:
    """Return the classes that are left out and learnt again."""
    return torch.linspace(0, classes - 1, min(classes, MOST_LEFT_OUT), dtype=torch.float64).round().long().tolist()


def _try_classes(found: Statistics, features: Tensor, labels: Tensor, folds: Tensor) -> Iterator[Trial]:
    """Yield the trials of each fold.

    Args:
        found: what is known of the old classes.
        features: [N,d]
        labels: [N]
        folds: [N], -1 for those that are in none.
    """
    kept, classes = found.kept, len(found.whole.densities.counts)
    fold = fold_of(len(kept.labels))
    for one in _left_out(classes):
        members, left = kept.labels == one, max(MADE_AGAIN // classes, 2)
        for number in range(FOLDS):
            here = fold == number
            taught = (members & ~here).nonzero()[:, 0]
            if left and len(taught) and bool((members & here).any()) and bool((~members & here).any()):
                left -= 1
                # From another place each time: they are not all learnt from the same examples.
                taught = taught.roll(-number * len(taught) // FOLDS)
                rest = (folds != number) & (labels != one)
                model = _make_again(found, found.folds[number], features, labels, rest)
                yield from _try_class(found, model, here, one, [taught[:n] for n in SHOTS if len(taught) >= n])


def _make_again(found: Statistics, model: Model, features: Tensor, labels: Tensor, rest: Tensor) -> Model:
    """Return the model of a fold, made without a class too; the same one where the rest is too few.

    Args:
        found: what is known of the old classes.
        model: the one with the class.
        features: [N,d]
        labels: [N]
        rest: [N] bool, the examples of the other classes that are not of the fold.
    """
    axes, counts = found.whole.space.axes.shape[1], torch.bincount(labels[rest])
    if axes > int(rest.sum()) or int(counts.max()) < 2:
        return model
    classes, shrinkage = len(found.whole.densities.counts), found.rates.shrinkage
    again = fit_models(features[rest], labels[rest], classes, axes, (shrinkage,))[0]
    if int((counts > 0).sum()) > 1:
        return again
    # One class alone does not tell how far classes lie apart: as far as the two did, in no direction.
    spread = model.densities.spread.mean().expand_as(again.densities.spread)
    return again._replace(densities=again.densities._replace(spread=spread))


def _try_class(found: Statistics, model: Model, here: Tensor, one: int, tries: list[Tensor]) -> Iterator[Trial]:
    """Yield the trials of a class in a fold.

    Args:
        found: what is known of the old classes.
        model: made without the fold, and without the class.
        here: [M] bool, the kept examples of the fold.
        one: the class.
        tries: of each trial, the places [n] of the examples that it is learnt from.
    """
    kept, densities = found.kept, model.densities
    points = model.points(kept.features)
    features, places = model.scale_points(points), densities.place(points)
    columns = [(taught, ~here & (kept.labels != one)) for taught in tries]
    rows = score_rows(features[here], separate(features, *_make_columns(kept.weights, columns), model.outside))
    others = (torch.arange(len(densities.counts)) != one).nonzero()[:, 0]
    own, nobody = densities.old(places[here])[:, others], densities.nobody(places[here])
    scored = _score(found.rates, own, nobody, _columns(kept.logits[here], others))
    best, names = scored.answers.max(1)
    for taught, row in zip(tries, rows.T, strict=True):
        few = densities.gaussians(own.new_tensor([float(len(taught))]), places[taught].mean(0, keepdim=True))
        dense = found.rates.density * few.log_densities(places[here])[:, 0] - scored.known
        yield Trial(
            one,
            len(taught),
            torch.stack([dense, row, scored.lead], 1),
            dense,
            best,
            others[names] == kept.labels[here],
            kept.labels[here] == one,
            scored.strangeness,
            scored.strange_parts[:, 0],
            kept.weights[here],
        )


def weigh(rates: Rates, densities: Tensor, rows: Tensor, scored: Scored) -> tuple[Tensor, Tensor]:
    """Return the log odds [B,K] of new classes against the old ones, and what inputs lack of each, [B,K].

    What they lack is to be added to its log odds so that they are not called unknown.

    Args:
        rates: how scores are weighed.
        densities: [B,K] log densities of the inputs under the new classes.
        rows: [B,K] log odds by the regressions.
        scored: the inputs as the old classes have them.
    """
    against = scored.known + rates.confidence * scored.lead
    likeness = rates.density * densities + rates.separation * rows
    odds = rates.odds * (likeness - against[:, None])
    nobody = scored.known + scored.strange_parts[:, 0]
    return odds, _join_lacks(rates, find_doubt(rates, scored.strangeness)[:, None] - odds, nobody[:, None] - likeness)


def _join_lacks(rates: Rates, through_old: Tensor, directly: Tensor) -> Tensor:
    """Return what inputs lack, from what they lack by how they compare with the old classes, and without these.

    Args:
        rates: how scores are weighed.
        through_old: the log odds of the unknown against the old classes, less those of new classes against them.
        directly: those of a class that nobody has seen against new classes, not scaled yet.
    """
    return rates.through_old * through_old + (1 - rates.through_old) * rates.odds * directly


def _make_columns(weights: Tensor, cases: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the weights [M,K] and the new ones [M,K] of regressions of kept examples against others."""
    shares, new = weights.new_zeros(len(weights), len(cases)), torch.zeros(len(weights), len(cases), dtype=torch.bool)
    for case, (taught, others) in enumerate(cases):
        total = (weights * others).sum().clamp(min=1e-30)
        shares[:, case] = (1 - SHARE) * weights * others / total
        shares[taught, case] = SHARE / len(taught)
        new[taught, case] = True
    return shares, new


def _fit_logistic(scores: Tensor, positive: Tensor, weights: Tensor, share: float) -> tuple[float, float]:
    """Return slope and offset of the log odds in a score, where positive ones have a share of the weight.

    By Newton's method on the mean log loss; a slight penalty keeps the slope finite where scores part them wholly.
    """
    target = positive.double()
    of_positive, of_others = (weights * target).sum(), (weights * (1 - target)).sum()
    weights = weights * torch.where(positive, share / of_positive, (1 - share) / of_others)
    spread = scores.std(correction=0).clamp(min=1e-9)
    inputs = torch.stack([scores / spread, torch.ones_like(scores)], 1)
    found, penalty = inputs.new_zeros(2), 1e-4 * torch.eye(2, dtype=torch.float64)
    for _ in range(STEPS):
        chance = (inputs @ found).sigmoid()
        slope = inputs.T @ (weights * (chance - target)) + penalty @ found
        curvature = (inputs * (weights * chance * (1 - chance))[:, None]).T @ inputs + penalty
        step = torch.linalg.solve(curvature, slope)
        found = found - step / step.norm().clamp(min=1)  # at most one at a time: far away the curvature misleads
    return max(float(found[0] / spread), 1e-3), float(found[1])


def _lacks_of(rates: Rates, trial: Trial) -> Tensor:
    """Return what a trial's inputs lack of its class, [m]."""
    dense, row, _ = trial.parts.unbind(1)
    through_old = find_doubt(rates, trial.strangeness) - trial.odds
    return _join_lacks(rates, through_old, trial.nobody - dense - rates.separation * row)


def _fit_lacks(rates: Rates, trials: list[Trial]) -> Lacks:
    groups = [
        torch.cat([_lacks_of(rates, one)[one.own] for one in trials if one.left == left])
        for left in dict.fromkeys(one.left for one in trials)
    ]
    means = torch.stack([each.mean() for each in groups])
    rest = torch.cat([each - each.mean() for each in groups])
    between, within = (max(float(each.std(correction=0)), 1e-3) for each in (means, rest))
    tail = float(quantile(rest, torch.ones_like(rest), 1 - rates.unknown_rate))
    return Lacks(float(means.mean()), between, within, tail / within)


def find_doubt(rates: Rates, strangeness: Tensor) -> Tensor:
    """Return the log odds that inputs are unknown, from their threshold on."""
    return rates.slope * (strangeness - rates.threshold)


def _sum_up(found: Statistics, trials: list[Trial], strangeness: Tensor, right: Tensor) -> Trials:
    """Return what is to be expected; each fold is judged by thresholds from the others."""
    weights, rates = found.kept.weights, found.rates
    flagged, fold = torch.zeros_like(right), fold_of(len(right))
    for number in range(min(FOLDS, len(fold))):
        rest = fold != number
        threshold = tail_quantile(strangeness[rest], weights[rest], rates.unknown_rate)
        flagged[~rest] = strangeness[~rest] > threshold
    costs, wins, told = _judge(rates, trials)
    lost, new = (tuple(_mean(each) for each in shares) for shares in (costs, wins))
    return Trials(_share(right, weights), _share(flagged, weights), _mean(told), lost, new)


def _judge(rates: Rates, trials: list[Trial]) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Return what each trial costs and wins, for each of `SHOTS`, and what it has that is called unknown; as shares.

    Each is judged by the evidence that the other folds of its class say a class needs.
    """
    costs: list[list[float]] = [[] for _ in SHOTS]
    wins: list[list[float]] = [[] for _ in SHOTS]
    told = []
    for place, shots in enumerate(SHOTS):
        for left in dict.fromkeys(one.left for one in trials):
            folds = [one for one in trials if one.shots == shots and one.left == left]
            for one in folds:
                elsewhere = [each for each in folds if each is not one]
                if elsewhere:
                    gains, others = one.odds - one.best, ~one.own
                    known = torch.cat([~each.own for each in elsewhere])
                    evidence = choose_evidence(
                        rates,
                        torch.cat([each.odds - each.best for each in elsewhere])[known],
                        torch.cat([each.right for each in elsewhere])[known],
                        torch.cat([each.weights for each in elsewhere])[known],
                    )
                    costs[place].append(_share((gains > evidence)[others] & one.right[others], one.weights[others]))
                    wins[place].append(_share((gains > evidence)[one.own], one.weights[one.own]))
                told.append(_share((one.strangeness > rates.threshold)[one.own], one.weights[one.own]))
    return costs, wins, told


def choose_evidence(rates: Rates, gains: Tensor, right: Tensor, weights: Tensor) -> float:
    """Return the log odds that new classes need, so that they cost no more old answers than they may.

    Args:
        rates: how scores are weighed.
        gains: [M] by how much the best new class leads the best old one.
        right: [M] bool: whether that one is right.
        weights: [M]
    """
    gains = torch.where(right, gains, gains.min())
    # No share can be told that is less than half of one of them.
    share = max(rates.old_loss, 0.5 / len(gains)) if rates.old_loss > 0 else 0.0
    return max(float(tail_quantile(gains, weights, share)), rates.least_evidence)


def _share(chosen: Tensor, weights: Tensor) -> float:
    return float((weights * chosen).sum() / weights.sum().clamp(min=1e-30))


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
