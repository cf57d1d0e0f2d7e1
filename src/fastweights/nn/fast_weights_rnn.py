"""Fast weights that attend to the recent past: Ba et al. 2016, equations 1 to 5."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fastweights.nn._fast_weights import FastWeights, check_state
from fastweights.nn._sequences import arrange
from fastweights.nn._state import FastWeightsState, Unformed, map_memory
from fastweights.ops.associative import Constants


class FastWeightsRNN(FastWeights):
    """A recurrent layer whose fast weights hold the recent past, used like `torch.nn.LSTM` (Ba et al. 2016, eq 1 to 5).

    Every step decays the fast matrix A, writes the last hidden state into it, A(t) = decay A(t-1) + rate h(t) h(t)^T,
    and lets the new state settle for `inner_steps` under it: h_{s+1} = f(LN(W h(t) + C x(t+1) + b + A(t) h_s)).

    Parameters of layer 0: `weight_ih` [H,D], `weight_hh` [H,H], `bias` [H], `norm.weight` [H], `norm.bias` [H];
    of layer l: the same names with `_l1`, `_l2`, ...

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of hidden units.
        num_layers: layers on top of one another.
        decay: what is left of the fast matrix after a step, 0 to 1.
        rate: how strongly a hidden state is written, not negative.
        inner_steps: S, reads of the memory in one step.
        nonlinearity: "relu" or "tanh".
        layer_norm: normalise what is summed in every inner step (eq 5).
        normalize_initial: normalise in front of h_0 too, with the same gain and bias.
        identity_scale: `weight_hh` starts as this multiple of the identity.
        dropout: on the outputs of every layer but the last.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        impl: "auto", "reference", "cpu" or "triton".
        form: "attention" (over the stored hidden states), "matrix" (the fast matrix is formed), or "auto", the faster.

    Raises:
        ValueError: a size, constant, `impl` or `form` is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.FastWeightsRNN(input_size=10, hidden_size=20)
        >>> y, state = layer(torch.randn(7, 3, 10))          # x [T,B,D]
        >>> y.shape, state.hidden.shape, state.memory.shape  # [T,B,H], [B,H], [B,H,H]
        (torch.Size([7, 3, 20]), torch.Size([3, 20]), torch.Size([3, 20, 20]))
        >>> y, state = layer(torch.randn(5, 3, 10), state)   # goes on where the first piece ended
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        decay: float = 0.95,
        rate: float = 0.5,
        inner_steps: int = 1,
        nonlinearity: str = "relu",
        layer_norm: bool = True,
        normalize_initial: bool = False,
        identity_scale: float = 0.05,
        dropout: float = 0.0,
        batch_first: bool = False,
        impl: str = "auto",
        form: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            Constants(decay, rate, inner_steps, nonlinearity, normalize_initial),
            layer_norm=layer_norm,
            identity_scale=identity_scale,
            impl=impl,
            form=form,
        )
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, got {dropout}")
        if dropout > 0 and num_layers == 1:
            warnings.warn(f"dropout={dropout} acts between layers and does nothing with num_layers=1", stacklevel=2)
        self.num_layers, self.dropout, self.batch_first = num_layers, dropout, batch_first
        for layer, suffix in enumerate(self._suffixes()):
            self._add_layer(suffix, input_size if layer == 0 else hidden_size, device, dtype)
        self.reset_parameters()

    def _suffixes(self) -> list[str]:
        return ["" if layer == 0 else f"_l{layer}" for layer in range(self.num_layers)]

    def reset_parameters(self) -> None:
        """Start anew: `weight_hh` a multiple of the identity, `weight_ih` uniform by its fan-out, `bias` zero."""
        for suffix in self._suffixes():
            self._reset_layer(suffix)

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: FastWeightsState | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, FastWeightsState]:
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
        y = sequences.x
        states = self._layer_states(state, y.shape[1], sequences.unbatched)
        results = []
        for layer, (suffix, layer_state) in enumerate(zip(self._suffixes(), states, strict=True)):
            if layer > 0 and self.dropout > 0:
                y = F.dropout(y, self.dropout, self.training)
            y, result = self._run_layer(suffix, y, layer_state, sequences.lengths)
            results.append(result)
        return sequences.restore(y), self._join(results, sequences.unbatched)

    def _layer_states(
        self, state: FastWeightsState | None, batch: int, unbatched: bool
    ) -> list[FastWeightsState] | list[None]:
        if state is None:
            return [None] * self.num_layers
        layers = () if self.num_layers == 1 else (self.num_layers,)
        state = check_state(state, (*layers, *(() if unbatched else (batch,))), self.hidden_size)
        hidden = state.hidden.reshape(self.num_layers, batch, self.hidden_size)
        memory = state.memory.reshape(self.num_layers, batch, self.hidden_size, self.hidden_size)
        return [FastWeightsState(h, m) for h, m in zip(hidden, memory, strict=True)]

    def _join(self, states: list[FastWeightsState], unbatched: bool) -> FastWeightsState:
        state = states[0]
        if self.num_layers > 1:
            memory: Any = Unformed(lambda: torch.stack([state.memory for state in states]))
            if torch.compiler.is_compiling():
                memory = memory.tensor()
            state = FastWeightsState(torch.stack([state.hidden for state in states]), memory)
        if unbatched:
            state = FastWeightsState(state.hidden.squeeze(-2), map_memory(lambda memory: memory.squeeze(-3), state))
        return state

    def extra_repr(self) -> str:
        parts = [self._describe()]
        parts += [f"num_layers={self.num_layers}"] * (self.num_layers != 1)
        parts += [f"dropout={self.dropout}"] * (self.dropout != 0)
        parts += ["batch_first=True"] * self.batch_first
        return ", ".join(parts)
