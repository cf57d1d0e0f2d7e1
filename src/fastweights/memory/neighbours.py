"""What a search finds."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.memory._checks import exact_dtype


class Neighbours(NamedTuple):
    """The entries nearest to each query, nearest first.

    Attributes:
        indices: [Q,K] int64, rows of `store.keys` and `store.values`: 0 is the oldest entry. They hold until the next
            change of the memory.
        distances: [Q,K], *squared* Euclidean distances.
        weights: [Q,K], w_k proportional to 1 / (epsilon + distance_k), each row's sum 1.
        keys: [Q,K,d].
        values: [Q,K,*value_shape].

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> store = memory.EpisodicMemory(10, 2)
        >>> store.write(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([7, 8]))
        >>> indices, distances, weights, keys, values = store.search(torch.zeros(1, 2), 2)
        >>> distances.tolist(), values.tolist()
        ([[0.0, 25.0]], [[7, 8]])
    """

    indices: Tensor
    distances: Tensor
    weights: Tensor
    keys: Tensor
    values: Tensor


def kernel_weights(distances: Tensor, epsilon: float) -> Tensor:
    """Kernel of Sprechmann et al. 2018, section 2.2: squared distances [...,K] -> weights [...,K] whose sum is 1."""
    kernel = 1 / (epsilon + distances.to(exact_dtype(distances.device)))
    return (kernel / kernel.sum(-1, keepdim=True)).to(distances.dtype)


def check_epsilon(epsilon: float) -> None:
    if not (epsilon > 0 and torch.isfinite(torch.tensor(float(epsilon)))):
        raise ValueError(f"epsilon must be a positive number, got {epsilon!r}")
