"""A small network of one number, for very many numbers: exactly, a line at a time.

A network of three linear layers with leaky ReLU between them is a piecewise linear function of a single input. With 40
units a layer it has some hundreds of pieces; to find a number's piece and take its line costs a twentieth of the 1,680
products that the network itself takes, forward and backward.
"""

from typing import cast

import torch
from torch import Tensor, nn


def evaluated(network: nn.Sequential, x: Tensor) -> Tensor:
    """What the network gives for each number of x [...] by itself: [...]; gradients flow to its weights and to x."""
    breaks, slopes, levels = _lines(network)
    piece = torch.bucketize(x.detach(), breaks)
    return slopes.take(piece) * x + levels.take(piece)


def _lines(network: nn.Sequential) -> tuple[Tensor, Tensor, Tensor]:
    """Where a piece may end [P - 1], in order, and the line of each: its slope [P] and its value at zero [P].

    There are as many as there can be at most, so that their number does not depend on the weights; some are empty.
    """
    first, second, third = (cast(nn.Linear, network[place]) for place in (0, 2, 4))
    weight, bias = first.weight[:, 0], first.bias
    with torch.no_grad():
        kinks = _zeros(weight, bias).sort().values  # of the first layer; its units do not change side between two
        between = _inside(kinks)
        side = _sides(torch.outer(between, weight) + bias, network[1])
        rises, heights = (side * weight) @ second.weight.T, (side * bias) @ second.weight.T + second.bias
        # Of the second layer, in each of these spans [K + 1, units]; a zero elsewhere is none of this span's.
        low, high = _spans(kinks)
        zeros = _zeros(rises, heights)
        zeros = torch.where((zeros > low.unsqueeze(1)) & (zeros < high.unsqueeze(1)), zeros, kinks[0])
        breaks = torch.cat([kinks, zeros.flatten()]).sort().values
        places = torch.outer(_inside(breaks), weight) + bias
        side = _sides(places, network[1])
        upper_side = _sides((side * places) @ second.weight.T + second.bias, network[3])
    slopes = (upper_side * ((side * weight) @ second.weight.T)) @ third.weight[0]
    levels = (upper_side * ((side * bias) @ second.weight.T + second.bias)) @ third.weight[0] + third.bias
    return breaks, slopes, levels


def _zeros(rises: Tensor, heights: Tensor) -> Tensor:
    """Where rise * x + height is zero; 0 for what never is."""
    return (-heights / torch.where(rises == 0, torch.ones_like(rises), rises)).where(rises != 0, 0)


def _inside(breaks: Tensor) -> Tensor:
    """A place within each piece: before the first break, between two, after the last."""
    return torch.cat([breaks[:1] - 1, (breaks[1:] + breaks[:-1]) / 2, breaks[-1:] + 1])


def _spans(breaks: Tensor) -> tuple[Tensor, Tensor]:
    infinite = torch.full_like(breaks[:1], torch.inf)
    return torch.cat([-infinite, breaks]), torch.cat([breaks, infinite])


def _sides(z: Tensor, activation: nn.Module) -> Tensor:
    """The slope of a leaky ReLU at z."""
    slope: float = activation.negative_slope  # type: ignore[assignment]
    return torch.ones_like(z).where(z > 0, slope)
