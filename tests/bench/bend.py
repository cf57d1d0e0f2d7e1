"""Errors for parity to find."""

from typing import Any

import torch


class Bend(torch.autograd.Function):
    """Its argument, and a gradient that is off by a factor, in some examples of [T,B,H] or everywhere."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float = 1.0001, examples: list[int] | None = None) -> torch.Tensor:
        ctx.factor, ctx.examples = factor, slice(None) if examples is None else examples
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = grads[0].clone()
        if isinstance(ctx.examples, slice):
            return gradient * ctx.factor, None, None
        gradient[:, ctx.examples] *= ctx.factor
        return gradient, None, None
