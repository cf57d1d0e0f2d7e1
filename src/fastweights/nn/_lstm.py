"""A layer of LSTM as a language model needs it: dropout of its state, layer norm, restarts and lengths."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.checks import check_dropout, check_normalized, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import RecurrentLayer, RecurrentState
from fastweights.ops.autocast import autocast_is_on
from fastweights.ops.lstm import LayerNorms, lstm
from fastweights.ops.lstm.reference import EPS


def draw_mask(like: Tensor, shape: Sequence[int], dropout: float) -> Tensor:
    """Draw what dropout multiplies by, 0 or what keeps the mean."""
    return like.new_empty(*shape).bernoulli_(1 - dropout).div_(1 - dropout)


class _Pair(NamedTuple):
    hidden: Tensor
    cell: Tensor


class LSTMState(RecurrentState, _Pair):
    """The state that an LSTM hands from one piece of a sequence to the next; unbatched, both lack the batch axis.

    Attributes:
        hidden: [B,H].
        cell: [B,H].
    """


class LSTM(RecurrentLayer[LSTMState]):
    """One layer of an LSTM whose hidden state passes a mask of dropout before a step reads it, at no cost to speak of.

    The equations are those of `fastweights.ops.lstm.lstm`. In training the mask is drawn once a call and kept over its
    steps (Gal & Ghahramani 2016).

    Parameters, in blocks for i, f, g and o as in `torch.nn.LSTM`: `weight_ih` [4H,D], `weight_hh` [4H,H] and `bias`
    [4H]. With layer norm, `norms` are those of the input's part [4H], of the state's part [4H] and of the cell [H],
    each with a `weight` and a `bias`.

    Args:
        input_size: D, the number of features of an input.
        hidden_size: H, the number of units.
        layer_norm: normalise the gates and the cell (Ba, Kiros & Hinton 2016).
        state_dropout: the probability of dropout on the hidden state that a step reads.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size is not an integer of at least 1, or the probability is not one of at least 0 and less than 1.

    Examples:
        >>> import torch
        >>> from fastweights.nn._lstm import LSTM
        >>> y, state = LSTM(input_size=10, hidden_size=20)(torch.randn(7, 3, 10))  # x [T,B,D]
        >>> y.shape, state.cell.shape                                              # [T,B,H], [B,H]
        (torch.Size([7, 3, 20]), torch.Size([3, 20]))
    """

    _state_type = LSTMState

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        layer_norm: bool = False,
        state_dropout: float = 0.0,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size)
        if layer_norm:
            check_normalized(hidden_size=hidden_size)
        check_dropout(state_dropout=state_dropout)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.layer_norm, self.state_dropout, self.batch_first = layer_norm, state_dropout, batch_first
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size, **options))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size, **options))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size, **options))
        widths = (4 * hidden_size, 4 * hidden_size, hidden_size) if layer_norm else ()
        norms = [nn.LayerNorm(width, eps=EPS, **options) for width in widths]
        self.norms = nn.ModuleList(norms) if layer_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all: uniform within 1 / sqrt(H), as `torch.nn.LSTM`; what a unit forgets starts at a bias of 1."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.uniform_(self.weight_hh, -bound, bound)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.bias.data[self.hidden_size : 2 * self.hidden_size])
        for part in self.norms or ():
            part.reset_parameters()  # type: ignore[operator]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A layer that was pickled as a private part of the language model knew the size of its state alone.
        width = state["_parameters"]["weight_ih"].shape[1]
        before = {
            "input_size": width,
            "layer_norm": bool(state["_modules"]),
            "state_dropout": 0.0,
            "batch_first": False,
        }
        super().__setstate__(before | state)  # type: ignore[no-untyped-call]

    @property
    def _dtype(self) -> torch.dtype:
        return self.weight_hh.dtype

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"hidden": (*batch, self.hidden_size), "cell": (*batch, self.hidden_size)}

    def _run(
        self, x: Tensor, state: LSTMState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, LSTMState]:
        if state is None:
            # Two tensors: Dynamo takes none twice.
            state = LSTMState(*(x.new_zeros(x.shape[1], self.hidden_size, dtype=self._dtype) for _ in range(2)))
        mask = None
        if self.training and self.state_dropout > 0:
            mask = draw_mask(self.weight_hh, (x.shape[1], self.hidden_size), self.state_dropout)
        norms: Any = self.norms and LayerNorms(*((part.weight, part.bias) for part in self.norms))  # type: ignore[arg-type]
        outputs, hidden, cell = lstm(
            x,
            self.weight_ih,
            self.bias,
            self.weight_hh,
            *state.to(self._dtype),
            mask=mask,
            norms=norms,
            lengths=lengths,
            starts=starts,
        )
        device = x.device.type
        y = outputs.to(torch.get_autocast_dtype(device)) if autocast_is_on(device, self._dtype) else outputs
        return y, LSTMState(hidden, cell)

    def extra_repr(self) -> str:
        sizes = ("input_size", "hidden_size")
        return describe(vars(self), sizes, layer_norm=False, state_dropout=0.0, batch_first=False)
