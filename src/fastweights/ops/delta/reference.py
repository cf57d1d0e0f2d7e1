"""The delta family step by step in plain PyTorch: the definition that the kernel is checked against.

    S <- exp(g_t) S_{t-1}                    what is kept of the state; of each channel another part, if g has those
    u_t = beta_t (v_t - S^T k_t)             what is written: by the additive rules v_t itself
    S_t = S + k_t u_t^T
    o_t = scale S_t^T q_t                    plus skip v_t, where the rule is additive and there is a skip

Schlag, Irie & Schmidhuber 2021, "Linear transformers are secretly fast weight programmers", equations 4 and 24; the
decay is that of Yang, Kautz & Hatamizadeh 2024, "Gated delta networks", equation 10. A decay for each channel is that
of Kimi delta attention (Kimi Team 2025, "Kimi Linear", equation 1) and, with the additive rule, of gated linear
attention (Yang et al. 2024, "Gated linear attention transformers", equation 3).

With a and b the state changes by a matrix of rank one too, of what a reads of the state before the step:

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T + b_t (S_{t-1}^T a_t)^T

which flash-linear-attention calls DPLR, diagonal plus low rank. It is the rule of RWKV-7 (Peng et al. 2025, "RWKV-7
Goose with expressive dynamic state evolution", equation 17).
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops.packed import check_bounds, check_cu_seqlens


class DeltaInputs(NamedTuple):
    """The tensors of the recurrence, in the order in which the reference and the kernel take them."""

    q: Tensor  # [B,T,H,K], or of fewer heads, each for as many consecutive ones of the others
    k: Tensor  # as q
    v: Tensor  # [B,T,H,V]
    g: Tensor | None  # [B,T,H] or [B,T,H,K]: log decays, minus infinity where the state restarts; None is 0
    beta: Tensor | None  # [B,T,H]; None is 1
    a: Tensor | None  # [B,T,H,K]: reads what b writes; q and k have as many heads as v then, and g is [B,T,H,K]
    b: Tensor | None  # [B,T,H,K], where there is an a
    skip: Tensor | None  # [H], where the rule is additive: how much of its own value each output has; None is nothing
    state: Tensor | None  # [B,H,K,V]; None is zero
    lengths: Tensor | None  # int64 [B]; None is T for all
    cu_seqlens: Tensor | None  # int64 [N+1]: bounds of N sequences packed into one row; states are [N,H,K,V] then


def state_shape(inputs: DeltaInputs) -> tuple[int, int, int, int]:
    """Return [B,H,K,V], or [N,H,K,V] of packed sequences."""
    batch, _, _, keys = inputs.k.shape
    heads = inputs.v.shape[2]
    return batch if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1, heads, keys, inputs.v.shape[-1]


def check_inputs(inputs: DeltaInputs) -> None:
    """Refuse tensors whose shapes, dtypes and devices do not fit together."""
    q, k, v, g, beta, a, b, skip, state, lengths, cu_seqlens = inputs
    fits = v.dim() == k.dim() == 4 and q.shape == k.shape and k.shape[:2] == v.shape[:2]
    if not fits or 0 in (*k.shape[1:], *v.shape[2:]) or v.shape[2] % k.shape[2]:
        raise ValueError(
            "q and k must be [B,T,H,K] and v [B,T,H,V], or a multiple of their heads, with a step, a head, a key and a "
            f"value at least, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    batch, steps, heads, _ = v.shape
    of_keys = (batch, steps, heads, k.shape[3])
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch, v.device)
        if lengths is not None:
            raise ValueError("cu_seqlens already say how long each sequence is: leave lengths out")
    of_steps, of_heads = (batch, steps, heads), state_shape(inputs)
    if g is not None and g.shape not in (of_steps, of_keys):
        raise ValueError(
            f"{_decay_name(inputs)} must be [B,T,H], {list(of_steps)} here, or [B,T,H,K], {list(of_keys)}, got "
            f"{list(g.shape)}"
        )
    if beta is not None and beta.shape != of_steps:
        raise ValueError(f"beta must be [B,T,H], {list(of_steps)} here, got {list(beta.shape)}")
    if skip is not None and skip.shape != (heads,):
        raise ValueError(f"skip must be [H], [{heads}] here, got {list(skip.shape)}")
    for name, tensor in (("a", a), ("b", b)):
        if tensor is not None and (tensor.shape != of_keys or k.shape != of_keys):
            raise ValueError(
                f"q, k, a and b must be [B,T,H,K], of as many heads as v, {list(of_keys)} here, got {list(k.shape)} "
                f"for k, {list(tensor.shape)} for {name}"
            )
    if state is not None and state.shape != of_heads:
        which = "B" if cu_seqlens is None else "N"
        raise ValueError(f"initial_state must be [{which},H,K,V], {list(of_heads)} here, got {list(state.shape)}")
    dtype, device = v.dtype, v.device
    for name, tensor in (
        *(("q", q), ("k", k), (_decay_name(inputs), g), ("beta", beta), ("a", a), ("b", b)),
        *(("skip", skip), ("initial_state", state)),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.device != device):
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, v is {dtype} on {device}")
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must be [B], [{batch}] here, got {list(lengths.shape)}")
    if lengths.dtype != torch.int64 or lengths.device != device:
        raise TypeError(f"lengths must be int64 on {device}, got {lengths.dtype} on {lengths.device}")


def _decay_name(inputs: DeltaInputs) -> str:
    return "g" if inputs.a is None else "gk"  # as the function that was called has it


def check_numbers(inputs: DeltaInputs, correct: bool) -> None:
    """Refuse numbers that the rules have no use for; NaN passes, as it does everywhere.

    An additive rule has use for any beta. With `correct`, one of up to 2 turns around what is held for a key of length
    one, and no more: the eigenvalues of the transition I - beta k k^T stay between -1 and 1 (Grazzi et al. 2025,
    "Unlocking state-tracking in linear RNNs through negative eigenvalues"; it is `allow_neg_eigval` elsewhere).
    """
    for name, tensor, least, most, words in (
        (_decay_name(inputs), inputs.g, -torch.inf, 0, "be logs of decays, at most 0"),
        ("beta", inputs.beta if correct else None, 0, 2, "lie between 0 and 2"),
        ("lengths", inputs.lengths, 0, inputs.v.shape[1], f"lie between 0 and {inputs.v.shape[1]}"),
    ):
        if tensor is not None and (wrong := tensor[(tensor < least) | (tensor > most)]).numel() > 0:
            raise ValueError(f"{name} must {words}, got {wrong[0].item():g}")
    if inputs.cu_seqlens is not None:
        check_bounds(inputs.cu_seqlens, inputs.v.shape[1])


def delta(inputs: DeltaInputs, scale: float, correct: bool) -> tuple[Tensor, Tensor]:
    """Run the recurrence; without `correct` the values are written as they are.

    Returns:
        The outputs [B,T,H,V], zero past a length, and the state after each last valid step [B,H,K,V], or [N,H,K,V].
    """
    q, k, v, g, beta, a, b, skip, state, lengths, cu_seqlens = inputs
    if cu_seqlens is not None:
        return _run_packed(inputs, scale, correct)
    if state is None:
        state = v.new_zeros(state_shape(inputs))
    q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], 2) for each in (q, k))
    if lengths is not None:  # what is past a length may be no numbers, which would reach the gradients of the others
        past = torch.arange(v.shape[1], device=v.device) >= lengths.unsqueeze(1)

        def blank(tensor: Tensor) -> Tensor:
            return tensor.masked_fill(past.view(*past.shape, *[1] * (tensor.dim() - 2)), 0)

        q, k, v = blank(q), blank(k), blank(v)
        g, beta, a, b = (None if tensor is None else blank(tensor) for tensor in (g, beta, a, b))
    outputs = []
    for step in range(v.shape[1]):
        kept, value = state, v[:, step]
        if g is not None:
            now = g[:, step].unsqueeze(-1) if g.dim() == 4 else g[:, step, :, None, None]
            # Nothing of an earlier state must be left, NaN neither.
            kept = torch.where(now.isneginf(), torch.zeros_like(state), now.exp() * state)
        if correct:
            value = value - _read(kept, k[:, step])
        if beta is not None:
            value = beta[:, step].unsqueeze(-1) * value
        new = kept + k[:, step].unsqueeze(-1) * value.unsqueeze(-2)
        if g is not None and a is not None and b is not None:
            anew = g[:, step].isneginf().all(-1)[..., None, None]  # a start: there is nothing to read
            before = _read(torch.where(anew, torch.zeros_like(state), state), a[:, step])
            new = new + b[:, step].unsqueeze(-1) * before.unsqueeze(-2)
        output = scale * _read(new, q[:, step])
        if skip is not None:
            output = output + skip.unsqueeze(-1) * v[:, step]
        if lengths is not None:
            valid = (step < lengths).view(-1, 1, 1)
            output = torch.where(valid, output, torch.zeros_like(output))
            new = torch.where(valid.unsqueeze(-1), new, state)
        state = new
        outputs.append(output)
    return torch.stack(outputs, 1), state


def _run_packed(inputs: DeltaInputs, scale: float, correct: bool) -> tuple[Tensor, Tensor]:
    """Run the sequences that are packed into one row, one after the other."""
    assert inputs.cu_seqlens is not None
    outputs, states = [], []
    bounds = inputs.cu_seqlens.tolist()
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = None if inputs.state is None else inputs.state[index : index + 1]
        if start == end:  # nothing changes the state of no steps
            states.append(inputs.v.new_zeros(1, *state_shape(inputs)[1:]) if state is None else state)
            continue
        pieces = [None if tensor is None else tensor[:, start:end] for tensor in inputs[:7]]
        output, last = delta(DeltaInputs._make((*pieces, inputs.skip, state, None, None)), scale, correct)
        outputs.append(output)
        states.append(last)
    return torch.cat(outputs, 1), torch.cat(states)


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Return what a state [B,H,K,V] holds for a key [B,H,K]: [B,H,V]."""
    return (key.unsqueeze(-2) @ state).squeeze(-2)
