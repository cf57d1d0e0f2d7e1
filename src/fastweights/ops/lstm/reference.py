"""The LSTM in plain PyTorch: the definition that the fast implementation is checked against.

    x_t, h_{t-1} and c_{t-1} give h_t and c_t (Hochreiter & Schmidhuber 1997; with a forget gate, Gers et al. 2000):

    [i; f; g; o] = W_ih x_t + b + W_hh (m * h_{t-1})       1. the gates, in torch's order
    c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g)      2. the cell
    h_t = sigmoid(o) * tanh(c_t)                           3. the hidden state

    where m is a mask of dropout that stays the same at every step (Gal & Ghahramani 2016), or one. With layer norm (Ba,
    Kiros & Hinton 2016) step 1 has LN(W_ih x_t) + b + LN(W_hh (m * h_{t-1})), and step 3 has tanh(LN(c_t)), each with a
    gain and a bias of its own.

Before a step that `starts` marks, h and c are zeros: another sequence begins.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5  # added to the variance by the layer norms
FIXED = 3  # the last inputs, which have no gradient


class LSTMInputs(NamedTuple):
    """The tensors of the recurrence, in the order in which both implementations take them."""

    x: Tensor  # [T,B,D]; zero past a length
    weight_ih: Tensor  # [4H,D], in the dtype of x, that of the products
    bias: Tensor  # [4H], in the dtype of the state
    weight_hh: Tensor  # [4H,H], in the dtype of x
    hidden: Tensor  # [B,H]
    cell: Tensor  # [B,H]
    mask: Tensor | None = None  # [B,H]; None is one everywhere
    lengths: Tensor | None = None  # int64 [B]; None is T for all
    starts: Tensor | None = None  # bool [T,B], none past a length; None is nowhere


class LayerNorms(NamedTuple):
    """The gain and the bias of each layer norm."""

    of_input: tuple[Tensor, Tensor]  # [4H] each
    of_state: tuple[Tensor, Tensor]  # [4H] each
    of_cell: tuple[Tensor, Tensor]  # [H] each


def input_shapes(x: Tensor, hidden: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs but lengths and starts, by name."""
    (steps, batch, features), size = x.shape, hidden.shape[-1]
    state = (batch, size)
    return {
        "x": (steps, batch, features),
        "weight_ih": (4 * size, features),
        "bias": (4 * size,),
        "weight_hh": (4 * size, size),
        "hidden": state,
        "cell": state,
        "mask": state,
    }


def lstm(inputs: LSTMInputs, norms: LayerNorms | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence; the products run in the dtype of x, all else in that of the state.

    Returns:
        The hidden states after every step [T,B,H], zero past a length, and the state [B,H], [B,H] after the last one.
    """
    x, weight_ih, bias, weight_hh, hidden, cell, mask, lengths, starts = inputs
    of_input, of_state, of_cell = norms or (None, None, None)
    drive = _normalise(F.linear(x, weight_ih).to(cell.dtype), of_input) + bias
    outputs = []
    for step, now in enumerate(drive.unbind()):
        if starts is not None:
            anew = starts[step].unsqueeze(1)
            hidden, cell = hidden.masked_fill(anew, 0), cell.masked_fill(anew, 0)
        read = hidden if mask is None else hidden * mask
        product = F.linear(read.to(weight_hh.dtype), weight_hh).to(cell.dtype)
        i, f, g, o = (now + _normalise(product, of_state)).chunk(4, 1)
        new_cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        new = o.sigmoid() * _normalise(new_cell, of_cell).tanh()
        if lengths is None:
            hidden, cell = new, new_cell
            outputs.append(new)
            continue
        valid = (step < lengths).unsqueeze(1)
        outputs.append(torch.where(valid, new, torch.zeros_like(new)))
        hidden, cell = torch.where(valid, new, hidden), torch.where(valid, new_cell, cell)
    return torch.stack(outputs), hidden, cell


def _normalise(x: Tensor, norm: tuple[Tensor, Tensor] | None) -> Tensor:
    return x if norm is None else F.layer_norm(x, x.shape[-1:], *norm, eps=EPS)
