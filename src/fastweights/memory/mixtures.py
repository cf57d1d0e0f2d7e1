"""Mixtures of predictors: log probabilities in, log probabilities out, and the weights that fit a stream best."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10_000
_GAP = 1e-7  # nats an answer that the fitted weights may be worse than the best


def mix(log_probs: Sequence[Tensor], weights: Sequence[float] | Tensor) -> Tensor:
    """The log probabilities of a mixture, log sum_i w_i p_i: of any number of predictors, each [...] -> [...].

    Equation 5 of Sprechmann et al. 2018, and (1 - l_c - l_m) p_lm + l_c p_cache + l_m p_mbpa of its appendix B. The
    tensors may hold the probability of the target alone, [T], or of all classes, [T,V].

    Args:
        log_probs: of each predictor, in nats; minus infinity where it rules an answer out.
        weights: of each predictor, not negative, with sum 1.

    Raises:
        ValueError: shapes that differ, or weights that are not such.

    Examples:
        >>> import torch
        >>> from fastweights.memory import mix
        >>> model, cache = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.9, 0.0]).log()
        >>> mix([model, cache], [0.75, 0.25]).exp()
        tensor([0.6000, 0.0750])
    """
    stacked = _stacked(log_probs)
    given = torch.as_tensor(weights, dtype=torch.float64)
    if given.shape != (len(log_probs),):
        raise ValueError(f"mix takes a weight for each of the {len(log_probs)} predictors, got {list(given.shape)}")
    if not bool((given >= 0).all()) or abs(float(given.sum()) - 1) > 1e-6:
        raise ValueError(f"weights must not be negative and must have the sum 1, got {given.tolist()}")
    shares = given.log().to(stacked.device, stacked.dtype)
    return torch.logsumexp(stacked + shares.view(-1, *[1] * (stacked.dim() - 1)), 0)


def fit_weights(log_probs: Sequence[Tensor]) -> Tensor:
    """The weights of a mixture under which a validation stream is most likely: each predictor's [T] -> [predictors].

    The likelihood has one maximum; expectation maximisation goes there until it is within 1e-7 nats an answer of it,
    which the gradient certifies.

    Args:
        log_probs: of each predictor, log p(target) at every position, in nats.

    Returns:
        Weights with sum 1, float64, for `mix`.

    Raises:
        ValueError: shapes that differ, no position, NaN, or a position that every predictor rules out.

    Examples:
        >>> import torch
        >>> from fastweights.memory import fit_weights
        >>> right, wrong = torch.full((300,), 0.9).log(), torch.full((300,), 0.1).log()
        >>> fit_weights([torch.cat([right, wrong[:100]]), torch.cat([wrong, right[:100]])])  # right 3 times of 4
        tensor([0.8125, 0.1875], dtype=torch.float64)
    """
    stacked = _stacked(log_probs).double()
    if stacked.dim() != 2 or stacked.shape[1] == 0:
        raise ValueError(f"fit_weights takes log p(target) of each predictor, [T], got {list(stacked.shape[1:])}")
    best = stacked.max(0, keepdim=True).values
    if bool(torch.isinf(best).any()) or bool(torch.isnan(stacked).any()):
        index = int((~torch.isfinite(best[0])).nonzero()[0])
        raise ValueError(f"no predictor gives position {index} a finite log probability: no mixture can")
    likely = (stacked - best).exp()  # what all share at a position does not matter
    weights = torch.full((len(likely),), 1 / len(likely), dtype=torch.float64, device=likely.device)
    for _ in range(_ROUNDS):
        # Of the mean log likelihood; by concavity the maximum is no more than log(max) away.
        gradient = (likely / (weights @ likely)).mean(1)
        if math.log(float(gradient.max())) <= _GAP:
            break
        weights = weights * gradient
    return weights / weights.sum()


def _stacked(log_probs: Sequence[Tensor]) -> Tensor:
    if len(log_probs) == 0:
        raise ValueError("a mixture takes at least one predictor, got none")
    shapes = [list(each.shape) for each in log_probs]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"the predictors' log probabilities must have one shape, got {shapes}")
    if any(not each.dtype.is_floating_point for each in log_probs):
        raise ValueError(f"log probabilities must be floating-point numbers, got {[each.dtype for each in log_probs]}")
    return torch.stack(list(log_probs))
