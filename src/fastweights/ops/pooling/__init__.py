"""A leaky ReLU of the maximum of every 2 x 2 pixels: what follows a convolution in `few_shot.ConvEncoder`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import KernelError
from fastweights.ops.pooling import cpu
from fastweights.ops.pooling._autograd import Pooling

__all__ = ["IMPLEMENTATIONS", "leaky_max_pool"]

IMPLEMENTATIONS = ("auto", "reference", "cpu")
FEWEST = 100_000  # numbers, for which the way through Python to a kernel pays


def leaky_max_pool(images: Tensor, slope: float = 0.2, *, impl: str = "auto") -> Tensor:
    """Leaky ReLU of the maximum of every 2 x 2 pixels; at an odd side's end, of those that there are.

    The kernel keeps a byte of every maximum for the derivatives, where torch keeps the images and eight bytes, and
    writes no maximum before the nonlinearity.

    Args:
        images: on a processor best with the channels side by side (`torch.channels_last`).
        slope: of the leaky ReLU below zero, at least 0.
        impl: "auto", "reference" or "cpu", which takes bfloat16, float32 and float64, and lays the channels of what it
            gives side by side. "auto" takes it for images that lie so, of at least 100,000 numbers, outside of
            torch.compile: the way through Python costs more for fewer.

    Shapes: images [N,C,H,W] -> [N,C,ceil(H/2),ceil(W/2)].

    Raises:
        ValueError: `impl` is unknown, `slope` is negative, or the images have another shape.
        KernelError: the kernel was asked for by name and cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.pooling import leaky_max_pool
        >>> leaky_max_pool(torch.tensor([[[[1.0, 2.0, -5.0], [3.0, 4.0, -10.0]]]])).tolist()
        [[[[4.0, -1.0]]]]
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if images.dim() != 4 or 0 in images.shape[1:]:
        raise ValueError(f"images must be [N,C,H,W], none of C, H and W zero; got {list(images.shape)}")
    if not slope >= 0:
        raise ValueError(f"slope must be at least 0, so that a maximum stays one; got {slope}")
    reason = cpu.unavailable(images)
    # A compiled graph has torch's own, for Dynamo traces no function with forward derivatives.
    if impl == "auto" and (torch.compiler.is_compiling() or images.numel() < FEWEST or images.stride(1) != 1):
        impl = "reference"
    if impl == "cpu" and reason is not None:
        raise KernelError(f"impl='cpu' was asked for, but {reason}")
    if impl == "reference" or reason is not None:
        return F.leaky_relu(F.max_pool2d(images, 2, ceil_mode=True), slope)
    found: Tensor = Pooling.apply(images, slope)[0]  # type: ignore[no-untyped-call]
    return found
