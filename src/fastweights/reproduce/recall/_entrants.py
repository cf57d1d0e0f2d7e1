"""The layers that a bench compares at equal numbers of weights: those of the library, and one of the user's own."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from fastweights.errors import RunError
from fastweights.reproduce._experiment import find_size
from fastweights.reproduce.recall._bench import TITLES, FrameSettings, make_mixer
from fastweights.reproduce.recall._own_layer import OwnLayer, OwnMixer, load_layer
from fastweights.reproduce.recall.frame import BLOCKS, Mixer
from fastweights.runs import Record

NEAR = 0.1  # share by which a network may miss the number of weights


@dataclass(frozen=True)
class Entrant:
    """A layer of the library, or the user's own, that goes through a bench."""

    title: str
    name: str  # of its members' folders
    mixer: Callable[[int], Mixer]  # of so many features
    own: OwnLayer | None = None

    @property
    def about(self) -> Record:
        """Return what tells it from others beside its settings."""
        return {} if self.own is None else {"layer": self.title, "source": self.own.source}

    def count(self, size: int) -> int:
        """Return the weights of all blocks' mixers of so many features.

        Raises:
            ValueError: the layer cannot be made.
        """
        # Shapes alone; what somebody else's constructor does need not work without numbers.
        with torch.random.fork_rng(), torch.device("meta") if self.own is None else nullcontext():
            return BLOCKS * count_weights(self.mixer(size))


def enter(settings: FrameSettings, layer: str | None = None) -> dict[str, Entrant]:
    """Return the layers by name: those of the settings, and the user's own, FILE.py:CLASS, if there is one.

    Raises:
        RunError: the user's own cannot be loaded.
    """
    entrants: dict[str, Entrant] = {
        model: Entrant(TITLES[model], model, functools.partial(make_mixer, model, settings=settings))
        for model in settings.models
    }
    if layer is not None:
        own = load_layer(layer)
        entrants[own.name] = Entrant(own.title, own.name, functools.partial(OwnMixer, own), own)
    return entrants


def find_width(title: str, count: Callable[[int], int], parameters: int) -> int:
    """Return the features with which a network comes closest to a number of weights.

    Args:
        title: of the network, for the user.
        count: the weights of the network with so many features; a ValueError refuses them.
        parameters: the number.

    Raises:
        RunError: it does not come near.
        ValueError: the layer cannot be made.
    """
    size = find_size(count, parameters)
    if abs((nearest := count(size)) - parameters) > NEAR * parameters:
        raise RunError(
            f"{title} has {nearest:,} parameters with {size:,} feature{'s' if size > 1 else ''}, and comes no closer "
            f"to {parameters:,}: give another --parameters, or leave the layer out"
        )
    return size


def count_weights(module: nn.Module) -> int:
    """Return how many numbers of a module are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


class Nothing(Mixer):
    """A mixer without weights."""

    def state_size(self, steps: int) -> int | None:
        return 0
