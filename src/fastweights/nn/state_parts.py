"""The state of a recurrent layer as other libraries want it: its parts by name, and their shapes."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn


class StateParts(NamedTuple):
    """The parts of the state of a single layer of `fastweights.nn`."""

    kind: type[Any]  # called with the parts, each [B,...]
    shapes: dict[str, torch.Size]  # shape of each part by its name, without the batch


def takes_starts(layer: nn.Module) -> bool:
    """Return whether it is a recurrent layer of `fastweights.nn`, with an `input_size` and a `hidden_size`."""
    sizes = hasattr(layer, "input_size") and hasattr(layer, "hidden_size")
    return sizes and "starts" in inspect.signature(layer.forward).parameters


def show(layer: nn.Module) -> str:
    """Return the representation of a layer in one line, for an error."""
    return " ".join(str(layer).split())


def parts_of(layer: nn.Module) -> StateParts:
    """Return the parts of a layer's state.

    Raises:
        ValueError: its state is not that of a single layer of `fastweights.nn`, or the layer is batch first.
    """
    right = "layer must be a single layer of fastweights.nn, time first"
    if not takes_starts(layer):
        raise ValueError(f"{right}, got {show(layer)}")
    batch = 1 + getattr(layer, "num_layers", 1)  # so that it cannot be taken for an axis of layers
    with torch.no_grad():
        _, state = layer(next(layer.parameters()).new_zeros(1, batch, int(layer.input_size)))  # type: ignore[arg-type]
    if not hasattr(state, "_fields") or any(part.shape[0] != batch for part in state):
        raise ValueError(f"{right}, got {show(layer)}")
    return StateParts(type(state), {name: part.shape[1:] for name, part in zip(state._fields, state, strict=True)})
