"""Layers that learn as they run, used like those of `torch.nn`."""

import torch

from fastweights.nn._lstm import LSTMState
from fastweights.nn.associative_lstm import AssociativeLSTM, AssociativeLSTMState
from fastweights.nn.fast_weight_programmer import FastWeightProgrammer, FastWeightProgrammerState
from fastweights.nn.fast_weights_linear import FastWeightsLinear
from fastweights.nn.fast_weights_rnn import FastWeightsRNN, FastWeightsRNNCell, FastWeightsState
from fastweights.nn.gated_fast_weights_rnn import GatedFastWeightsRNN, GatedFastWeightsRNNCell, GatedFastWeightsState
from fastweights.nn.hebbian_softmax import HebbianSoftmax, InnerObjective
from fastweights.nn.hyper_lstm import HyperLSTM, HyperLSTMState
from fastweights.nn.irnn import IRNN
from fastweights.nn.lstm_language_model import LSTMLanguageModel, LSTMLanguageModelState
from fastweights.nn.restarts import run_with_starts
from fastweights.nn.transformers import TransformersPatch, patch_transformers

__all__ = [
    "IRNN",
    "AssociativeLSTM",
    "AssociativeLSTMState",
    "FastWeightProgrammer",
    "FastWeightProgrammerState",
    "FastWeightsLinear",
    "FastWeightsRNN",
    "FastWeightsRNNCell",
    "FastWeightsState",
    "GatedFastWeightsRNN",
    "GatedFastWeightsRNNCell",
    "GatedFastWeightsState",
    "HebbianSoftmax",
    "HyperLSTM",
    "HyperLSTMState",
    "InnerObjective",
    "LSTMLanguageModel",
    "LSTMLanguageModelState",
    "TransformersPatch",
    "patch_transformers",
    "run_with_starts",
]

# What `torch.load` reads without `weights_only=False`: named tuples of tensors.
torch.serialization.add_safe_globals(
    [
        AssociativeLSTMState,
        FastWeightProgrammerState,
        FastWeightsState,
        GatedFastWeightsState,
        HyperLSTMState,
        LSTMLanguageModelState,
        LSTMState,
    ]
)
