"""Layers that learn as they run, used like those of `torch.nn`."""

from fastweights.nn.associative_lstm import AssociativeLSTM, AssociativeLSTMState
from fastweights.nn.conv_encoder import ConvEncoder
from fastweights.nn.fast_weights_head import FastWeights, FastWeightsHead
from fastweights.nn.fast_weights_linear import FastWeightsLinear
from fastweights.nn.fast_weights_rnn import FastWeightsRNN, FastWeightsRNNCell, FastWeightsState
from fastweights.nn.few_shot_network import FewShotNetwork
from fastweights.nn.fine_tuning_head import FineTuning, FineTuningHead, SoftmaxLayers
from fastweights.nn.gated_fast_weights_rnn import GatedFastWeightsRNN, GatedFastWeightsRNNCell, GatedFastWeightsState
from fastweights.nn.hebbian_softmax import HebbianSoftmax, InnerObjective
from fastweights.nn.hyper_lstm import HyperLSTM, HyperLSTMState
from fastweights.nn.irnn import IRNN
from fastweights.nn.maml import MAML
from fastweights.nn.metric_heads import MatchingHead, PrototypeHead
from fastweights.nn.residual_encoder import ResidualEncoder
from fastweights.nn.sentence_encoder import SentenceEncoder

__all__ = [
    "IRNN",
    "MAML",
    "AssociativeLSTM",
    "AssociativeLSTMState",
    "ConvEncoder",
    "FastWeights",
    "FastWeightsHead",
    "FastWeightsLinear",
    "FastWeightsRNN",
    "FastWeightsRNNCell",
    "FastWeightsState",
    "FewShotNetwork",
    "FineTuning",
    "FineTuningHead",
    "GatedFastWeightsRNN",
    "GatedFastWeightsRNNCell",
    "GatedFastWeightsState",
    "HebbianSoftmax",
    "HyperLSTM",
    "HyperLSTMState",
    "InnerObjective",
    "MatchingHead",
    "PrototypeHead",
    "ResidualEncoder",
    "SentenceEncoder",
    "SoftmaxLayers",
]
