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


def make_pass(
    forward: Forward,
    x: Tensor,
    gradient: Callable[[Tensor], Tensor],
    modules: Sequence[nn.Module],
    *,
    training: bool,
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Callable[[], None]:
    """Return a call: forward alone, or in training forward and backward from the gradient that suits the outputs."""
    if not training:

        def infer() -> None:
            with torch.inference_mode(), autocast():
                forward(x)

        return infer
    x = x.clone().requires_grad_()
    parameters = [x, *(parameter for module in modules for parameter in module.parameters())]

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        with autocast():
            outputs = forward(x)
        outputs.backward(gradient(outputs))  # type: ignore[no-untyped-call]

    return train


def make_calls(
    problem: Any, refuse: Callable[[str], str | None], compiled: Sequence[str], limit: float
) -> tuple[Calls, dict[str, str]]:
    """Return a pass of every rival that can run here, and why the others cannot.

    Args:
        problem: has `forwards()`, `compiled(rival)` and `prepare(forward)`.
        refuse: says why a rival is not run, or None.
        compiled: the rivals that torch.compile makes, each within `limit` seconds.
    """
    forwards = problem.forwards()
    skipped = {name: reason for name in (*forwards, *compiled) if (reason := refuse(name)) is not None}
    calls = {name: problem.prepare(forward) for name, forward in forwards.items() if name not in skipped}
    if fitting := [name for name in compiled if name not in skipped]:
        ready, failed = try_compilations(problem, fitting, limit)
        for name in ready:
            calls[name] = problem.prepare(problem.compiled(name))
            calls[name]()  # compiles: no measure of how many rounds fit
        skipped |= failed
    return calls, skipped


def compile_one_size(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch.compile makes of a function for the sizes that it is first called with."""
    return torch.compile(function, dynamic=False)


def prepare_warm_pass(problem: Any, rival: str) -> Callable[[], None]:
    """Return a pass of a rival, after one of two steps and two sequences has warmed the libraries."""
    tiny = type(problem)(replace(problem.case, steps=2, batch=2))
    tiny.prepare(tiny.forwards()[rival])()
    call: Callable[[], None] = problem.prepare(problem.forwards()[rival])
    return call
