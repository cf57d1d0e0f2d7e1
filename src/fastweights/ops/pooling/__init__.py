"""A leaky ReLU of the maximum of every 2 x 2 pixels: what follows a convolution in `nn.ConvEncoder`."""

from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import KernelError
from fastweights.ops.pooling import cpu
from fastweights.ops.pooling._autograd import pooling

__all__ = ["IMPLEMENTATIONS", "leaky_max_pool"]

IMPLEMENTATIONS = ("auto", "reference", "cpu")
_FEWEST = 100_000  # numbers, below which a call by way of Python takes longer than torch


def leaky_max_pool(images: Tensor, slope: float = 0.2, *, impl: str = "auto") -> Tensor:
    """Leaky ReLU of the maximum of every 2 x 2 pixels; at an odd side's end, of those that there are.

    The kernel keeps a byte of every maximum for the derivatives, where torch keeps the images and eight bytes, and
    writes no maximum before the nonlinearity: forward and backward take a third of the time.

    Args:
        images: any memory format; with the channels side by side (`torch.channels_last`) the kernel need not copy them.
        slope: of the leaky ReLU below zero, at least 0.
        impl: "auto", "reference" or "cpu", which takes bfloat16, float32 and float64.

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
    if impl == "auto" and images.numel() < _FEWEST:
        reason = "there are too few numbers"
    if impl == "cpu" and reason is not None:
        raise KernelError(f"impl='cpu' was asked for, but {reason}")
    if impl == "reference" or reason is not None:
        return F.leaky_relu(F.max_pool2d(images, 2, ceil_mode=True), slope)
    found: Tensor = pooling(images, slope)[0]
    return found
