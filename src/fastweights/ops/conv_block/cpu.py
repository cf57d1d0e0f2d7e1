"""The C++ kernels of the block: lay out the tensors, then pass pointers (csrc/convolution.cpp, csrc/pooling.cpp)."""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import KernelError
from fastweights.ops import _native

_MOST = 2**31 - 2**10  # images: C++ counts them in 32 bits, and each thread counts one past the end


class _PoolingProblem(ctypes.Structure):
    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("slope", ctypes.c_double),
        ("threads", ctypes.c_int64),
    ]


class _ConvolutionProblem(ctypes.Structure):
    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("slope", ctypes.c_double),
        ("threads", ctypes.c_int64),
    ]


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return empty images [N,C,H,W] with the channels side by side, on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def empty_pooled(images: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return an empty result [N,channels,ceil(H/2),ceil(W/2)] of images [N,.,H,W], and the codes of its numbers."""
    count, _, height, width = images.shape
    shape = count, channels, (height + 1) // 2, (width + 1) // 2
    return empty(shape, images, images.dtype), empty(shape, images, torch.uint8)


def pool(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Pool images [N,C,H,W] to [N,C,ceil(H/2),ceil(W/2)]; each number has a code: which pixel it was, and its sign."""
    images = _lay_out(images)
    pooled, codes = map(_native.in_large_pages, empty_pooled(images, images.shape[1]))
    _call("pooling", "forward", images, images.shape[1], slope, images, pooled, codes)
    return pooled, codes


def spread(gradients: Tensor, codes: Tensor, height: int, width: int, slope: float) -> Tensor:
    """Return the gradient of the images [N,C,height,width] from that of the pooled ones."""
    gradients, codes = _lay_out(gradients), _lay_out(codes)
    images = _native.in_large_pages(empty((*gradients.shape[:2], height, width), gradients, gradients.dtype))
    _call("pooling", "spread", images, images.shape[1], slope, gradients, codes, images)
    return images


def convolve(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Convolve images [N,I,H,W] and pool them to [N,C,ceil(H/2),ceil(W/2)], with the codes of `pool`."""
    images, channels = _lay_out(images), len(weight)
    pooled, codes = map(_native.in_large_pages, empty_pooled(images, channels))
    # The bias, then the taps: [1 + 9 I, C], and in blocks as the kernel's registers hold them.
    taps = torch.cat([bias.view(1, -1), weight.permute(2, 3, 1, 0).flatten(0, 2)]).to(widen(images.dtype))
    lanes = _native.REGISTER_BYTES // taps.element_size()
    taps = F.pad(taps, (0, -channels % lanes))
    taps = taps.view(len(taps), -1, lanes).transpose(0, 1).contiguous()
    _call("convolution", "forward", images, channels, slope, images, taps, pooled, codes)
    return pooled, codes


def sum_taps(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
    """Return each image's part of the gradients of bias and taps, [N,C,1 + 9 I]: row by row, in each the inputs."""
    gradients, codes, images = _lay_out(gradients), _lay_out(codes), _lay_out(images)
    (count, inputs), channels = images.shape[:2], gradients.shape[1]
    dtype = widen(images.dtype)
    lanes = _native.REGISTER_BYTES // dtype.itemsize
    shape = (count, -(-channels // lanes), 1 + 9 * inputs, lanes)
    taps = torch.zeros(shape, dtype=dtype, device=images.device)
    per_image = ctypes.c_int64(taps[0].numel() if count else 0)
    _call("convolution", "backward", images, channels, slope, gradients, codes, images, taps, per_image)
    return taps.transpose(2, 3).flatten(1, 2)[:, :channels].clone()


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of this dtype's numbers are computed."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _lay_out(images: Tensor) -> Tensor:
    """Return the images with their channels side by side, without a lazy negation."""
    return images.resolve_neg().contiguous(memory_format=torch.channels_last)


def _call(
    kernel: str, entry: str, images: Tensor, channels: int, slope: float, *arguments: Tensor | ctypes.c_int64
) -> None:
    count, inputs, height, width = images.shape
    if count > _MOST:
        raise KernelError(f"the kernels of images take at most {_MOST:,}, got images of shape {tuple(images.shape)}")
    threads = torch.get_num_threads()
    problem: ctypes.Structure = _PoolingProblem(count, height, width, channels, slope, threads)
    if kernel == "convolution":
        problem = _ConvolutionProblem(count, height, width, inputs, channels, slope, threads)
    plain = (ctypes.c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one for one in arguments)
    _native.call(kernel, entry, "images", images, problem, *plain)
