"""The choice of a predictor's settings: by its scores of a text that it was not made for, mixed with the model's."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

from torch import Tensor

from fastweights.memory.predictors.mixtures import fit_weights, mix

Value = TypeVar("Value", bound=Hashable)


def choose_setting(model: Tensor, scores: Mapping[Value, Tensor]) -> Value:
    """Return the value of a setting whose mixture with the model makes a text likeliest.

    Args:
        model: log p of each token by the model alone, in nats, [T].
        scores: the same by the predictor with each value of the setting, [T] each.

    Examples:
        >>> import torch
        >>> model = torch.tensor([0.5, 0.5]).log()
        >>> choose_setting(model, {0.3: torch.tensor([0.6, 0.4]).log(), 1.0: torch.tensor([0.9, 0.6]).log()})
        1.0
    """
    gains = {}
    for value, score in scores.items():
        pair = [model, score]
        gains[value] = float(mix(pair, fit_weights(pair)).double().mean())
    return max(gains, key=gains.__getitem__)
