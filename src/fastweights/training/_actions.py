"""The kinds of actions that a policy can draw: how they are drawn, how likely they are, and what environments take."""

import math
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

Weights = tuple[Tensor, Tensor]  # log probabilities of actions, and entropies of what they were drawn from


class Actions(Protocol):
    """A kind of actions, drawn from a distribution that `size` numbers describe: the policy's logits [...,size]."""

    size: int

    def draw(self, logits: Tensor, likeliest: bool = False) -> Tensor:
        """Return actions as they are stored, drawn or the likeliest."""

    def weigh(self, logits: Tensor, actions: Tensor) -> Weights:
        """Return the log probability of actions and the entropy, each [...], of logits [...,size]."""

    def as_environments_want(self, actions: Tensor) -> NDArray[Any]:
        """Return actions [B,...] as a vector environment takes them."""


class Choice:
    """One of n choices: the logits of all of them, as of a `Discrete` space."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.size, self.start = n, start

    def draw(self, logits: Tensor, likeliest: bool = False) -> Tensor:
        if likeliest:
            return logits.argmax(-1)
        chances = logits.softmax(-1)
        # As torch.multinomial draws, which would stop at NaN before the loss tells of it.
        return (chances / torch.empty_like(chances).exponential_()).argmax(-1)

    def weigh(self, logits: Tensor, actions: Tensor) -> Weights:
        log_p = logits.log_softmax(-1)
        return log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def as_environments_want(self, actions: Tensor) -> NDArray[Any]:
        taken: NDArray[Any] = actions.cpu().numpy() + self.start
        return taken


class Choices:
    """Several choices at once, each drawn by itself: the logits of all, one behind the other, as of `MultiDiscrete`."""

    def __init__(self, counts: NDArray[Any], starts: NDArray[Any]) -> None:
        self.counts, self.starts = counts.flatten().tolist(), starts
        self.parts = [Choice(count) for count in self.counts]
        self.size = sum(self.counts)

    def draw(self, logits: Tensor, likeliest: bool = False) -> Tensor:
        pairs = zip(self.parts, logits.split_with_sizes(self.counts, -1), strict=True)
        return torch.stack([part.draw(some, likeliest) for part, some in pairs], -1)

    def weigh(self, logits: Tensor, actions: Tensor) -> Weights:
        triples = zip(self.parts, logits.split_with_sizes(self.counts, -1), actions.unbind(-1), strict=True)
        log_p, entropy = zip(*(part.weigh(some, chosen) for part, some, chosen in triples), strict=True)
        return torch.stack(log_p).sum(0), torch.stack(entropy).sum(0)

    def as_environments_want(self, actions: Tensor) -> NDArray[Any]:
        taken: NDArray[Any] = actions.cpu().numpy().reshape(-1, *self.starts.shape) + self.starts
        return taken


class Numbers:
    """Numbers, each Gaussian: the means of all, then the logs of their standard deviations, as of a `Box`.

    They are in units of the bounds, -1 to 1; what is drawn outside reaches the environments clipped to them. A number
    that lacks a bound is as it is.
    """

    def __init__(self, space: Any) -> None:
        self.low, self.high, self.shape, self.dtype = space.low, space.high, space.shape, space.dtype
        bounded = space.bounded_below & space.bounded_above
        low, high = (numpy.where(bounded, bound, 0).astype(numpy.float64) for bound in (space.low, space.high))
        self.middle, self.unit = low + (high - low) / 2, numpy.where(bounded, (high - low) / 2, 1)
        self.size = 2 * math.prod(space.shape)

    def draw(self, logits: Tensor, likeliest: bool = False) -> Tensor:
        means, deviations = logits.chunk(2, -1)
        return means if likeliest else means + deviations.exp() * torch.randn_like(means)

    def weigh(self, logits: Tensor, actions: Tensor) -> Weights:
        means, log_deviations = logits.chunk(2, -1)
        away = (actions - means) / log_deviations.exp()
        log_p = -away.square() / 2 - log_deviations - math.log(2 * math.pi) / 2
        return log_p.sum(-1), (log_deviations + math.log(2 * math.pi * math.e) / 2).sum(-1)

    def as_environments_want(self, actions: Tensor) -> NDArray[Any]:
        # Of NaN the loss tells, after environments that would take none.
        numbers = numpy.nan_to_num(actions.cpu().double().numpy()).reshape(-1, *self.shape)
        taken: NDArray[Any] = (self.middle + self.unit * numbers).clip(self.low, self.high).astype(self.dtype)
        return taken


def actions_of(space: Any) -> Actions:
    """Return the kind of a space of gymnasium that `check_environments` has let pass."""
    if hasattr(space, "n"):
        return Choice(int(space.n), int(space.start))
    if hasattr(space, "nvec"):
        return Choices(space.nvec, space.start)
    return Numbers(space)
