"""The tensors and modules of one case, the same for every rival, and the passes that are timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.bench.gated import cases
from fastweights.bench.gated.cases import Case
from fastweights.nn import GatedFastWeightsRNN, GatedFastWeightsRNNCell, GatedFastWeightsState

Forward = Callable[[Tensor], Tensor]  # x [T,B,D] -> outputs [T,B,H], or [T,B,U] of an LSTM of U units


class Problem:
    """x, the gradient of the outputs, our layer, the same in plain PyTorch, and an LSTM of as many parameters."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.steps * case.hidden_size)
        self.x = torch.randn(case.steps, case.batch, case.input_size, generator=generator)
        # The first columns are the gradient of our outputs, all of them that of the LSTM's.
        units = max(case.hidden_size, case.lstm_size)
        self.grad = torch.randn(case.steps, case.batch, units, generator=generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = GatedFastWeightsRNN(case.input_size, case.hidden_size, slow_inner_size=case.inner_size)
            self.lstm = nn.LSTM(case.input_size, case.lstm_size)
        self.plain = self._plain(GatedFastWeightsRNN)
        self.cell = self._plain(GatedFastWeightsRNNCell)

    def _plain(self, kind: Any) -> Any:
        """The layer or its cell as the reference, with the parameters of our layer."""
        case = self.case
        plain = kind(case.input_size, case.hidden_size, slow_inner_size=case.inner_size, impl="reference")
        plain.slow_in, plain.slow_out = self.layer.slow_in, self.layer.slow_out
        return plain

    def forwards(self) -> dict[str, Forward]:
        """Every rival that needs no compiler."""
        return {
            cases.OURS: lambda x: self.layer(x)[0],
            cases.EAGER: lambda x: self.plain(x)[0],
            cases.LSTM: lambda x: self.lstm(x)[0],
        }

    def loop(self, cell: Callable[..., tuple[Tensor, GatedFastWeightsState]]) -> Forward:
        """A loop over the cell, or over what a compiler made of it."""

        def forward(x: Tensor) -> Tensor:
            # Not None, which would be a second program for the compiler.
            shapes = self.layer._state_shapes(x.shape[1:2]).values()
            state = GatedFastWeightsState(*(x.new_zeros(shape) for shape in shapes))
            outputs = []
            for now in x.unbind():
                y, state = cell(now, state)
                outputs.append(y)
            return torch.stack(outputs)

        return forward

    def timed(self, forward: Forward) -> Callable[[], None]:
        """One pass of the case's mode."""
        if self.case.mode == "inference":

            def infer() -> None:
                with torch.inference_mode():
                    forward(self.x)

            return infer
        x = self.x.clone().requires_grad_()
        parameters = [x, *self.layer.parameters(), *self.lstm.parameters()]
        sizes = self.case.hidden_size, self.case.lstm_size
        grads = {size: self.grad[..., :size].contiguous() for size in sizes}

        def train() -> None:
            for parameter in parameters:
                parameter.grad = None
            outputs = forward(x)
            outputs.backward(grads[outputs.shape[2]])  # type: ignore[no-untyped-call]

        return train
