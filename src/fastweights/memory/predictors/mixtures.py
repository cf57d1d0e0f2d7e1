"""Mixtures of predictors: log probabilities in, log probabilities out, and the weights that fit a stream best."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10_000
_GAIN = 1e-12  # nats a position that a round must gain for another to follow


def mix(log_probs: Sequence[Tensor], weights: Sequence[float] | Tensor) -> Tensor:
    """Return the log probabilities of a mixture, log sum_i w_i p_i: any number of predictors, each [...] -> [...].

    Equation 5 of Sprechmann et al. 2018, and (1 - l_c - l_m) p_lm + l_c p_cache + l_m p_mbpa of its appendix B. The
    tensors may hold the probability of the target alone, [T], or of all classes, [T,V].

    Args:
        log_probs: of each predictor, in nats; minus infinity where it rules an answer out.
        weights: of each predictor, not negative, with sum 1.

    Raises:
        ValueError: no tensors, shapes that differ, or weights that are negative or have another sum.

    Examples:
        >>> import torch
        >>> from fastweights.memory import mix
        >>> model, cache = torch.tensor([0.5, 0.1]).log(), torch.tensor([0.9, 0.0]).log()
        >>> mix([model, cache], [0.75, 0.25]).exp()
        tensor([0.6000, 0.0750])
    """
    stacked = _stack(log_probs)
    shares = torch.as_tensor(weights, dtype=torch.float64)
    if shares.shape != (len(log_probs),):
        raise ValueError(f"mix takes a weight for each of the {len(log_probs)} predictors, got {list(shares.shape)}")
    if not bool((shares >= 0).all()) or abs(float(shares.sum()) - 1) > 1e-6:
        raise ValueError(f"weights must not be negative and must have the sum 1, got {shares.tolist()}")
    shares = shares.log().to(stacked.device, stacked.dtype)
    return torch.logsumexp(stacked + shares.view(-1, *[1] * (stacked.dim() - 1)), 0)


@torch.no_grad()
def fit_weights(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the weights under which a mixture makes a validation stream most likely: each [T] -> [predictors].

    The likelihood has one maximum, and expectation maximisation comes closer with every round: it ends when a round
    gains less than 1e-12 nats a position, or after 10,000 rounds, when the weights cost at most
    log(predictors) / 10,000 nats a position. Predictors that are alike may share their weight in any way.

    Args:
        log_probs: of each predictor, log p(target) at every position, in nats; minus infinity where it rules it out.

    Returns:
        Weights with sum 1, float64, for `mix`.

    Raises:
        ValueError: no tensors, shapes that differ, no position, a log probability that is NaN or plus infinity, or a
            position that every predictor rules out.

    Examples:
        >>> import torch
        >>> from fastweights.memory import fit_weights
        >>> right, wrong = torch.full((300,), 0.9).log(), torch.full((300,), 0.1).log()
        >>> fit_weights([torch.cat([right, wrong[:100]]), torch.cat([wrong, right[:100]])])  # right 3 times of 4
        tensor([0.8125, 0.1875], dtype=torch.float64)
    """
    stacked = _stack(log_probs).double()
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
    score = -math.inf
    for _ in range(_ROUNDS):
        mixed = weights @ likely
        before, score = score, float(mixed.log().mean())
        if score - before < _GAIN:
            break
        weights = weights * (likely @ mixed.reciprocal()) / likely.shape[1]
    return weights / weights.sum()


def _stack(log_probs: Sequence[Tensor]) -> Tensor:
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
