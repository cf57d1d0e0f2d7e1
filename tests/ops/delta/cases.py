"""Sizes and random inputs for the delta family."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.ops import delta

from .numpy_loop import Array

RULES: dict[str, Any] = {
    "sum": delta.linear_attention,
    "decay": delta.simple_gla,
    "delta": delta.delta_rule,
    "gated_delta": delta.gated_delta_rule,
    "dplr": delta.dplr_delta_rule,
}


@dataclass(frozen=True)
class Case:
    rule: str
    steps: int
    keys: int = 5
    values: int = 4
    batch: int = 2
    heads: int = 2
    ragged: bool = False
    restarted: bool = False
    initial: bool = True
    strongest: float = 0.5  # the strongest log decay
    channels: bool = False  # a decay for each channel of the keys
    key_heads: int | None = None  # of q and k, where they are fewer
    weighed: bool = False  # values that an additive rule writes with a beta, and passes on with a skip

    def __str__(self) -> str:
        marks = "-lengths" * self.ragged + "-starts" * self.restarted + "-zeros" * (not self.initial)
        marks += "-channels" * self.channels + f"-of{self.key_heads}" * (self.key_heads is not None)
        marks += "-beta" * self.weighed
        marks += f"-g{self.strongest:g}" * (self.strongest != 0.5)
        return f"{self.rule}-T{self.steps}-K{self.keys}-V{self.values}-B{self.batch}-H{self.heads}{marks}"

    @property
    def correct(self) -> bool:
        return self.rule in ("delta", "gated_delta")

    def lengths(self) -> list[int] | None:
        if not self.ragged:
            return None
        lengths = np.random.default_rng(3).integers(0, self.steps + 1, self.batch)
        lengths[0], lengths[-1] = 0, self.steps
        return [int(length) for length in lengths]

    def starts(self) -> Array | None:
        if not self.restarted:
            return None
        starts = np.random.default_rng(4).random((self.batch, self.steps)) < 0.05
        starts[-1, :1] = starts[0, -1:] = True
        return starts

    def inputs(self, draw: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(5 + draw)
        shape = (self.batch, self.steps, self.heads)
        q, k = random.normal(size=(2, *shape[:2], self.key_heads or self.heads, self.keys))
        inputs = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True)}
        inputs["v"] = random.normal(size=(*shape, self.values))
        if self.rule == "dplr":  # as RWKV-7 has it: what is read is taken away, in part
            erased = random.normal(size=inputs["k"].shape)
            erased /= np.linalg.norm(erased, axis=-1, keepdims=True)
            inputs |= {"a": -erased, "b": erased * random.random(erased.shape)}
            inputs["gk"] = -self.strongest * random.random(erased.shape)
        if self.rule in ("decay", "gated_delta"):
            inputs["g"] = -self.strongest * random.random((*shape, self.keys) if self.channels else shape)
        if self.correct or self.weighed:
            inputs["beta"] = random.random(shape) if self.correct else 3 * random.normal(size=shape)
        if self.weighed:
            inputs["skip"] = random.normal(size=self.heads)
        if self.initial:
            inputs["initial_state"] = random.normal(size=(self.batch, self.heads, self.keys, self.values))
        return inputs


def call(case: Case, tensors: Mapping[str, Tensor], impl: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of an implementation."""
    lengths, starts = case.lengths(), case.starts()
    outputs, state = RULES[case.rule](
        **tensors,
        output_final_state=True,
        starts=None if starts is None else torch.from_numpy(starts).to(device),
        lengths=None if lengths is None else torch.tensor(lengths, device=device),
        impl=impl,
    )
    assert state is not None
    return outputs, state


def draw_grads(results: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of some scalar by the results."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype) for result in results]


def run(case: Case, dtype: torch.dtype, impl: str, draw: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Return both results, and the gradient of every input, by name."""
    arrays = case.inputs(draw)
    tensors = {name: torch.from_numpy(array).to(device, dtype).requires_grad_() for name, array in arrays.items()}
    results = call(case, tensors, impl, device)
    outer = [grad.to(device) for grad in draw_grads(results)]
    gradients = torch.autograd.grad(results, list(tensors.values()), outer)
    named = {f"gradient of {name}": gradient.cpu() for name, gradient in zip(tensors, gradients, strict=True)}
    return {"outputs": results[0].detach().cpu(), "state": results[1].detach().cpu(), **named}
