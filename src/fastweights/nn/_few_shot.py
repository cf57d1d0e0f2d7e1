"""Labels, slope and precision of layers that are written with labelled examples."""

import torch
from torch import Tensor

from fastweights.nn._softmax_loss import transformed

SLOPE = 0.2  # of the leaky ReLU of fwCNN and of what takes fast weights: that of the paper's framework


def check_labels(labels: Tensor, shape: torch.Size, num_classes: int) -> None:
    """Refuse labels that are not one class index an example, or name more classes than there are columns.

    Raises:
        ValueError: a label, or the shape or dtype of the labels, is wrong.
    """
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a tensor {list(shape)} int64, one a key; got a {type(labels).__name__}")
    if labels.shape != shape or labels.dtype != torch.int64:
        raise ValueError(f"labels must be {list(shape)} int64, one a key; got {list(labels.shape)} {labels.dtype}")
    # Under torch.func there are no numbers to look at, and looking would cut a compiled graph in two.
    if torch.compiler.is_compiling() or transformed() or labels.numel() == 0:
        return
    least, most = (int(bound) for bound in labels.aminmax())
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"labels must lie between 0 and {num_classes - 1}, the {num_classes} classes that there are columns for; "
            f"got {least} to {most}"
        )


def to_single(tensor: Tensor) -> Tensor:
    """Return the tensor in single precision at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
