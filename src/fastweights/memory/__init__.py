"""Memories for models that are trained already: they adapt at test time, and the model stays as it is."""

import sys

from fastweights.memory.classifier.adaptive_classifier import AdaptiveClassifier, Answers, Example
from fastweights.memory.classifier.fit_report import FitReport
from fastweights.memory.language_model.adaptive_language_model import AdaptiveLanguageModel
from fastweights.memory.language_model.certificate import Certificate, Check, certify
from fastweights.memory.predictors.caches import NeuralCache, UnboundedCache
from fastweights.memory.predictors.mbpa import MbPA
from fastweights.memory.predictors.mixtures import fit_weights, mix
from fastweights.memory.predictors.ngram_cache import NGramCache
from fastweights.memory.predictors.past import Past
from fastweights.memory.predictors.predictor import Predictor, Reader
from fastweights.memory.predictors.stream_mbpa import StreamMbPA
from fastweights.memory.predictors.widen import widen_output
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.faiss_index import FaissIndex
from fastweights.memory.store.neighbours import Neighbours, attend

# The modules as they were called before they stood in folders, for one release; pickles name private ones too.
for _before, _now in {
    "episodic": "store.episodic",
    "faiss_index": "store.faiss_index",
    "neighbours": "store.neighbours",
    "_store": "store.ring",
    "caches": "predictors.caches",
    "mbpa": "predictors.mbpa",
    "mixtures": "predictors.mixtures",
    "stream_mbpa": "predictors.stream_mbpa",
    "widen": "predictors.widen",
    "_adaptation": "predictors._adaptation",
    "_past": "predictors.past",
    "adaptive_classifier": "classifier.adaptive_classifier",
    "fit_report": "classifier.fit_report",
    "_class_densities": "classifier._densities",
    "_class_statistics": "classifier._statistics",
    "_classifier_file": "classifier._file",
    "_examples": "classifier._examples",
    "_new_classes": "classifier._new_classes",
    "adaptive_language_model": "language_model.adaptive_language_model",
    "certificate": "language_model.certificate",
    "_causal_model": "language_model._causal_model",
    "_network": "network",
}.items():
    sys.modules[f"{__name__}.{_before}"] = globals()[_before] = sys.modules[f"{__name__}.{_now}"]

__all__ = [
    "AdaptiveClassifier",
    "AdaptiveLanguageModel",
    "Answers",
    "Certificate",
    "Check",
    "EpisodicMemory",
    "Example",
    "FaissIndex",
    "FitReport",
    "MbPA",
    "NGramCache",
    "Neighbours",
    "NeuralCache",
    "Past",
    "Predictor",
    "Reader",
    "StreamMbPA",
    "UnboundedCache",
    "attend",
    "certify",
    "fit_weights",
    "mix",
    "widen_output",
]
