"""Sizes and random inputs for the selective scan."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastweights.ops.selective_scan import selective_scan

Array = NDArray[Any]
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


@dataclass(frozen=True)
class Case:
    steps: int
    channels: int = 5
    numbers: int = 3  # of a channel's state
    batch: int = 2
    plain: bool = False  # without D, z, delta_bias, softplus and a state

    def __str__(self) -> str:
        return f"T{self.steps}-D{self.channels}-N{self.numbers}-B{self.batch}{'-plain' * self.plain}"

    def inputs(self, draw: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(7 + draw)
        wide, narrow = (self.batch, self.channels, self.steps), (self.batch, self.numbers, self.steps)
        u, z = random.normal(size=(2, *wide))
        inputs = {"u": u, "delta": random.random(wide) if self.plain else random.normal(size=wide)}
        inputs["A"] = -4 * random.random((self.channels, self.numbers))
        inputs["B"], inputs["C"] = random.normal(size=(2, *narrow))
        if not self.plain:
            inputs["D"], inputs["delta_bias"] = random.normal(size=(2, self.channels))
            inputs["z"] = z
            inputs["initial_state"] = random.normal(size=(self.batch, self.channels, self.numbers))
        return inputs


def call(case: Case, tensors: dict[str, Tensor], impl: str) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of an implementation."""
    results: tuple[Tensor, Tensor] = selective_scan(
        **tensors, delta_softplus=not case.plain, return_last_state=True, impl=impl
    )
    return results


def run(case: Case, dtype: torch.dtype, impl: str, draw: int = 0) -> dict[str, Tensor]:
    """Return both results, and the gradient of every input, by name."""
    tensors = {name: torch.from_numpy(array).to(dtype).requires_grad_() for name, array in case.inputs(draw).items()}
    results = call(case, tensors, impl)
    gradients = torch.autograd.grad(results, list(tensors.values()), draw_grads(results))
    named = {f"gradient of {name}": gradient for name, gradient in zip(tensors, gradients, strict=True)}
    return {"outputs": results[0].detach(), "state": results[1].detach(), **named}


def draw_grads(results: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the gradients of some scalar by the results."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype) for result in results]


def loop(inputs: dict[str, Array], softplus: bool) -> tuple[Array, Array]:
    """The equations in NumPy, one channel at a time; every line is complex-analytic, for the complex step."""
    u, delta = inputs["u"], inputs["delta"]
    batch, channels, steps = u.shape
    kind = np.result_type(*inputs.values())
    outputs, states = np.zeros(u.shape, kind), np.zeros((batch, channels, inputs["A"].shape[1]), kind)
    for b in range(batch):
        for d in range(channels):
            x = inputs["initial_state"][b, d] if "initial_state" in inputs else states[b, d]
            for t in range(steps):
                size = delta[b, d, t] + (inputs["delta_bias"][d] if "delta_bias" in inputs else 0)
                size = np.log1p(np.exp(size)) if softplus else size
                x = np.exp(size * inputs["A"][d]) * x + size * u[b, d, t] * inputs["B"][b, :, t]
                y = x @ inputs["C"][b, :, t]
                if "D" in inputs:
                    y = y + inputs["D"][d] * u[b, d, t]
                if "z" in inputs:
                    gate = inputs["z"][b, d, t]
                    y = y * gate / (1 + np.exp(-gate))
                outputs[b, d, t] = y
            states[b, d] = x
    return outputs, states
