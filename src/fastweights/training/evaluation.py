"""The score of a classifier on a split, and the checks of splits that every loop makes before it trains."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import TrainingError
from fastweights.nn.modes import evaluating

Split = tuple[Tensor, Tensor]  # inputs [N,...], targets [N]


def evaluate(model: nn.Module, split: Split, *, batch_size: int = 1000) -> tuple[float, float]:
    """Return the mean cross entropy (nats) and the error (per cent) of a classifier on a split.

    The model is read in evaluation mode, `batch_size` inputs at a time, and is left as it was.

    Args:
        model: inputs [B,...] -> logits [B,C].
        split: inputs [N,...] and class indices [N].
        batch_size: inputs at a time.

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


def check_splits(splits: Mapping[str, object]) -> None:
    """Refuse splits without train, validation or test.

    Raises:
        ValueError: one of them is missing.
    """
    if not {"train", "validation", "test"} <= splits.keys():
        raise ValueError(f"splits must hold train, validation and test, got {', '.join(splits) or 'nothing'}")


def check_examples(split: str, **parts: Tensor) -> None:
    """Refuse a split that is empty, or whose tensors are of several lengths or hold NaN or infinity.

    Raises:
        TypeError: a part is no tensor.
        ValueError: the parts are of different lengths.
        TrainingError: a part is empty or not finite.
    """
    for name, tensor in parts.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"the {split} {name} must be a tensor, got {type(tensor).__name__}: torch.as_tensor makes one"
            )
        if len(tensor) == 0:
            raise TrainingError(f"the {split} split is empty: its {name} have shape {tuple(tensor.shape)}")
    if len({len(tensor) for tensor in parts.values()}) > 1:
        lengths = " and ".join(f"{len(tensor)} {name}" for name, tensor in parts.items())
        raise ValueError(f"the {split} split has {lengths}: give as many of each")
    for name, tensor in parts.items():
        if not tensor.is_floating_point():
            continue
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            index = tuple(bad[0].tolist())
            raise TrainingError(
                f"the {split} {name} hold {tensor[index].item()} at {index}, and {len(bad)} such values in all: "
                "mend or drop these examples"
            )
