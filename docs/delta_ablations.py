r"""`nn.DeltaFastWeightsRNN` without one of its parts, for the gauntlet, as a layer of your own goes through it.

fastweights reproduce recall/gauntlet --models hidden-delta --cells mqar-4 parity s3 --effort 1 \
    --layer docs/delta_ablations.py:NoGates

Weights that a part is without stay zero, and count all the same: the sizes are those of the whole layer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from fastweights.nn import DeltaFastWeightsRNN
from fastweights.nn.short_convolution import ShortConvolution
from fastweights.ops.short_convolution import short_convolution


class Without(nn.Module):
    """A parametrization that keeps rows of a weight at zero."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, weight: Tensor) -> Tensor:
        mask = torch.ones(len(weight), 1)
        mask[self.rows] = 0
        return weight * mask


class Whole(nn.Module):
    """The layer with all of its parts."""

    convolution = 4

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.size = hidden_size
        self.layer = DeltaFastWeightsRNN(input_size, hidden_size, convolution=self.convolution, batch_first=True)

    def without(self, weight: str, first: int | None, last: int | None) -> None:
        """Take rows away, in units: z is the first H, then q, k, v, and last a and b."""
        rows = slice(*(None if unit is None else unit * self.size for unit in (first, last)))
        register_parametrization(self.layer, weight, Without(rows))

    def forward(self, x: Tensor) -> Tensor:  # x [B,T,D] -> y [B,T,H]
        return self.layer(x)[0]


class NoStateInState(Whole):
    """The hidden state chooses keys, values, queries and gates, but not the next hidden state."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.without("weight_hh", 0, 1)


class NoKeysFromState(Whole):
    """Keys, values, queries and gates come from the inputs alone; the hidden state goes into the next."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.without("weight_hh", 1, None)


class NoState(Whole):
    """The hidden state goes nowhere: a delta rule with a decay, whose memory is linear."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.without("weight_hh", None, None)


class NoConvolution(Whole):
    """Keys, values and queries of the input of their own step alone."""

    convolution = 0


class OneConvolution(Whole):
    """One convolution of the inputs in place of one for each product: keys and queries see the same steps mixed."""

    convolution = 0

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.inputs = ShortConvolution(input_size, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inputs(x)[0])


class NoGates(Whole):
    """One decay and one rate for all steps, which are learnt."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        with torch.no_grad():  # what is left of the gates; their start is that of the whole layer
            gates = slice(4 * hidden_size, None)
            self.layer.convolution_bias[gates] = self.layer.bias[gates]
        for weight in ("weight_ih", "weight_hh", "convolution_weight"):
            self.without(weight, 4, None)


class SmallValues(Whole):
    """Values that start as small as keys: in heads of 32 units and more a sixteenth as large as in the whole layer."""

    reach = 0.25  # in units of the bound that `torch.nn.Linear` starts within

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        for weight in (self.layer.weight_ih, self.layer.weight_hh):
            bound = self.reach / weight.shape[1] ** 0.5
            nn.init.uniform_(weight[3 * hidden_size : 4 * hidden_size].detach(), -bound, bound)


class LargeValues(SmallValues):
    """Values that start as large as in the whole layer in heads of 32 units and more, in narrower ones too."""

    reach = 4.0


class NoNorm(Whole):
    """The hidden state is the ReLU of a sum that is not normalised; step by step in plain PyTorch, and slow."""

    def forward(self, x: Tensor) -> Tensor:
        layer, size = self.layer, self.size
        inputs = F.linear(x, layer.weight_ih, layer.bias)
        driven = short_convolution(inputs, layer.convolution_weight, layer.convolution_bias)
        h, memory = x.new_zeros(len(x), size), x.new_zeros(len(x), size, size)
        outputs = []
        for drive in driven.unbind(1):
            z, q, k, v, gates = torch.split(drive + h @ layer.weight_hh.t(), [size] * 4 + [2], 1)
            q, k, v = F.normalize(F.silu(q), dim=1), F.normalize(F.silu(k), dim=1), F.silu(v)
            decay, rate = gates.sigmoid().unsqueeze(2).unbind(1)
            memory = decay.unsqueeze(2) * memory
            missing = rate * (v - torch.einsum("bk,bkv->bv", k, memory))
            memory = memory + k.unsqueeze(2) * missing.unsqueeze(1)
            h = F.relu(self.scale(z + torch.einsum("bk,bkv->bv", q, memory)))
            outputs.append(h)
        return torch.stack(outputs, 1)

    def scale(self, sums: Tensor) -> Tensor:
        """Return [B,H] times the gain and plus the bias of the norm, without the norm."""
        return self.layer.norm.bias + self.layer.norm.weight * sums
