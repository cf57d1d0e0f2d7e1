"""Sizes and random inputs for the recurrent delta rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.recurrent_delta import StepInputs, recurrent_delta, recurrent_delta_step

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    steps: int
    size: int = 6
    heads: int = 2
    batch: int = 3
    ragged: bool = False
    restarted: bool = False

    def __str__(self) -> str:
        marks = "-lengths" * self.ragged + "-starts" * self.restarted
        return f"T{self.steps}-H{self.size}-N{self.heads}-B{self.batch}{marks}"

    def inputs(self, draw: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(5 + draw)
        rows, width = 4 * self.size + 2 * self.heads, self.size // self.heads
        return {
            "drive": random.normal(size=(self.steps, self.batch, rows)),
            "weight": random.normal(size=(rows, self.size)) / np.sqrt(self.size),
            "gain": 0.5 + random.random(self.size),
            "bias": 0.3 * random.normal(size=self.size),
            "hidden": random.normal(size=(self.batch, self.size)),
            "memory": random.normal(size=(self.batch, self.heads, width, width)),
        }

    def lengths(self) -> list[int] | None:
        if not self.ragged:
            return None
        lengths = np.random.default_rng(3).integers(0, self.steps + 1, self.batch)
        lengths[0], lengths[-1] = 0, self.steps
        return [int(length) for length in lengths]

    def starts(self) -> Array | None:
        if not self.restarted:
            return None
        starts = np.random.default_rng(4).random((self.steps, self.batch)) < 0.1
        starts[:1, -1] = starts[-1:, 0] = True
        return starts


@dataclass(frozen=True)
class StepCase:
    """One step of the layer, of inputs that a convolution of some taps reads, or none."""

    features: int
    size: int
    heads: int
    batch: int
    taps: int

    def __str__(self) -> str:
        return f"D{self.features}-H{self.size}-N{self.heads}-B{self.batch}-C{self.taps}"

    def inputs(self, dtype: torch.dtype, draw: int = 0) -> StepInputs:
        recurrence = Case(1, self.size, self.heads, self.batch).inputs(draw)
        random = np.random.default_rng(9 + draw)
        rows = len(recurrence["weight"])
        arrays = {
            "x": random.normal(size=(self.batch, self.features)),
            "weight_ih": random.normal(size=(rows, self.features)) / np.sqrt(self.features),
            "bias_ih": random.normal(size=rows),
            "weight_hh": recurrence["weight"],
            "last": random.normal(size=(self.batch, max(self.taps - 1, 0), self.features)),
            **{name: recurrence[name] for name in ("gain", "bias", "hidden", "memory")},
        }
        if self.taps:
            arrays["taps"] = random.normal(size=(self.features, self.taps))
            arrays["taps_bias"] = random.normal(size=self.features)
        return StepInputs(**{name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()})


def run_step(inputs: StepInputs, impl: str) -> dict[str, Tensor]:
    """Return all results of a step; that of the reference part by part."""
    if impl == "cpu":
        result = recurrent_delta_step(inputs)
        assert result is not None
        return result._asdict()
    x, last = inputs.x, inputs.last
    if inputs.taps is not None and inputs.taps_bias is not None:
        read = torch.cat((last, x.unsqueeze(1)), 1)
        x, last = torch.einsum("bcd,dc->bd", read, inputs.taps) + inputs.taps_bias, read[:, 1:]
    drive = F.linear(x, inputs.weight_ih, inputs.bias_ih).unsqueeze(0)
    fixed = (inputs.weight_hh, inputs.gain, inputs.bias, inputs.hidden, inputs.memory)
    outputs, hidden, memory = recurrent_delta(drive, *fixed, impl=impl)
    return {"outputs": outputs[0], "hidden": hidden, "memory": memory, "last": last}


def call(case: Case, tensors: Mapping[str, Tensor], impl: str) -> tuple[Tensor, ...]:
    """Return the outputs, the last hidden state and the last memory of an implementation."""
    lengths, starts = case.lengths(), case.starts()
    return recurrent_delta(
        **tensors,
        lengths=None if lengths is None else torch.tensor(lengths),
        starts=None if starts is None else torch.from_numpy(starts),
        impl=impl,
    )


def draw_grads(results: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of some scalar by the results."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype) for result in results]


def run(case: Case, dtype: torch.dtype, impl: str, draw: int = 0) -> dict[str, Tensor]:
    """Return all results, and the gradient of every input, by name."""
    tensors = {name: torch.from_numpy(array).to(dtype).requires_grad_() for name, array in case.inputs(draw).items()}
    results = call(case, tensors, impl)
    gradients = torch.autograd.grad(results, list(tensors.values()), draw_grads(results))
    named = {f"gradient of {name}": gradient for name, gradient in zip(tensors, gradients, strict=True)}
    outputs, hidden, memory = (result.detach() for result in results)
    return {"outputs": outputs, "last hidden": hidden, "last memory": memory, **named}


def loop(case: Case, inputs: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """The equations in NumPy, a sequence at a time; every line is complex-analytic, for the complex step."""
    drive, weight = inputs["drive"], inputs["weight"]
    size, heads, width = case.size, case.heads, case.size // case.heads
    kind = np.result_type(*inputs.values())
    outputs = np.zeros((case.steps, case.batch, size), kind)
    hidden, memory = inputs["hidden"].astype(kind), inputs["memory"].astype(kind)
    lengths, starts = case.lengths(), case.starts()
    for b in range(case.batch):
        h, matrices = hidden[b].copy(), memory[b].copy()
        for t in range(case.steps if lengths is None else lengths[b]):
            if starts is not None and starts[t, b]:
                h, matrices = np.zeros_like(h), np.zeros_like(matrices)
            row = drive[t, b] + weight @ h
            sums = row[:size].copy()
            for n in range(heads):
                own = slice(n * width, (n + 1) * width)
                q, k, v = (_silu(row[i * size : (i + 1) * size][own]) for i in (1, 2, 3))
                q, k = q / np.sqrt((q * q).sum()), k / np.sqrt((k * k).sum())
                kept, rate = _sigmoid(row[4 * size + n]), _sigmoid(row[4 * size + heads + n])
                matrix = kept * matrices[n]
                matrices[n] = matrix + rate * np.outer(k, v - matrix.T @ k)
                sums[own] += matrices[n].T @ q
            centred = sums - sums.mean()
            y = inputs["gain"] * centred / np.sqrt((centred * centred).mean() + 1e-5) + inputs["bias"]
            h = np.where(y.real > 0, y, 0)
            outputs[t, b] = h
        hidden[b], memory[b] = h, matrices
    return outputs, hidden, memory


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
