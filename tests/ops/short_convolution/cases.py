"""Sizes and random inputs for the short convolution."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastweights.ops.short_convolution import short_convolution

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    steps: int
    channels: int = 5
    taps: int = 4
    batch: int = 2
    silu: bool = True
    plain: bool = False  # without a bias, inputs before, and starts

    def __str__(self) -> str:
        words = "-silu" * self.silu + "-plain" * self.plain
        return f"T{self.steps}-C{self.channels}-W{self.taps}-B{self.batch}{words}"

    @property
    def activation(self) -> str | None:
        return "silu" if self.silu else None

    def inputs(self, draw: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(7 + draw)
        inputs = {
            "x": random.normal(size=(self.batch, self.steps, self.channels)),
            "weight": random.normal(size=(self.channels, self.taps)),
        }
        if not self.plain:
            inputs["bias"] = random.normal(size=self.channels)
            inputs["last"] = random.normal(size=(self.batch, self.taps - 1, self.channels))
        return inputs

    def starts(self) -> Array | None:
        """Return where sequences start: some one behind the other, and in one sequence the first step."""
        if self.plain:
            return None
        starts = np.random.default_rng(3).random((self.batch, self.steps)) < 0.2
        starts[-1, :2] = True
        return starts


def call(case: Case, tensors: dict[str, Any], impl: str) -> Tensor:
    """Return the outputs of an implementation."""
    starts = case.starts()
    flags = None if starts is None else torch.from_numpy(starts)
    return short_convolution(**tensors, activation=case.activation, starts=flags, impl=impl)


def run(case: Case, dtype: torch.dtype, impl: str, draw: int = 0) -> dict[str, Tensor]:
    """Return the outputs, and the gradient of every input, by name."""
    tensors = {name: torch.from_numpy(array).to(dtype).requires_grad_() for name, array in case.inputs(draw).items()}
    outputs = call(case, tensors, impl)
    gradients = torch.autograd.grad(outputs, list(tensors.values()), draw_grad(outputs))
    named = {f"gradient of {name}": gradient for name, gradient in zip(tensors, gradients, strict=True)}
    return {"outputs": outputs.detach(), **named}


def draw_grad(outputs: Tensor) -> Tensor:
    """Return the gradient of some scalar by the outputs."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs.dtype)


def loop(inputs: dict[str, Array], starts: Array | None, silu: bool) -> Array:
    """The equation in NumPy, one number at a time; every line is complex-analytic, for the complex step."""
    x, weight = inputs["x"], inputs["weight"]
    batch, steps, channels = x.shape
    taps, outputs = weight.shape[1], np.zeros(x.shape, np.result_type(*inputs.values()))
    for b in range(batch):
        for t in range(steps):
            for c in range(channels):
                y = inputs["bias"][c] if "bias" in inputs else 0
                for k in range(taps):
                    if t - k >= 0:
                        y = y + weight[c, taps - 1 - k] * x[b, t - k, c]
                    elif "last" in inputs:
                        y = y + weight[c, taps - 1 - k] * inputs["last"][b, t - k + taps - 1, c]
                    if starts is not None and t - k >= 0 and starts[b, t - k]:
                        break  # nothing of what was before a start
                outputs[b, t, c] = y / (1 + np.exp(-y)) if silu else y
    return outputs
