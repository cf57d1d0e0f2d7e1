"""Gaussian densities of classes in a network's features, which say how well an example fits a class of few examples.

The classes share one covariance, and their means come from a Gaussian too (the two-covariance model of probabilistic
linear discriminant analysis, Ioffe 2006). So the density of a class is known after any number n of examples::

    mean m_c ~ N(0, s),   example of class c ~ N(m_c, 1)           in coordinates in which both covariances are diagonal
    p(z | n examples of mean u) = N(z;  g u,  1 + s / (n s + 1)),  g = n s / (n s + 1)

With n = 0 it is the density of a class that nobody has seen.

Features are taken on as many of their principal axes as the examples can carry, as the direction from the centre of the
classes and the logarithm of the distance: directions are closer to Gaussian than features are. What lies outside the
axes has no density. It is kept beside the points, because a class that the network never saw may differ just there.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# A covariance of more axes than this is no better, and costs more. A smaller set of examples carries fewer: with as
# many axes as examples, an example that took part in the covariance looks far closer than a new one.
MOST_AXES = 256
EXAMPLES_AN_AXIS = 3
FEWEST_AXES = 32  # where there are twice as many examples
AXES_FROM = 2048  # examples that the axes are computed from, at most
MOST_OUTSIDE = 256  # numbers that say where features lie outside the axes, at most
# How far the covariance of class means is drawn towards a sphere: a class that the network never saw may lie where no
# class has been.
MEANS_SHRINKAGE = 0.8


class Space(NamedTuple):
    """The points of features: their direction from the centre on the axes, the logarithm of the distance, and the rest.

    The rest is what lies outside the axes, in units of the distance on them, but no longer than one.
    """

    center: Tensor  # [d] float32: mean of the class means
    axes: Tensor  # [d,r] float32, orthogonal, in units of the features
    outside: Tensor  # [d,m] float32: directions orthogonal to the axes; all of them, or random ones
    distance: Tensor  # [] float64: mean distance of an example from the centre, on the axes

    def points(self, features: Tensor) -> Tensor:
        """Return the points of features, [...,d] float32 -> [...,r+1+m] float64."""
        away = features - self.center
        axes, outside = (away @ self.axes).double(), (away @ self.outside).double()
        length = axes.norm(dim=-1, keepdim=True)
        safe = length.clamp(min=1e-12 * self.distance)
        rest = outside / torch.maximum(safe, outside.norm(dim=-1, keepdim=True))
        return torch.cat([axes / safe, torch.log1p(length / self.distance), rest], -1)


class Gaussians(NamedTuple):
    """The densities of some classes, worked out so that a batch of places costs two products."""

    precision: Tensor  # [D,C]: inverse variances
    pull: Tensor  # [D,C]: centres times those
    constant: Tensor  # [C]

    def log_densities(self, places: Tensor) -> Tensor:
        """Return the log density of each place under each class, up to one constant, [B,D] -> [B,C]."""
        return places @ self.pull - 0.5 * (places.square() @ self.precision + self.constant)


class Densities(NamedTuple):
    """What is known of the covariances and of the old classes, in coordinates in which both covariances are diagonal.

    A place is a point in these coordinates, [D] with D = r + 1. All is float64.
    """

    origin: Tensor  # [D]: mean of the class means
    rotation: Tensor  # [D,D]
    spread: Tensor  # [D]: s, the variance of class means where that of examples is 1
    counts: Tensor  # [C]: n of each class
    means: Tensor  # [C,D]: u of each class

    def place(self, points: Tensor) -> Tensor:
        """Return where points lie, [...,D+m] -> [...,D]; what lies outside the axes does not count."""
        return (points[..., : len(self.origin)] - self.origin) @ self.rotation

    def gaussians(self, counts: Tensor, means: Tensor) -> Gaussians:
        """Return the densities of classes of `counts` [C] examples with the means [C,D] of their places."""
        total = counts[..., None] * self.spread
        variance = 1 + self.spread / (total + 1)
        precision, center = 1 / variance, total / (total + 1) * means
        return Gaussians(
            precision.T, (center * precision).T, (center.square() * precision).sum(1) + variance.log().sum(-1)
        )

    def old(self, places: Tensor) -> Tensor:
        """Return the log densities of the old classes, [B,D] -> [B,C]."""
        return self.gaussians(self.counts, self.means).log_densities(places)

    def nobody(self, places: Tensor) -> Tensor:
        """Return the log density of a class that nobody has seen, [B,D] -> [B]."""
        size = len(self.spread)
        return self.gaussians(self.spread.new_zeros(1), self.spread.new_zeros(1, size)).log_densities(places)[:, 0]


class Model(NamedTuple):
    """All that is made of some examples: where features lie, and how dense the classes are there."""

    space: Space
    densities: Densities
    # [D+m]: by which points are divided to be, on the axes, of mean squared length one, with equal variances
    scale: Tensor

    def points(self, features: Tensor) -> Tensor:
        """Return the points of features, [B,d] -> [B,D+m]."""
        return self.space.points(features)

    def scale_points(self, points: Tensor) -> Tensor:
        """Return what regressions see of points, [B,D+m] -> [B,D+m]; nothing of it is made of labels."""
        return points / self.scale

    @property
    def outside(self) -> int:
        """m, how many of the last numbers of a point lie outside the axes."""
        return self.space.outside.shape[1]


def count_axes(examples: int, size: int) -> int:
    """Return on how many axes the densities of so many examples of `size` features are."""
    return min(size, MOST_AXES, max(examples // EXAMPLES_AN_AXIS, min(FEWEST_AXES, examples // 2), 1))


def fit_models(features: Tensor, labels: Tensor, classes: int, axes: int, shrinkages: tuple[float, ...]) -> list[Model]:
    """Return models of some examples, alike but for the shrinkage of the covariance within classes.

    Args:
        features: [N,d] float32, in an order that is a random one.
        labels: [N]; a class may have no examples.
        classes: C
        axes: r, at most N and d.
        shrinkages: how far the covariance is drawn towards a sphere, from 0 to 1, for each of the results.

    Raises:
        ValueError: the examples of each class have equal features.
    """
    features, features32 = features.double(), features
    residuals = features - class_means(features, labels, torch.bincount(labels, minlength=classes))[labels]
    if bool((residuals.square().mean(0) <= 1e-12 * features.square().mean(0)).all()):  # as exact as float32 is
        raise ValueError(
            "the examples of each class have equal features, to a millionth of their size: they do not tell how a "
            "class spreads; if a large number was added to all, subtract it"
        )
    space = _fit_space(features, labels, classes, axes)
    points = space.points(features32)
    # What lies outside counts as the last axis does, or up to twice as much where much of the features lies there.
    gain = 1 + (points[:, axes + 1 :].square().sum(1).mean()).clamp(max=1)
    points = points[:, : axes + 1]
    variance = points.var(0, correction=0)
    # Not by less than a tenth of the whole: on an axis on which these examples hardly differ, others may.
    scale = ((variance + 0.01 * variance.mean()) * points.shape[1]).sqrt()
    scale = torch.cat([scale, (scale[:axes].min() / gain).expand(space.outside.shape[1])])
    return [Model(space, each, scale) for each in fit_densities(points, labels, classes, shrinkages)]


def _fit_space(features: Tensor, labels: Tensor, classes: int, number: int) -> Space:
    counts = torch.bincount(labels, minlength=classes)
    center = class_means(features, labels, counts)[counts > 0].mean(0)
    # A feature of a great variance among many must not be all that counts, nor noise in one of a small variance. Those
    # that are constant in these examples count as the median of the others: nothing tells how much they can vary.
    variance = features.var(0, correction=0)
    varied = variance[variance > 1e-12 * features.square().mean(0)]  # as exact as float32 is
    unit = (variance + (varied if len(varied) else variance).median()).clamp(min=1e-300).rsqrt()
    away = (features - center) * unit
    some = away[:AXES_FROM]
    if len(some) < features.shape[1]:  # the smaller of the two matrices that have the same eigenvalues
        axes = torch.linalg.qr(some.T @ torch.linalg.eigh(some @ some.T)[1][:, -number:])[0]
    else:
        axes = torch.linalg.eigh(some.T @ some)[1][:, -number:]
    outside = _draw_outside(axes) * unit[:, None]
    axes = (axes * unit[:, None]).float().contiguous()
    distance = ((features - center) @ axes.double()).norm(dim=1).mean()
    return Space(center.float(), axes, outside.float(), distance.clamp(min=torch.finfo(torch.float32).tiny))


def _draw_outside(axes: Tensor) -> Tensor:
    """Return directions orthogonal to axes [d,r], and to each other, that keep squared lengths in the mean, [d,m]."""
    size, number = axes.shape
    count = min(size - number, MOST_OUTSIDE)
    some = torch.randn(size, count, generator=torch.Generator().manual_seed(0), dtype=axes.dtype)
    found: Tensor = torch.linalg.qr(torch.cat([axes, some], 1))[0][:, number:]
    return found * math.sqrt((size - number) / max(count, 1))


def fit_densities(points: Tensor, labels: Tensor, classes: int, shrinkages: tuple[float, ...]) -> list[Densities]:
    """Return the densities of the old classes, with the covariance within classes drawn towards a sphere.

    Args:
        points: [N,D]
        labels: [N]; a class may have no examples.
        classes: C
        shrinkages: how far, from 0 to 1, for each of the results.
    """
    counts = torch.bincount(labels, minlength=classes).double()
    means = class_means(points, labels, counts)
    here = counts > 0
    weights = class_weights(counts, labels)[labels]
    residuals = points - means[labels]
    freedom = (weights * (1 - 1 / counts[labels])).sum().clamp(min=1e-9)
    sample = (residuals * weights[:, None]).T @ residuals / freedom
    origin, found = means[here].mean(0), []
    for shrinkage in shrinkages:
        within = (1 - shrinkage) * sample + (shrinkage + 1e-9) * _sphere(sample)
        root = torch.linalg.cholesky(within)
        whitened = torch.linalg.solve_triangular(root, (means[here] - origin).T, upper=False).T
        between = whitened.T @ whitened / max(len(whitened) - 1, 1)
        between = (1 - MEANS_SHRINKAGE) * between + MEANS_SHRINKAGE * _sphere(between)
        variance, axes = torch.linalg.eigh(between)
        rotation = torch.linalg.solve_triangular(root.T, axes, upper=True)
        spread = (variance - (1 / counts[here]).mean()).clamp(min=1e-3)  # less what means owe to having few examples
        found.append(Densities(origin, rotation, spread, counts, ((means - origin) @ rotation) * here[:, None]))
    return found


def class_weights(counts: Tensor, labels: Tensor) -> Tensor:
    """Return the weight of an example of each class, [C]: a class of very many examples must not decide alone.

    It counts as much as the class of the median example.
    """
    return (counts[labels].double().median() / counts.clamp(min=1)).clamp(max=1)


def class_means(points: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each class, [N,D] -> [C,D]; zeros for a class without examples."""
    return points.new_zeros(len(counts), points.shape[1]).index_add_(0, labels, points) / counts.clamp(min=1)[:, None]


def _sphere(covariance: Tensor) -> Tensor:
    """Return the multiple of the identity that has the same trace."""
    size = len(covariance)
    return covariance.trace() / size * torch.eye(size, dtype=covariance.dtype)
