"""Memories for models that are trained already: they adapt at test time, and the model stays as it is."""

import sys

from fastweights.memory.classifier.adaptive_classifier import AdaptiveClassifier, Answers
from fastweights.memory.classifier.fit_report import FitReport
from fastweights.memory.language_model.adaptive_language_model import AdaptiveLanguageModel
from fastweights.memory.language_model.certificate import Certificate, Check, certify
from fastweights.memory.predictors.caches import NeuralCache, UnboundedCache
from fastweights.memory.predictors.mbpa import MbPA
from fastweights.memory.predictors.mixtures import fit_weights, mix
from fastweights.memory.predictors.stream_mbpa import StreamMbPA
from fastweights.memory.predictors.widen import widen_output
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.faiss_index import FaissIndex
from fastweights.memory.store.neighbours import Neighbours, attend

# The modules as they were called before they stood in folders, for one release.
for _folder, _names in {
    "store": ("episodic", "faiss_index", "neighbours"),
    "predictors": ("caches", "mbpa", "mixtures", "stream_mbpa", "widen"),
    "classifier": ("adaptive_classifier", "fit_report"),
    "language_model": ("adaptive_language_model", "certificate"),
}.items():
    for _name in _names:
        sys.modules[f"{__name__}.{_name}"] = globals()[_name] = sys.modules[f"{__name__}.{_folder}.{_name}"]

__all__ = [
    "AdaptiveClassifier",
    "AdaptiveLanguageModel",
    "Answers",
    "Certificate",
    "Check",
    "EpisodicMemory",
    "FaissIndex",
    "FitReport",
    "MbPA",
    "Neighbours",
    "NeuralCache",
    "StreamMbPA",
    "UnboundedCache",
    "attend",
    "certify",
    "fit_weights",
    "mix",
    "widen_output",
]
