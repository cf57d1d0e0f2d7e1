"""What a classifier is worth on a split."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn.modes import evaluating

Split = tuple[Tensor, Tensor]  # inputs [N,...], targets [N]


def evaluate(model: nn.Module, split: Split, *, batch_size: int = 1000) -> tuple[float, float]:
    """Mean cross entropy (nats) and error (per cent) of a classifier over inputs [N,...] and class indices [N].

    The model is read in evaluation mode, `batch_size` inputs at a time, and is left as it was.

    Examples:
        >>> import torch
        >>> from fastweights.training import evaluate
        >>> loss, error = evaluate(torch.nn.Identity(), (torch.eye(4), torch.tensor([0, 1, 2, 0])))
        >>> error
        25.0
    """
    inputs, targets = split
    loss = wrong = 0.0
    batches = zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True)
    with evaluating(model), torch.no_grad():
        for x, y in batches:
            logits = model(x)
            loss += F.cross_entropy(logits, y, reduction="sum").item()
            wrong += (logits.argmax(1) != y).sum().item()
    return loss / len(targets), 100 * wrong / len(targets)
