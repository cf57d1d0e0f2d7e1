"""Gated fast weights: Schlag & Schmidhuber 2017, equations 2 to 8."""

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fastweights.nn._gated import GatedFastWeights, GatedFastWeightsState
from fastweights.nn._sequences import arrange


class GatedFastWeightsRNN(GatedFastWeights):
    """A small recurrent network whose weights a second network writes at every step (Schlag & Schmidhuber 2017).

    The slow network s reads the input and says what to write into both weight matrices of the fast one (eq 3 to 8):

        inner = tanh(slow_in [s_t; x_t]);  [z; update 1; update 2] = slow_out inner;  s_{t+1} = tanh(z)
        F_{t+1} = G * H + (1 - G) * F_t,  H = tanh(alpha) tanh(beta)^T,  G = sigmoid(gamma) sigmoid(delta)^T

    and the fast network, which alone gives the output, uses what was written until the step before (eq 2):

        h_{t+1} = LN(tanh(F2_t [LN(tanh(F1_t [h_t; x_t; 1])); 1]))

    The layer norms have no gain and no bias; the fast layers' biases are the last columns of F1 and F2. No step's fast
    matrices are kept for the backward pass: the kernel writes them again, one sequence at a time.

    Parameters: `slow_in.weight` [P,S+D], columns: slow state, input; `slow_in.bias` [P]; `slow_out.weight`
    [S+4H+2M+2N,P] with M = H+D+1 and N = H+1, rows: z; alpha [H], beta [M], gamma [H], delta [M] of F1; alpha [H],
    beta [N], gamma [H], delta [N] of F2; `slow_out.bias`. All start as those of `torch.nn.Linear`, but the columns of
    `slow_in` for the slow state and the rows of `slow_out` for z: each is orthogonal, and so, where P is at least S, is
    their product, so that the slow network holds what it has read for some steps. The paper does not say how it starts.

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of units of both fast layers.
        slow_hidden_size: S, units of the slow network's state; None is `hidden_size`.
        slow_inner_size: P, units of its inner layer.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        impl: "auto", "reference", "cpu" or "triton".
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a size or `impl` is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.GatedFastWeightsRNN(input_size=15, hidden_size=40)
        >>> y, state = layer(torch.randn(7, 3, 15))         # x [T,B,D]
        >>> y.shape, state.fast_1.shape, state.fast_2.shape # [T,B,H], [B,H,H+D+1], [B,H,H+1]
        (torch.Size([7, 3, 40]), torch.Size([3, 40, 56]), torch.Size([3, 40, 41]))
        >>> y, state = layer(torch.randn(5, 3, 15), state.detach())  # goes on where the first piece ended
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        slow_hidden_size: int | None = None,
        slow_inner_size: int = 100,
        batch_first: bool = False,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(input_size, hidden_size, slow_hidden_size, slow_inner_size, impl, device, dtype)
        self.batch_first = batch_first

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: GatedFastWeightsState | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, GatedFastWeightsState]:
        """Run over whole sequences.

        Args:
            x: [T,B,D], [B,T,D] with `batch_first`, [T,D] unbatched, or a PackedSequence.
            state: where an earlier piece ended; None starts from zeros.
            lengths: valid steps of each sequence, [B] integers from 0 to T; a sequence of 0 steps keeps its state.

        Returns:
            The hidden states in the form of x, zero past each length, and the state after each last valid step.

        Raises:
            ValueError: x, state or lengths do not fit the layer or one another.
        """
        sequences = arrange(x, lengths, input_size=self.input_size, batch_first=self.batch_first)
        if state is not None:
            leading = () if sequences.unbatched else (sequences.x.shape[1],)
            state = self._check_state(state, leading)
            if sequences.unbatched:
                state = GatedFastWeightsState(*(tensor.unsqueeze(0) for tensor in state))
        y, state = self._run(sequences.x, state, sequences.lengths)
        if sequences.unbatched:
            state = GatedFastWeightsState(*(tensor.squeeze(0) for tensor in state))
        return sequences.restore(y), state

    def extra_repr(self) -> str:
        return self._describe() + ", batch_first=True" * self.batch_first


class GatedFastWeightsRNNCell(GatedFastWeights):
    """One step of `GatedFastWeightsRNN`, with the same parameters (Schlag & Schmidhuber 2017, eq 2 to 8).

    The arguments are those of the layer, but for `batch_first`; its `state_dict` loads into the cell.

    Raises:
        ValueError: a size or `impl` is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> cell = nn.GatedFastWeightsRNNCell(input_size=15, hidden_size=40)
        >>> state = None
        >>> for x in torch.randn(7, 3, 15):  # x [B,D]
        ...     y, state = cell(x, state)
        >>> y.shape, state.fast_1.shape      # [B,H], [B,H,H+D+1]
        (torch.Size([3, 40]), torch.Size([3, 40, 56]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        slow_hidden_size: int | None = None,
        slow_inner_size: int = 100,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(input_size, hidden_size, slow_hidden_size, slow_inner_size, impl, device, dtype)

    def forward(self, x: Tensor, state: GatedFastWeightsState | None = None) -> tuple[Tensor, GatedFastWeightsState]:
        """Take one step: x [B,D] or [D], and the state before it -> the new hidden state [B,H] or [H], and the state.

        Raises:
            ValueError: x or state do not fit the cell or one another.
        """
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(f"x must be [B,D] or [D] with D = {self.input_size}, got shape {tuple(x.shape)}")
        unbatched = x.dim() == 1
        if state is not None:
            state = self._check_state(state, x.shape[:-1])
            if unbatched:
                state = GatedFastWeightsState(*(tensor.unsqueeze(0) for tensor in state))
        y, state = self._run(x.unsqueeze(0).unsqueeze(0) if unbatched else x.unsqueeze(0), state, None)
        if unbatched:
            return y[0, 0], GatedFastWeightsState(*(tensor.squeeze(0) for tensor in state))
        return y[0], state

    def extra_repr(self) -> str:
        return self._describe()
