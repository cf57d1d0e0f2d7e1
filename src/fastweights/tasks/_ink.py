"""Drawings out of scans and photographs: what is ink, what is paper, and strokes as broad as Omniglot's."""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.errors import FastWeightsError
from fastweights.tasks._areas import exact_area_means

LEAST_CONTRAST = 25.0  # of 255, between ink and paper
MOST_INK = 0.5  # the mean of a drawing: more, and paper was taken for ink
_LEAST_OVER_NOISE = 5  # standard deviations of the paper; less may be the paper itself
_NOISE = 4  # standard deviations that paper and ink may be off by
_BROAD = 0.05  # of the side: Omniglot's strokes
_THIN = 0.04  # those to be broadened
_THINNEST = 0.026  # the same in images of as few pixels as Omniglot's, whose single dots are 0.0267
_LEAST_LEFT = 64.0  # of 255: the darkest pixel of a drawing made small; strokes are fainter where noise hides them
_FAINT = 64  # of 255: what strong noise leaves behind is fainter, and is no stroke
_FINE = 8  # cells that thin strokes are broadened on, along a pixel of the drawing
_PARTS = 8  # that the light is compared in, along a side


class _Levels(NamedTuple):
    """Of each channel of an image [channels,1], of 255."""

    paper: Tensor  # the median
    noise: Tensor  # the paper's standard deviation, by the half of it that is lighter, where no ink is
    ink: Tensor
    darker: Tensor  # how many pixels are surely darker than paper
    lighter: Tensor


def drawing(image: Tensor, size: int, path: Path, refusal: type[FastWeightsError]) -> Tensor:
    """Ink as 255 on paper that is 0 [channels,size,size], the whole of a file's dark ink on light paper, uint8.

    Strokes thinner than the network has seen would be next to nothing in the mean over an area that is mostly paper:
    they are made as broad as Omniglot's first.

    Raises:
        refusal: it is mostly dark, or blank, or its paper is taken for ink.
    """
    pixels = max(image.shape[1:])
    if large := pixels > 4 * size:
        image = _evenly_lit(image)
    levels = _levels(image)
    contrast = levels.paper - levels.ink
    inked = levels.darker >= _least(image)  # red ink is none in red light
    if int(levels.lighter.max()) > max(int(levels.darker.max()), _least(image)):
        raise refusal(
            f"{path} is mostly dark: an image file must show dark ink on light paper; turn it over, or give it more "
            "paper about the ink"
        )
    if not bool(inked.any()):
        raise refusal(
            f"{path} is blank, or lit unevenly: its darkest stroke is {levels.ink.min():.0f} of 255 and its paper "
            f"{levels.paper.max():.0f}, give or take {levels.noise.max():.1f}"
        )
    margin = torch.minimum(_NOISE * levels.noise, 0.4 * contrast)  # that far from paper and from ink is still either
    ink = (levels.paper - image.flatten(1) - margin) / (contrast - 2 * margin).clamp(min=1)
    ink = (255 * ink * inked).clamp(0, 255).round().byte().view_as(image)
    sure = bool((contrast > 2.5 * _NOISE * levels.noise)[inked].all())
    if sure and pixels > 2 * size:  # else a pixel's width is no thin stroke
        strokes = _without_specks(ink, size * _FINE)
        if not bool((strokes >= 128).any()):
            raise refusal(f"{path} is blank: its ink is but specks, none of them as large as a stroke")
        if (width := _width(strokes)) < (_THIN if large else _THINNEST):
            ink = _broadened(strokes, size * _FINE, _BROAD - width)
    found = exact_area_means(ink, size)
    if (most := float(found.max())) < _LEAST_LEFT:
        raise refusal(
            f"{path} is blank: at {size} x {size} pixels its darkest ink is {most:.2g} of 255; cut the drawing out, or "
            "scan it with less noise"
        )
    if (mean := float(found.mean()) / 255) > MOST_INK:
        raise refusal(f"{path} is mostly ink: {100 * mean:.0f} % of it; paper must be even, and most of the image")
    return found.round().byte()


def _least(image: Tensor) -> int:
    """Pixels of a line that is one broad and a twentieth of the side long: less ink than that is a speck."""
    return max(1, max(image.shape[1:]) // 20)


def _evenly_lit(image: Tensor) -> Tensor:
    """As if the light did not fall off in any direction [channels,height,width], uint8.

    The slope is a median over parts of the page, so that even paper stays as it is to the bit, whatever is on it.
    """
    few = image[:, :: max(1, image.shape[1] // 512), :: max(1, image.shape[2] // 512)]
    high, wide = (length // _PARTS for length in few.shape[1:])
    if not high or not wide:  # a strip
        return image
    parts = few[:, : high * _PARTS, : wide * _PARTS].reshape(-1, _PARTS, high, _PARTS, wide)
    lit = parts.transpose(2, 3).flatten(3).median(3).values.float()
    half = _PARTS // 2
    down = (lit[:, half:] - lit[:, :half]).flatten(1).median(1).values.view(-1, 1, 1) / half
    right = (lit[:, :, half:] - lit[:, :, :half]).flatten(1).median(1).values.view(-1, 1, 1) / half
    if not bool(down.any() | right.any()):
        return image
    # In parts from the middle of the image.
    y, x = (_PARTS * ((torch.arange(length) + 0.5) / length - 0.5) for length in image.shape[1:])
    middle = lit.flatten(1).median(1).values.view(-1, 1, 1)
    brightest = middle + half * (down.abs() + right.abs())
    light = middle + down * y.view(-1, 1) + right * x
    return (image * (brightest / light.clamp(min=1))).clamp(0, 255).round().byte()


def _levels(image: Tensor) -> _Levels:
    count = image[0].numel()
    # A million values out of 256: counted rather than sorted.
    counts = torch.stack([torch.bincount(channel.flatten().int(), minlength=256) for channel in image])
    below = counts.cumsum(1)

    def ranked(rank: int | Tensor) -> Tensor:
        return (below < rank).sum(1, keepdim=True).float()

    paper = ranked((count + 1) // 2)
    noise = (ranked(max(1, 3 * count // 4)) - paper).clamp(min=0) / 0.674
    apart = (_LEAST_OVER_NOISE * noise).clamp(min=LEAST_CONTRAST)
    levels = torch.arange(256)
    darker = (counts * (levels <= paper - apart)).sum(1, keepdim=True)
    lighter = (counts * (levels >= paper + apart)).sum(1, keepdim=True)
    # Not the very darkest: a fly on a pencil drawing is none of its strokes.
    return _Levels(paper, noise, ranked((darker // 10).clamp(min=_least(image))), darker, lighter)


def _without_specks(ink: Tensor, side: int) -> Tensor:
    """Ink [channels,height,width] but for dust, which would be broadened as strokes are.

    Dust has about it, within the breadth of a stroke, less than two fifths of a line that is a pixel broad.
    """
    pixels, breadth = max(ink.shape[1:]), max(1, 2 * round(side * _BROAD / 2) - 1)
    cells = F.adaptive_avg_pool2d(ink.where(ink >= _FAINT, 0).float() / 255, _parts(ink, side))
    # Along one side and then the other: a square at once would take its area of a time.
    for square in ((breadth, 1), (1, breadth)):
        cells = F.avg_pool2d(cells, square, stride=1, padding=[length // 2 for length in square])
    kept = (cells >= 0.4 * side / breadth / pixels).float()
    return ink * F.interpolate(kept.unsqueeze(0), ink.shape[1:])[0].byte()


def _parts(ink: Tensor, side: int) -> tuple[int, int]:
    """Cells along height and width of an image whose longer side has that many."""
    high, wide = (max(1, round(side * length / max(ink.shape[1:]))) for length in ink.shape[1:])
    return high, wide


def _width(ink: Tensor) -> float:
    """Of the strokes, as a part of the side: twice the area of the ink by the length of its border.

    That length by Cauchy and Crofton: how often lines in four directions cross it.
    """
    mask = F.pad((ink >= 128).any(0), (1, 1, 1, 1))
    straight = (mask[1:] != mask[:-1]).sum() + (mask[:, 1:] != mask[:, :-1]).sum()
    slanted = (mask[1:, 1:] != mask[:-1, :-1]).sum() + (mask[1:, :-1] != mask[:-1, 1:]).sum()
    border = math.pi / 8 * (float(straight) + float(slanted) / math.sqrt(2))
    return 2 * float(mask.sum()) / border / max(ink.shape[1:])


def _broadened(ink: Tensor, side: int, by: float) -> Tensor:
    """What is ink at all, on a square of cells [channels,side,side], its strokes broader by a part of the side."""
    parts = _parts(ink, side)
    cells = F.adaptive_max_pool2d((ink >= 128).float(), parts)
    down, right = (side - part for part in parts)
    cells = F.pad(cells, (right // 2, right - right // 2, down // 2, down - down // 2))
    # A square of cells broadens a stroke by its own side, or more where it is slanted: by 4 / pi of it on average.
    kernel = max(1, round(math.pi / 4 * side * by))
    for square in ((kernel, 1), (1, kernel)):
        cells = F.max_pool2d(cells, square, stride=1, padding=[length // 2 for length in square])
    return (255 * cells[:, :side, :side]).byte()
