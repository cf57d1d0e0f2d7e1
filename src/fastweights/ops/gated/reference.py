"""The recurrence of Schlag & Schmidhuber 2017 in plain PyTorch: the definition that every kernel is checked against.

    inner_t = tanh(W_in [s_t; x_t] + b_in)                          the slow network
    [z_t; delta_t] = W_out inner_t + b_out,   s_{t+1} = tanh(z_t)
    a_t     = LN(tanh(F1_t [h_t; x_t; 1]))                          the fast network
    h_{t+1} = LN(tanh(F2_t [a_t; 1]))
    F_{t+1} = G * H + (1 - G) * F_t                                 for F1 and for F2, elementwise,
    H = tanh(alpha) tanh(beta)^T,  G = sigmoid(gamma) sigmoid(delta)^T

The slow network does not see the fast one, so each is a function of its own here, and a kernel of its own elsewhere.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def slow_network(
    drive: Tensor, weight_hh: Tensor, weight_z: Tensor, bias_z: Tensor, hidden: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Eq 3 and 4, from drive = W_in's columns of x times x, plus b_in.

    Shapes: drive [T,B,P], weight_hh [P,S] (W_in's columns of s), weight_z [S,P] (W_out's rows of z), bias_z [S], hidden
    [B,S], lengths [B]; the inner units [T,B,P], zero past a length, and the states s after every step [T,B,S], which
    stand still there.
    """
    inners, states = [], []
    for step, now in enumerate(drive.unbind()):
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


def fast_network(
    inners: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq 2 and 5 to 8, from the slow network's inner units: W_out's other rows say what to write at every step.

    Shapes: inners [T,B,P], weight [U,P] and bias [U] with U = 4H+2M+2N (alpha, beta, gamma, delta of F1, then of F2), M
    = H+D+1 and N = H+1, x [T,B,D], hidden [B,H], fast_1 [B,H,M], fast_2 [B,H,N], lengths [B]; the hidden states after
    every step [T,B,H], zero past a length, and both matrices after the last step. The product with `weight` runs in its
    own dtype, the recurrence in that of x.
    """
    updates = F.linear(inners, weight, bias).to(x.dtype)
    size, width_1, width_2 = hidden.shape[1], fast_1.shape[2], fast_2.shape[2]
    parts = [size, width_1, size, width_1, size, width_2, size, width_2]
    one = torch.ones_like(hidden[:, :1])
    outputs = []
    for step, (now, update) in enumerate(zip(x.unbind(), updates.unbind(), strict=True)):
        inside = _layer(fast_1, torch.cat((hidden, now, one), 1), eps)
        new = _layer(fast_2, torch.cat((inside, one), 1), eps)
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


def _layer(fast: Tensor, x: Tensor, eps: float) -> Tensor:
    sums = (fast @ x.unsqueeze(2)).squeeze(2)
    return F.layer_norm(torch.tanh(sums), sums.shape[1:], eps=eps)


def _write(fast: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor, delta: Tensor) -> Tensor:
    written = torch.tanh(alpha).unsqueeze(2) * torch.tanh(beta).unsqueeze(1)
    gate = torch.sigmoid(gamma).unsqueeze(2) * torch.sigmoid(delta).unsqueeze(1)
    return gate * written + (1 - gate) * fast
