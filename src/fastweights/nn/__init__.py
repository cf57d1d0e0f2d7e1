"""Layers that learn as they run, used like those of `torch.nn`."""

import importlib
from typing import Any

import torch

from fastweights.nn._lstm import LSTMState
from fastweights.nn.associative_lstm import AssociativeLSTM, AssociativeLSTMState
from fastweights.nn.delta_fast_weights_rnn import DeltaFastWeightsRNN, DeltaFastWeightsState
from fastweights.nn.fast_weight_programmer import FastWeightProgrammer, FastWeightProgrammerState
from fastweights.nn.fast_weights_linear import FastWeightsLinear
from fastweights.nn.fast_weights_rnn import FastWeightsRNN, FastWeightsRNNCell, FastWeightsState
from fastweights.nn.gated_fast_weights_rnn import GatedFastWeightsRNN, GatedFastWeightsRNNCell, GatedFastWeightsState
from fastweights.nn.hebbian_softmax import HebbianSoftmax, InnerObjective
from fastweights.nn.hyper_lstm import HyperLSTM, HyperLSTMState
from fastweights.nn.irnn import IRNN
from fastweights.nn.lstm_language_model import LSTMLanguageModel, LSTMLanguageModelState
from fastweights.nn.restarts import run_with_starts

__all__ = [
    "IRNN",
    "AssociativeLSTM",
    "AssociativeLSTMState",
    "DeltaFastWeightsRNN",
    "DeltaFastWeightsState",
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
    "run_with_starts",
]

# What `torch.load` reads without `weights_only=False`: named tuples of tensors.
torch.serialization.add_safe_globals(
    [
        AssociativeLSTMState,
        DeltaFastWeightsState,
        FastWeightProgrammerState,
        FastWeightsState,
        GatedFastWeightsState,
        HyperLSTMState,
        LSTMLanguageModelState,
        LSTMState,
    ]
)


def __getattr__(name: str) -> Any:
    # The names and the module of fastweights.integrations.transformers were here, and are for one release.
    if name in ("TransformersPatch", "patch_transformers", "transformers"):
        module = importlib.import_module("fastweights.integrations.transformers")
        return module if name == "transformers" else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
