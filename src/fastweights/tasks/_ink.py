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
_THIN, _BROAD = 0.026, 0.05  # of the side; Omniglot's strokes are 0.05, its thinnest drawings, single dots, 0.0267
_LEAST_LEFT = 64.0  # of 255: the darkest pixel of a drawing made small; strokes are fainter where noise hides them
_FINE = 8  # cells that thin strokes are broadened on, along a pixel of the drawing


class _Levels(NamedTuple):
    """Of each channel of an image [channels,1], of 255."""

    paper: Tensor  # the median
    ink: Tensor
    light: Tensor  # as far from the other end as ink from this
    noise: Tensor  # the paper's standard deviation, by the half of it that is lighter, where no ink is


def drawing(image: Tensor, size: int, path: Path, refusal: type[FastWeightsError]) -> Tensor:
    """Ink as 255 on paper that is 0 [channels,size,size], the whole of a file's dark ink on light paper, uint8.

    Strokes thinner than the network has seen would be next to nothing in the mean over an area that is mostly paper:
    they are made as broad as Omniglot's first.

    Raises:
        refusal: it is mostly dark, or blank, or its paper is taken for ink.
    """
    levels = _levels(image)
    contrast = levels.paper - levels.ink
    inked = contrast >= (_LEAST_OVER_NOISE * levels.noise).clamp(min=LEAST_CONTRAST)  # red ink is none in red light
    if float((levels.light - levels.paper).max()) > max(float(contrast.max()), LEAST_CONTRAST):
        raise refusal(f"{path} is mostly dark: an image file must show dark ink on light paper; turn it over")
    if not bool(inked.any()):
        raise refusal(
            f"{path} is blank, or lit unevenly: its darkest stroke is {levels.ink.min():.0f} of 255 and its paper "
            f"{levels.paper.max():.0f}, give or take {levels.noise.max():.1f}"
        )
    margin = torch.minimum(_NOISE * levels.noise, 0.4 * contrast)  # that far from paper and from ink is still either
    ink = (levels.paper - image.flatten(1) - margin) / (contrast - 2 * margin).clamp(min=1)
    ink = (255 * ink * inked).clamp(0, 255).round().byte().view_as(image)
    sure = bool((contrast > 2.5 * _NOISE * levels.noise)[inked].all())
    large = max(image.shape[1:]) > 2 * size  # else a pixel's width is no thin stroke
    if sure and large and (width := _width(ink)) < _THIN:
        ink = _broadened(ink, size * _FINE, _BROAD - width)
    found = exact_area_means(ink, size)
    if (most := float(found.max())) < _LEAST_LEFT:
        raise refusal(
            f"{path} is blank: at {size} x {size} pixels its darkest ink is {most:.2g} of 255; cut the drawing out, or "
            "scan it with less noise"
        )
    if (mean := float(found.mean()) / 255) > MOST_INK:
        raise refusal(f"{path} is mostly ink: {100 * mean:.0f} % of it; paper must be even, and most of the image")
    return found.round().byte()


def _levels(image: Tensor) -> _Levels:
    """Ink is what a line is of that is a pixel broad and a twentieth of the side long: a speck is none."""
    count, side = image[0].numel(), max(image.shape[1:])
    least = max(1, side // 20)
    # A million values out of 256: counted rather than sorted.
    below = torch.stack([torch.bincount(channel.flatten().int(), minlength=256) for channel in image]).cumsum(1)

    def ranked(rank: int) -> Tensor:
        return (below < rank).sum(1, keepdim=True).float()

    paper = ranked((count + 1) // 2)
    return _Levels(paper, ranked(least), ranked(count + 1 - least), (ranked(3 * count // 4) - paper) / 0.674)


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
    parts = [max(1, round(side * length / max(ink.shape[1:]))) for length in ink.shape[1:]]
    cells = F.adaptive_max_pool2d((ink >= 128).float(), parts)
    down, right = (side - part for part in parts)
    cells = F.pad(cells, (right // 2, right - right // 2, down // 2, down - down // 2))
    # A square of cells broadens a stroke by its own side, or more where it is slanted: by 4 / pi of it on average.
    kernel = max(1, round(math.pi / 4 * side * by))
    return (255 * F.max_pool2d(cells, kernel, stride=1, padding=kernel // 2)[:, :side, :side]).byte()
