"""Made-up rows of the CSV files, and errors for parity to find."""

from typing import Any

import torch

from fastweights.bench.published import Row


def make_row(columns: list[str], rival: str, value: float | None, **cells: Any) -> Row:
    """A row of either file of a subject with such columns: what was measured of a rival, as a time and as a peak."""
    row: dict[str, Any] = dict.fromkeys(columns, "") | {
        "date": "2026-01-02",
        "commit": "abc",
        "processor": "Abacus",
        "torch": "2.13.0",
        "kernel": "in use (x86-64-v3)",
        "threads": 1,
        "rival": rival,
        "milliseconds": "" if value is None else value,
        "mebibytes": "" if value is None else value,
        "skipped": "",
    }
    return {name: str(cell) for name, cell in (row | cells).items()}


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
