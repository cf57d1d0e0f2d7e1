"""The convolutional encoder of the few-shot networks (Munkhdalai & Trischler 2018, section 5.1)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_sizes
from fastweights.few_shot._layers import autocast_to_bfloat16, initialise_he, prepare_images
from fastweights.nn.fast_weights_linear import SLOPE
from fastweights.ops.conv_block import run_blocks
from fastweights.pretrained import Pretrained


class ConvEncoder(Pretrained, nn.Module):
    """Blocks of 3 x 3 convolution, leaky ReLU and 2 x 2 max pooling, without normalisation: images -> features.

    Sides are halved and rounded up: five blocks make 64 features of 28 x 28 pixels with 64 filters, and 288 of 84 x 84
    with 32 (Munkhdalai & Trischler 2018, table 4). Weights are drawn as He et al. 2015, biases are zero.

    Args:
        channels: channels of the images, such as 1 or 3.
        filters: filters of every block.
        blocks: the number of blocks.
        size: pixels of a side of the images.
        standardise: give every image mean 0 and variance 1 first. Fast weights bind by products, in which one
            described photograph of strong contrast would outweigh the others.
        interpolated: training images have been turned, stretched or shifted, which blurs them: in evaluation (`eval`)
            images are blurred as much, so that drawings are as sharp as the network knows them.
        mirrored: training images have been mirrored at random: in evaluation the features are the mean of those of an
            image and of its mirror image.
        dropout: the share of the features that is left out in training, at random. Fast weights bind by products of
            features, and learn not to bind by a few of them.
        half: compute in bfloat16 where that is safe (autocast): two to three times as fast on a processor that
            multiplies matrices of it (AMX), slow on others.

    Attributes:
        features: D, the width of the output.

    Raises:
        ValueError: a size less than 1, or a share out of range; from the call, images of another shape or dtype.

    Shapes: images [N,channels,size,size], uint8 or floating point of 0 to 1 -> [N,D].

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> encoder = few_shot.ConvEncoder(channels=1, filters=64, size=28)
        >>> encoder(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 64])
        >>> few_shot.ConvEncoder(channels=3, filters=32, size=84).features
        288
    """

    def __init__(
        self,
        channels: int,
        filters: int,
        *,
        size: int,
        blocks: int = 5,
        standardise: bool = False,
        interpolated: bool = False,
        mirrored: bool = False,
        dropout: float = 0.0,
        half: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(channels=channels, filters=filters, size=size, blocks=blocks)
        self.channels, self.size, self.half_precision = channels, size, half
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
        self.standardise, self.interpolated, self.mirrored = standardise, interpolated, mirrored
        convolutions = nn.ModuleList(
            nn.Conv2d(filters if block else channels, filters, 3, padding=1) for block in range(blocks)
        )
        # Channels side by side in memory: on a processor a step takes half the time.
        self.convolutions = convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for _ in range(blocks):
            size = (size + 1) // 2
        self.features = filters * size**2
        self.dropout = nn.Dropout(dropout)
        initialise_he(self)

    def forward(self, images: Tensor) -> Tensor:
        scaled = self._scale(images)
        if self.mirrored and not self.training:
            return (self._features(scaled) + self._features(scaled.flip(-1))) / 2
        return self._features(scaled)

    def _features(self, scaled: Tensor) -> Tensor:
        layers = [(convolution.weight, convolution.bias) for convolution in self.convolutions]
        with autocast_to_bfloat16(scaled.device, self.half_precision):
            # The maximum before the nonlinearity, which keeps the order of numbers: the same result for less work.
            h = run_blocks(scaled, layers, SLOPE)
        features: Tensor = self.dropout(h.flatten(1).to(scaled.dtype))
        return features

    @torch.no_grad()
    def initialise_from(self, images: Tensor) -> None:
        """Start every filter at mean 0 and variance 1 over images of the kind to come (Krähenbühl et al. 2016).

        Drawn weights give all images nearly the same features, and nothing here normalises them: on photographs the
        first hundreds of updates go into telling them apart at all. A filter's weights and bias are scaled and shifted
        by what leaves its pooling, block after block; one that gives all images the same is left as it is.

        Shapes: images [N,channels,size,size]; some hundreds are enough.

        Raises:
            ValueError: no images, values that are not finite, or images that the call would refuse.

        Examples:
            >>> import torch
            >>> from fastweights import few_shot
            >>> encoder = few_shot.ConvEncoder(channels=3, filters=32, size=84)
            >>> encoder.initialise_from(torch.rand(64, 3, 84, 84))
        """
        if len(images) == 0:
            raise ValueError(f"there must be images to start from, got {list(images.shape)}")
        h = self._scale(images)
        if not bool(h.isfinite().all()):  # the statistics of every filter would be NaN
            raise ValueError("images to start from must be finite, got NaN or infinity")
        for convolution in self.convolutions:
            pooled = F.max_pool2d(convolution(h), 2, ceil_mode=True)
            spread, mean = torch.std_mean(pooled, (0, 2, 3), correction=0)
            # Not exactly 0 where rounding alone makes values differ.
            differs = spread > 1e-6 * (1 + mean.abs())
            scale, shift = torch.where(differs, 1 / spread, 1), torch.where(differs, mean, 0)
            convolution.weight.mul_(scale.view(-1, 1, 1, 1))
            convolution.bias.sub_(shift).mul_(scale)
            h = F.leaky_relu((pooled - shift.view(-1, 1, 1)) * scale.view(-1, 1, 1), SLOPE)

    def _scale(self, images: Tensor) -> Tensor:
        scaled = prepare_images(images, self.channels, self.size, self.convolutions[0].weight.dtype)
        if self.interpolated and not self.training:
            scaled = _blur(scaled)
        if not self.standardise:
            return scaled
        last = scaled.permute(0, 2, 3, 1)
        # An image of one colour becomes 0.
        return F.layer_norm(last, last.shape[1:], eps=1e-6).permute(0, 3, 1, 2)


def _blur(images: Tensor) -> Tensor:
    """Blur images as much as bilinear interpolation at random places does on average.

    Between two pixels, at a part u of the way, it takes 1 - u of one and u of the other: a variance of u (1 - u), which
    is 1/6 on average, and that of one twelfth, ten and one.
    """
    wide = F.pad(images, (1, 1, 1, 1), mode="replicate")
    across = (wide[..., :-2] + 10 * wide[..., 1:-1] + wide[..., 2:]) / 12
    return (across[..., :-2, :] + 10 * across[..., 1:-1, :] + across[..., 2:, :]) / 12
