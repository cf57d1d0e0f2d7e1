"""The delta family step by step in plain PyTorch: the definition that the kernel is checked against.

    S <- exp(g_t) S_{t-1}                    what is kept of the state
    u_t = beta_t (v_t - S^T k_t)             what is written: by the additive rules v_t itself
    S_t = S + k_t u_t^T
    o_t = scale S_t^T q_t

Schlag, Irie & Schmidhuber 2021, "Linear transformers are secretly fast weight programmers", equations 4 and 24; the
decay is that of Yang, Kautz & Hatamizadeh 2024, "Gated delta networks", equation 10.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DeltaInputs(NamedTuple):
    """The tensors of the recurrence, in the order in which the reference and the kernel take them."""

    q: Tensor  # [B,T,H,K]
    k: Tensor  # [B,T,H,K]
    v: Tensor  # [B,T,H,V]
    g: Tensor | None  # [B,T,H]: log decays, minus infinity where the state starts anew; None is 0
    beta: Tensor | None  # [B,T,H]; None is 1
    state: Tensor | None  # [B,H,K,V]; None is zero
    lengths: Tensor | None  # int64 [B]; None is T for all


def delta(inputs: DeltaInputs, scale: float, correct: bool) -> tuple[Tensor, Tensor]:
    """Run the recurrence; without `correct` the values are written as they are.

    Returns:
        The outputs [B,T,H,V], zero past a length, and the state after each last valid step [B,H,K,V].
    """
    q, k, v, g, beta, state, lengths = inputs
    if state is None:
        state = v.new_zeros(v.shape[0], *k.shape[2:], v.shape[3])
    outputs = []
    for step in range(v.shape[1]):
        kept, value = state, v[:, step]
        if g is not None:
            now = g[:, step, :, None, None]
            # Nothing of an earlier state must be left, NaN neither.
            kept = torch.where(now.isneginf(), torch.zeros_like(state), now.exp() * state)
        if correct:
            value = value - _read(kept, k[:, step])
        if beta is not None:
            value = beta[:, step].unsqueeze(-1) * value
        new = kept + k[:, step].unsqueeze(-1) * value.unsqueeze(-2)
        output = scale * _read(new, q[:, step])
        if lengths is not None:
            valid = (step < lengths).view(-1, 1, 1)
            output = torch.where(valid, output, torch.zeros_like(output))
            new = torch.where(valid.unsqueeze(-1), new, state)
        state = new
        outputs.append(output)
    return torch.stack(outputs, 1), state


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Return what a state [B,H,K,V] holds for a key [B,H,K]: [B,H,V]."""
    return (key.unsqueeze(-2) @ state).squeeze(-2)
