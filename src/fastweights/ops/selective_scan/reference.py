"""The selective scan step by step in plain PyTorch: the definition that the kernel is checked against.

    x_t = exp(delta_t A) x_{t-1} + delta_t u_t B_t        of each channel, N numbers
    y_t = C_t x_t

Gu & Dao 2023, "Mamba: linear-time sequence modeling with selective state spaces", equations 2 and 4, discretised as
their code does it: A by a zero-order hold, B by Euler's rule. All channels share the keys B and the queries C.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class ScanInputs(NamedTuple):
    """The tensors of the recurrence, in the order in which the reference and the kernel take them."""

    u: Tensor  # [B,T,D]
    delta: Tensor  # [B,T,D]
    a: Tensor  # [D,N]
    b: Tensor  # [B,T,N]
    c: Tensor  # [B,T,N]
    state: Tensor | None  # [B,D,N]; None is zero
    cu_seqlens: Tensor | None  # int64 [S+1]: bounds of S sequences packed into one row; states are [S,D,N] then


def state_shape(inputs: ScanInputs) -> tuple[int, int, int]:
    """Return [B,D,N], or [S,D,N] of packed sequences."""
    sequences = len(inputs.u) if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
    return sequences, *inputs.a.shape


def scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Run the recurrence.

    Returns:
        The outputs [B,T,D], and the state after each last step [B,D,N], or [S,D,N].
    """
    u, delta, a, b, c, state, cu_seqlens = inputs
    if cu_seqlens is not None:
        return _scan_packed(inputs, cu_seqlens.tolist())
    if state is None:
        state = u.new_zeros(state_shape(inputs))
    outputs = []
    for step in range(u.shape[1]):
        now = delta[:, step].unsqueeze(-1)
        written = (now * u[:, step].unsqueeze(-1)) * b[:, step].unsqueeze(1)
        state = (now * a).exp() * state + written
        outputs.append((state @ c[:, step].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def update(state: Tensor, x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Take one step from states [B,D,N]: return the next ones, and what is read of them [B,D].

    x and delta are [B,D], a is [D,N] or, where all numbers of a state decay alike, [D], b and c are [B,groups,N].
    """
    rates = a if a.dim() == 2 else a.unsqueeze(1)
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (b, c))
    state = (delta.unsqueeze(2) * rates).exp() * state + (delta * x).unsqueeze(2) * b
    return state, (state * c).sum(2)


def _scan_packed(inputs: ScanInputs, bounds: list[int]) -> tuple[Tensor, Tensor]:
    outputs, states = [], []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = None if inputs.state is None else inputs.state[index : index + 1]
        if start == end:  # nothing changes the state of no steps
            states.append(inputs.u.new_zeros(1, *inputs.a.shape) if state is None else state)
            continue
        u, delta, b, c = (tensor[:, start:end] for tensor in (inputs.u, inputs.delta, inputs.b, inputs.c))
        output, last = scan(ScanInputs(u, delta, inputs.a, b, c, state, None))
        outputs.append(output)
        states.append(last)
    return torch.cat(outputs, 1), torch.cat(states)
