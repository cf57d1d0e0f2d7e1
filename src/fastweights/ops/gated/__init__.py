"""Gated fast weights: the recurrence of Schlag & Schmidhuber 2017, "Gated fast weights for associative retrieval"."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.checks import check_choice
from fastweights.ops._native import IMPLEMENTATIONS, choose
from fastweights.ops._operator import Operation
from fastweights.ops.autocast import autocast_is_on, without_autocast
from fastweights.ops.gated import cpu, reference, triton
from fastweights.ops.gated.reference import FIXED, LAYER_NORMS, FastInputs, SlowInputs
from fastweights.ops.lengths import take_last

__all__ = ["IMPLEMENTATIONS", "LAYER_NORMS", "Result", "gated"]


class Result(NamedTuple):
    """The outputs of a run, and the state after the last valid step."""

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
    starts: Tensor | None = None,
    layer_norm: str = "after",
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
        starts: the steps before which a sequence restarts, bool [T,B]: its state is zeros there, and no gradient
            goes further back. None is nowhere.
        layer_norm: where it stands, of tanh: "after", "before", "both" or "none". All but "after" are in plain PyTorch
            alone.
        impl: "auto", "reference", "cpu" or "triton", which keeps both fast matrices on chip and refuses those that do
            not fit: in float32 past 128 x 128.

    Gradients of any order go through every implementation.

    Raises:
        ValueError: `impl` or `layer_norm` is unknown, or x has no step.
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
    check_choice(LAYER_NORMS, layer_norm=layer_norm)
    plain = None if layer_norm == "after" else f"layer_norm={layer_norm!r} is in plain PyTorch alone"
    impl = choose(hidden, impl, lambda: triton.unavailable(x, hidden), plain)
    slow: Any = reference.slow_network if impl == "reference" else lambda inputs: _SLOW(inputs, impl)
    by_reference = functools.partial(reference.fast_network, layer_norm=layer_norm)
    fast: Any = by_reference if impl == "reference" else lambda inputs: _FAST(inputs, impl)
    slow_size = slow_hidden.shape[-1]
    weight_z, bias_z = slow_out_weight[:slow_size], slow_out_bias[:slow_size]
    valid = None if lengths is None else (torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths).unsqueeze(2)
    # What lies past a length must not reach a gradient: zero times NaN is NaN.
    inputs = x if valid is None else torch.where(valid, x, torch.zeros_like(x))
    # Under autocast the products over all steps run in its dtype; the recurrences and their states keep their own.
    dtype, device = hidden.dtype, x.device.type
    lower = torch.get_autocast_dtype(device) if autocast_is_on(device, dtype) else dtype
    drive = F.linear(inputs, slow_in_weight[:, slow_size:], slow_in_bias)
    with without_autocast(device):
        weight_hh = slow_in_weight[:, :slow_size]
        inners, states = slow(SlowInputs(drive.to(dtype), weight_hh, weight_z, bias_z, slow_hidden, lengths, starts))
        product = (tensor.to(lower) for tensor in (inners, slow_out_weight[slow_size:], slow_out_bias[slow_size:]))
        results = fast(FastInputs._make((*product, inputs.to(dtype), hidden, fast_1, fast_2, lengths, starts)))
    outputs, fast_1, fast_2 = results[:3]  # a kernel's trace comes behind
    return Result(outputs, take_last(outputs, lengths, hidden), states[-1].clone(), fast_1, fast_2)


_KERNELS: dict[str, Any] = {"cpu": cpu, "triton": triton}


def _slow_forward(inputs: SlowInputs, impl: str, keep_trace: bool) -> tuple[Tensor, Tensor]:
    return _KERNELS[impl].slow_forward(inputs)  # type: ignore[no-any-return]


def _slow_backward(
    grads: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor, Tensor],
    inputs: SlowInputs,
    impl: str,
    wanted: list[bool],
) -> list[Tensor]:
    (grad_inners, grad_states), (inners, states) = grads, kept
    if grad_inners is None:
        grad_inners = torch.zeros_like(inners)
    of_drive, of_z, of_hidden = _KERNELS[impl].slow_backward(grad_inners, grad_states, inners, states, inputs)
    rows_z, rows_inner = _flatten_rows(of_z, impl), _flatten_rows(inners, impl)
    # The first step's state is `hidden`; a copy with the others behind it would be a pass over all of them.
    first, others = inputs.hidden, states[:-1]
    if inputs.starts is not None:
        first, others = reference.clear(inputs.starts[0], first), reference.clear(inputs.starts[1:], others)
    of_hh = torch.addmm(of_drive[0].t() @ first, of_drive[1:].flatten(0, 1).t(), others.flatten(0, 1))
    return [of_drive, of_hh, rows_z.t() @ rows_inner, rows_z.sum(0), of_hidden]


def _flatten_rows(tensor: Tensor, impl: str) -> Tensor:
    """Return the rows of a tensor [T,B,...] in the order in which they lie: C++ keeps sequences whole."""
    return (tensor.transpose(0, 1) if impl == "cpu" else tensor).flatten(0, 1)


def _empty_inners(like: Tensor, impl: str) -> Tensor:
    return cpu.empty_sequences(like, like.shape[2]) if impl == "cpu" else torch.empty_like(like)


def _fake_slow_forward(inputs: SlowInputs, impl: str, keep_trace: bool) -> tuple[Tensor, Tensor]:
    drive = inputs.drive
    return _empty_inners(drive, impl), drive.new_empty(*drive.shape[:2], inputs.hidden.shape[1])


def _fake_slow_backward(grads: Any, kept: Any, inputs: SlowInputs, *options: Any) -> list[Tensor]:
    tensors: Any = inputs[:-FIXED]
    return list(map(torch.empty_like, tensors))


def _fast_forward(inputs: FastInputs, impl: str, keep_trace: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _KERNELS[impl].fast_forward(inputs, keep_trace)  # type: ignore[no-any-return]


def _fast_backward(
    grads: tuple[Tensor | None, ...], kept: tuple[Tensor, Tensor], inputs: FastInputs, impl: str, wanted: list[bool]
) -> list[Tensor]:
    # A state is most often detached, and its matrices are most of the bytes to write.
    return _KERNELS[impl].fast_backward(*grads, *kept, inputs, any(wanted[5:]))  # type: ignore[no-any-return]


def _fake_fast_forward(inputs: FastInputs, impl: str, keep_trace: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, hidden = inputs.x, inputs.hidden
    trace = x.new_empty(_KERNELS[impl].count_trace(inputs.weight, x, hidden) if keep_trace else 0)
    outputs = x.new_empty(*x.shape[:2], hidden.shape[1])
    return outputs, x.new_empty(inputs.fast_1.shape), x.new_empty(inputs.fast_2.shape), trace


def _fake_fast_backward(grads: Any, kept: Any, inputs: FastInputs, impl: str, wanted: list[bool]) -> list[Tensor]:
    tensors: Any = inputs[:-FIXED]
    inners, *others = tensors
    shapes = [tensor.shape for tensor in others]
    if not any(wanted[5:]):
        shapes[-2:] = torch.Size([0]), torch.Size([0])
    return [_empty_inners(inners, impl), *(t.new_empty(shape) for t, shape in zip(others, shapes, strict=True))]


_SLOW = Operation(
    "gated_slow",
    SlowInputs,
    "str impl",
    fixed=FIXED,
    results=2,
    differentiable=2,
    kept=(0, 1),
    forward=_slow_forward,
    backward=_slow_backward,
    fake_forward=_fake_slow_forward,
    fake_backward=_fake_slow_backward,
    reference=lambda inputs, impl: reference.slow_network(inputs),
)
_FAST = Operation(
    "gated_fast",
    FastInputs,
    "str impl",
    fixed=FIXED,
    results=4,
    differentiable=3,
    kept=(0, 3),
    forward=_fast_forward,
    backward=_fast_backward,
    fake_forward=_fake_fast_forward,
    fake_backward=_fake_fast_backward,
    reference=lambda inputs, impl: reference.fast_network(inputs),
)
