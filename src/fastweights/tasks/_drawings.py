"""Drawings that are turned, slanted, stretched and shifted a little, each in a way of its own."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

DEGREES = 30.0
SHIFT = 2.0  # pixels


def augment(images: Tensor, *, generator: torch.Generator, degrees: float = DEGREES, shift: float = SHIFT) -> Tensor:
    """Turn and shift each image by an angle and two distances of its own, as Rae et al. 2018, section 4.1.

    The angle is uniform within `degrees` either way, the distances down and to the right are uniform within `shift`
    pixels either way, not whole ones: pixels are interpolated bilinearly. An image is turned about its middle, and
    what comes in from outside is 0, paper. The numbers are drawn on the generator's device, so that one generator gives
    the same images on any; all else happens on that of the images.

    Shapes: images [B, 1, size, size], not empty, float32 or float64; the result is like it.

    Raises:
        ValueError: `images` has another shape or dtype, or `degrees` or `shift` is negative or not finite.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import omniglot
        >>> images = torch.zeros(32, 1, 28, 28)
        >>> images[:, :, 4:24, 13:15] = 1
        >>> generator = torch.Generator().manual_seed(0)
        >>> turned = omniglot.augment(images, generator=generator)
        >>> turned.shape, torch.equal(turned[0], turned[1])
        (torch.Size([32, 1, 28, 28]), False)
        >>> torch.allclose(omniglot.augment(images, generator=generator, degrees=0, shift=0), images, atol=1e-5)
        True
    """
    _check_images(images)
    for name, limit in (("degrees", degrees), ("shift", shift)):
        if not 0 <= limit < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {limit}")
    draws = torch.rand(3, len(images), generator=generator, device=generator.device, dtype=images.dtype)
    angle, down, right = (2 * draws - 1).to(images.device)
    return _move(images, _turn(math.radians(degrees) * angle), shift * down, shift * right)


def distort(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Turn, slant, stretch and shift each image in a way of its own, as Koch et al. 2015, section 4.1, but farther.

    "Siamese neural networks for one-shot image recognition": an angle within 10 degrees, a slant within 0.3 and a
    stretch within 0.8 to 1.2 along each side, and a shift within 2 pixels (theirs of larger images) along each side;
    each of the seven is drawn uniformly, and left out half of the time. Numbers are drawn on the generator's device.

    Shapes: images [B, 1, size, size], not empty, float32 or float64; the result is like it.

    Raises:
        ValueError: `images` has another shape or dtype.

    Examples:
        >>> import torch
        >>> from fastweights.tasks import omniglot
        >>> images = torch.zeros(32, 1, 28, 28)
        >>> images[:, :, 4:24, 13:15] = 1
        >>> distorted = omniglot.distort(images, generator=torch.Generator().manual_seed(0))
        >>> distorted.shape, torch.equal(distorted[0], distorted[1])
        (torch.Size([32, 1, 28, 28]), False)
    """
    _check_images(images)
    draws = torch.rand(2, 7, len(images), generator=generator, device=generator.device, dtype=images.dtype)
    limits = torch.tensor([math.radians(10), 0.3, 0.3, 0.2, 0.2, 2, 2], dtype=images.dtype, device=draws.device)
    parts = limits.unsqueeze(1) * torch.where(draws[0] < 0.5, 2 * draws[1] - 1, 0)
    angle, slant_x, slant_y, stretch_x, stretch_y, down, right = parts.to(images.device)
    one = torch.ones_like(angle)
    slant = torch.stack([one, slant_x, slant_y, one], dim=1).view(-1, 2, 2)
    stretch = torch.stack([1 + stretch_x, 1 + stretch_y], dim=1).unsqueeze(1)
    # Small products by hand: TF32 or bfloat16 would lose places.
    slanted = (_turn(angle).unsqueeze(3) * slant.unsqueeze(1)).sum(2)
    return _move(images, slanted * stretch, down, right)


def _check_images(images: Tensor) -> None:
    if images.dim() != 4 or images.shape[1] != 1 or images.shape[2] != images.shape[3] or images.numel() == 0:
        raise ValueError(f"images must be [B, 1, size, size] and not empty, got {list(images.shape)}")
    if images.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"images must be float32 or float64 (such as images.float() / 255), got {images.dtype}")


def _turn(radians: Tensor) -> Tensor:
    """What turns a place back [B, 2, 2] that an image was turned to anticlockwise, y pointing down."""
    cosine, sine = radians.cos(), radians.sin()
    return torch.stack([cosine, -sine, sine, cosine], dim=1).view(-1, 2, 2)


def _move(images: Tensor, back: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Map each image [B, 1, size, size] about its middle, by the inverse of `back` [B, 2, 2], then shift it by [B]."""
    # Where in the old image each pixel of the new one comes from: shifted back, then mapped back, in the frame of
    # grid_sample, in which x points right, y points down, and the image reaches from -1 to 1. Not by affine_grid: its
    # matrix product takes as long as all of this, and loses places where TF32 or bfloat16 is allowed in products.
    size = images.shape[-1]
    centres = (2 * torch.arange(size, dtype=images.dtype, device=images.device) + 1) / size - 1
    x, y = ((centres - 2 / size * shift.unsqueeze(1)).unsqueeze(1) for shift in (right, down))  # [B, 1, size]
    across = back[:, :, :1] * x  # what each column adds to the old x and y
    along = back[:, :, 1:] * y  # and each row
    grid = (across.unsqueeze(2) + along.unsqueeze(3)).permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
