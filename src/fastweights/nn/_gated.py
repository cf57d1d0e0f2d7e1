"""What the gated layer and its cell share: the state, the slow network's parameters and a run."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.nn._sequences import check_state_shapes
from fastweights.ops.autocast import autocast_is_on
from fastweights.ops.gated import IMPLEMENTATIONS, gated


class GatedFastWeightsState(NamedTuple):
    """What a gated layer carries from one piece of a sequence to the next.

    For an unbatched sequence all four lack the batch axis.

    Examples:
        >>> import torch
        >>> from fastweights.nn import GatedFastWeightsState
        >>> state = GatedFastWeightsState(hidden=torch.zeros(2, 4), slow_hidden=torch.zeros(2, 5),
        ...                               fast_1=torch.zeros(2, 4, 8), fast_2=torch.zeros(2, 4, 5))
        >>> state.detach().fast_1.shape
        torch.Size([2, 4, 8])
    """

    hidden: Tensor  # [B,H]
    slow_hidden: Tensor  # [B,S]
    fast_1: Tensor  # [B,H,H+D+1], columns: hidden, input, bias
    fast_2: Tensor  # [B,H,H+1], columns: inner units, bias

    def detach(self) -> "GatedFastWeightsState":
        """The same state, cut from the graph: for truncated backpropagation through time."""
        return GatedFastWeightsState(*(tensor.detach() for tensor in self))


class GatedFastWeights(nn.Module):
    """The slow network's parameters and a run over time, shared by the layer and the cell."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        slow_hidden_size: int | None,
        slow_inner_size: int,
        impl: str,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        slow_hidden_size = hidden_size if slow_hidden_size is None else slow_hidden_size
        sizes = {
            "input_size": input_size,
            "hidden_size": hidden_size,
            "slow_hidden_size": slow_hidden_size,
            "slow_inner_size": slow_inner_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.slow_hidden_size, self.slow_inner_size = slow_hidden_size, slow_inner_size
        self.impl = impl
        rows = slow_hidden_size + 4 * hidden_size + 2 * sum(self._columns())
        self.slow_in = nn.Linear(slow_hidden_size + input_size, slow_inner_size, device=device, dtype=dtype)
        self.slow_out = nn.Linear(slow_inner_size, rows, device=device, dtype=dtype)
        self.reset_parameters()

    def _columns(self) -> tuple[int, int]:
        return self.hidden_size + self.input_size + 1, self.hidden_size + 1

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start anew: as `torch.nn.Linear`, but the slow state's way to the next one is orthogonal."""
        self.slow_in.reset_parameters()
        self.slow_out.reset_parameters()
        # As torch's linear layers start, a slow state shrinks to a third or less in a step: what it holds of a key is
        # gone before the value comes. Here it is turned and, but for tanh, keeps its length.
        size, weight = self.slow_hidden_size, self.slow_in.weight
        wide = torch.promote_types(weight.dtype, torch.float32)  # in bfloat16 there is no orthogonal start
        into = nn.init.orthogonal_(weight.new_empty(self.slow_inner_size, size, dtype=wide))
        turn = nn.init.orthogonal_(weight.new_empty(size, size, dtype=wide))
        weight[:, :size] = into
        self.slow_out.weight[:size] = turn @ into.t()

    def _state_shapes(self, leading: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        columns_1, columns_2 = self._columns()
        return {
            "hidden": (*leading, self.hidden_size),
            "slow_hidden": (*leading, self.slow_hidden_size),
            "fast_1": (*leading, self.hidden_size, columns_1),
            "fast_2": (*leading, self.hidden_size, columns_2),
        }

    def _check_state(self, state: GatedFastWeightsState, leading: tuple[int, ...]) -> GatedFastWeightsState:
        state = GatedFastWeightsState(*state)  # a plain tuple is welcome
        check_state_shapes(state, **self._state_shapes(leading))
        return state

    def _run(
        self, x: Tensor, state: GatedFastWeightsState | None, lengths: Tensor | None
    ) -> tuple[Tensor, GatedFastWeightsState]:
        dtype = self.slow_in.weight.dtype
        if state is None:
            shapes = self._state_shapes(x.shape[1:2]).values()
            zero = x.new_zeros((), dtype=dtype)  # expanded, which the kernel takes for a state that need not be read
            state = GatedFastWeightsState(*(zero.expand(shape) for shape in shapes))
        state = GatedFastWeightsState(*(tensor.to(dtype) for tensor in state))
        weights = (self.slow_in.weight, self.slow_in.bias, self.slow_out.weight, self.slow_out.bias)
        result = gated(x, *weights, *state, lengths=lengths, impl=self.impl)
        outputs = result.outputs
        device = x.device.type
        if autocast_is_on(device):
            outputs = outputs.to(torch.get_autocast_dtype(device))
        return outputs, GatedFastWeightsState(*result[1:])

    def _describe(self) -> str:
        parts = [f"{self.input_size}, {self.hidden_size}"]
        parts += [f"slow_hidden_size={self.slow_hidden_size}"] * (self.slow_hidden_size != self.hidden_size)
        parts += [f"slow_inner_size={self.slow_inner_size}"] * (self.slow_inner_size != 100)
        parts += [f"impl={self.impl!r}"] * (self.impl != "auto")
        return ", ".join(parts)
