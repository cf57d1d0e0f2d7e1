"""The block in plain PyTorch: the definition that the kernels are held to."""

from torch import Tensor
from torch.nn import functional as F


def leaky_max_pool(images: Tensor, slope: float) -> Tensor:
    """Return the leaky ReLU of the maximum of every 2 x 2 pixels, [N,C,H,W] -> [N,C,ceil(H/2),ceil(W/2)]."""
    return F.leaky_relu(F.max_pool2d(images, 2, ceil_mode=True), slope)


def conv_leaky_max_pool(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Return `leaky_max_pool` of the convolution, [N,I,H,W], [C,I,3,3] and [C] -> [N,C,ceil(H/2),ceil(W/2)]."""
    return leaky_max_pool(F.conv2d(images, weight, bias, padding=1), slope)
