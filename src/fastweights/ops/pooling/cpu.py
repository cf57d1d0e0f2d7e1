"""The C++ kernel of the pooling: says what it takes, then passes pointers (csrc/pooling.cpp)."""

import ctypes

import torch
from torch import Tensor

from fastweights.ops import _calls, _library

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_CHANNELS_LAST = torch.channels_last


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
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "the cpu kernel cannot be traced"
    # A subclass may keep its numbers elsewhere, or have none.
    if type(images) not in (Tensor, torch.nn.Parameter):
        return f"the cpu kernel takes plain tensors, images is a {type(images).__name__}"
    if images.device.type != "cpu":
        return f"the cpu kernel needs tensors on the cpu, got {images.device}"
    if images.dtype not in _DTYPES:
        return f"the cpu kernel takes bfloat16, float32 and float64, got {images.dtype}"
    if len(images) > torch.iinfo(torch.int32).max:
        return f"the cpu kernel takes fewer than 2**31 images, got {len(images)}"
    return _library.MISSING


def forward(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """What images [N,C,H,W] give [N,C,ceil(H/2),ceil(W/2)], and the code of each: which pixel, and its sign."""
    images = _laid_out(images)
    pooled, codes = _pooled_like(images, images.dtype), _pooled_like(images, torch.uint8)
    _call("forward", images.shape, slope, images, pooled, codes)
    return pooled, codes


def spread(gradients: Tensor, codes: Tensor, size: tuple[int, int], slope: float) -> Tensor:
    """The gradient of the images, of height and width `size`, from that of what they gave."""
    gradients, codes = _laid_out(gradients), _laid_out(codes)
    shape = torch.Size([*gradients.shape[:2], *size])
    images = torch.empty(shape, dtype=gradients.dtype, memory_format=_CHANNELS_LAST)
    _call("spread", shape, slope, gradients, codes, images)
    return images


def gather(images: Tensor, codes: Tensor, slope: float) -> Tensor:
    """What images would give with these codes: linear in them, the transpose of `spread`."""
    images, codes = _laid_out(images), _laid_out(codes)
    pooled = _pooled_like(images, images.dtype)
    _call("gather", images.shape, slope, images, codes, pooled)
    return pooled


def _laid_out(images: Tensor) -> Tensor:
    return images.resolve_neg().contiguous(memory_format=_CHANNELS_LAST)


def _pooled_like(images: Tensor, dtype: torch.dtype) -> Tensor:
    count, channels, height, width = images.shape
    return torch.empty(count, channels, -(-height // 2), -(-width // 2), dtype=dtype, memory_format=_CHANNELS_LAST)


def _call(entry: str, shape: torch.Size, slope: float, *tensors: Tensor) -> None:
    count, channels, height, width = shape
    problem = _Problem(count, height, width, channels, slope, torch.get_num_threads())
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    what = f"images of shape {tuple(shape)}"
    _calls.call("pooling", entry, tensors[0].dtype, what, ctypes.byref(problem), *addresses)
