"""The block in plain PyTorch, which defines it: the kernels are held to this."""

from torch import Tensor
from torch.nn import functional as F


def pool(images: Tensor, slope: float) -> Tensor:
    """Return the leaky ReLU of the maxima of 2 x 2 pixels: images [N,C,H,W] -> [N,C,ceil(H/2),ceil(W/2)]."""
    return F.leaky_relu(F.max_pool2d(images, 2, ceil_mode=True), slope)


def convolve(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the 3 x 3 convolution, padded by one: images [N,I,H,W], weight [C,I,3,3], bias [C] -> [N,C,H,W]."""
    return F.conv2d(images, weight, bias, padding=1)
