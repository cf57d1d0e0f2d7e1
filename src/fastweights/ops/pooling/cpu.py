"""The C++ kernel of the pooling: says what it takes, then passes pointers (csrc/pooling.cpp)."""

import ctypes

import torch
from torch import Tensor

from fastweights.errors import KernelError
from fastweights.ops import _calls, _library

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_MOST = 2**31 - 2**10  # images: C++ counts them in 32 bits, past the end by as many as there are threads


class _Problem(ctypes.Structure):
    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("slope", ctypes.c_double),
        ("threads", ctypes.c_int64),
    ]


def unavailable(images: Tensor) -> str | None:
    """Why the kernel cannot take these images, or None when it can."""
    if images.device.type != "cpu":
        return f"the cpu kernel needs tensors on the cpu, got {images.device}"
    if images.dtype not in _DTYPES:
        return f"the cpu kernel takes bfloat16, float32 and float64, got {images.dtype}"
    return _library.MISSING


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Images [N,C,H,W] with the channels side by side, on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def pooled_shape(images: Tensor, channels: int) -> tuple[int, int, int, int]:
    """[N,channels,ceil(H/2),ceil(W/2)] of [N,.,H,W]."""
    count, _, height, width = images.shape
    return count, channels, (height + 1) // 2, (width + 1) // 2


def forward(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """What images [N,C,H,W] give [N,C,ceil(H/2),ceil(W/2)], and the code of each: which pixel, and its sign."""
    images, shape = laid_out(images), pooled_shape(images, images.shape[1])
    pooled, codes = empty(shape, images, images.dtype), empty(shape, images, torch.uint8)
    _call("forward", images.shape, slope, images, pooled, codes)
    return pooled, codes


def spread(gradients: Tensor, codes: Tensor, height: int, width: int, slope: float) -> Tensor:
    """The gradient of the images [N,C,height,width] from that of what they gave."""
    gradients, codes = laid_out(gradients), laid_out(codes)
    images = empty((*gradients.shape[:2], height, width), gradients, gradients.dtype)
    _call("spread", images.shape, slope, gradients, codes, images)
    return images


def check_count(images: int, what: str) -> None:
    """Refuse more images than the kernels count; `what` they are."""
    if images > _MOST:
        raise KernelError(f"the kernels of images take at most {_MOST:,}, got {what}")


def laid_out(images: Tensor) -> Tensor:
    """The images with their channels side by side, without a lazy negation."""
    return images.resolve_neg().contiguous(memory_format=torch.channels_last)


def _call(entry: str, shape: torch.Size, slope: float, *tensors: Tensor) -> None:
    count, channels, height, width = shape
    what = f"images of shape {tuple(shape)}"
    check_count(count, what)
    problem = _Problem(count, height, width, channels, slope, torch.get_num_threads())
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    _calls.call("pooling", entry, tensors[0].dtype, what, ctypes.byref(problem), *addresses)
