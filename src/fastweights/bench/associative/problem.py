"""The tensors and modules of one case, the same for every rival, and the passes that are timed."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench.associative import cases
from fastweights.bench.associative.cases import Case
from fastweights.nn import FastWeightsRNN
from fastweights.ops.associative import Inputs, reference

Forward = Callable[[Tensor], Tensor]  # x [T,B,D] -> outputs [T,B,H]


class Problem:
    """x, the gradient of the outputs, our layer, and an LSTM of the same size."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.steps * case.hidden_size)
        self.x = torch.randn(case.steps, case.batch, case.input_size, generator=generator)
        self.grad = torch.randn(case.steps, case.batch, case.hidden_size, generator=generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = FastWeightsRNN(case.input_size, case.hidden_size, decay=0.9)
            self.lstm = nn.LSTM(case.input_size, case.hidden_size)

    def forwards(self) -> dict[str, Forward]:
        """Every rival that needs no compiler."""
        return {
            cases.OURS: lambda x: self.layer(x)[0],
            cases.ATTENTION: lambda x: self.eager(x, reference.attention_form),
            cases.MATRIX: lambda x: self.eager(x, reference.matrix_form),
            cases.LSTM: lambda x: self.lstm(x)[0],
        }

    def eager(self, x: Tensor, form: Callable[..., Tensor]) -> Tensor:
        """A form of the reference on our layer's parameters."""
        drive, weight_hh, *norm = self._driven(x)
        hidden = drive.new_zeros(drive.shape[1:])
        inputs = Inputs._make((drive, weight_hh, *norm, hidden, None, None))
        return form(inputs, self.layer.constants)

    def stepwise(self, step: Callable[..., tuple[Tensor, Tensor]]) -> Forward:
        """A loop over `matrix_step`, or over what a compiler made of it."""

        def forward(x: Tensor) -> Tensor:
            drive, *parameters = self._driven(x)
            hidden = drive.new_zeros(drive.shape[1:])
            memory = drive.new_zeros(*hidden.shape, hidden.shape[-1])
            outputs = []
            for now in drive.unbind():
                hidden, memory = step(now, *parameters, hidden, memory)
                outputs.append(hidden)
            return torch.stack(outputs)

        return forward

    def matrix_step(
        self, drive: Tensor, weight_hh: Tensor, gain: Tensor, shift: Tensor, hidden: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One step of the matrix form: the next hidden state and the matrix that it read."""
        constants = self.layer.constants
        inputs = Inputs(drive.unsqueeze(0), weight_hh, gain, shift, hidden, memory, None)
        outputs = reference.matrix_form(inputs, constants)
        # The form keeps its matrix to itself; a compiler sees that this is the same and forms it once.
        written = constants.rate * hidden.unsqueeze(2) * hidden.unsqueeze(1)
        return outputs[0], constants.decay * memory + written

    def _driven(self, x: Tensor) -> tuple[Tensor, ...]:
        named = dict(self.layer.named_parameters())
        drive = F.linear(x, named["weight_ih"], named["bias"])
        return drive, named["weight_hh"], named["norm.weight"], named["norm.bias"]

    def timed(self, forward: Forward, steps: int | None = None) -> Callable[[], None]:
        """One pass of the case's mode and precision, over the first `steps` steps or all."""
        x, grad = self.x[:steps], self.grad[:steps]
        if self.case.mode == "inference":

            def infer() -> None:
                with torch.inference_mode(), self.autocast():
                    forward(x)

            return infer
        x = x.clone().requires_grad_()
        parameters = [x, *self.layer.parameters(), *self.lstm.parameters()]
        grads = {torch.float32: grad, torch.bfloat16: grad.bfloat16()}

        def train() -> None:
            for parameter in parameters:
                parameter.grad = None
            with self.autocast():
                outputs = forward(x)
            outputs.backward(grads[outputs.dtype])  # type: ignore[no-untyped-call]

        return train

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What the precision of the case asks for."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.case.precision == "bfloat16")
