"""The shapes of what both kernels are given, by name and in order."""

from torch import Tensor


def slow_shapes(drive: Tensor, hidden: Tensor) -> dict[str, tuple[int, ...]]:
    """Of `reference.slow_network`'s tensors, lengths left out."""
    steps, batch, inner = _three_axes(drive, "drive")
    size = hidden.shape[-1]
    return {
        "drive": (steps, batch, inner),
        "weight_hh": (inner, size),
        "weight_z": (size, inner),
        "bias_z": (size,),
        "hidden": (batch, size),
    }


def fast_shapes(x: Tensor, hidden: Tensor) -> dict[str, tuple[int, ...]]:
    """Of `reference.fast_network`'s tensors, lengths left out."""
    steps, batch, features = _three_axes(x, "x")
    size = hidden.shape[-1]
    columns_1, columns_2 = size + features + 1, size + 1
    return {
        "updates": (steps, batch, 4 * size + 2 * (columns_1 + columns_2)),
        "x": (steps, batch, features),
        "hidden": (batch, size),
        "fast_1": (batch, size, columns_1),
        "fast_2": (batch, size, columns_2),
    }


def _three_axes(tensor: Tensor, name: str) -> tuple[int, int, int]:
    if tensor.dim() != 3:
        raise ValueError(f"{name} must be [T,B,...], got shape {tuple(tensor.shape)}")
    steps, batch, numbers = tensor.shape
    return steps, batch, numbers
