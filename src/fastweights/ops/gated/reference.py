"""The recurrence of Schlag & Schmidhuber 2017 in plain PyTorch: the definition that every kernel is checked against.

    inner_t = tanh(W_in [s_t; x_t] + b_in)                          the slow network
    [z_t; delta_t] = W_out inner_t + b_out,   s_{t+1} = tanh(z_t)
    a_t     = LN(tanh(F1_t [h_t; x_t; 1]))                          the fast network
    h_{t+1} = LN(tanh(F2_t [a_t; 1]))
    F_{t+1} = G * H + (1 - G) * F_t                                 for F1 and for F2, elementwise,
    H = tanh(alpha) tanh(beta)^T,  G = sigmoid(gamma) sigmoid(delta)^T

The slow network does not see the fast one, so each is a function of its own here, and a kernel of its own elsewhere.
Before a step that `starts` marks, s, h and both F are zeros: another sequence begins. The layer norms may stand before
tanh too, or instead, or be left out: section 3 of the paper tried that.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5  # added to the variance by the layer norms
FIXED = 2  # the last inputs, which have no gradient
LAYER_NORMS = ("after", "before", "both", "none")  # where they stand, of tanh


class SlowInputs(NamedTuple):
    """The tensors of the slow network, in the order in which the reference and the kernels take them."""

    drive: Tensor  # [T,B,P]: W_in's columns of x times x, plus b_in
    weight_hh: Tensor  # [P,S]: W_in's columns of s
    weight_z: Tensor  # [S,P]: W_out's rows of z
    bias_z: Tensor  # [S]
    hidden: Tensor  # [B,S]
    lengths: Tensor | None = None  # int64 [B]; None is T for all
    starts: Tensor | None = None  # bool [T,B]; None is nowhere


class FastInputs(NamedTuple):
    """The tensors of the fast network, in the order in which the reference and the kernels take them."""

    inners: Tensor  # [T,B,P]: the slow network's inner units
    weight: Tensor  # [U,P], U = 4H+2M+2N: W_out's rows of alpha, beta, gamma and delta of F1, then of F2
    bias: Tensor  # [U]
    x: Tensor  # [T,B,D]
    hidden: Tensor  # [B,H]
    fast_1: Tensor  # [B,H,M], M = H+D+1
    fast_2: Tensor  # [B,H,N], N = H+1
    lengths: Tensor | None = None  # int64 [B]; None is T for all
    starts: Tensor | None = None  # bool [T,B]; None is nowhere


def slow_shapes(drive: Tensor, hidden: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the slow network's inputs that have gradients, by name."""
    steps, batch, inner = _check_axes(drive, "drive")
    size = hidden.shape[-1]
    return {
        "drive": (steps, batch, inner),
        "weight_hh": (inner, size),
        "weight_z": (size, inner),
        "bias_z": (size,),
        "hidden": (batch, size),
    }


def fast_shapes(x: Tensor, hidden: Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the fast network's recurrence by name: the updates [T,B,U], x, hidden, fast_1, fast_2."""
    steps, batch, features = _check_axes(x, "x")
    size = hidden.shape[-1]
    columns_1, columns_2 = size + features + 1, size + 1
    return {
        "updates": (steps, batch, 4 * size + 2 * (columns_1 + columns_2)),
        "x": (steps, batch, features),
        "hidden": (batch, size),
        "fast_1": (batch, size, columns_1),
        "fast_2": (batch, size, columns_2),
    }


def _check_axes(tensor: Tensor, name: str) -> tuple[int, int, int]:
    if tensor.dim() != 3:
        raise ValueError(f"{name} must be [T,B,...], got shape {tuple(tensor.shape)}")
    steps, batch, numbers = tensor.shape
    return steps, batch, numbers


def slow_network(inputs: SlowInputs) -> tuple[Tensor, Tensor]:
    """Run the slow network (eq 3 and 4).

    Returns:
        The inner units [T,B,P], zero past a length, and the states s after every step [T,B,S], which stand still there.
    """
    drive, weight_hh, weight_z, bias_z, hidden, lengths, starts = inputs
    inners, states = [], []
    for step, now in enumerate(drive.unbind()):
        if starts is not None:
            hidden = clear(_valid_starts(starts, lengths, step), hidden)
        inner = torch.tanh(now + hidden @ weight_hh.t())
        new = torch.tanh(F.linear(inner, weight_z, bias_z))
        if lengths is None:
            hidden = new
        else:
            valid = (step < lengths).unsqueeze(1)
            inner, hidden = torch.where(valid, inner, torch.zeros_like(inner)), torch.where(valid, new, hidden)
        inners.append(inner)
        states.append(hidden)
    return torch.stack(inners), torch.stack(states)


def clear(flags: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with zeros where the flags of its first axes say so, whatever stood there."""
    return torch.where(flags.view(*flags.shape, *[1] * (tensor.dim() - flags.dim())), torch.zeros_like(tensor), tensor)


def fast_network(inputs: FastInputs, layer_norm: str = "after") -> tuple[Tensor, Tensor, Tensor]:
    """Run the fast network (eq 2 and 5 to 8); the slow network's inner units say what to write at every step.

    The product with `weight` runs in its own dtype, the recurrence in that of x.

    Returns:
        The hidden states after every step [T,B,H], zero past a length, and both matrices after the last step.
    """
    inners, weight, bias, x, hidden, fast_1, fast_2, lengths, starts = inputs
    updates = F.linear(inners, weight, bias).to(x.dtype)
    size, width_1, width_2 = hidden.shape[1], fast_1.shape[2], fast_2.shape[2]
    parts = [size, width_1, size, width_1, size, width_2, size, width_2]
    one = torch.ones_like(hidden[:, :1])
    outputs = []
    for step, (now, update) in enumerate(zip(x.unbind(), updates.unbind(), strict=True)):
        if starts is not None:
            anew = _valid_starts(starts, lengths, step)
            hidden, fast_1, fast_2 = clear(anew, hidden), clear(anew, fast_1), clear(anew, fast_2)
        inside = _layer(fast_1, torch.cat((hidden, now, one), 1), layer_norm)
        new = _layer(fast_2, torch.cat((inside, one), 1), layer_norm)
        pieces = torch.split(update, parts, 1)
        written_1, written_2 = _write(fast_1, *pieces[:4]), _write(fast_2, *pieces[4:])
        if lengths is None:
            hidden, fast_1, fast_2 = new, written_1, written_2
            outputs.append(new)
            continue
        valid = (step < lengths).unsqueeze(1)
        outputs.append(torch.where(valid, new, torch.zeros_like(new)))
        hidden = torch.where(valid, new, hidden)
        fast_1 = torch.where(valid.unsqueeze(2), written_1, fast_1)
        fast_2 = torch.where(valid.unsqueeze(2), written_2, fast_2)
    return torch.stack(outputs), fast_1, fast_2


def _valid_starts(starts: Tensor, lengths: Tensor | None, step: int) -> Tensor:
    """Return which sequences restart before a step [B]: past its length a sequence keeps its state."""
    return starts[step] if lengths is None else starts[step] & (step < lengths)


def _layer(fast: Tensor, x: Tensor, layer_norm: str) -> Tensor:
    def normalize(x: Tensor, *where: str) -> Tensor:
        return F.layer_norm(x, x.shape[1:], eps=EPS) if layer_norm in where else x

    sums = (fast @ x.unsqueeze(2)).squeeze(2)
    return normalize(torch.tanh(normalize(sums, "before", "both")), "after", "both")


def _write(fast: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, delta: Tensor) -> Tensor:
    written = torch.tanh(alpha).unsqueeze(2) * torch.tanh(beta).unsqueeze(1)
    gate = torch.sigmoid(gamma).unsqueeze(2) * torch.sigmoid(delta).unsqueeze(1)
    return gate * written + (1 - gate) * fast
