"""Table 2 of the paper: whole models of about 50,000 parameters, and a step of their training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import Case
from fastweights.nn import FastWeightsRNN, GatedFastWeightsRNN, HyperLSTM
from fastweights.tasks import gated_retrieval

CHARACTERS = len(gated_retrieval.VOCABULARY)
ATTENTION_SIZE = 207
ATTENTION_DECAY = 0.9
LEARNING_RATE = 0.002  # the paper's
CLIP_NORM = 0.1
_SHORTEST = len("S(aa,b),Q(aa)b.")  # no query takes fewer characters


class Model(nn.Module):
    """Characters [T,B] and a state -> logits [T,B,15] and the state, through a table of 15 features a character."""

    def __init__(self, layer: nn.Module, units: int) -> None:
        super().__init__()
        self.units = units
        self.embedding = nn.Embedding(CHARACTERS, CHARACTERS)
        self.layer = layer
        self.readout = nn.Linear(units, CHARACTERS)

    def forward(self, inputs: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.layer(self.embedding(inputs), state)
        return self.readout(y), state

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(parameter.numel() for parameter in self.parameters())


def models() -> dict[str, Model]:
    """The four of the paper's table 2; the sizes make about 50,000 parameters each.

    Examples:
        >>> {name: model.size for name, model in models().items()}
        {'AttentionFW': 49920, 'torch.nn.LSTM': 48540, 'HyperLSTM': 49744, 'fastweights': 46234}
    """
    size = Case().hidden_size
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            cases.ATTENTION: Model(FastWeightsRNN(CHARACTERS, ATTENTION_SIZE, decay=ATTENTION_DECAY), ATTENTION_SIZE),
            cases.LSTM: Model(nn.LSTM(CHARACTERS, 100), 100),
            cases.HYPER: Model(HyperLSTM(CHARACTERS, 80, hyper_hidden_size=24, hyper_embedding_size=4), 80),
            cases.OURS: Model(GatedFastWeightsRNN(CHARACTERS, size), size),
        }


def training_step(model: Model, case: Case) -> Callable[[], None]:
    """Truncated backpropagation over one segment, again and again: the state is carried on, cut from the graph."""
    generator = torch.Generator().manual_seed(0)
    stream = gated_retrieval.sample(case.batch * case.steps // _SHORTEST + 1, generator=generator)
    inputs, targets, _ = gated_retrieval.segment(gated_retrieval.streams(stream, case.batch), 0, case.steps)
    optimizer = torch.optim.NAdam(model.parameters(), lr=LEARNING_RATE)
    state: Any = None

    def step() -> None:
        nonlocal state
        logits, state = model(inputs, state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        state = tuple(leaf.detach() for leaf in state) if type(state) is tuple else state.detach()

    return step
