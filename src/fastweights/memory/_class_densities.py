"""Gaussian densities of classes in a network's features, which say how well an example fits a class of few examples.

The classes share one covariance, and their means come from a Gaussian too (the two-covariance model of probabilistic
linear discriminant analysis, Ioffe 2006). So the density of a class is known after any number n of examples::

    mean m_c ~ N(0, s),   example of class c ~ N(m_c, 1)           in coordinates in which both covariances are diagonal
    p(z | n examples of mean u) = N(z;  g u,  1 + s / (n s + 1)),  g = n s / (n s + 1)

With n = 0 it is the density of a class that nobody has seen, which is how unknown inputs are told.

Features are taken as the direction from the centre of the classes and the logarithm of the distance: directions are
closer to Gaussian than features are, and an affine map of the rest changes nothing.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SHOTS = 5  # examples of a class that is left out to see how many old examples it would take
MOST_LEFT_OUT = 30  # classes
# The share of old examples that a class which is left out may take. One that the network never saw takes more: it lies
# closer to the others than those that it has learnt to keep apart.
MOST_LOST = 0.015
# The least that an input's densities must say for a new class, and how much the network's own certainty counts against
# it. Chosen on MNIST, Reuters and Omniglot, where the examples that a network was trained on are too sure to tell.
LEAST_EVIDENCE = -2.6
CERTAINTY = 0.5
# The share of old examples that are less certain than any input may count as: the network is surer still of inputs that
# are out of all proportion, such as pixels from 0 to 255 where it has learnt 0 to 1.
MOST_CERTAIN = 0.9
# How far covariances are drawn towards a sphere: that of examples at least, because a class that the network never saw
# spreads differently from those it did; that of class means, because such a class may lie where no class has been.
LEAST_SHRINKAGE = 0.2
MEANS_SHRINKAGE = 0.5
STEPS = 40  # of a bisection
BLOCK = 256  # examples whose directions stay in a processor's cache


class Densities(NamedTuple):
    """The densities of the old classes and how to weigh them, in float64."""

    center: Tensor  # [d]
    distance: Tensor  # []: mean distance of an example from the centre
    origin: Tensor  # [d+1]: mean of the class means
    rotation: Tensor  # [d+1,d+1]
    spread: Tensor  # [d+1]: s, the variance of class means where that of examples is 1
    counts: Tensor  # [C]: n of each class
    means: Tensor  # [C,d+1]: u of each class
    density_scale: Tensor  # []: by which log densities are multiplied, because features are not quite Gaussian
    logit_scale: Tensor  # []: by which the network's logits are multiplied
    certainty: Tensor  # []: the greatest lead of the best answer that counts
    evidence: Tensor  # []: log odds that a new class needs
    threshold: Tensor  # []: score above which an input is unknown
    # []: how much more than by their log odds new classes count against the unknown, so that of their inputs no greater
    # share is called unknown than of those of old classes.
    familiarity: Tensor


class Gaussians(NamedTuple):
    """The densities of some classes, worked out so that a batch of places costs two products."""

    precision: Tensor  # [d+1,C]: inverse variances
    pull: Tensor  # [d+1,C]: centres times those
    constant: Tensor  # [C]

    def log_densities(self, places: Tensor) -> Tensor:
        """Return the log density of each place under each class, up to one constant, [B,d+1] -> [B,C]."""
        return places @ self.pull - 0.5 * (places.square() @ self.precision + self.constant)


class Scores(NamedTuple):
    """How inputs fit the classes: all in the units of log odds against the old classes together."""

    old: Tensor  # [B,C]: log probabilities among the old classes
    new: Tensor  # [B,K]: log odds of each new class
    unknown: Tensor  # [B]: log odds of a class that nobody has seen against all others


def fit_densities(features: Tensor, labels: Tensor, logits: Tensor | None, unknown_rate: float) -> Densities:
    """Return the densities of the old classes, with every rate chosen on examples that are left out in turn.

    Args:
        features: [N,d]
        labels: [N], at least one example of each of C classes, and more examples than classes.
        logits: [N,C] of the network, or None where there is no output layer.
        unknown_rate: share of old examples that may be called unknown.

    Raises:
        ValueError: the examples of each class have equal features.
    """
    features, classes = features.double(), int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=classes).double()
    class_means = _class_means(features, labels, counts)
    center = class_means.mean(0)
    distance = (features - center).norm(dim=1).mean().clamp(min=torch.finfo(torch.float32).tiny)
    points = _directions(features, center, distance)
    class_means = _class_means(points, labels, counts)
    # A class of many examples counts as much as the median one: it must not set the covariance alone.
    weights = (counts.median() / counts).clamp(max=1)[labels]
    within, freedom, shrinkage = _covariance(points - class_means[labels], weights, labels, counts)
    if within.trace() < 1e-12:  # places are of length one or so
        raise ValueError("the examples of each class have equal features: they do not tell how a class spreads")
    root = torch.linalg.cholesky(within)
    origin = class_means.mean(0)
    whitened = torch.linalg.solve_triangular(root, (class_means - origin).T, upper=False).T
    between = whitened.T @ whitened / (classes - 1)
    between = (1 - MEANS_SHRINKAGE) * between + MEANS_SHRINKAGE * _sphere(between)
    variance, axes = torch.linalg.eigh(between)
    rotation = torch.linalg.solve_triangular(root.T, axes, upper=True)
    spread = (variance - (1 / counts).mean()).clamp(min=1e-3)  # less what the means owe to having few examples
    means = (class_means - origin) @ rotation

    places = (points - origin) @ rotation
    left_out = _leave_one_out(spread, counts, means, places, labels, weights * (1 - shrinkage) / freedom)
    density_scale = _fit_scale(left_out, labels, weights)
    own = left_out * density_scale
    nobody = density_scale * _gaussians(spread, counts.new_zeros(1), means.new_zeros(1, len(spread))).log_densities(
        places
    )
    if logits is None:
        logit_scale, answers = density_scale.clone(), own
    else:
        logit_scale = _fit_scale(logits.double(), labels, weights)
        answers = logits.double() * logit_scale
    certainty = _quantile(_lead(answers), weights, MOST_CERTAIN)
    threshold = _quantile(_odds(nobody, own, answers, certainty)[:, 0], weights, 1 - unknown_rate)
    evidence, familiarity = threshold.new_tensor(LEAST_EVIDENCE), threshold.new_zeros(())
    if classes > 2:  # of two, none can be left out
        # The same noise always, drawn before the rotation: its axes and signs are arbitrary where spreads are equal.
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(classes, len(spread), generator=generator, dtype=torch.float64) @ axes / math.sqrt(SHOTS)
        few = _gaussians(spread, counts.new_full((classes,), SHOTS), means + noise)
        learnt = density_scale * few.log_densities(places)
        gains, gained, strange, members = _leave_classes_out(learnt, nobody, own, answers, certainty, labels, weights)
        evidence = _quantile(gains, gained, 1 - MOST_LOST).clamp(min=LEAST_EVIDENCE)
        familiarity = (_quantile(strange, members, 1 - unknown_rate) - threshold).clamp(min=0)
    return Densities(
        center,
        distance,
        origin,
        rotation,
        spread,
        counts,
        means,
        density_scale,
        logit_scale,
        certainty,
        evidence,
        threshold,
        familiarity,
    )


def score(found: Densities, gaussians: Gaussians, features: Tensor, logits: Tensor | None, old: int) -> Scores:
    """Score inputs for classes of which the first `old` are old.

    Args:
        found: the densities of the old classes.
        gaussians: those of all classes, made by `make_gaussians`.
        features: [B,d]
        logits: [B,old] of the network, or None.
        old: how many of the classes are the network's own.
    """
    densities = gaussians.log_densities(place(found, features)) * found.density_scale
    own = densities[:, :old]
    answers = own if logits is None else logits.double() * found.logit_scale
    odds = _odds(densities[:, old:], own, answers, found.certainty)
    known = torch.cat([odds.new_zeros(len(odds), 1), odds[:, :-1] + found.familiarity], 1).logsumexp(1)
    return Scores(F.log_softmax(answers, 1), odds[:, :-1] - found.evidence, odds[:, -1] - known)


def make_gaussians(found: Densities, counts: Tensor, means: Tensor) -> Gaussians:
    """Return the densities of classes, and behind them that of a class of which there is no example.

    Args:
        found: the densities of the old classes.
        counts: [C] examples of each class.
        means: [C,d+1] of their places.
    """
    with_nobody = torch.cat([counts, counts.new_zeros(1)]), torch.cat([means, means.new_zeros(1, means.shape[1])])
    return _gaussians(found.spread, *with_nobody)


def place(found: Densities, features: Tensor) -> Tensor:
    """Return where features lie in the coordinates of the densities, [...,d] -> [...,d+1] float64."""
    return (_directions(features.double(), found.center, found.distance) - found.origin) @ found.rotation


def sum_places(found: Densities, features: Tensor, index: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return how many examples of each class there are, and the sums of their places, [n,d] -> [C] and [C,d+1].

    The sums are rotated, and not each example: that is what takes long.
    """
    counts = torch.bincount(index, minlength=classes)
    sums = found.origin.new_zeros(classes, len(found.origin))
    for first in range(0, len(index), BLOCK):
        block = slice(first, first + BLOCK)
        sums.index_add_(0, index[block], _directions(features[block].double(), found.center, found.distance))
    return counts, (sums - counts[:, None] * found.origin) @ found.rotation


def _directions(features: Tensor, center: Tensor, distance: Tensor) -> Tensor:
    away = features - center
    length = away.norm(dim=-1, keepdim=True)
    return torch.cat([away / length.clamp(min=1e-12 * distance), torch.log1p(length / distance)], -1)


def _class_means(points: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    sums = points.new_zeros(len(counts), points.shape[1]).index_add_(0, labels, points)
    return sums / counts[:, None]


def _covariance(residuals: Tensor, weights: Tensor, labels: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the covariance within classes, its degrees of freedom, and how far it was shrunk towards a multiple of 1.

    The shrinkage is the oracle approximating one (Chen et al. 2010, equation 23), or `LEAST_SHRINKAGE` if that is more.
    """
    size = residuals.shape[1]
    freedom = (weights * (1 - 1 / counts[labels])).sum()
    sample = (residuals * weights[:, None]).T @ residuals / freedom
    trace, squares = sample.trace(), sample.square().sum()
    numerator = (1 - 2 / size) * squares + trace**2
    shrinkage = (numerator / ((freedom + 1 - 2 / size) * (squares - trace**2 / size)).clamp(min=1e-300)).clamp(
        LEAST_SHRINKAGE, 1
    )
    return (1 - shrinkage) * sample + (shrinkage + 1e-9) * _sphere(sample), freedom, shrinkage


def _sphere(covariance: Tensor) -> Tensor:
    """Return the multiple of the identity that has the same trace."""
    size = len(covariance)
    return covariance.trace() / size * torch.eye(size, dtype=covariance.dtype, device=covariance.device)


def _gaussians(spread: Tensor, counts: Tensor, means: Tensor) -> Gaussians:
    precision, center, logarithm = _predict(spread, counts, means)
    return Gaussians(precision.T, (center * precision).T, (center.square() * precision).sum(1) + logarithm)


def _predict(spread: Tensor, counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inverse variances and the centres [...,d+1] of classes, and their log determinants [...]."""
    total = counts[..., None] * spread
    variance = 1 + spread / (total + 1)
    return 1 / variance, total / (total + 1) * means, variance.log().sum(-1)


def _leave_one_out(
    spread: Tensor, counts: Tensor, means: Tensor, places: Tensor, labels: Tensor, shares: Tensor
) -> Tensor:
    """Return the log densities of the examples, each as if it had not been there, [N,d+1] -> [N,C].

    Without example x of a class of n, the mean of its class is (n u - x) / (n - 1), and the covariance of all classes
    has lost share * n / (n - 1) (x - u)(x - u)', whose inverse follows by Sherman and Morrison.
    """
    n = counts[labels]
    fewer = (n - 1).clamp(min=0)
    residuals = places - means[labels]
    shares = shares * n / fewer.clamp(min=1)
    precision, center, logarithm = _predict(spread, counts, means)
    lengths = residuals.square() @ precision.T
    products = (residuals * places) @ precision.T - residuals @ (center * precision).T
    squares = places.square() @ precision.T - 2 * places @ (center * precision).T + (center.square() * precision).sum(1)
    own_mean = torch.where(fewer[:, None] > 0, (n[:, None] * means[labels] - places) / fewer.clamp(min=1)[:, None], 0.0)
    own_precision, own_center, own_logarithm = _predict(spread, fewer, own_mean)
    logarithm = logarithm.expand(len(places), -1).clone()
    away = places - own_center
    for all_classes, own in (
        (lengths, (residuals.square() * own_precision).sum(1)),
        (products, (residuals * away * own_precision).sum(1)),
        (squares, (away.square() * own_precision).sum(1)),
        (logarithm, own_logarithm),
    ):
        all_classes.scatter_(1, labels[:, None], own[:, None])
    rest = (1 - shares[:, None] * lengths).clamp(min=0.05)  # what is left of the variance along the residual
    return -0.5 * (squares + shares[:, None] * products.square() / rest + logarithm + rest.log())


def _fit_scale(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the factor of at most 1 that makes scores the best log probabilities, by bisecting the slope of the loss.

    Never more than 1: examples that a network was trained on would make it surer than it is of others.
    """
    low, high = math.log(1e-3), 0.0
    right = scores.gather(1, labels[:, None])[:, 0]
    for _ in range(STEPS):
        middle = (low + high) / 2
        expected = ((scores * math.exp(middle)).softmax(1) * scores).sum(1)
        if float((weights * (expected - right)).sum()) < 0:
            low = middle
        else:
            high = middle
    return scores.new_tensor(math.exp((low + high) / 2))


def _odds(densities: Tensor, own: Tensor, answers: Tensor, certainty: Tensor) -> Tensor:
    """Return the log odds of classes against the old ones: by the densities, less the network's certainty.

    Args:
        densities: [B,K] log densities of the classes in question.
        own: [B,C] log densities of the old classes.
        answers: [B,C] logits; all three are scaled.
        certainty: [], the greatest that counts.
    """
    return densities - own.logsumexp(1, keepdim=True) - CERTAINTY * _lead(answers).clamp(max=certainty)[:, None]


def _lead(answers: Tensor) -> Tensor:
    """Return by how much the best answer leads; there is nothing to lead where there is one class."""
    if answers.shape[1] == 1:
        return answers.new_zeros(len(answers))
    best, second = answers.topk(2, 1).values.unbind(1)
    return best - second


def _leave_classes_out(
    learnt: Tensor,
    nobody: Tensor,
    own: Tensor,
    answers: Tensor,
    certainty: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leave some classes out, one at a time, and learn each anew from `SHOTS` examples.

    Args:
        learnt: [N,C] log densities of the examples under each class learnt anew, scaled like the three that follow.
        nobody: [N,1] under a class that nobody has seen.
        own: [N,C] under the old classes.
        answers: [N,C] logits.
        certainty: [], the greatest that counts.
        labels: [N]
        weights: [N]

    Returns:
        By how much the class would win over the best answer for each example of the others, and the examples' weights;
        by how much a class that nobody has seen would win over it for each of its own examples, and their weights.
    """
    classes = learnt.shape[1]
    chosen = torch.linspace(0, classes - 1, min(classes, MOST_LEFT_OUT), dtype=torch.float64).round().long().tolist()
    gains, strange, gained, members = [], [], [], []
    for one in chosen:
        others, rows = torch.arange(classes) != one, labels != one
        rest = answers[rows][:, others]
        odds = _odds(learnt[rows, one : one + 1], own[rows][:, others], rest, certainty)[:, 0]
        gains.append(odds - F.log_softmax(rest, 1).amax(1))
        strange.append((nobody[:, 0] - learnt[:, one])[~rows])
        gained.append(weights[rows])
        members.append(weights[~rows])
    return torch.cat(gains), torch.cat(gained), torch.cat(strange), torch.cat(members)


def _quantile(numbers: Tensor, weights: Tensor, share: float) -> Tensor:
    """Return the least number that has at least this share of the weight at or below it."""
    ordered, order = numbers.sort()
    below = weights[order].cumsum(0)
    place = int(torch.searchsorted(below, share * below[-1]))
    return ordered[min(place, len(ordered) - 1)]
