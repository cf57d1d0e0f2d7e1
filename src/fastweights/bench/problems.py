"""Parts of the problems of several subjects: streams of activations and words, and passes of recurrent layers."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.bench.process import try_compilations

Forward = Callable[[Tensor], Tensor]  # x [T,B,D] -> outputs [T,B,H]
Calls = dict[str, Callable[[], object]]


def make_activations(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return [count,size]: a gate of logistic units times a hyperbolic tangent, as the hidden state of an LSTM."""
    gate, inside = torch.randn(2, count, size, generator=generator)
    return torch.sigmoid(gate) * torch.tanh(inside)


def draw_words(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """Return [count] classes as frequent as Zipf has words: that of rank r in proportion to 1 / r."""
    frequencies = 1 / torch.arange(1, classes + 1, dtype=torch.float64)
    return torch.multinomial(frequencies, count, replacement=True, generator=generator)


class LayerProblem:
    """The tensors and modules of one case of a recurrent layer, the same for every rival.

    A subclass makes `layer` and `lstm`.
    """

    layer: Any
    lstm: nn.LSTM

    def __init__(self, case: Any, units: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.steps * case.hidden_size)
        self.x = torch.randn(case.steps, case.batch, case.input_size, generator=generator)
        # Outputs with fewer units take the first columns as their gradient.
        self.grad = torch.randn(case.steps, case.batch, units, generator=generator)
        # One step in ten begins another sequence.
        self.starts = torch.rand(case.steps, case.batch, generator=generator) < 0.1

    def forwards(self) -> dict[str, Forward]:
        """Return every rival that needs no compiler."""
        raise NotImplementedError

    def restart(self, x: Tensor) -> Tensor:
        """Run our layer where sequences restart."""
        outputs: Tensor = self.layer(x, starts=self.starts[: len(x), : x.shape[1]])[0]
        return outputs

    def compiled(self, rival: str) -> Forward:
        """Return a rival that its first call compiles."""
        raise NotImplementedError

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that the case's precision asks for."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.case.precision == "bfloat16")

    def prepare(self, forward: Forward, steps: int | None = None) -> Callable[[], None]:
        """Return one pass over the first `steps` steps or all: forward, and where the case is training, backward."""
        x = self.x[:steps]
        if self.case.mode == "inference":

            def infer() -> None:
                with torch.inference_mode(), self.autocast():
                    forward(x)

            return infer
        inputs = x.clone().requires_grad_()
        parameters = [inputs, *self.layer.parameters(), *self.lstm.parameters()]
        dtypes = (torch.float32, torch.bfloat16) if self.case.precision == "bfloat16" else (torch.float32,)
        gradients = {
            (dtype, size): self.grad[:steps, :, :size].to(dtype).contiguous()
            for dtype in dtypes
            for size in {self.layer.hidden_size, self.lstm.hidden_size}
        }

        def train() -> None:
            for parameter in parameters:
                parameter.grad = None
            with self.autocast():
                outputs = forward(inputs)
            outputs.backward(gradients[outputs.dtype, outputs.shape[2]])  # type: ignore[no-untyped-call]

        return train

    def calls(
        self, refuse: Callable[[str], str | None], compiled: Sequence[str], limit: float
    ) -> tuple[Calls, dict[str, str]]:
        """Return a pass of every rival that can run here, and why the others cannot.

        Args:
            refuse: says why a rival is not run, or None.
            compiled: the rivals that torch.compile makes, each within `limit` seconds.
        """
        forwards = self.forwards()
        skipped = {name: reason for name in (*forwards, *compiled) if (reason := refuse(name)) is not None}
        calls: Calls = {name: self.prepare(forward) for name, forward in forwards.items() if name not in skipped}
        if fitting := [name for name in compiled if name not in skipped]:
            ready, failed = try_compilations(self, fitting, limit)
            for name in ready:
                calls[name] = self.prepare(self.compiled(name))
                calls[name]()  # compiles: no measure of how many rounds fit
            skipped |= failed
        return calls, skipped


def prepare_warm_pass(problem: LayerProblem, rival: str) -> Callable[[], None]:
    """Return a pass of a rival, after one of two steps and two sequences has warmed the libraries."""
    tiny = type(problem)(replace(problem.case, steps=2, batch=2))  # type: ignore[call-arg]
    tiny.prepare(tiny.forwards()[rival])()
    return problem.prepare(problem.forwards()[rival])


def compile_one_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch.compile makes of a function for the sizes that it is first called with."""
    return torch.compile(function, dynamic=False)
