"""What a trained language model would give a memory: activations of an LSTM, and words as frequent as Zipf has it."""

import torch
from torch import Tensor


def activations(count: int, size: int, generator: torch.Generator) -> Tensor:
    """[count,size]: a gate of logistic units times a hyperbolic tangent, as the hidden state of an LSTM."""
    gate, inside = torch.randn(2, count, size, generator=generator)
    return torch.sigmoid(gate) * torch.tanh(inside)


def words(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """[count]: the class of rank r in proportion to 1 / r."""
    frequencies = 1 / torch.arange(1, classes + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, count, replacement=True, generator=generator)
