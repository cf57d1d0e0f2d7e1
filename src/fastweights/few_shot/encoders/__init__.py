"""Encoders of few-shot networks: images or sentences -> features."""

from fastweights.few_shot.encoders.conv import ConvEncoder
from fastweights.few_shot.encoders.residual import ResidualEncoder
from fastweights.few_shot.encoders.sentence import SentenceEncoder

__all__ = ["ConvEncoder", "ResidualEncoder", "SentenceEncoder"]
