"""Memories for models that are trained already: they adapt at test time, and the model stays as it is."""

from fastweights.memory.mixtures import fit_weights, mix
from fastweights.memory.neural_cache import NeuralCache

__all__ = ["NeuralCache", "fit_weights", "mix"]
