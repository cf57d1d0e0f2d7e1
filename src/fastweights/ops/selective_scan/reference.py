"""The selective scan step by step in plain PyTorch: the definition that the kernel is checked against.

    x_t = exp(delta_t A) x_{t-1} + delta_t u_t B_t        of each channel, N numbers
    y_t = (C_t x_t + D u_t) silu(z_t)

delta is first given a bias and its softplus, where they are wanted.

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
    bias: Tensor | None  # [D], added to delta
    skip: Tensor | None  # [D], how much of u passes by
    gate: Tensor | None  # [B,T,D], of the output, before its SiLU
    state: Tensor | None  # [B,D,N]; None is zero
    cu_seqlens: Tensor | None  # int64 [S+1]: bounds of S sequences packed into one row; states are [S,D,N] then


class UpdateInputs(NamedTuple):
    """The tensors of one step, but for the states."""

    x: Tensor  # [B,D]
    delta: Tensor  # [B,D]
    a: Tensor  # [D,N]; or [D], where all numbers of a state decay alike
    b: Tensor  # [B,N], or [B,groups,N], each for as many consecutive channels
    c: Tensor  # as b
    bias: Tensor | None  # [D], added to delta
    skip: Tensor | None  # [D], how much of x passes by
    gate: Tensor | None  # [B,D], of the output, before its SiLU


def state_shape(inputs: ScanInputs) -> tuple[int, int, int]:
    """Return [B,D,N], or [S,D,N] of packed sequences."""
    sequences = len(inputs.u) if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
    return sequences, *inputs.a.shape


def scan(inputs: ScanInputs, softplus: bool) -> tuple[Tensor, Tensor]:
    """Run the recurrence; with `softplus` the size of a step is softplus of delta, after the bias.

    Returns:
        The outputs [B,T,D], and the state after each last step [B,D,N], or [S,D,N].
    """
    u, delta, a, b, c, bias, skip, gate, state, cu_seqlens = inputs
    if cu_seqlens is not None:
        return _scan_packed(inputs, softplus, cu_seqlens.tolist())
    delta = _size_of_step(delta, bias, softplus)
    if state is None:
        state = u.new_zeros(state_shape(inputs))
    outputs = []
    for step in range(u.shape[1]):
        now = delta[:, step].unsqueeze(-1)
        written = (now * u[:, step].unsqueeze(-1)) * b[:, step].unsqueeze(1)
        state = (now * a).exp() * state + written
        outputs.append((state @ c[:, step].unsqueeze(-1)).squeeze(-1))
    return _let_out(torch.stack(outputs, 1), u, skip, gate), state


def update(state: Tensor, inputs: UpdateInputs, softplus: bool) -> tuple[Tensor, Tensor]:
    """Take one step from states [B,D,N]: return the next ones, and the outputs [B,D].

    With `softplus` the size of a step is softplus of delta, after the bias.
    """
    x, delta, a, b, c, bias, skip, gate = inputs
    delta = _size_of_step(delta, bias, softplus)
    rates = a if a.dim() == 2 else a.unsqueeze(1)
    b, c = (each if each.dim() == 3 else each.unsqueeze(1) for each in (b, c))
    b, c = (each.repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (b, c))
    state = (delta.unsqueeze(2) * rates).exp() * state + (delta * x).unsqueeze(2) * b
    return state, _let_out((state * c).sum(2), x, skip, gate)


def _size_of_step(delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    delta = delta if bias is None else delta + bias
    return torch.nn.functional.softplus(delta) if softplus else delta


def _let_out(y: Tensor, u: Tensor, skip: Tensor | None, gate: Tensor | None) -> Tensor:
    y = y if skip is None else y + u * skip
    return y if gate is None else y * torch.nn.functional.silu(gate)


def _scan_packed(inputs: ScanInputs, softplus: bool, bounds: list[int]) -> tuple[Tensor, Tensor]:
    outputs, states = [], []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = None if inputs.state is None else inputs.state[index : index + 1]
        if start == end:  # nothing changes the state of no steps
            states.append(inputs.u.new_zeros(1, *inputs.a.shape) if state is None else state)
            continue
        u, delta, b, c = (tensor[:, start:end] for tensor in (inputs.u, inputs.delta, inputs.b, inputs.c))
        gate = None if inputs.gate is None else inputs.gate[:, start:end]
        own = inputs._replace(u=u, delta=delta, b=b, c=c, gate=gate, state=state, cu_seqlens=None)
        output, last = scan(own, softplus)
        outputs.append(output)
        states.append(last)
    return torch.cat(outputs, 1), torch.cat(states)
