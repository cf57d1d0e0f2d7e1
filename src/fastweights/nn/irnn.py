"""The IRNN of Le, Jaitly & Hinton 2015: a ReLU network whose recurrent weights start as a multiple of the identity."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastweights.checks import check_finite, check_sizes
from fastweights.nn._recurrent import ABSENT, Sequences, arrange, check_kind, warn_of_overflow
from fastweights.nn._scan import scan_steps
from fastweights.nn.restarts import find_pieces
from fastweights.ops.exporting import is_exporting_onnx
from fastweights.pretrained import Pretrained


class IRNN(Pretrained, nn.RNN):
    """`torch.nn.RNN` with ReLU units, identity recurrent weights and zero biases (the baseline of Ba et al. 2016).

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of hidden units.
        num_layers: the number of layers on top of one another.
        identity_scale: recurrent weights start as this multiple of the identity; 1 is Le et al.'s. With the default a
            state halves at every step at the start: what must be held for more than some ten steps is learnt with 1.
        dropout: the probability of dropout on the outputs of every layer but the last.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size is not an integer of at least 1, or `identity_scale` is not finite.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> y, hidden = nn.IRNN(input_size=10, hidden_size=20)(torch.randn(7, 3, 10))  # x [T,B,D]
        >>> y.shape, hidden.shape                                                      # [T,B,H], [layers,B,H]
        (torch.Size([7, 3, 20]), torch.Size([1, 3, 20]))
    """

    _absent = ABSENT

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        identity_scale: float = 0.5,
        dropout: float = 0.0,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        check_finite(identity_scale=identity_scale)
        self.identity_scale = identity_scale  # before super(), which resets the parameters
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            nonlinearity="relu",
            dropout=dropout,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self) -> None:
        """Reset all: recurrent weights a multiple of the identity, input weights uniform by fan-out, biases zero."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith("weight_hh"):
                with torch.no_grad():
                    nn.init.eye_(parameter).mul_(self.identity_scale)
            elif name.startswith("weight_ih"):
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.zeros_(parameter)

    def forward(  # type: ignore[override]
        self,
        x: Tensor | PackedSequence,
        state: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run over whole sequences, as `torch.nn.RNN` does.

        Args:
            x: [T,B,D], [B,T,D] with `batch_first`, [T,D] unbatched, or a PackedSequence.
            state: where an earlier piece ended, [layers,B,H]; None starts from zeros.
            lengths: valid steps of each sequence, [B] integers from 0 to T; a sequence of 0 steps keeps its state.
            starts: the steps before which another sequence begins, bool [T,B], [B,T] with `batch_first`, [T] unbatched:
                the state is zeros there, and no gradient goes further back. None is nowhere.

        Returns:
            The hidden states in the form of x, zeros past a length, and the last of each sequence.

        Raises:
            TypeError: lengths are not integers or come with a PackedSequence, or starts are not a tensor of bool.
            ValueError: x has another shape or no steps, or lengths or starts another shape than its steps.
        """
        check_kind(x)
        sequences = arrange(x, lengths, {"starts": starts}, self.input_size, self.batch_first)
        if is_exporting_onnx() and isinstance(x, Tensor) and lengths is None and starts is None:
            return self._run_as_scan(x, state)
        pieces = lengths is not None or starts is not None
        y, state = self._run_pieces(sequences, state) if pieces else super().forward(x, state)
        warn_of_overflow(self, sequences.x, state, "give a smaller identity_scale, or smaller steps in training")
        return y, state

    def _run_pieces(self, sequences: Sequences, state: Tensor | None) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run over sequences of several lengths, from one start to the next."""
        steps, batch = sequences.x.shape[:2]
        if state is None:
            state = sequences.x.new_zeros(self.num_layers, batch, self.hidden_size)
        elif sequences.unbatched:
            state = state.unsqueeze(1)
        anew = sequences.controls.get("starts", sequences.x.new_zeros(steps, batch, dtype=torch.bool))
        outputs, time = [], int(self.batch_first)
        for begin, end in find_pieces(anew):
            state = state.masked_fill(anew[begin].unsqueeze(1), 0)
            if sequences.lengths is None:
                y, state = super().forward(sequences.x[begin:end].transpose(0, time), state)
                outputs.append(y.transpose(0, time))
                continue
            own = (sequences.lengths - begin).clamp(0, end - begin)
            some = own.gt(0).unsqueeze(1)
            # A packed sequence has a step at least: what that makes of one without is left out.
            packed = pack_padded_sequence(sequences.x[begin:end], own.clamp(min=1).cpu(), enforce_sorted=False)
            packed, after = super().forward(packed, state)
            padded, _ = pad_packed_sequence(packed, total_length=end - begin)
            outputs.append(padded.masked_fill(~some, 0))
            state = torch.where(some, after, state)
        return sequences.restore(torch.cat(outputs)), state.squeeze(1) if sequences.unbatched else state

    def _run_as_scan(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run over x in evaluation, a step at a time in one node of a graph for each layer."""
        unbatched, time = x.dim() == 2, int(self.batch_first and x.dim() == 3)
        y, ends = x.unsqueeze(1) if unbatched else x.transpose(0, time), []
        if state is None:
            state = y.new_zeros(self.num_layers, y.shape[1], self.hidden_size)
        elif unbatched:
            state = state.unsqueeze(1)

        for layer, hidden in enumerate(state.unbind()):
            y, end = self._scan_layer(layer, y, hidden)
            ends.append(end)
        end_state = torch.stack(ends)
        return (y.squeeze(1), end_state.squeeze(1)) if unbatched else (y.transpose(0, time), end_state)

    def _scan_layer(self, layer: int, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        def parameter(name: str) -> Tensor:  # read where it is used: the node gives a step its own
            weight: Tensor = getattr(self, f"{name}_l{layer}")
            return weight

        def step(inputs: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
            after = torch.relu(inputs[0] + F.linear(before[0], parameter("weight_hh")))
            return after, [after]

        drive = F.linear(x, parameter("weight_ih"), parameter("bias_ih") + parameter("bias_hh"))
        y, (end,) = scan_steps(self, step, [hidden], [drive])
        return y, end

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, identity_scale={self.identity_scale}"
