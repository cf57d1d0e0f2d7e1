"""Sizes and random inputs for the LSTM."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.ops.lstm import LayerNorms, Result, lstm

from .numpy_loop import Array

INPUTS = ("x", "weight_ih", "bias", "weight_hh", "hidden", "cell")
RESULTS = Result._fields


@dataclass(frozen=True)
class Case:
    size: int
    steps: int
    batch: int
    features: int = 3
    masked: bool = False
    ragged: bool = False
    starts: bool = False
    norms: bool = False

    def __str__(self) -> str:
        sizes = f"H{self.size}-T{self.steps}-B{self.batch}-D{self.features}"
        return "-".join([sizes, *(f.name for f in fields(self) if getattr(self, f.name) is True)])

    def mask(self) -> Array | None:
        """What a step multiplies the state that it reads by, [B,H]: zero or two."""
        return np.random.default_rng(5).integers(0, 2, (self.batch, self.size)) * 2.0 if self.masked else None

    def lengths(self) -> list[int] | None:
        if not self.ragged:
            return None
        lengths = np.random.default_rng(3).integers(0, self.steps + 1, self.batch)
        lengths[0], lengths[-1] = 0, self.steps
        return [int(length) for length in lengths]

    def flags(self) -> Array | None:
        """Where sequences restart, [T,B] of bool: the first one at once, the last one nowhere."""
        if not self.starts:
            return None
        flags = np.random.default_rng(4).random((self.steps, self.batch)) < 0.25
        flags[0, 0], flags[:, -1] = True, False
        return flags

    def inputs(self, draw: int = 0) -> dict[str, Array]:
        random = np.random.default_rng(7 + draw)
        size = self.size
        shapes: dict[str, tuple[int, ...]] = {
            "x": (self.steps, self.batch, self.features),
            "weight_ih": (4 * size, self.features),
            "bias": (4 * size,),
            "weight_hh": (4 * size, size),
            "hidden": (self.batch, size),
            "cell": (self.batch, size),
        }
        for of, width in (("input", 4 * size), ("state", 4 * size), ("cell", size)) if self.norms else ():
            shapes |= {f"{of} gain": (width,), f"{of} bias": (width,)}
        # By the number of units: larger weights would amplify every rounding from step to step.
        drawn = {name: random.normal(size=shape) for name, shape in shapes.items()}
        return drawn | {name: array * array.shape[-1] ** -0.5 for name, array in drawn.items() if "weight" in name}

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        """The mask, the lengths and the starts, as the library takes them."""
        mask, lengths, flags = self.mask(), self.lengths(), self.flags()
        return {
            "mask": None if mask is None else torch.from_numpy(mask).to(dtype),
            "lengths": None if lengths is None else torch.tensor(lengths),
            "starts": None if flags is None else torch.from_numpy(flags),
        }

    def run(self, tensors: tuple[Tensor, ...], impl: str) -> Result:
        """Run over the inputs in their order."""
        given, others = tensors[: len(INPUTS)], tensors[len(INPUTS) :]
        norms = LayerNorms(*zip(others[::2], others[1::2], strict=True)) if self.norms else None
        return lstm(*given, norms=norms, impl=impl, **self.options(given[0].dtype))


def draw_slopes(results: Result) -> list[Tensor]:
    """Return a gradient for each result."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype) for value in results]
