"""One step of the fast-weights layer, for loops that the caller writes."""

from typing import Any

from torch import Tensor

from fastweights.nn._fast_weights import FastWeights, check_state
from fastweights.nn._state import FastWeightsState
from fastweights.ops.associative import Constants


class FastWeightsRNNCell(FastWeights):
    """One step of `FastWeightsRNN`, with parameters of the same names (Ba et al. 2016, eq 1 to 5).

    The arguments are those of `FastWeightsRNN`, but for `form`: a single step forms the fast matrix. A `state_dict` of
    a one-layer `FastWeightsRNN` loads into the cell.

    Raises:
        ValueError: a size, constant or `impl` is out of range.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> cell = nn.FastWeightsRNNCell(input_size=10, hidden_size=20)
        >>> state = None
        >>> for x in torch.randn(7, 3, 10):  # x [B,D]
        ...     y, state = cell(x, state)
        >>> y.shape, state.memory.shape      # [B,H], [B,H,H]
        (torch.Size([3, 20]), torch.Size([3, 20, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        decay: float = 0.95,
        rate: float = 0.5,
        inner_steps: int = 1,
        nonlinearity: str = "relu",
        layer_norm: bool = True,
        normalize_initial: bool = False,
        identity_scale: float = 0.05,
        impl: str = "auto",
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
        )
        self._add_layer("", input_size, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: `weight_hh` a multiple of the identity, `weight_ih` uniform by its fan-out, `bias` zero."""
        self._reset_layer("")

    def forward(self, x: Tensor, state: FastWeightsState | None = None) -> tuple[Tensor, FastWeightsState]:
        """Take one step: x [B,D] or [D], and the state before it -> the new hidden state [B,H] or [H], and the state.

        Raises:
            ValueError: x or state do not fit the cell or one another.
        """
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(f"x must be [B,D] or [D] with D = {self.input_size}, got shape {tuple(x.shape)}")
        unbatched = x.dim() == 1
        if state is not None:
            state = check_state(state, x.shape[:-1], self.hidden_size)
            if unbatched:
                state = FastWeightsState(state.hidden.unsqueeze(0), state.memory.unsqueeze(0))
        outputs, state = self._run_layer("", x.unsqueeze(0).unsqueeze(0) if unbatched else x.unsqueeze(0), state, None)
        if unbatched:
            return outputs[0, 0], FastWeightsState(state.hidden[0], state.memory[0])
        return outputs[0], state

    def extra_repr(self) -> str:
        return self._describe()
