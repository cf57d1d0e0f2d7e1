"""Gated fast weights: the recurrence of Schlag & Schmidhuber 2017, "Gated fast weights for associative retrieval"."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops._calls import IMPLEMENTATIONS, choose
from fastweights.ops.autocast import autocast_is_on, without_autocast
from fastweights.ops.gated import reference, triton
from fastweights.ops.gated._autograd import FastNetwork, SlowNetwork, fast_operator, slow_operator

__all__ = ["IMPLEMENTATIONS", "Result", "gated"]

EPS = 1e-5


class Result(NamedTuple):
    """What a run gives: the outputs, and the state after the last valid step."""

    outputs: Tensor  # [T,B,H], zero past a length
    hidden: Tensor  # [B,H]
    slow_hidden: Tensor  # [B,S]
    fast_1: Tensor  # [B,H,H+D+1]
    fast_2: Tensor  # [B,H,H+1]


def gated(
    x: Tensor,
    slow_in_weight: Tensor,
    slow_in_bias: Tensor,
    slow_out_weight: Tensor,
    slow_out_bias: Tensor,
    hidden: Tensor,
    slow_hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    *,
    lengths: Tensor | None = None,
    impl: str = "auto",
) -> Result:
    """Run a slow network that writes the fast network's weights at every step (Schlag & Schmidhuber 2017, eq 2 to 8).

    Args:
        x: the inputs, [T,B,D].
        slow_in_weight: [P,S+D], columns: the slow state, the input.
        slow_in_bias: [P].
        slow_out_weight: [S+4H+2M+2N,P] with M = H+D+1 and N = H+1, rows: z; alpha, beta, gamma and delta of F1; of F2.
        slow_out_bias: [S+4H+2M+2N].
        hidden: h_0 of the fast network, [B,H].
        slow_hidden: the slow network's state, [B,S].
        fast_1: F1, [B,H,M], columns: h, x, the bias.
        fast_2: F2, [B,H,N], columns: the inner units, the bias.
        lengths: valid steps of each sequence, int64 [B], from 0 to T (the cpu kernel refuses others, the rest take
            them as 0 or T).
        impl: "auto", "reference", "cpu" or "triton", which keeps both fast matrices on chip and refuses those that do
            not fit: in float32 past 128 x 128.

    Gradients of any order go through every implementation.

    Raises:
        ValueError: `impl` is unknown, or x has no step.
        KernelError: the implementation that was asked for by name cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.gated import gated
        >>> size, features, slow = 4, 3, 5
        >>> rows = slow + 4 * size + 2 * (size + features + 1) + 2 * (size + 1)
        >>> result = gated(torch.randn(7, 2, features), torch.randn(6, slow + features), torch.zeros(6),
        ...                torch.randn(rows, 6), torch.zeros(rows), torch.zeros(2, size), torch.zeros(2, slow),
        ...                torch.zeros(2, size, size + features + 1), torch.zeros(2, size, size + 1))
        >>> result.outputs.shape, result.fast_1.shape
        (torch.Size([7, 2, 4]), torch.Size([2, 4, 8]))
    """
    if x.dim() != 3 or x.shape[0] == 0:
        raise ValueError(f"x must be [T,B,D] with at least one step, got shape {tuple(x.shape)}")
    impl = choose(hidden, impl, lambda: triton.unavailable(x, hidden))
    slow_size = slow_hidden.shape[-1]
    weight_z, bias_z = slow_out_weight[:slow_size], slow_out_bias[:slow_size]
    valid = None if lengths is None else (torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths).unsqueeze(2)
    # What lies past a length must not reach a gradient: zero times NaN is NaN.
    inputs = x if valid is None else torch.where(valid, x, torch.zeros_like(x))
    # Under autocast the products over all steps run in its dtype; the recurrences and their states keep their own.
    dtype, device = hidden.dtype, x.device.type
    lower = torch.get_autocast_dtype(device) if autocast_is_on(device) else dtype
    drive = F.linear(inputs, slow_in_weight[:, slow_size:], slow_in_bias)
    with without_autocast(device):
        weight_hh = slow_in_weight[:, :slow_size]
        inners, states = _slow(impl, drive.to(dtype), weight_hh, weight_z, bias_z, slow_hidden, lengths)
        product = (tensor.to(lower) for tensor in (inners, slow_out_weight[slow_size:], slow_out_bias[slow_size:]))
        outputs, fast_1, fast_2 = _fast(impl, *product, inputs.to(dtype), hidden, fast_1, fast_2, lengths)
    last = outputs[-1].clone()
    if lengths is not None:
        index = (lengths - 1).clamp(min=0).view(1, -1, 1).expand(1, -1, outputs.shape[2])
        last = torch.where((lengths > 0).unsqueeze(1), outputs.gather(0, index).squeeze(0), hidden)
    return Result(outputs, last, states[-1].clone(), fast_1, fast_2)


def _differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _slow(impl: str, *inputs: Any) -> tuple[Tensor, Tensor]:
    if impl == "reference":
        return reference.slow_network(*inputs)
    # Dynamo cannot trace the function where there is nothing to differentiate.
    plain = torch.compiler.is_compiling() and not _differentiated(*inputs)
    run: Any = slow_operator if plain else SlowNetwork.apply
    inners, states = run(*inputs, impl)
    return inners, states


def _fast(impl: str, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    if impl == "reference":
        return reference.fast_network(*(*inputs, EPS))
    differentiated = _differentiated(*inputs)
    run: Any = fast_operator if torch.compiler.is_compiling() and not differentiated else FastNetwork.apply
    outputs, fast_1, fast_2, _ = run(*inputs, EPS, differentiated, impl)
    return outputs, fast_1, fast_2
