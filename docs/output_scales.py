r"""Layers whose outputs are a tenth as large, or gated by the input, for the benches, as a layer of your own goes in.

fastweights reproduce recall/language --layer docs/output_scales.py:SmallDelta
"""

from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn import DeltaFastWeightsRNN


class Delta(nn.Module):
    """`DeltaFastWeightsRNN` with four heads, or with more of about 32 units."""

    scale = 1.0
    gated = False
    convolution = 4

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        heads = max(4, round(hidden_size / 32))
        self.layer = DeltaFastWeightsRNN(
            input_size, hidden_size, heads, convolution=self.convolution, output_gate=self.gated, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:  # x [B,T,D] -> y [B,T,H]
        return self.scale * self.layer(x)[0]


class LSTM(nn.Module):
    """An LSTM, with the same gate behind it."""

    scale = 1.0
    gated = False

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(input_size, hidden_size, batch_first=True)
        self.gate = nn.Linear(input_size, hidden_size) if self.gated else None
        self.state_size = 2 * hidden_size

    def forward(self, x: Tensor) -> Tensor:  # x [B,T,D] -> y [B,T,H]
        y = self.scale * self.layer(x)[0]
        return y if self.gate is None else y * F.silu(self.gate(x))


class SmallDelta(Delta):
    """Outputs a tenth as large."""

    scale = 0.1


class GatedDelta(Delta):
    """The input chooses what is given out."""

    gated = True


class SmallGatedDelta(SmallDelta, GatedDelta):
    """Both."""


class SmallNoConvolution(SmallDelta):
    """Outputs a tenth as large, without a convolution."""

    convolution = 0


class SmallGatedNoConvolution(SmallGatedDelta):
    """A tenth as large, and the input chooses, without a convolution."""

    convolution = 0


class SmallLSTM(LSTM):
    """Outputs a tenth as large."""

    scale = 0.1


class GatedLSTM(LSTM):
    """The input chooses what is given out."""

    gated = True


class SmallGatedLSTM(SmallLSTM, GatedLSTM):
    """Both."""
