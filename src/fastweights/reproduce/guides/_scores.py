"""Scores that several guides have."""

from torch import Tensor, cat


def area_under_curve(positive: Tensor, negative: Tensor) -> float:
    """Return how often a positive has a greater score than a negative, in per cent; ties count by half.

    Args:
        positive: scores, [P].
        negative: scores, [N].

    Examples:
        >>> import torch
        >>> area_under_curve(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0]))
        87.5
    """
    both = cat([positive, negative]).double()
    _, index, counts = both.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[index][: len(positive)]  # ties share theirs
    count = len(positive)
    return 100 * float((ranks.sum() - count * (count + 1) / 2) / (count * len(negative)))
