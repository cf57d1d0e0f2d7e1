"""The residual encoder of the few-shot networks (Munkhdalai & Trischler 2018, section 5.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastweights.checks import check_sizes
from fastweights.few_shot._layers import autocast_to_bfloat16, initialise_he, prepare_images
from fastweights.pretrained import Pretrained

_SLOPE = 0.1  # slope of the leaky ReLU


class ResidualEncoder(Pretrained, nn.Module):
    """The residual network of TCML (Mishra et al. 2017) under a single 1 x 1 convolution: images -> features.

    A block is three 3 x 3 convolutions, each with batch normalisation and a leaky ReLU of slope 0.1, beside a 1 x 1
    convolution as the shortcut, and 2 x 2 max pooling of their sum. Four of them, a 1 x 1 convolution and the mean over
    all places are the encoder of fwResNet, without dropout (Munkhdalai & Trischler 2018, table 4). Weights are drawn as
    He et al. 2015, biases are zero.

    In training, batch normalisation takes its statistics from all images of a call, which then depend on one another;
    in evaluation (`eval`) an image's features are its own.

    Our reading, where the papers leave room: sides are halved and rounded up, so that 84 pixels become 6 and TCML's
    mean over 6 x 6 places is that over all; the shortcut has a bias and no normalisation; the last features pass a
    leaky ReLU after the mean, where TCML has a ReLU before its second 1 x 1 convolution: here nothing comes between
    them and the head, and a ReLU would leave those dead that start negative for every image.

    Args:
        channels: channels of the images, 1 or 3.
        size: pixels of a side of the images.
        widths: filters of the blocks, one number a block.
        features: D, filters of the 1 x 1 convolution.
        half: compute in bfloat16 where that is safe (autocast), as `ConvEncoder` does.

    Attributes:
        features: D, the width of the output.

    Raises:
        ValueError: a size less than 1, or no block; from the call, images of another shape or dtype.

    Shapes: images [N,channels,size,size], uint8 or floating point of 0 to 1 -> [N,D].

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> encoder = few_shot.ResidualEncoder(channels=3, size=84)
        >>> encoder(torch.rand(2, 3, 84, 84)).shape
        torch.Size([2, 1024])
        >>> few_shot.ResidualEncoder(channels=1, size=28, widths=(16, 32), features=64).features
        64
    """

    def __init__(
        self,
        channels: int = 3,
        *,
        size: int = 84,
        widths: Sequence[int] = (64, 96, 128, 256),
        features: int = 1024,
        half: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(channels=channels, size=size, features=features)
        if not isinstance(widths, Sequence) or not widths:
            raise ValueError(f"widths must have a number of filters for each block, at least one; got {widths!r}")
        check_sizes(**{f"widths[{block}]": filters for block, filters in enumerate(widths)})
        self.channels, self.size, self.features, self.half_precision = channels, size, features, half
        pairs = zip((channels, *widths), widths, strict=False)
        blocks = nn.Sequential(*(_Block(before, filters) for before, filters in pairs))
        # Channels side by side in memory, as in ConvEncoder.
        self.blocks = blocks.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # The mean of a 1 x 1 convolution is that convolution of the mean: equal features, from one place, not 36.
        self.last = nn.Linear(widths[-1], features)
        self.activation = nn.LeakyReLU(_SLOPE)
        initialise_he(self)

    def forward(self, images: Tensor) -> Tensor:
        scaled = prepare_images(images, self.channels, self.size, self.last.weight.dtype)
        with autocast_to_bfloat16(images.device, self.half_precision):
            features: Tensor = self.activation(self.last(self.blocks(scaled).mean((2, 3))))
        return features.to(scaled.dtype)


class _Block(nn.Module):
    """Three convolutions beside a shortcut: [N,channels,S,S] -> [N,filters,ceil(S/2),ceil(S/2)]."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (channels, filters, filters):
            # Without bias, as the normalisation subtracts it with the mean; in place, as that needs its input alone.
            layers += [nn.Conv2d(before, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters)]
            layers.append(nn.LeakyReLU(_SLOPE, inplace=True))
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Conv2d(channels, filters, 1)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.layers(x) + self.shortcut(x))
        return pooled
