"""Hebbian Softmax (Rae et al. 2018): the layer, its loss, its recorder and its inner objectives, a file each."""

from fastweights.nn.hebbian_softmax.layer import HebbianSoftmax
from fastweights.nn.hebbian_softmax.objectives import InnerObjective

__all__ = ["HebbianSoftmax", "InnerObjective"]
