"""Layers of a search that `nn.DeltaFastWeightsRNN` came out of: a recurrence that reads a memory of its inputs."""

import torch
from torch import Tensor, nn

from fastweights.nn import FastWeightProgrammer


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
