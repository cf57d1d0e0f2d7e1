"""The passage of a text that shows what a memory gains: no better than the rest, and no worse."""

from torch import Tensor


def choose_passage(gains: Tensor, most: int) -> slice:
    """Return where the passage lies whose gain is nearest to the mean of the whole text.

    Args:
        gains: what each token gains, [T].
        most: tokens of a passage; a shorter text is one passage.

    Examples:
        >>> import torch
        >>> choose_passage(torch.tensor([0.0, 0.0, 2.0, 2.0, 1.0, 1.0]), 2)
        slice(4, 6, None)
    """
    size = min(most, len(gains))
    means = gains.double().unfold(0, size, size).mean(1)
    start = size * int((means - gains.double().mean()).abs().argmin())
    return slice(start, start + size)
