"""The C++ kernel of the convolution: says what it takes, then passes pointers (csrc/convolution.cpp)."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops import _calls
from fastweights.ops.pooling import cpu as pooling


class _Problem(ctypes.Structure):
    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("slope", ctypes.c_double),
        ("threads", ctypes.c_int64),
    ]


def unavailable(images: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """Why the kernel cannot take these, or None when it can."""
    for tensor in (weight, bias):
        if tensor.dtype != images.dtype or tensor.device != images.device:
            return f"weights are {tensor.dtype} on {tensor.device}, images {images.dtype} on {images.device}"
    return pooling.unavailable(images)


def forward(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """What images [N,I,H,W] give [N,C,ceil(H/2),ceil(W/2)], and the code of each: which pixel, and its sign."""
    images, channels = pooling.laid_out(images), len(weight)
    shape = pooling.pooled_shape(images, channels)
    pooled, codes = pooling.empty(shape, images, images.dtype), pooling.empty(shape, images, torch.uint8)
    # The bias, then the taps: [1 + 9 I, C], and in blocks as the kernel's registers hold them.
    taps = torch.cat([bias.view(1, -1), weight.permute(2, 3, 1, 0).flatten(0, 2)]).to(wide(images.dtype))
    lanes = _calls.register_width(taps)
    taps = F.pad(taps, (0, -channels % lanes))
    taps = taps.view(len(taps), -1, lanes).transpose(0, 1).contiguous()
    _call("forward", images, channels, slope, images, taps, pooled, codes)
    return pooled, codes


def backward(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
    """What each image gives the gradients of bias and taps, [N,C,1 + 9 I]: row by row, in each the inputs."""
    gradients, codes, images = pooling.laid_out(gradients), pooling.laid_out(codes), pooling.laid_out(images)
    (count, inputs), channels = images.shape[:2], gradients.shape[1]
    taps = torch.zeros(0, dtype=wide(images.dtype), device=images.device)
    lanes = _calls.register_width(taps)
    taps = taps.new_zeros(count, -(-channels // lanes), 1 + 9 * inputs, lanes)
    of_one = ctypes.c_int64(taps[0].numel() if count else 0)
    _call("backward", images, channels, slope, gradients, codes, images, taps, of_one)
    return taps.transpose(2, 3).flatten(1, 2)[:, :channels].clone()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is computed in."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _call(entry: str, images: Tensor, channels: int, slope: float, *arguments: Tensor | ctypes.c_int64) -> None:
    count, inputs, height, width = images.shape
    what = f"images of shape {tuple(images.shape)}"
    pooling.check_count(count, what)
    problem = _Problem(count, height, width, inputs, channels, slope, torch.get_num_threads())
    plain = (ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one for one in arguments)
    _calls.call("convolution", entry, images.dtype, what, ctypes.byref(problem), *plain)
