r"""Recurrent layers whose matrix memory goes through a nonlinearity at every step, for the gauntlet.

fastweights reproduce recall/gauntlet --models hidden-delta --cells mqar-4 parity s3 \
    --layer docs/nonlinear_memories.py:E88

They are the neighbours of `nn.DeltaFastWeightsRNN`, whose memory is linear and whose hidden state is not: here keys,
values and queries come from the inputs alone, through a short convolution, and the memory itself is what a step cannot
be computed without. The memory is written from their equations; convolution, keys of unit length, gate and the start of
the decay are as in this library's layers. Step by step in plain PyTorch, and slow.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn.short_convolution import ShortConvolution

_KEPT = 4.0  # the bias of a decay at the start: 0.98 of the memory is kept, as in DeltaFastWeightsRNN


class NonlinearMemory(nn.Module):
    """What both share: products of the inputs, a loop over the steps, and a gate on what is read."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.size, self.state_size = hidden_size, hidden_size**2 + 3 * 3 * hidden_size
        self.products = nn.Linear(input_size, 3 * hidden_size)
        self.convolution = ShortConvolution(3 * hidden_size, 4)
        self.gate, self.decay = nn.Linear(input_size, hidden_size), nn.Linear(input_size, 1)
        nn.init.constant_(self.decay.bias, _KEPT)

    def forward(self, x: Tensor) -> Tensor:  # x [B,T,D] -> y [B,T,H]
        q, k, v = self.convolution(self.products(x))[0].split(self.size, 2)
        q, k, v = F.normalize(F.silu(q), dim=2), F.normalize(F.silu(k), dim=2), F.silu(v)
        decay = self.decay(x).sigmoid()
        memory, outputs = x.new_zeros(len(x), self.size, self.size), []
        for step in range(x.shape[1]):
            memory = self.write(memory, k[:, step], v[:, step], decay[:, step].unsqueeze(2))
            outputs.append(torch.bmm(q[:, step].unsqueeze(1), memory))
        return torch.cat(outputs, 1) * F.silu(self.gate(x))

    def write(self, memory: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        """Return the memory [B,H,H], rows of keys, after a step: k and v [B,H], decay [B,1,1]."""
        raise NotImplementedError


class E88(NonlinearMemory):
    """The delta rule with a decay through a tanh (E. Garrison's code, elman): M = tanh(decay M + k (v - M^T k)^T)."""

    def write(self, memory: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        missing = v.unsqueeze(1) - torch.bmm(k.unsqueeze(1), memory)
        return torch.baddbmm(decay * memory, k.unsqueeze(2), missing).tanh()


class M2RNN(NonlinearMemory):
    """A matrix state that is mixed by a weight (arXiv 2603.14360): M = f M + (1 - f) tanh(M W + k v^T)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.mix = nn.Parameter(torch.eye(hidden_size))

    def write(self, memory: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        new = torch.baddbmm(memory @ self.mix, k.unsqueeze(2), v.unsqueeze(1)).tanh()
        return torch.lerp(new, memory, decay)
