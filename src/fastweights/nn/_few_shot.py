"""What the few-shot networks and their heads share."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fastweights.nn._compiler import torch_func_is_active

SLOPE = 0.2  # of the leaky ReLU of fwCNN and of what takes fast weights: that of the paper's framework


def check_labels(labels: Tensor, shape: torch.Size, num_classes: int) -> None:
    """Refuse labels that are not one class index an example, or of more classes than there are columns.

    Raises:
        ValueError: they are.
    """
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a tensor {list(shape)} int64, one a key; got a {type(labels).__name__}")
    if labels.shape != shape or labels.dtype != torch.int64:
        raise ValueError(f"labels must be {list(shape)} int64, one a key; got {list(labels.shape)} {labels.dtype}")
    # Under torch.func there are no numbers to look at, and looking would cut a compiled graph in two.
    if torch.compiler.is_compiling() or torch_func_is_active() or labels.numel() == 0:
        return
    least, most = (int(bound) for bound in labels.aminmax())
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"labels must lie between 0 and {num_classes - 1}, the {num_classes} classes that there are columns for; "
            f"got {least} to {most}"
        )


def check_tasks(description: Tensor, labels: Tensor, queries: Tensor) -> None:
    """Refuse parts of tasks that are not of equally many, or of none.

    Raises:
        ValueError: they are not.
    """
    counts = len(description), len(labels), len(queries)
    if len(set(counts)) > 1 or not counts[0]:
        raise ValueError(
            "description, labels and queries must be of as many tasks, of 1 at least; got {}, {} and {}".format(*counts)
        )


def check_described(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse a description that is not features [tasks,n,D] and a label for each.

    Raises:
        ValueError: it is not.
    """
    if features.dim() != 3:
        raise ValueError(f"features must be [tasks,n,D], got {list(features.shape)}")
    check_labels(labels, features.shape[:2], num_classes)


def check_memory(memory: object, kind: type) -> None:
    """Refuse what another head remembers.

    Raises:
        ValueError: it is not of this kind.
    """
    if not isinstance(memory, kind):
        raise ValueError(f"memory must be the {kind.__name__} that describe returned, got a {type(memory).__name__}")


def check_asked(features: Tensor, tasks: int, width: int) -> None:
    """Refuse features of queries that are not [tasks,m,D] of the tasks that were described.

    Raises:
        ValueError: they are not.
    """
    if features.dim() != 3 or (features.shape[0], features.shape[2]) != (tasks, width):
        raise ValueError(f"features must be [{tasks},m,{width}], of the tasks described; got {list(features.shape)}")


def single(tensor: Tensor) -> Tensor:
    """In single precision at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def pixels(images: Tensor, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Images [N,channels,size,size] of 0 to 1 in the weights' dtype, with the channels side by side.

    Raises:
        ValueError: another shape or dtype.
    """
    if images.dim() != 4 or tuple(images.shape[1:]) != (channels, size, size):
        raise ValueError(f"images must be [N,{channels},{size},{size}], got {list(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8, or floating point of 0 to 1; got {images.dtype}")
    scaled = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
    return scaled.contiguous(memory_format=torch.channels_last)


def in_half(device: torch.device, wanted: bool) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where it is wanted; else whatever the caller has set stays."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def he_initialised(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers as He et al. 2015; their biases are zero."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def check_encoder(encoder: nn.Module) -> int:
    """How wide the features are that an encoder gives.

    Raises:
        ValueError: it does not say so.
    """
    features = getattr(encoder, "features", None)
    if not isinstance(features, int):
        raise ValueError(f"{type(encoder).__name__} must say in `features` how wide its features are, got {features!r}")
    return features
