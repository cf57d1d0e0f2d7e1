"""Sequences that restart within a pass of torch's own recurrent layers, which know nothing of it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastweights.nn._recurrent import arrange_controls


def run_with_starts(
    layer: nn.RNNBase, x: Tensor, state: Any = None, *, starts: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Run `torch.nn.LSTM`, `GRU` or `RNN` over sequences that restart at some steps.

    The layer runs from one start to the next: as many calls as there are steps with a start.

    Args:
        layer: the layer, with `batch_first` or without.
        x: [T,B,D], [B,T,D] with `batch_first`, [T,D] unbatched.
        state: as the layer takes it; None starts from zeros.
        starts: the steps before which another sequence begins, bool [T,B], [B,T] with `batch_first`, [T] unbatched:
            the state is zeros there, and no gradient goes further back. None is nowhere.

    Returns:
        What the layer returns: the hidden states in the form of x, and the state after the last step.

    Raises:
        TypeError: the layer is another one; starts are not a tensor of bool, or come with a PackedSequence.
        ValueError: they have another shape than the steps of x, there is no step, or the layer is bidirectional.

    Examples:
        >>> import torch
        >>> from fastweights.nn import run_with_starts
        >>> layer, x = torch.nn.LSTM(10, 20), torch.randn(7, 3, 10)
        >>> starts = torch.zeros(7, 3, dtype=torch.bool)
        >>> starts[4] = True
        >>> y, state = run_with_starts(layer, x, starts=starts)
        >>> torch.allclose(y[4:], layer(x[4:])[0], atol=1e-6)
        True
    """
    name = type(layer).__name__
    if not isinstance(layer, nn.RNNBase):
        raise TypeError(
            f"layer must be an LSTM, GRU or RNN of torch.nn, got a {name}: our layers take starts= themselves"
        )
    if starts is None:
        y, state = layer(x, state)
        return y, state
    if isinstance(x, PackedSequence):
        raise TypeError(f"{name} takes starts= with padded sequences alone: torch.nn.utils.rnn.pad_packed_sequence")
    if layer.bidirectional:
        raise ValueError(f"a bidirectional {name} reads beyond a start: give a layer of one direction")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got a {type(x).__name__}: torch.as_tensor(x)")
    unbatched, time = x.dim() == 2, int(layer.batch_first and x.dim() == 3)
    if x.dim() not in (2, 3) or x.shape[time] == 0:
        layout = "[B,T,D] or [T,D]" if layer.batch_first else "[T,B,D] or [T,D]"
        raise ValueError(f"x must be {layout} with at least one step, got shape {tuple(x.shape)}")
    time_major = x.unsqueeze(1) if unbatched else x.transpose(0, time)
    form = {"unbatched": unbatched, "batch_first": layer.batch_first}
    starts = arrange_controls({"starts": starts}, time_major, None, **form)["starts"]
    outputs = []
    for begin, end in find_pieces(starts):
        anew = starts[begin].unsqueeze(1)
        if isinstance(state, tuple):
            state = tuple(tensor.masked_fill(anew, 0) for tensor in state)
        elif state is not None:
            state = state.masked_fill(anew, 0)
        y, state = layer(x.narrow(time, begin, end - begin), state)
        outputs.append(y)
    return torch.cat(outputs, time), state


def find_pieces(starts: Tensor) -> list[tuple[int, int]]:
    """Return the first step, and the one after the last, of the pieces between the steps [T,B] that have a start."""
    begins = [0, *(t for t in starts.any(1).nonzero().flatten().tolist() if t > 0)]
    return list(zip(begins, [*begins[1:], len(starts)], strict=True))
