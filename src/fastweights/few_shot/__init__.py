"""Networks that learn the classes of a task from a few examples, and classifiers that are ready to use.

An encoder makes features; a head binds them to labels. `FewShotClassifier` is a trained network in use.
"""

from fastweights.few_shot.classifier import FewShotClassifier, Predictions
from fastweights.few_shot.encoders import ConvEncoder, ResidualEncoder, SentenceEncoder
from fastweights.few_shot.fast_weights_head import FastWeights, FastWeightsHead
from fastweights.few_shot.fine_tuning import FineTuning, FineTuningHead, SoftmaxLayers
from fastweights.few_shot.maml import MAML
from fastweights.few_shot.metric_heads import MatchingHead, PrototypeHead
from fastweights.few_shot.network import FewShotNetwork

__all__ = [
    "MAML",
    "ConvEncoder",
    "FastWeights",
    "FastWeightsHead",
    "FewShotClassifier",
    "FewShotNetwork",
    "FineTuning",
    "FineTuningHead",
    "MatchingHead",
    "Predictions",
    "PrototypeHead",
    "ResidualEncoder",
    "SentenceEncoder",
    "SoftmaxLayers",
]
