"""The layers that must obey the laws in tests/nn/test_laws.py: every recurrent layer joins this registry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights import nn
from fastweights.nn._lstm import LSTM
from fastweights.ops import missing_kernels

INPUT_SIZE = 3

State = Any  # a tensor, or a named tuple of tensors


@dataclass(frozen=True)
class Layer:
    """A recurrent layer: `make(**options)` takes batch_first, dtype and device beside what is fixed here."""

    name: str
    make: Callable[..., torch.nn.Module]
    hidden_size: int = 5
    ours: bool = True  # not a layer of torch's own, whose autocast, compilation and aliasing are torch's affair
    lengths: bool = True  # takes `lengths=`
    starts: bool = True  # takes `starts=`
    needs_kernel: bool = False

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0, **options: Any) -> torch.nn.Module:
        """The layer with random weights, so that no law holds by the symmetry of an initialisation."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = self.make(**options)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return layer

    def random_state(self, layer: torch.nn.Module, batch: int) -> State:
        """A state that is not zero: the one that a random sequence ends in."""
        dtype = next(layer.parameters()).dtype
        x = torch.randn(4, batch, INPUT_SIZE, dtype=dtype, generator=torch.Generator().manual_seed(9))
        with torch.no_grad():
            return layer(x)[1]


def _fast_weights(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return nn.FastWeightsRNN(INPUT_SIZE, 5, **fixed, **options)

    return make


class _Stepwise(torch.nn.Module):
    """A cell run over a sequence, so that it obeys what the layer obeys."""

    def __init__(self, cell: torch.nn.Module, batch_first: bool) -> None:
        super().__init__()
        self.cell, self.batch_first = cell, batch_first

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        time = 1 if self.batch_first and x.dim() == 3 else 0
        outputs = []
        for step in x.unbind(time):
            y, state = self.cell(step, state)
            outputs.append(y)
        return torch.stack(outputs, time), state


def _cell(batch_first: bool = False, **options: Any) -> torch.nn.Module:
    return _Stepwise(nn.FastWeightsRNNCell(INPUT_SIZE, 5, **options), batch_first)


def _irnn(**options: Any) -> torch.nn.Module:
    return nn.IRNN(INPUT_SIZE, 5, **options)


def _associative_lstm(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return nn.AssociativeLSTM(INPUT_SIZE, 6, **fixed, **options)

    return make


def _delta(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return nn.DeltaFastWeightsRNN(INPUT_SIZE, 6, **fixed, **options)

    return make


def _gated(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return nn.GatedFastWeightsRNN(INPUT_SIZE, 5, slow_hidden_size=4, slow_inner_size=6, **fixed, **options)

    return make


def _hyper_lstm(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return nn.HyperLSTM(INPUT_SIZE, 5, hyper_hidden_size=4, hyper_embedding_size=2, **fixed, **options)

    return make


def _lstm(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return LSTM(INPUT_SIZE, 5, **fixed, **options)

    return make


def _programmer(**fixed: Any) -> Callable[..., torch.nn.Module]:
    def make(**options: Any) -> torch.nn.Module:
        return nn.FastWeightProgrammer(INPUT_SIZE, 3, key_size=2, value_size=2, **fixed, **options)

    return make


def _gated_cell(batch_first: bool = False, **options: Any) -> torch.nn.Module:
    return _Stepwise(nn.GatedFastWeightsRNNCell(INPUT_SIZE, 5, slow_inner_size=6, **options), batch_first)


LAYERS = [
    Layer("fast weights", _fast_weights()),
    Layer("fast weights, rate of the paper", _fast_weights(rate=0.5)),
    Layer("fast weights, reference", _fast_weights(impl="reference")),
    Layer("fast weights, kernel", _fast_weights(impl="cpu"), needs_kernel=True),
    Layer("fast weights, tanh, not normalised", _fast_weights(nonlinearity="tanh", layer_norm=False, rate=0.1)),
    Layer("fast weights, three inner steps", _fast_weights(inner_steps=3, normalize_initial=True)),
    Layer("fast weights, method 2", _fast_weights(inner_steps=2, hold_input=False)),
    Layer("fast weights, two layers", _fast_weights(num_layers=2)),
    Layer("fast weights cell", _cell, lengths=False, starts=False),
    Layer("associative LSTM", _associative_lstm(), hidden_size=6),
    Layer("associative LSTM, one copy and head", _associative_lstm(copies=1, heads=1), hidden_size=6),
    Layer("delta fast weights", _delta(num_heads=2), hidden_size=6),
    Layer("delta fast weights, one head, no convolution", _delta(convolution=0), hidden_size=6),
    Layer("delta fast weights, output gate", _delta(num_heads=2, output_gate=True), hidden_size=6),
    Layer("delta fast weights, reference", _delta(impl="reference"), hidden_size=6),
    Layer("delta fast weights, kernel", _delta(impl="cpu"), hidden_size=6, needs_kernel=True),
    Layer("gated fast weights", _gated()),
    Layer("gated fast weights, reference", _gated(impl="reference")),
    Layer("gated fast weights, kernel", _gated(impl="cpu"), needs_kernel=True),
    Layer("gated fast weights, not normalised", _gated(layer_norm="none")),
    Layer("gated fast weights cell", _gated_cell, lengths=False, starts=False),
    Layer("HyperLSTM", _hyper_lstm()),
    Layer("HyperLSTM, not normalised", _hyper_lstm(layer_norm=False)),
    Layer("LSTM", _lstm()),
    Layer("LSTM, normalised", _lstm(layer_norm=True)),
    Layer("fast weight programmer", _programmer(), hidden_size=3),
    Layer("fast weight programmer, reference", _programmer(impl="reference"), hidden_size=3),
    Layer("fast weight programmer, kernel", _programmer(impl="cpu"), hidden_size=3, needs_kernel=True),
    Layer(
        "fast weight programmer, delta",
        _programmer(rule="delta", feature_map="dpfp", negative_eigenvalues=True),
        hidden_size=3,
    ),
    *(
        Layer(f"fast weight programmer, {rule}", _programmer(rule=rule), hidden_size=3)
        for rule in ("kda", "gated_delta_2", "rwkv7")
    ),
    Layer("fast weight programmer, decay", _programmer(rule="decay", feature_map="elu"), hidden_size=3),
    Layer(
        "fast weight programmer, sum",
        _programmer(rule="sum", feature_map="elu", convolution=0, output_gate=False),
        hidden_size=3,
    ),
    Layer("IRNN", _irnn, ours=False),
]

KERNELS = missing_kernels() is None


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state."""
    return [state] if isinstance(state, Tensor) else list(state)


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The state with a function applied to each of its tensors."""
    return function(state) if isinstance(state, Tensor) else type(state)(*map(function, state))
