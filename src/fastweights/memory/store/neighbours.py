"""The result of a search, and a prediction from it alone."""

from typing import NamedTuple

from torch import Tensor


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


def attend(neighbours: Neighbours, num_classes: int) -> Tensor:
    """Predict from the neighbours alone, p(y = j) = sum_k w_k [v_k = j] (Sprechmann et al. 2018, equation 9).

    Args:
        neighbours: of a memory whose values are class indices.
        num_classes: V.

    Returns:
        Probabilities [Q,V].

    Raises:
        ValueError: values that are no classes.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> store = memory.EpisodicMemory(10, 2)
        >>> store.write(torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]), torch.tensor([2, 2, 0]))
        >>> memory.attend(store.search(torch.zeros(1, 2), neighbours=2), num_classes=3).tolist()
        [[0.0, 0.0, 1.0]]
    """
    values, weights = check_classes(neighbours.values, num_classes), neighbours.weights
    return weights.new_zeros(len(values), num_classes).scatter_add_(1, values, weights)


def check_classes(values: Tensor, num_classes: int) -> Tensor:
    """Return class indices [Q,K] as int64.

    Raises:
        ValueError: they are no indices, or not of 0 to `num_classes` - 1.
    """
    if values.dim() != 2 or values.is_floating_point():
        raise ValueError(f"class indices are [Q,K] integers, got values {list(values.shape)}, {values.dtype}")
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= num_classes:
        raise ValueError(f"the classes are 0 to {num_classes - 1}, and the memory holds values {least} to {most}")
    return values.long()
