"""Parts that several few-shot networks are built of: the start of their weights, their images, their precision."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def initialise_he(module: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers as He et al. 2015 do, and set their biases to zero."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def prepare_images(images: Tensor, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return images [N,channels,size,size] of 0 to 1 in the weights' dtype, with the channels side by side in memory.

    Raises:
        ValueError: the images have another shape or dtype.
    """
    if images.dim() != 4 or tuple(images.shape[1:]) != (channels, size, size):
        raise ValueError(f"images must be [N,{channels},{size},{size}], got {list(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8, or floating point of 0 to 1; got {images.dtype}")
    scaled = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
    return scaled.contiguous(memory_format=torch.channels_last)


def autocast_to_bfloat16(device: torch.device, wanted: bool) -> AbstractContextManager[object]:
    """Return a context that casts to bfloat16 if `wanted`, and else leaves what the caller has set."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()
