"""Memories for models that are trained already: they adapt at test time, and the model stays as it is."""

from fastweights.memory.adaptive_classifier import AdaptiveClassifier, Answers
from fastweights.memory.adaptive_language_model import AdaptiveLanguageModel
from fastweights.memory.caches import NeuralCache, UnboundedCache
from fastweights.memory.certificate import Certificate, Check, certify
from fastweights.memory.episodic import EpisodicMemory
from fastweights.memory.faiss_index import FaissIndex
from fastweights.memory.fit_report import FitReport
from fastweights.memory.mbpa import MbPA
from fastweights.memory.mixtures import fit_weights, mix
from fastweights.memory.neighbours import Neighbours, attend
from fastweights.memory.stream_mbpa import StreamMbPA
from fastweights.memory.widen import widen_output

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
