"""The settings and the four models of Schlag & Schmidhuber 2017, section 4."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from fastweights.nn import FastWeightsRNN, GatedFastWeightsRNN, HyperLSTM
from fastweights.tasks import gated_retrieval as task

ModelName = Literal["attention", "lstm", "hyper-lstm", "gated"]

TITLES: dict[ModelName, str] = {
    "attention": "AttentionFW",
    "lstm": "LSTM",
    "hyper-lstm": "HyperLSTM",
    "gated": "Gated fast weights",
}

# The units that have the paper's numbers of parameters; of a HyperLSTM nearly, for it does not say how it is made.
PAPER_SIZES: dict[ModelName, int] = {"attention": 300, "lstm": 600, "hyper-lstm": 874, "gated": 40}


@dataclass(frozen=True)
class Settings:
    """Associative retrieval of Schlag & Schmidhuber 2017: a long stream of keys, values and queries."""

    models: tuple[ModelName, ...] = ("gated",)
    """The rows of the table."""
    seeds: tuple[int, ...] = (1,)
    """One training run for each: of the weights and of the streams that start anew."""

    train_queries: int = task.SIZES[0]
    """Queries in the stream of training, each with 1 to 10 storage tokens before it."""
    validation_queries: int = task.SIZES[1]
    """Queries in the stream that chooses the best pass."""
    test_queries: int = task.SIZES[2]
    """Queries in the stream of the table."""
    data_seed: int = 0
    """Of the streams themselves, which every run shares."""

    epochs: int = 10
    """Gated fast weights: passes over the training stream."""
    attention_epochs: int = 4
    """AttentionFW: passes over the training stream."""
    lstm_epochs: int = 4
    """LSTM: passes over the training stream; one takes several times as long as one of gated fast weights."""
    hyper_lstm_epochs: int = 2
    """HyperLSTM: passes over the training stream; one takes many times as long as one of gated fast weights."""
    batch_size: int = 256
    """Pieces of the stream that are read side by side."""
    segment: int = 32
    """Characters that the gradient goes back over."""
    reset: float = 0.02
    """The chance, at each segment, that the state of a piece starts from zeros again."""
    learning_rate: float = 1e-3
    """Of Nadam."""
    annealing: Literal["none", "cosine"] = "cosine"
    """How the learning rate falls: not at all, or along a cosine to zero at the last of the passes."""
    clip_norm: float = 0.1
    """The norm that the gradient is clipped to."""

    embedding_size: int = 15
    """Features of a character."""
    hidden_size: int = 40
    """Gated fast weights: units of the fast network and of the slow network's state."""
    slow_inner_size: int = 100
    """Gated fast weights: units of the slow network's inner layer."""
    attention_hidden_size: int = 300
    """AttentionFW: units."""
    attention_decay: float = 0.95
    """AttentionFW: what is left of the fast matrix after a step."""
    attention_rate: float = 0.5
    """AttentionFW: how strongly a hidden state is written."""
    lstm_hidden_size: int = 600
    """LSTM: units."""
    hyper_lstm_hidden_size: int = 874
    """HyperLSTM: units of the large LSTM."""
    hyper_lstm_small_size: int = 128
    """HyperLSTM: units of the small LSTM."""
    hyper_lstm_embedding_size: int = 16
    """HyperLSTM: features between the two."""

    evaluate_only: bool = False
    """Train nothing: test the weights in the run's folder, or the published ones where it has none."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints."""


PRESETS = {
    "quick": Settings(),
    "paper": Settings(models=("attention", "lstm", "hyper-lstm", "gated"), epochs=50),
}

OF_MODELS: dict[ModelName, tuple[str, ...]] = {
    "attention": ("attention_hidden_size", "attention_decay", "attention_rate"),
    "lstm": ("lstm_hidden_size",),
    "hyper-lstm": ("hyper_lstm_hidden_size", "hyper_lstm_small_size", "hyper_lstm_embedding_size"),
    "gated": ("hidden_size", "slow_inner_size"),
}
EPOCHS: dict[ModelName, str] = {
    "attention": "attention_epochs",
    "lstm": "lstm_epochs",
    "hyper-lstm": "hyper_lstm_epochs",
    "gated": "epochs",
}


class StreamModel(nn.Module):
    """Embedding, a recurrent layer and a projection: inputs [T,B] and a state -> logits [T,B,15] and the next state."""

    def __init__(self, model: ModelName, settings: Settings) -> None:
        super().__init__()
        features, size = settings.embedding_size, hidden_size(model, settings)
        self.embedding = nn.Embedding(len(task.VOCABULARY), features)
        self.core: nn.Module
        if model == "attention":
            self.core = FastWeightsRNN(features, size, decay=settings.attention_decay, rate=settings.attention_rate)
        elif model == "lstm":
            self.core = nn.LSTM(features, size)
            # torch has two bias vectors where one is enough and the paper counts one: the other stays zero.
            self.core.get_parameter("bias_hh_l0").requires_grad_(False).zero_()
        elif model == "hyper-lstm":
            self.core = HyperLSTM(
                features,
                size,
                hyper_hidden_size=settings.hyper_lstm_small_size,
                hyper_embedding_size=settings.hyper_lstm_embedding_size,
            )
            # As published the features between the two LSTMs start alike and stay so.
            nn.init.normal_(self.core.embedding_weight, std=0.01)
        else:
            self.core = GatedFastWeightsRNN(features, size, slow_inner_size=settings.slow_inner_size)
        self.output = nn.Linear(size, len(task.VOCABULARY))

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.embedding(inputs)
        if isinstance(self.core, nn.LSTM):  # its state has an axis of layers in front
            y, state = self.core(x, None if state is None else tuple(tensor.unsqueeze(0) for tensor in state))
            return self.output(y), tuple(tensor.squeeze(0) for tensor in state)
        y, state = self.core(x, state)
        return self.output(y), state


def hidden_size(model: ModelName, settings: Settings) -> int:
    """The units of a model: the size that stands in the table."""
    size: int = getattr(settings, OF_MODELS[model][0])
    return size
