"""What every recurrent layer takes and gives: padded, batch-first, unbatched or packed sequences, with or without
lengths."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

Restore = Callable[[Tensor], Tensor | PackedSequence]


@dataclass(frozen=True)
class Sequences:
    """A batch in the one form that the recurrences work on."""

    x: Tensor  # [T,B,D]
    lengths: Tensor | None  # [B] int64
    unbatched: bool
    restore: Restore  # outputs [T,B,H] -> the form in which x came


def arrange(x: Tensor | PackedSequence, lengths: Tensor | None, *, input_size: int, batch_first: bool) -> Sequences:
    """Check x and lengths and bring them to [T,B,D].

    Raises:
        ValueError: x or lengths have the wrong shape, or a sequence has no steps.
        TypeError: lengths is not an integer tensor, or comes with a PackedSequence, which has its own.
    """
    if isinstance(x, PackedSequence):
        if lengths is not None:
            raise TypeError("a PackedSequence has its own lengths: leave out lengths=")
        return _arrange_packed(x, input_size)
    if x.dim() not in (2, 3) or x.shape[-1] != input_size:
        layout = "[B,T,D] or [T,D]" if batch_first else "[T,B,D] or [T,D]"
        raise ValueError(f"x must be {layout} with D = input_size = {input_size}, got shape {tuple(x.shape)}")
    unbatched = x.dim() == 2
    time_major = x.unsqueeze(1) if unbatched else x.transpose(0, 1) if batch_first else x
    if time_major.shape[0] == 0:
        raise ValueError(f"x of shape {tuple(x.shape)} has no time steps: give at least one")
    if lengths is not None:
        lengths = _check_lengths(lengths, time_major, unbatched)
        # Whatever the padding holds, NaN too, must not reach the gradient of a weight through a product with zero.
        steps = torch.arange(time_major.shape[0], device=x.device)
        valid = (steps.unsqueeze(1) < lengths).unsqueeze(2)
        time_major = torch.where(valid, time_major, torch.zeros_like(time_major))

    def restore(y: Tensor) -> Tensor:
        return y.squeeze(1) if unbatched else y.transpose(0, 1) if batch_first else y

    return Sequences(time_major, lengths, unbatched, restore)


def _arrange_packed(x: PackedSequence, input_size: int) -> Sequences:
    if x.data.shape[-1] != input_size:
        raise ValueError(
            f"x must be packed from sequences with D = input_size = {input_size}, got data of shape "
            f"{tuple(x.data.shape)}"
        )
    padded, lengths = pad_packed_sequence(x)

    def restore(y: Tensor) -> PackedSequence:
        ordered, order = y, lengths
        if x.sorted_indices is not None:
            ordered, order = y.index_select(1, x.sorted_indices), lengths[x.sorted_indices.cpu()]
        packed = pack_padded_sequence(ordered, order, enforce_sorted=True)
        return PackedSequence(packed.data, packed.batch_sizes, x.sorted_indices, x.unsorted_indices)

    return Sequences(padded, lengths.to(padded.device), False, restore)


def _check_lengths(lengths: Tensor, x: Tensor, unbatched: bool) -> Tensor:
    if not isinstance(lengths, Tensor):
        raise TypeError(
            f"lengths must be a tensor of integers, got a {type(lengths).__name__}: torch.tensor({lengths})"
        )
    steps, batch = x.shape[:2]
    if lengths.dtype.is_floating_point or lengths.dtype.is_complex or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if unbatched and lengths.dim() == 0:
        lengths = lengths.unsqueeze(0)
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must have one entry for each of the {batch} sequences, got {tuple(lengths.shape)}")
    # On a GPU the look at the values would wait for the device, and in a compiled graph it would break the graph.
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and batch > 0:
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < 0 or high > steps:
            raise ValueError(f"lengths must lie between 0 and the {steps} steps of x, got {low} to {high}")
    return lengths.to(device=x.device, dtype=torch.int64)


def check_state_shapes(state: Any, **expected: tuple[int, ...]) -> None:
    """Check the tensors of a state, by name.

    Raises:
        ValueError: one has another shape.
        TypeError: one is not a tensor.
    """
    for name, shape in expected.items():
        tensor = getattr(state, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"state.{name} must be a tensor of shape {shape}, got {tensor!r}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"state.{name} must have shape {shape} for this x, got {tuple(tensor.shape)}")
