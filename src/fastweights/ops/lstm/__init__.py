"""The LSTM of Hochreiter & Schmidhuber 1997, with a mask of dropout that stays the same at every step, and restarts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.errors import KernelError
from fastweights.ops._native import check_flags, check_lengths, check_tensors
from fastweights.ops._operator import Operation
from fastweights.ops.autocast import autocast_is_on, without_autocast
from fastweights.ops.lstm import eager, reference
from fastweights.ops.lstm.reference import FIXED, LayerNorms, LSTMInputs

__all__ = ["IMPLEMENTATIONS", "LayerNorms", "Result", "lstm"]

IMPLEMENTATIONS = ("auto", "reference", "eager")


class Result(NamedTuple):
    """The outputs of a run, and the state after the last valid step."""

    outputs: Tensor  # [T,B,H], zero past a length
    hidden: Tensor  # [B,H]
    cell: Tensor  # [B,H]


def lstm(
    x: Tensor,
    weight_ih: Tensor,
    bias: Tensor,
    weight_hh: Tensor,
    hidden: Tensor,
    cell: Tensor,
    *,
    mask: Tensor | None = None,
    norms: LayerNorms | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    impl: str = "auto",
) -> Result:
    """Run an LSTM (Hochreiter & Schmidhuber 1997; its forget gate is of Gers et al. 2000).

        [i; f; g; o] = W_ih x_t + b + W_hh (m * h_{t-1})
        c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g)
        h_t = sigmoid(o) * tanh(c_t)

    Args:
        x: the inputs, [T,B,D].
        weight_ih: W_ih, [4H,D], in blocks for i, f, g and o, as in `torch.nn.LSTM`.
        bias: b, [4H].
        weight_hh: W_hh, [4H,H].
        hidden: h_0, [B,H].
        cell: c_0, [B,H].
        mask: m, what a step multiplies the hidden state that it reads by, [B,H]; dropout that is fixed over time (Gal &
            Ghahramani 2016). It has no gradient. None is one everywhere.
        norms: layer norm (Ba, Kiros & Hinton 2016) of W_ih x_t, of W_hh (m * h_{t-1}) and of c_t where h_t reads it: a
            gain and a bias for each, [4H], [4H] and [H].
        lengths: valid steps of each sequence, int64 [B], from 0 to T (others are taken as 0 or T).
        starts: the steps before which a sequence restarts, bool [T,B]: its state is zeros there, and no gradient
            goes further back. None is nowhere.
        impl: "auto", "reference", or "eager", whose backward pass is written out, without `norms`. A graph that is
            exported has the reference.

    Gradients of any order go through both implementations. Under autocast the products run in its dtype; the gates, the
    outputs and the state keep the state's own.

    Raises:
        ValueError: `impl` is unknown, x has no step, a shape does not fit, or the mask asks for a gradient.
        TypeError: a tensor has another dtype or device than x, or lengths or starts than theirs.
        KernelError: "eager" was asked for by name, and with `norms`.

    Examples:
        >>> import torch
        >>> from fastweights.ops.lstm import lstm
        >>> features, size = 3, 4
        >>> weights = torch.randn(4 * size, features), torch.zeros(4 * size), torch.randn(4 * size, size)
        >>> result = lstm(torch.randn(7, 2, features), *weights, torch.zeros(2, size), torch.zeros(2, size))
        >>> result.outputs.shape, result.cell.shape
        (torch.Size([7, 2, 4]), torch.Size([2, 4]))
    """
    check_choice(IMPLEMENTATIONS, impl=impl)
    if x.dim() != 3 or x.shape[0] == 0:
        raise ValueError(f"x must be [T,B,D] with at least one step, got shape {tuple(x.shape)}")
    if impl == "eager" and norms is not None:
        raise KernelError("impl='eager' was asked for, but it has no layer norm: leave impl= out")
    # Under autocast the products alone are in its dtype: the gates and the state keep the weights' own.
    device = x.device.type
    lower = torch.get_autocast_dtype(device) if autocast_is_on(device, weight_hh.dtype) else None
    _check(LSTMInputs(x, weight_ih, bias, weight_hh, hidden, cell, mask, lengths, starts), norms, any_dtype=bool(lower))
    if lengths is not None:
        valid = torch.arange(x.shape[0], device=x.device).unsqueeze(1) < lengths
        # What lies past a length must not reach a gradient: zero times NaN is NaN.
        x = torch.where(valid.unsqueeze(2), x, torch.zeros_like(x))
        starts = None if starts is None else starts & valid
    if lower:
        x, weight_ih, weight_hh = x.to(lower), weight_ih.to(lower), weight_hh.to(lower)
    inputs = LSTMInputs(x, weight_ih, bias, weight_hh, hidden, cell, mask, lengths, starts)
    # A graph that is exported has torch's own operators alone, so that it runs where this package is not.
    plain = impl == "reference" or norms is not None or torch.compiler.is_exporting()
    with without_autocast(device):
        results: Any = reference.lstm(inputs, norms) if plain else _OPERATION(inputs)
    return Result(*results[:3])  # what the backward pass needs comes behind


def _check(inputs: LSTMInputs, norms: LayerNorms | None, *, any_dtype: bool) -> None:
    """Refuse inputs that do not fit together; x may have any dtype where autocast will choose it."""
    x, _, _, weight, hidden, _, mask, lengths, starts = inputs
    steps, batch, _ = x.shape
    tensors = (None if any_dtype else x, *inputs[1 : 1 - FIXED])
    check_tensors(tensors, reference.input_shapes(x, hidden), weight, "weight_hh")
    if mask is not None and mask.requires_grad:
        raise ValueError("mask has no gradient, and this one asks for it: mask.detach()")
    for name, pair in zip(LayerNorms._fields, norms or (), strict=False):
        width = hidden.shape[1] if name == "of_cell" else len(weight)
        check_tensors(pair, {f"norms.{name}[{part}]": (width,) for part in range(2)}, weight, "weight_hh")
    check_lengths(lengths, batch, x.device)
    check_flags({"starts": starts}, steps, batch, x.device)


_OPERATION = Operation(
    "lstm",
    LSTMInputs,
    "",
    fixed=FIXED,
    results=6,
    differentiable=3,
    kept=(0, 3, 4, 5),
    forward=lambda inputs, keep_trace: eager.forward(inputs),
    backward=eager.backward,
    fake_forward=lambda inputs, keep_trace: eager.fake_forward(inputs),
    fake_backward=lambda grads, kept, inputs, wanted: eager.fake_backward(inputs, wanted),
    reference=reference.lstm,
)
