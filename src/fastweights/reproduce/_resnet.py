"""A residual network for images of 84 x 84 pixels (He et al. 2016, "Deep residual learning", with basic blocks)."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BLOCKS = 2  # of each of the four widths, as in the network of 18 layers
_MEAN, _DEVIATION = (0.47, 0.45, 0.40), (0.28, 0.27, 0.28)  # of ImageNet's red, green and blue, 0 to 1


class ResNet(nn.Module):
    """Images -> the activations under the softmax layer: 18 layers, the first at half the resolution of the images.

    Shapes: images [B,3,S,S], uint8 or float of 0 to 1 -> [B,8 * width] float32.

    Args:
        width: channels of the first blocks; the others have 2, 4 and 8 times as many.
        half: compute in bfloat16 where that is safe (autocast): twice as fast on a processor that multiplies matrices
            of it (AMX), slow on others.

    Examples:
        >>> import torch
        >>> from fastweights.reproduce._resnet import ResNet
        >>> ResNet(width=4)(torch.rand(2, 3, 84, 84)).shape
        torch.Size([2, 32])
    """

    def __init__(self, width: int, *, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU())
        channels = width
        for stage in range(4):
            for block in range(_BLOCKS):
                layers.append(_Block(channels, width * 2**stage, stride=2 if stage and not block else 1))
                channels = width * 2**stage
        self.features = channels
        self.layers = nn.Sequential(*layers)
        # Channels side by side in memory: on a processor a step takes half the time. Of fewer channels than a register
        # has places oneDNN's gradient of a 1 x 1 convolution with a stride writes past its memory (its issue 6035).
        if width >= 16:
            self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        centred = (as_float(images) - self.mean) / self.deviation  # type: ignore[operator]
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half_precision):
            activations: Tensor = self.layers(centred)
        return activations.float().mean((2, 3))


class _Block(nn.Module):
    """relu(x + F(x)), F two convolutions; where the shape changes x passes a convolution of 1 x 1 (He et al., eq 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.shortcut(x) + cast(Tensor, self.second_norm(self.second(inner))))


def as_float(images: Tensor) -> Tensor:
    """Images of 0 to 1."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def augment(
    images: Tensor,
    size: int,
    *,
    least_area: float = 0.5,
    light: float = 0.4,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Cut a part out of each image and mirror every other: [B,3,S,S] uint8 or float -> [B,3,size,size] float.

    The part has `least_area` to 1 of the area and 3/4 to 4/3 of the proportions; each image is brightened and given
    contrast by up to `light` either way. Without a generator what is drawn is torch's own, as dropout.

    Examples:
        >>> import torch
        >>> from fastweights.reproduce._resnet import augment
        >>> augment(torch.rand(2, 3, 84, 84), size=64).shape
        torch.Size([2, 3, 64, 64])
    """
    count, device = len(images), images.device
    where = device if generator is None else generator.device
    area, proportion, across, down, mirror, brightness, contrast = torch.rand(
        7, count, generator=generator, device=where
    ).to(device)
    side = (area * (1 - least_area) + least_area).sqrt()
    stretch = (4 / 3) ** (proportion - 0.5)
    width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
    transform = torch.zeros(count, 2, 3, device=device)
    transform[:, 0, 0], transform[:, 1, 1] = torch.where(mirror < 0.5, -width, width), height
    transform[:, 0, 2], transform[:, 1, 2] = (2 * across - 1) * (1 - width), (2 * down - 1) * (1 - height)
    grid = F.affine_grid(transform, [count, 3, size, size], align_corners=False)
    cut = F.grid_sample(as_float(images), grid, padding_mode="reflection", align_corners=False)
    mean = cut.mean((1, 2, 3), keepdim=True)
    gains = (1 - light + 2 * light * torch.stack([contrast, brightness])).view(2, -1, 1, 1, 1)
    lit: Tensor = (cut - mean) * gains[0] + mean * gains[1]
    return lit.clamp(0, 1)
