"""Sizes and random inputs for the gated recurrence."""

from dataclasses import dataclass

import numpy as np

from .numpy_loop import Array

WEIGHTS = ("slow_in_weight", "slow_in_bias", "slow_out_weight", "slow_out_bias")
STATES = ("hidden", "slow_hidden", "fast_1", "fast_2")
INPUTS = ("x", *WEIGHTS, *STATES)


@dataclass(frozen=True)
class Case:
    size: int
    steps: int
    batch: int
    features: int = 3
    slow_size: int = 4
    inner_size: int = 5
    ragged: bool = False
    starts: bool = False

    def __str__(self) -> str:
        sizes = f"H{self.size}-T{self.steps}-B{self.batch}-D{self.features}-S{self.slow_size}-P{self.inner_size}"
        return sizes + "-lengths" * self.ragged + "-starts" * self.starts

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
        size, wide, slow, inner = self.size, self.size + self.features + 1, self.slow_size, self.inner_size
        rows = slow + 4 * size + 2 * wide + 2 * (size + 1)
        shapes = {
            "x": (self.steps, self.batch, self.features),
            "slow_in_weight": (inner, slow + self.features),
            "slow_in_bias": (inner,),
            "slow_out_weight": (rows, inner),
            "slow_out_bias": (rows,),
            "hidden": (self.batch, size),
            "slow_hidden": (self.batch, slow),
            "fast_1": (self.batch, size, wide),
            "fast_2": (self.batch, size, size + 1),
        }
        # Matrices that are not small: a layer norm of nearly equal numbers would amplify every rounding.
        return {name: random.normal(size=shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
