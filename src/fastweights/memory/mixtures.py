"""Mixtures of predictors: log probabilities in, log probabilities out, and the weights that fit a stream best."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 1000
_GAP = 1e-7  # nats an answer that the fitted weights may be worse than the best
_RIDGE = 1e-12  # of the trace of the curvature
_SHORTEST = 1e-9  # of a Newton step


def mix(log_probs: Sequence[Tensor], weights: Sequence[float] | Tensor) -> Tensor:
    """The log probabilities of a mixture, log sum_i w_i p_i: of any number of predictors, each [...] -> [...].

    Equation 5 of Sprechmann et al. 2018, and (1 - l_c - l_m) p_lm + l_c p_cache + l_m p_mbpa of its appendix B. The
    tensors may hold the probability of the target alone, [T], or of all classes, [T,V].

    Args:
        log_probs: of each predictor, in nats; minus infinity where it rules an answer out.
        weights: of each predictor, not negative, with sum 1.

    Raises:
        ValueError: no tensors, shapes that differ, or weights that are not such.

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


@torch.no_grad()
def fit_weights(log_probs: Sequence[Tensor]) -> Tensor:
    """The weights of a mixture under which a validation stream is most likely: each predictor's [T] -> [predictors].

    The likelihood has one maximum. Rounds of expectation maximisation and of Newton's method go there until the answer
    is within 1e-7 nats a position of it, which the gradient certifies; of predictors that are alike any share will do.

    Args:
        log_probs: of each predictor, log p(target) at every position, in nats; minus infinity where it rules it out.

    Returns:
        Weights with sum 1, float64, for `mix`.

    Raises:
        ValueError: no tensors, shapes that differ, no position, a log probability that is NaN or plus infinity, or a
            position that every predictor rules out.
        ArithmeticError: the certificate could not be reached in float64.

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
    wrong = ~(stacked < math.inf)  # true of NaN too
    if bool(wrong.any()):
        predictor, index = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"predictor {predictor} gives position {index} the log probability {float(stacked[predictor, index])}: "
            "it must be a finite number, or minus infinity"
        )
    best = stacked.max(0).values
    if bool(best.isinf().any()):
        index = int(best.isinf().nonzero()[0])
        raise ValueError(f"no predictor gives position {index} a finite log probability: no mixture can")
    likely = (stacked - best).exp()  # what all share at a position does not matter
    weights = torch.full((len(likely),), 1 / len(likely), dtype=torch.float64, device=likely.device)
    for _ in range(_ROUNDS):
        # Of the mean log likelihood; by concavity the maximum is no more than max - 1 away.
        gradient = (likely / (weights @ likely)).mean(1)
        gap = float(gradient.max()) - 1
        if gap <= _GAP:
            return weights
        # Expectation maximisation never makes it worse, but crawls where predictors are alike, and does not leave 0.
        weights = _newton(likely, weights * gradient)
    raise ArithmeticError(f"after {_ROUNDS} rounds the weights may still be {gap} nats an answer from the best")


def _newton(likely: Tensor, weights: Tensor) -> Tensor:
    """Weights with sum 1 that are no worse: a step of sequential quadratic programming.

    Of sum(w) - mean(log(w L)) over w >= 0, whose minimum has the sum 1 of itself (Kim et al. 2018, "A fast algorithm
    for maximum likelihood estimation of mixture proportions using sequential quadratic programming").
    """
    mixed = weights @ likely
    ratios = likely / mixed
    curvature = ratios @ ratios.T / ratios.shape[1]
    ridge = _RIDGE * curvature.trace()  # alike predictors make it singular
    target = _least(
        curvature + ridge * torch.eye(len(weights), dtype=weights.dtype, device=weights.device),
        2 * ratios.mean(1) - 1 + ridge * weights,
        weights,
    )
    step = target - weights
    change = step @ ratios  # of every position's likelihood, relative to what it is
    slope = step.sum() - change.mean()
    size = 1.0
    while size > _SHORTEST:
        # As a difference, so that steps far below the rounding of the likelihood itself are told apart.
        gained = size * step.sum() - (size * change).clamp(min=-1).log1p().mean()
        if bool(gained <= 1e-4 * size * slope):
            weights = weights + size * step
            break
        size /= 2
    return weights / weights.sum()


def _least(curvature: Tensor, slope: Tensor, start: Tensor) -> Tensor:
    """y >= 0 with the least y curvature y / 2 - slope y, or what is better than the start: an active-set method."""
    found, free = start, start > 0
    for _ in range(4 * len(start)):
        target = torch.zeros_like(found)
        target[free] = torch.linalg.solve(curvature[free][:, free], slope[free])
        falling = target < 0
        if bool(falling.any()):  # as far as none of them is negative, and then without the first at 0
            reach = torch.where(falling, found / (found - target), math.inf)
            first = int(reach.argmin())
            found = found + reach[first] * (target - found)
            found[first] = 0
            free = free & (found > 0)
            continue
        found = target
        wish = torch.where(free, -math.inf, slope - curvature @ found)
        first = int(wish.argmax())
        if float(wish[first]) <= 0:
            break
        free[first] = True
    return found


def _stacked(log_probs: Sequence[Tensor]) -> Tensor:
    if len(log_probs) == 0:
        raise ValueError("a mixture takes at least one predictor, got none")
    for number, each in enumerate(log_probs):
        if not isinstance(each, Tensor):
            raise ValueError(f"log probabilities must be tensors, got {type(each).__name__} of predictor {number}")
    shapes = [list(each.shape) for each in log_probs]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"the predictors' log probabilities must have one shape, got {shapes}")
    if any(not each.dtype.is_floating_point for each in log_probs):
        raise ValueError(f"log probabilities must be floating-point numbers, got {[each.dtype for each in log_probs]}")
    return torch.stack(list(log_probs))
