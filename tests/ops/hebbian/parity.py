"""Problems on which the kernel is compared with the reference; as a program: all of them, for one instruction set."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _native
from fastweights.ops.hebbian import COUNTINGS, smooth

from ..parity import DRAWS, check_parity

CLASSES, TOKENS = 40, 200
SIZES = (1, 3, 20, 63, 100, 256)


@dataclass(frozen=True)
class Case:
    """Classes absent, single and repeated, new and seen often; at a scale of 30 most means are beyond the norm."""

    size: int
    counting: Any = "literal"
    limit: float = 25
    scale: float = 1.0
    gamma: float = 0.1
    batches: int = 1

    def tensors(self, dtype: torch.dtype, draw: int = 0) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(self.size + 1000 * draw)
        weight = torch.randn(CLASSES, self.size, dtype=torch.float64, generator=generator)
        counts = torch.randint(0, 50, (CLASSES,), generator=generator)
        counts[::3] = 0
        activations = self.scale * torch.randn(TOKENS, self.size, dtype=torch.float64, generator=generator)
        frequencies = 1 / torch.arange(1, CLASSES + 1)
        frequencies[7] = 0
        labels = torch.multinomial(frequencies, TOKENS, replacement=True, generator=generator)
        return (
            weight.to(dtype),
            counts,
            list(activations.to(dtype).chunk(self.batches)),
            list(labels.chunk(self.batches)),
        )

    def run(self, dtype: torch.dtype, impl: str) -> tuple[Tensor, Tensor]:
        weight, counts, activations, labels = self.tensors(dtype)
        smooth(weight, counts, activations, labels, impl=impl, **self.options())
        return weight, counts

    def options(self) -> dict[str, Any]:
        return {"gamma": self.gamma, "limit": self.limit, "counting": self.counting}


CASES = [
    *(Case(size, counting) for size in SIZES for counting in COUNTINGS),
    *(Case(size, scale=30.0) for size in SIZES),
    *(Case(20, limit=limit) for limit in (1, 2**62, float("inf"))),
    *(Case(20, gamma=gamma, batches=3) for gamma in (0.0, 1.0)),
]


def require_parity(case: Case, draws: int = DRAWS) -> None:
    def smoothed(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        weight, counts, activations, labels = case.tensors(torch.float32, draw)
        weight, activations = weight.to(dtype), [each.to(dtype) for each in activations]
        smooth(weight, counts, activations, labels, impl=impl, **case.options())
        return {"weight": weight}

    check_parity(smoothed, ("cpu",), draws=draws)
    for dtype in (torch.float32, torch.float64):
        before = case.tensors(dtype)[0]
        (weight, counts), (expected, counted) = case.run(dtype, "cpu"), case.run(dtype, "reference")
        assert torch.equal(counts, counted), case
        assert not torch.equal(weight, before), case
        untouched = (before == expected).all(1)  # classes that nothing was computed for
        assert untouched.any(), case
        assert torch.equal(weight[untouched], before[untouched]), case


if __name__ == "__main__":
    for each in CASES:
        require_parity(each, draws=1)
    print(_native.STATUS)
