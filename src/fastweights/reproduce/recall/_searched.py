"""The layers of a search: can one nonlinear layer recall many keys and follow a state?"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn import FastWeightProgrammer
from fastweights.nn.short_convolution import ShortConvolution
from fastweights.reproduce.recall.frame import linear


class ReadingRecurrence(nn.Module):
    """A nonlinear recurrence whose inputs are x and what a delta rule reads at the same step: x [B,T,E] -> y [B,T,E].

    What is read is added to the output too, so that recall need not be learnt through the gates of the recurrence. The
    memory depends on x alone, so that all its steps are computed in chunks, before those of the recurrence.

    Args:
        memory: a programmer of E features.
        recurrence: of 2 E features and E units, with the batch first.
    """

    def __init__(self, memory: FastWeightProgrammer, recurrence: nn.Module) -> None:
        super().__init__()
        self.memory, self.recurrence = memory, recurrence

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        read, memory = self.memory(x)
        y, state = self.recurrence(torch.cat((x, read), 2))
        return y + read, (*memory, *(state if isinstance(state, tuple) else (state,)))


class HiddenDelta(nn.Module):
    """Ba's cell with keys, values and queries of their own, and a decay and a rate that it learns: x [B,T,E] -> y.

    The keys, values, queries, decay and rate depend on the hidden state, so that nothing can be computed ahead:

        u = convolution(x)
        q, k, v, a, b = project [u_t; h_{t-1}]      q and k of length one, v after a silu
        M = sigmoid(a) M
        M = M + sigmoid(b) k (v - M^T k)^T
        h_t = relu(norm(W h_{t-1} + C u_t + M^T q))

    Args:
        size: E, features and hidden units.
        heads: divide them; each has a matrix M of its own.
        convolution: the steps that the short convolution of x reads; 0 leaves it out.
    """

    def __init__(self, size: int, heads: int, convolution: int) -> None:
        super().__init__()
        self.heads = heads
        self.convolution = ShortConvolution(size, convolution) if convolution else None
        self.project_input = linear(size, 3 * size + 2 * heads)
        self.project_hidden = nn.Linear(size, 3 * size + 2 * heads, bias=False)
        self.input = linear(size, size)
        self.hidden = nn.Linear(size, size, bias=False)
        with torch.no_grad():
            self.project_input.bias[3 * size : -heads] = 4.0  # 0.98 of the memory is kept
            self.hidden.weight.copy_(0.5 * torch.eye(size))
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        last = x[:, :0]
        if self.convolution is not None:
            x, last = self.convolution(x)
        batch, _, size = x.shape
        rows, width = batch * self.heads, size // self.heads  # sizes of the matrices, one for each sequence and head
        written, drive = self.project_input(x).unbind(1), self.input(x).unbind(1)
        h, memory = x.new_zeros(batch, size), x.new_zeros(rows, width, width)
        outputs = []
        for fixed, now in zip(written, drive, strict=True):
            mixed = fixed + self.project_hidden(h)
            q, k, v, a, b = mixed.split((size, size, size, self.heads, self.heads), 1)
            q, k = (F.normalize(F.silu(part.reshape(rows, 1, width)), dim=2) for part in (q, k))
            decayed = memory * a.sigmoid().view(rows, 1, 1)
            missing = F.silu(v.reshape(rows, 1, width)) - k @ decayed
            memory = torch.baddbmm(decayed, k.transpose(1, 2), b.sigmoid().view(rows, 1, 1) * missing)
            h = F.relu(self.norm(self.hidden(h) + now + (q @ memory).reshape(batch, size)))
            outputs.append(h)
        return torch.stack(outputs, 1), (h, memory, last)
