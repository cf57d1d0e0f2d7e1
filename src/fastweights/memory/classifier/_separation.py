"""Logistic regressions that separate one new class each from the old ones, beside their densities.

Densities know how far an example lies from a class, and not where two classes are confused: a network that never saw a
class spreads it differently from those that it knows. What separates it from examples of the old ones does know.
"""

import torch
from torch import Tensor

STEPS = 100
PENALTY = 1e-4  # on the squared weights, for features of length one
CONSTANT = 0.2  # the feature of the offset
LEAST_REACH = 0.25  # how much the features outside the axes count for a new class of one example
SHARE = 0.1  # the weight of all examples of the new class together; the old ones have the rest


def separate(features: Tensor, weights: Tensor, new: Tensor, outside: int) -> Tensor:
    """Return the weights and the offset of each regression, [D+1,K]; none depends on the others beside it.

    Minimises ``sum_i weights[i] log(1 + exp(-sign[i] z[i])) + PENALTY / 2 |w|^2``, ``z = features w + CONSTANT w_0``,
    by a fixed number of accelerated steps (Nesterov 2004, scheme 2.2.22), so that equal examples give equal answers.

    Args:
        features: [n,D] of mean squared length one or so.
        weights: [n,K] not negative; each column sums to one.
        new: [n,K] bool: the examples of the new class.
        outside: how many of the last features lie outside the axes of the densities. They count less where a new class
            has few examples, and a quarter where it has one: nothing tells what is its own there and what its class's.
    """
    extended = torch.cat([features, features.new_full((len(features), 1), CONSTANT)], 1)
    # Each regression is a row here: of few rows the products take a fifth of the time that they take of few columns.
    weights, new = weights.T.contiguous(), new.T.contiguous()
    reach = features.new_ones(len(new), extended.shape[1])
    reach[:, features.shape[1] - outside : -1] = (
        (1 - 1 / new.sum(1, keepdim=True).clamp(min=1)).sqrt().clamp(min=LEAST_REACH)
    )
    sign = torch.where(new, 1.0, -1.0).to(features.dtype)
    scaled = -sign * weights
    # The greatest curvature of each loss, from which its step follows, a fifth more than power iterations find.
    vector = reach * (weights.sqrt() @ extended)
    for _ in range(8):
        vector = vector / vector.norm(dim=1, keepdim=True).clamp(min=1e-30)
        vector = reach * ((weights * ((reach * vector) @ extended.T)) @ extended)
    curvature = 0.3 * vector.norm(dim=1, keepdim=True) + PENALTY
    root = (PENALTY / curvature).sqrt()
    momentum = (1 - root) / (1 + root)
    found = before = torch.zeros_like(reach)
    for _ in range(STEPS):
        ahead = found + momentum * (found - before)
        pull = scaled * torch.sigmoid(-sign * ((reach * ahead) @ extended.T))
        slope = reach * (pull @ extended) + PENALTY * ahead
        before, found = found, ahead - slope / curvature
    return (reach * found).T


def score_rows(features: Tensor, rows: Tensor) -> Tensor:
    """Return the log odds of each new class, [B,D] and [D+1,K] -> [B,K]."""
    return features @ rows[:-1] + CONSTANT * rows[-1]
