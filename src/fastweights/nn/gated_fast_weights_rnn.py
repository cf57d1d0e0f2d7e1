"""Gated fast weights: Schlag & Schmidhuber 2017, equations 2 to 8."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.checks import check_choice, check_normalized, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import Recurrent, RecurrentCell, RecurrentLayer, RecurrentState
from fastweights.ops.autocast import autocast_is_on
from fastweights.ops.gated import IMPLEMENTATIONS, LAYER_NORMS, gated


class _Parts(NamedTuple):
    hidden: Tensor
    slow_hidden: Tensor
    fast_1: Tensor
    fast_2: Tensor


class GatedFastWeightsState(RecurrentState, _Parts):
    """The state that a gated layer hands from one piece of a sequence to the next.

    For an unbatched sequence all four lack the batch axis.

    Attributes:
        hidden: [B,H].
        slow_hidden: [B,S].
        fast_1: [B,H,H+D+1], columns: hidden, input, bias.
        fast_2: [B,H,H+1], columns: inner units, bias.

    Examples:
        >>> import torch
        >>> from fastweights.nn import GatedFastWeightsState
        >>> state = GatedFastWeightsState(hidden=torch.zeros(2, 4), slow_hidden=torch.zeros(2, 5),
        ...                               fast_1=torch.zeros(2, 4, 8), fast_2=torch.zeros(2, 4, 5))
        >>> state.detach().fast_1.shape
        torch.Size([2, 4, 8])
    """


class _GatedFastWeights(Recurrent[GatedFastWeightsState]):
    """The slow network's parameters and the recurrence, for the layer and the cell."""

    _state_type = GatedFastWeightsState
    layer_norm = "after"  # of a layer that was pickled before there was a choice

    # The arguments of the cell. The layer writes them out again: a user reads its signature in an editor.
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        slow_hidden_size: int | None = None,
        slow_inner_size: int = 100,
        layer_norm: str = "after",
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        slow_hidden_size = hidden_size if slow_hidden_size is None else slow_hidden_size
        check_sizes(
            input_size=input_size,
            hidden_size=hidden_size,
            slow_hidden_size=slow_hidden_size,
            slow_inner_size=slow_inner_size,
        )
        check_choice(IMPLEMENTATIONS, impl=impl)
        check_choice(LAYER_NORMS, layer_norm=layer_norm)
        if layer_norm != "none":
            check_normalized(hidden_size=hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.slow_hidden_size, self.slow_inner_size = slow_hidden_size, slow_inner_size
        self.layer_norm, self.impl = layer_norm, impl
        rows = slow_hidden_size + 4 * hidden_size + 2 * sum(self._columns())
        self.slow_in = nn.Linear(slow_hidden_size + input_size, slow_inner_size, device=device, dtype=dtype)
        self.slow_out = nn.Linear(slow_inner_size, rows, device=device, dtype=dtype)
        self.reset_parameters()

    @property
    def _dtype(self) -> torch.dtype:
        for name, part in (("slow_in", self.slow_in), ("slow_out", self.slow_out)):
            if not isinstance(part.weight, Tensor):
                # Not an AttributeError, which a module would take for a property that it does not have.
                raise TypeError(
                    f"{name} was replaced by a {type(part).__module__}.{type(part).__name__}: {type(self).__name__} "
                    "multiplies by the weights of a torch.nn.Linear itself, so it cannot be quantised: leave it out"
                )
        return self.slow_in.weight.dtype

    def _columns(self) -> tuple[int, int]:
        return self.hidden_size + self.input_size + 1, self.hidden_size + 1

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset all parameters: as `torch.nn.Linear`, but the slow state's way to the next one is orthogonal."""
        self.slow_in.reset_parameters()
        self.slow_out.reset_parameters()
        # Initialised like torch's linear layers, a slow state shrinks to a third or less in a step, and forgets the
        # key before the value comes. An orthogonal matrix keeps its length, up to tanh.
        size, weight = self.slow_hidden_size, self.slow_in.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)  # torch has no orthogonal start in bfloat16
        into = nn.init.orthogonal_(weight.new_empty(self.slow_inner_size, size, dtype=dtype))
        turn = nn.init.orthogonal_(weight.new_empty(size, size, dtype=dtype))
        weight[:, :size] = into
        self.slow_out.weight[:size] = turn @ into.t()

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        columns_1, columns_2 = self._columns()
        return {
            "hidden": (*batch, self.hidden_size),
            "slow_hidden": (*batch, self.slow_hidden_size),
            "fast_1": (*batch, self.hidden_size, columns_1),
            "fast_2": (*batch, self.hidden_size, columns_2),
        }

    def _run(
        self, x: Tensor, state: GatedFastWeightsState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, GatedFastWeightsState]:
        dtype, device = self._dtype, x.device.type
        if state is None:
            shapes = self._state_shapes((x.shape[1],)).values()
            zero = x.new_zeros((), dtype=dtype)  # expanded: the kernel knows such a state as zeros and does not read it
            state = GatedFastWeightsState(*(zero.expand(shape) for shape in shapes))
        weights = (self.slow_in.weight, self.slow_in.bias, self.slow_out.weight, self.slow_out.bias)
        # The operation itself knows which of its products run in the autocast dtype.
        steps = {"lengths": lengths, "starts": starts}
        options: dict[str, Any] = {**steps, "layer_norm": self.layer_norm, "impl": self.impl}
        outputs, *end = gated(x, *weights, *(tensor.to(dtype) for tensor in state), **options)
        if autocast_is_on(device, dtype):
            outputs = outputs.to(torch.get_autocast_dtype(device))
        return outputs, GatedFastWeightsState(*end)

    def extra_repr(self) -> str:
        return describe(
            vars(self),
            ["input_size", "hidden_size"],
            slow_hidden_size=self.hidden_size,
            slow_inner_size=100,
            layer_norm="after",
            impl="auto",
            batch_first=False,
        )


class GatedFastWeightsRNN(_GatedFastWeights, RecurrentLayer[GatedFastWeightsState]):
    """A small recurrent network whose weights a second network writes at every step (Schlag & Schmidhuber 2017).

    The slow network s reads the input and computes what is written into both weight matrices of the fast one (eq 3 to
    8):

        inner = tanh(slow_in [s_t; x_t]);  [z; update 1; update 2] = slow_out inner;  s_{t+1} = tanh(z)
        F_{t+1} = G * H + (1 - G) * F_t,  H = tanh(alpha) tanh(beta)^T,  G = sigmoid(gamma) sigmoid(delta)^T

    and the fast network, which alone gives the output, uses what was written until the step before (eq 2):

        h_{t+1} = LN(tanh(F2_t [LN(tanh(F1_t [h_t; x_t; 1])); 1]))

    So the first output of a sequence is zero whatever x is, and so is that after every start: nothing was written yet.
    What must answer its first input, such as an agent that acts on its first observation, needs a way around the layer,
    such as a linear layer of x whose outputs are added.

    The layer norms have no gain and no bias; the fast layers' biases are the last columns of F1 and F2. No step's fast
    matrices are kept for the backward pass: the kernel writes them again, one sequence at a time.

    Parameters: `slow_in.weight` [P,S+D], columns: slow state, input; `slow_in.bias` [P]; `slow_out.weight`
    [S+4H+2M+2N,P] with M = H+D+1 and N = H+1, rows: z; alpha [H], beta [M], gamma [H], delta [M] of F1; alpha [H],
    beta [N], gamma [H], delta [N] of F2; `slow_out.bias`. All start as those of `torch.nn.Linear`, but the columns of
    `slow_in` for the slow state and the rows of `slow_out` for z: each is orthogonal, and so, where P is at least S, is
    their product, so that the slow network holds what it has read for some steps. The paper does not say how it starts.

    It wants a smaller learning rate than an LSTM when it is wide. With 80 units Adam at 3e-3, by which an LSTM learnt a
    task in 100 steps, left it where it was, and 1e-3 taught it as fast. With inputs a tenth of unit size it learnt the
    task in one run of three.

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of units of both fast layers.
        slow_hidden_size: S, the number of units of the slow network's state; None is `hidden_size`.
        slow_inner_size: P, the number of units of its inner layer.
        layer_norm: where the layer norms of the fast network stand, of tanh: "after" (eq 2), or "before", "both" or
            "none", which the paper tried; these have no kernel and are slower.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        impl: "auto", "reference", "cpu" or "triton".
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size is out of range, or `layer_norm` or `impl` is unknown.

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
        layer_norm: str = "after",
        batch_first: bool = False,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            slow_hidden_size=slow_hidden_size,
            slow_inner_size=slow_inner_size,
            layer_norm=layer_norm,
            impl=impl,
            device=device,
            dtype=dtype,
        )
        self.batch_first = batch_first


class GatedFastWeightsRNNCell(_GatedFastWeights, RecurrentCell[GatedFastWeightsState]):
    """One step of `GatedFastWeightsRNN`, with the same parameters (Schlag & Schmidhuber 2017, eq 2 to 8).

    The arguments are those of the layer, but for `batch_first`; its `state_dict` loads into the cell.

    Raises:
        ValueError: a size is out of range, or `layer_norm` or `impl` is unknown.

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
