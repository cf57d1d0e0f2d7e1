"""The settings of a language model's memories, and the weights of their mixture, from a validation text in one pass."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fastweights.checks import check_positive
from fastweights.memory._causal_model import CausalModel, log_prob
from fastweights.memory._predictors import Predictors
from fastweights.memory.mixtures import fit_weights, mix

# Of kernels that are tried: over the mean squared length of a hidden state, theta, and 1 / bandwidth^2.
_SHARPNESS = tuple(2.0**power for power in range(9))
_RATES = tuple(10.0 ** (power / 2) for power in range(-2, 7))  # of MbPA, over the same

Candidate = tuple[str, float | None]  # a predictor's name, and the value of its setting


def fit(
    network: CausalModel,
    predictors: Predictors,
    ids: Tensor,
    *,
    thetas: Sequence[float] | None,
    bandwidths: Sequence[float | None] | None,
    rates: Sequence[float] | None,
    context: int | None,
) -> Tensor:
    """Give each predictor the best of its candidates, and return the weights, as `AdaptiveLanguageModel.fit` says."""
    for name, values in (("thetas", thetas), ("bandwidths", bandwidths), ("rates", rates)):
        for value in values or ():
            if value is not None:
                check_positive(**{name: value})
    scores: dict[Candidate, list[Tensor]] = {}
    keys, labels, _ = network.nothing()
    with contextlib.ExitStack() as stack:
        if predictors.mbpa is not None:
            stack.enter_context(predictors.mbpa._rewinding(len(ids)))
        for h, logits, targets in network.windows(ids, context):
            if not len(keys):
                length = float(h.square().sum(1).mean())
                thetas = thetas or [each / length for each in _SHARPNESS]
                bandwidths = bandwidths or [None, *(math.sqrt(length / each) for each in _SHARPNESS)]
                rates = rates or [each / length for each in _RATES]
            keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
            scores.setdefault(("model", None), []).append(log_prob(logits, targets).double())
            tried = (
                _try_rates(predictors, h, logits, targets, rates or ()),
                _try_kernels(predictors, h, targets, keys, labels, thetas or (), bandwidths or ()),
            )
            for candidate, score in (each for some in tried for each in some):
                scores.setdefault(candidate, []).append(score.double())
    return _choose(predictors, {candidate: torch.cat(parts) for candidate, parts in scores.items()})


def _try_rates(
    predictors: Predictors, h: Tensor, logits: Tensor, targets: Tensor, rates: Sequence[float]
) -> Iterator[tuple[Candidate, Tensor]]:
    """Yield log p of a window by MbPA with each rate; the last of them leaves it remembered."""
    mbpa = predictors.mbpa
    if mbpa is None:
        return
    before = mbpa.descent
    try:
        for rate in rates:
            mbpa.descent = before._replace(lr=rate)
            with mbpa._rewinding(len(h)) if rate != rates[-1] else contextlib.nullcontext():
                yield ("mbpa", rate), mbpa.score(h, targets, logits)[1]
    finally:
        mbpa.descent = before


def _try_kernels(
    predictors: Predictors,
    h: Tensor,
    targets: Tensor,
    keys: Tensor,
    labels: Tensor,
    thetas: Sequence[float],
    bandwidths: Sequence[float | None],
) -> Iterator[tuple[Candidate, Tensor]]:
    """Yield log p by the cache and by the neighbours, on parts of a window in their order; products are shared."""
    cache, knn = predictors.cache, predictors.knn
    for start, past in predictors.pasts(keys, labels, len(h)):
        some = slice(start, start + len(past.ages))
        if cache is not None:
            products = cache._recall(h[some], past)
            for theta in thetas:
                scaled = products._replace(likeness=products.likeness * (theta / cache.theta))
                yield ("cache", theta), predictors.share(scaled, targets[some])
        if knn is not None:
            before = knn.bandwidth
            try:
                knn.bandwidth = math.sqrt(0.5)
                squares = knn._recall(h[some], past)  # minus the squared distances
                for bandwidth in bandwidths:
                    knn.bandwidth = bandwidth
                    scaled = squares._replace(likeness=squares.likeness / knn._scale(-squares.likeness))
                    yield ("knn", bandwidth), predictors.share(scaled, targets[some])
            finally:
                knn.bandwidth = before


def _choose(predictors: Predictors, scores: dict[Candidate, Tensor]) -> Tensor:
    """Take the best candidate of each predictor in a mixture with the model, and fit the weights of all."""
    plain = scores["model", None]
    chosen = [plain]
    for name in predictors.names:
        gains = {}
        for (predictor, value), score in scores.items():
            if predictor == name:
                gains[value] = float(mix([plain, score], fit_weights([plain, score])).mean())
        best = max(gains, key=gains.__getitem__)
        chosen.append(scores[name, best])
        if name == "cache" and predictors.cache is not None and best is not None:
            predictors.cache.theta = best
        elif name == "mbpa" and predictors.mbpa is not None and best is not None:
            predictors.mbpa.descent = predictors.mbpa.descent._replace(lr=best)
        elif predictors.knn is not None:
            predictors.knn.bandwidth = best
    return fit_weights(chosen)
