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
RESULTS = ("outputs", "last hidden", "last memory", "last of the convolution")


@dataclass(frozen=True)
class Case:
    steps: int
    size: int = 6
    heads: int = 2
    batch: int = 3
    ragged: bool = False
    restarted: bool = False
    taps: int = 0

    def __str__(self) -> str:
        marks = "-lengths" * self.ragged + "-starts" * self.restarted + f"-C{self.taps}" * bool(self.taps)
        return f"T{self.steps}-H{self.size}-N{self.heads}-B{self.batch}{marks}"

    def inputs(self, draw: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(5 + draw)
        rows, width = 4 * self.size + 2 * self.heads, self.size // self.heads
        of_convolution = {"taps": (self.taps,), "taps_bias": ()}
        convolution = {name: random.normal(size=(rows, *more)) for name, more in of_convolution.items()}
        convolution["last"] = random.normal(size=(self.batch, max(self.taps - 1, 0), rows))
        return {
            "drive": random.normal(size=(self.steps, self.batch, rows)),
            "weight": random.normal(size=(rows, self.size)) / np.sqrt(self.size),
            "gain": 0.5 + random.random(self.size),
            "bias": 0.3 * random.normal(size=self.size),
            "hidden": random.normal(size=(self.batch, self.size)),
            "memory": random.normal(size=(self.batch, self.heads, width, width)),
            **(convolution if self.taps else {}),
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
    """One step of the layer, with a convolution of some taps, or none."""

    features: int
    size: int
    heads: int
    batch: int
    taps: int

    def __str__(self) -> str:
        return f"D{self.features}-H{self.size}-N{self.heads}-B{self.batch}-C{self.taps}"

    def inputs(self, dtype: torch.dtype, draw: int = 0) -> StepInputs:
        recurrence = Case(1, self.size, self.heads, self.batch, taps=self.taps).inputs(draw)
        random = np.random.default_rng(9 + draw)
        rows = len(recurrence["weight"])
        arrays = {
            "x": random.normal(size=(self.batch, self.features)),
            "weight_ih": random.normal(size=(rows, self.features)) / np.sqrt(self.features),
            "bias_ih": random.normal(size=rows),
            "weight_hh": recurrence["weight"],
            **{name: array for name, array in recurrence.items() if name not in ("drive", "weight")},
        }
        return StepInputs(**{name: torch.from_numpy(array).to(dtype) for name, array in arrays.items()})


def run_step(inputs: StepInputs, impl: str) -> dict[str, Tensor]:
    """Return all results of a step; that of the reference part by part."""
    if impl == "cpu":
        step = recurrent_delta_step(inputs)
        assert step is not None
        results: dict[str, Tensor | None] = step._asdict()
    else:
        drive = F.linear(inputs.x, inputs.weight_ih, inputs.bias_ih).unsqueeze(0)
        fixed = (inputs.weight_hh, inputs.gain, inputs.bias, inputs.hidden, inputs.memory)
        run = recurrent_delta(drive, *fixed, taps=inputs.taps, taps_bias=inputs.taps_bias, last=inputs.last, impl=impl)
        results = run._replace(outputs=run.outputs[0])._asdict()
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def call(case: Case, tensors: Mapping[str, Tensor], impl: str) -> tuple[Tensor, ...]:
    """Return the outputs and the state after them of an implementation."""
    lengths, starts = case.lengths(), case.starts()
    result = recurrent_delta(
        **tensors,
        lengths=None if lengths is None else torch.tensor(lengths),
        starts=None if starts is None else torch.from_numpy(starts),
        impl=impl,
    )
    return tuple(tensor for tensor in result if tensor is not None)


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
    return {**dict(zip(RESULTS, (result.detach() for result in results), strict=False)), **named}


def loop(case: Case, inputs: Mapping[str, Array]) -> tuple[Array, ...]:
    """The equations in NumPy, a sequence at a time; every line is complex-analytic, for the complex step."""
    drive, weight = inputs["drive"], inputs["weight"]
    size, heads, width = case.size, case.heads, case.size // case.heads
    kind = np.result_type(*inputs.values())
    outputs = np.zeros((case.steps, case.batch, size), kind)
    hidden, memory = inputs["hidden"].astype(kind), inputs["memory"].astype(kind)
    last = inputs["last"].astype(kind) if case.taps else None
    lengths, starts = case.lengths(), case.starts()
    for b in range(case.batch):
        h, matrices = hidden[b].copy(), memory[b].copy()
        recent = [] if last is None else list(last[b])
        for t in range(case.steps if lengths is None else lengths[b]):
            if starts is not None and starts[t, b]:
                h, matrices, recent = np.zeros_like(h), np.zeros_like(matrices), [0 * vectors for vectors in recent]
            row = drive[t, b].astype(kind)
            if case.taps:
                recent.append(drive[t, b])
                row = inputs["taps_bias"] + sum(inputs["taps"][:, i] * recent[i] for i in range(case.taps))
                recent = recent[1:]
            row = row + weight @ h
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
        if last is not None and case.taps > 1:
            last[b] = recent
    return (outputs, hidden, memory) if last is None else (outputs, hidden, memory, last)


def _sigmoid(x: Array) -> Array:
    y: Array = 1 / (1 + np.exp(-x))
    return y


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
