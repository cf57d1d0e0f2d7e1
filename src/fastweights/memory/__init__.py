"""Memories that adapt a trained model at test time: entries that are written, found again and undone."""

from fastweights.memory.episodic import EpisodicMemory
from fastweights.memory.faiss_index import FaissIndex
from fastweights.memory.neighbours import Neighbours

__all__ = ["EpisodicMemory", "FaissIndex", "Neighbours"]
