"""A 3 x 3 convolution and what follows it in `few_shot.ConvEncoder`, in one pass where the images have few channels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import KernelError
from fastweights.ops.autocast import autocast_is_on
from fastweights.ops.convolution import cpu
from fastweights.ops.convolution._autograd import Convolution
from fastweights.ops.pooling import FEWEST, IMPLEMENTATIONS, leaky_max_pool

__all__ = ["conv_leaky_max_pool"]

_MOST_INPUTS = 8  # channels; of 16, torch's float32 convolution is about as fast


def conv_leaky_max_pool(
    images: Tensor, weight: Tensor, bias: Tensor, slope: float = 0.2, *, impl: str = "auto"
) -> Tensor:
    """`leaky_max_pool` of a 3 x 3 convolution whose sides are padded by one.

    The kernel never writes what the convolution gives, four times as much as is left of it, nor its gradient: in that
    of the weights the maxima alone have a part. The gradient of images goes through torch's convolution.

    Args:
        weight: on a processor best with the channels side by side (`torch.channels_last`).
        slope: of the leaky ReLU below zero, at least 0.
        impl: "auto", "reference" or "cpu", which takes bfloat16, float32 and float64, and lays the channels of what it
            gives side by side. "auto" takes it outside of torch.compile for weights that lie so and images of at most
            eight channels that need no gradient, where the convolution gives at least 100,000 numbers. Under autocast,
            both compute in its type.

    Shapes: images [N,I,H,W], weight [C,I,3,3], bias [C] -> [N,C,ceil(H/2),ceil(W/2)].

    Raises:
        ValueError: `impl` is unknown, `slope` is negative, or images, weight and bias do not fit together.
        KernelError: the kernel was asked for by name and cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.convolution import conv_leaky_max_pool
        >>> conv_leaky_max_pool(torch.ones(1, 1, 2, 4), torch.ones(8, 1, 3, 3), torch.zeros(8))[0, 0].tolist()
        [[6.0, 6.0]]
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if not slope >= 0:
        raise ValueError(f"slope must be at least 0, so that a maximum stays one; got {slope}")
    if images.dim() != 4 or 0 in images.shape[1:] or weight.shape[1:] != (images.shape[1], 3, 3):
        raise ValueError(
            "images must be [N,I,H,W], none of I, H and W zero, and weight [C,I,3,3]; got "
            f"{list(images.shape)} and {list(weight.shape)}"
        )
    if len(weight) == 0 or bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have a number for each of C channels; got {list(bias.shape)} for {len(weight)}")
    if autocast_is_on(images.device.type) and images.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(images.device.type)
        images, weight, bias = images.to(dtype), weight.to(dtype), bias.to(dtype)
    reason = cpu.unavailable(images, weight, bias)
    numbers = len(weight) * images.numel() // images.shape[1]
    worth = images.shape[1] <= _MOST_INPUTS and weight.stride(1) == 1 and numbers >= FEWEST
    # A compiled graph has torch's own, for Dynamo traces no function with forward derivatives.
    if impl == "auto" and (torch.compiler.is_compiling() or images.requires_grad or not worth):
        impl = "reference"
    if impl == "cpu" and reason is not None:
        raise KernelError(f"impl='cpu' was asked for, but {reason}")
    if impl == "reference" or reason is not None:
        return leaky_max_pool(F.conv2d(images, weight, bias, padding=1), slope)
    return Convolution.apply(images, weight, bias, slope)[0]  # type: ignore[no-untyped-call, no-any-return]
