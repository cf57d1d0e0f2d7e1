"""The block of `few_shot.ConvEncoder`: a 3 x 3 convolution, 2 x 2 max pooling and a leaky ReLU, in one pass."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.errors import KernelError
from fastweights.ops import _native
from fastweights.ops.autocast import autocast_is_on
from fastweights.ops.conv_block import reference
from fastweights.ops.conv_block._derivatives import Convolution, Pooling

__all__ = ["IMPLEMENTATIONS", "conv_leaky_max_pool", "leaky_max_pool", "run_blocks"]

IMPLEMENTATIONS = ("auto", "reference", "cpu")
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)  # dtypes of the kernels
_FEWEST = 100_000  # numbers, from which the way through Python to a kernel pays
_MOST_INPUTS = 8  # channels; of 16, torch's float32 convolution is about as fast


def leaky_max_pool(images: Tensor, slope: float = 0.2, *, impl: str = "auto") -> Tensor:
    """Return the leaky ReLU of the maximum of every 2 x 2 pixels; at the end of an odd side, of the pixels there.

    The kernel keeps a byte of every maximum for the derivatives, where torch keeps the images and eight bytes, and
    writes no maximum before the nonlinearity.

    Args:
        images: on a processor best with the channels side by side (`torch.channels_last`).
        slope: the slope of the leaky ReLU below zero, at least 0.
        impl: "auto", "reference" or "cpu", which takes bfloat16, float32 and float64, and lays the channels of its
            results side by side. "auto" takes it for images with channels side by side and at least 100,000 numbers,
            outside of torch.compile: the way through Python costs more for fewer.

    Shapes: images [N,C,H,W] -> [N,C,ceil(H/2),ceil(W/2)].

    Raises:
        ValueError: `impl` is unknown, `slope` is negative, or the images have another shape.
        KernelError: the kernel was asked for by name and cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.conv_block import leaky_max_pool
        >>> leaky_max_pool(torch.tensor([[[[1.0, 2.0, -5.0], [3.0, 4.0, -10.0]]]])).tolist()
        [[[[4.0, -1.0]]]]
    """
    _check_slope(slope)
    if images.dim() != 4 or 0 in images.shape[1:]:
        raise ValueError(f"images must be [N,C,H,W], none of C, H and W zero; got {list(images.shape)}")
    pays = not torch.compiler.is_compiling() and images.numel() >= _FEWEST and images.stride(1) == 1
    if _takes_kernel(impl, pays, images):
        return Pooling.apply(images, slope)[0]  # type: ignore[no-untyped-call, no-any-return]
    return reference.pool(images, slope)


def conv_leaky_max_pool(
    images: Tensor, weight: Tensor, bias: Tensor, slope: float = 0.2, *, impl: str = "auto"
) -> Tensor:
    """Return `leaky_max_pool` of a 3 x 3 convolution whose sides are padded by one.

    The kernel never writes the convolution's result, four times as much as is left of it, nor its gradient: the maxima
    alone have a part in the gradient of the weights. The gradient of images goes through torch's convolution.

    Args:
        images: the images.
        weight: on a processor best with the channels side by side (`torch.channels_last`).
        bias: a number for each channel of the result.
        slope: the slope of the leaky ReLU below zero, at least 0.
        impl: "auto", "reference" or "cpu", which takes bfloat16, float32 and float64, and lays the channels of its
            results side by side. "auto" takes it outside of torch.compile for weights with channels side by side and
            images of at most eight channels that need no gradient, where the convolution gives at least 100,000
            numbers. Under autocast, both compute in its type.

    Shapes: images [N,I,H,W], weight [C,I,3,3], bias [C] -> [N,C,ceil(H/2),ceil(W/2)].

    Raises:
        ValueError: `impl` is unknown, `slope` is negative, or images, weight and bias do not fit together.
        KernelError: the kernel was asked for by name and cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.conv_block import conv_leaky_max_pool
        >>> conv_leaky_max_pool(torch.ones(1, 1, 2, 4), torch.ones(8, 1, 3, 3), torch.zeros(8))[0, 0].tolist()
        [[6.0, 6.0]]
    """
    return run_blocks(images, [(weight, bias)], slope, impl=impl)


def run_blocks(
    images: Tensor, layers: Iterable[tuple[Tensor, Tensor]], slope: float = 0.2, *, impl: str = "auto"
) -> Tensor:
    """Return `conv_leaky_max_pool` of the images by the first layer's weight and bias, of that by the next, and so on.

    Args:
        images: the images.
        layers: the weight and the bias of each block.
        slope: the slope of the leaky ReLU below zero, at least 0.
        impl: as in `conv_leaky_max_pool`; with "auto" each block has the implementation that is faster there.

    Shapes: images [N,I,H,W], layers ([C,I,3,3], [C]), ([D,C,3,3], [D]), ... -> [N,D,...]; sides are halved and rounded
    up by each block.

    Raises:
        ValueError: `impl` is unknown, `slope` is negative, or images, weights and biases do not fit together.
        KernelError: the kernel was asked for by name and cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.conv_block import run_blocks
        >>> layers = [(torch.ones(8, 1, 3, 3), torch.zeros(8)), (torch.ones(2, 8, 3, 3), torch.zeros(2))]
        >>> run_blocks(torch.ones(1, 1, 4, 4), layers).shape
        torch.Size([1, 2, 1, 1])
    """
    _check_slope(slope)
    # F.conv2d would cast too, but keep the cast weights, and sum up gradients in them, as long as autocast is on.
    casts = autocast_is_on(images.device.type, images.dtype)
    for weight, bias in layers:
        if images.dim() != 4 or 0 in images.shape[1:] or weight.shape[1:] != (images.shape[1], 3, 3):
            raise ValueError(
                "images must be [N,I,H,W], none of I, H and W zero, and weight [C,I,3,3]; got "
                f"{list(images.shape)} and {list(weight.shape)}"
            )
        if len(weight) == 0 or bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias must have a number for each of the {len(weight)} output channels; got {list(bias.shape)}"
            )
        if casts:
            dtype = torch.get_autocast_dtype(images.device.type)
            images, weight, bias = images.to(dtype), weight.to(dtype), bias.to(dtype)
        # A compiled graph has torch's own, for Dynamo traces no function with forward derivatives.
        pays = not torch.compiler.is_compiling() and images.shape[1] <= _MOST_INPUTS and weight.stride(1) == 1
        pays = pays and len(weight) * images.numel() // images.shape[1] >= _FEWEST
        if _takes_kernel(impl, pays and not images.requires_grad, images, weight, bias):
            images = Convolution.apply(images, weight, bias, slope)[0]  # type: ignore[no-untyped-call]
        else:
            images = leaky_max_pool(reference.convolve(images, weight, bias), slope, impl=impl)
    return images


def _check_slope(slope: float) -> None:
    if not slope >= 0:
        raise ValueError(f"slope must be at least 0, got {slope}")


def _takes_kernel(impl: str, pays: bool, images: Tensor, *weights: Tensor) -> bool:
    """Return whether the kernel computes a block: asked for by name, or with "auto" where it pays and can."""
    if impl == "auto":
        return pays and _find_obstacle(images, *weights) is None
    check_choice(IMPLEMENTATIONS, impl=impl)
    if impl == "cpu" and (reason := _find_obstacle(images, *weights)):
        raise KernelError(f"impl='cpu' was asked for, but {reason}")
    return impl == "cpu"


def _find_obstacle(images: Tensor, *weights: Tensor) -> str | None:
    """Return why the kernels cannot take these images and weights, or None when they can."""
    for tensor in weights:
        if tensor.dtype != images.dtype or tensor.device != images.device:
            return f"weights are {tensor.dtype} on {tensor.device}, images {images.dtype} on {images.device}"
    return _native.unavailable(images, "bfloat16, float32 and float64", _DTYPES)
