"""The short causal convolution that today's fast-weight models have before their rule."""

from typing import Any

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.ops import _native
from fastweights.ops._operator import Operation
from fastweights.ops.autocast import without_autocast
from fastweights.ops.packed import find_starts
from fastweights.ops.short_convolution import cpu, reference
from fastweights.ops.short_convolution.reference import ShortInputs

__all__ = ["IMPLEMENTATIONS", "short_convolution"]

IMPLEMENTATIONS = ("auto", "reference", "cpu")


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    last: Tensor | None = None,
    *,
    activation: str | None = None,
    starts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Convolve each channel by itself over the last W steps: y_t = f(bias + sum_k weight[:, W-1-k] x_{t-k}).

    The weights are those of `torch.nn.Conv1d` with `groups=C` and of causal_conv1d. Steps come before channels, as in
    the rest of a network, so that nothing is turned round; a row of x may be a part of a longer one.

    Args:
        x: the inputs, [B,T,C].
        weight: of each channel, the oldest step first, [C,W].
        bias: [C]; None is zero.
        last: the inputs before x, [B,W-1,C]; None is zeros.
        activation: f: "silu" or None.
        starts: the steps before which another sequence begins, bool [B,T]: what is before such a step counts as zero.
        cu_seqlens: the starts of sequences packed into one row, B = 1, and the end of the last, int64 or int32
            [sequences + 1]; in place of `starts`, and without `last`.
        impl: "auto", "reference" or "cpu".

    Returns:
        The outputs [B,T,C] in the dtype of x; what is below float32 is computed in float32. Gradients of any order go
        through in reverse mode; forward mode needs impl="reference".

    Raises:
        ValueError: a shape does not fit, an activation or `impl` is unknown, or `cu_seqlens` do not ascend from 0 to T
            or come with `starts` or `last`.
        TypeError: what should be a tensor is not one, or has another dtype than a real floating one, or starts no bool.
        KernelError: "cpu" was asked for by name, and it cannot compute this.

    Examples:
        >>> import torch
        >>> from fastweights.ops.short_convolution import short_convolution
        >>> x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)             # [B,T,C], [C,W]
        >>> y = short_convolution(x, weight, activation="silu")
        >>> one_step = short_convolution(x[:, 8:], weight, last=x[:, 5:8], activation="silu")
        >>> torch.allclose(one_step, y[:, 8:], atol=1e-6)
        True
    """
    check_choice(IMPLEMENTATIONS, impl=impl)
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    _check_tensors(x, weight, bias, last, starts)
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(
                f"cu_seqlens must be a tensor, got a {type(cu_seqlens).__name__}: torch.tensor({cu_seqlens})"
            )
        if starts is not None or last is not None:
            raise ValueError("cu_seqlens say where each sequence starts: give no starts and no last beside them")
        starts = find_starts(cu_seqlens, x.shape[0], x.shape[1], x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    more = [None if tensor is None else tensor.to(dtype) for tensor in (bias, last)]
    inputs, silu = ShortInputs(x.to(dtype), weight.to(dtype), more[0], more[1], starts), activation == "silu"
    if _native.choose(inputs.x, impl, lambda: "there is no Triton kernel") == "cpu":
        (y,) = _OPERATION(inputs, silu)
    else:
        with without_autocast(x.device.type):
            (y,) = reference.convolve(inputs, silu)
    return y.to(x.dtype)


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, last: Tensor | None, starts: Tensor | None) -> None:
    """Refuse tensors whose shapes, dtypes and devices do not fit together."""
    given = {"x": x, "weight": weight, "bias": bias, "last": last, "starts": starts}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("x", "weight")):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}: torch.as_tensor({name})")
    if x.dim() != 3 or weight.dim() != 2 or x.shape[2] != weight.shape[0] or 0 in weight.shape:
        raise ValueError(
            "x must be [B,T,C] and weight [C,W], with a channel and a step at least, got "
            f"{list(x.shape)} and {list(weight.shape)}"
        )
    (batch, steps, channels), taps = x.shape, weight.shape[1]
    shapes = {
        "bias": ("C", (channels,)),
        "last": ("B,W-1,C", (batch, taps - 1, channels)),
        "starts": ("B,T", (batch, steps)),
    }
    for name, (letters, shape) in shapes.items():
        tensor = given[name]
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be [{letters}], {list(shape)} here, got {list(tensor.shape)}")
    for name, tensor in given.items():
        if tensor is None:
            continue
        if name == "starts":
            if tensor.dtype != torch.bool or tensor.device != x.device:
                raise TypeError(f"starts must be bool on {x.device}, got {tensor.dtype} on {tensor.device}")
        elif not (tensor.is_floating_point() and tensor.device == x.device):
            raise TypeError(f"{name} must be of real numbers on {x.device}, got {tensor.dtype} on {tensor.device}")


def _forward(inputs: ShortInputs, silu: bool, _keep_trace: bool) -> list[Tensor]:
    return [cpu.forward(inputs, silu)]


def _backward(
    grads: tuple[Tensor | None], _kept: tuple[()], inputs: ShortInputs, silu: bool, _wanted: Any
) -> list[Tensor]:
    grad_outputs = torch.zeros_like(inputs.x) if grads[0] is None else grads[0]
    gradients = cpu.backward(grad_outputs, inputs, silu)
    return [inputs.x.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _fake_forward(inputs: ShortInputs, _silu: bool, _keep_trace: bool) -> list[Tensor]:
    return [inputs.x.new_empty(inputs.x.shape)]


def _fake_backward(_grads: Any, _kept: Any, inputs: ShortInputs, _silu: bool, _wanted: Any) -> list[Tensor]:
    return [inputs.x.new_empty(0 if tensor is None else tensor.shape) for tensor in inputs[:-1]]


_OPERATION = Operation(
    "short_convolution",
    ShortInputs,
    "bool silu",
    results=1,
    differentiable=1,
    kept=(),
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    reference=reference.convolve,
)
