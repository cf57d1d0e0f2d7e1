"""Parity of the kernel of the selective scan, also as a program: tests/ops/test_levels.py runs it."""

import torch
from torch import Tensor

from fastweights.ops import _native

from ..parity import DRAWS, check_parity
from .cases import Case, run

# Around a chunk of 64 steps, and channels that fill registers and slices and that do not.
CASES = [
    Case(1),
    Case(63, 16, 16, batch=1),
    Case(64, 64, 4),
    Case(65, 37, 16, batch=3),
    Case(150, 130, 5, plain=True),
]


def require_parity(case: Case, draws: int = DRAWS) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, draw)

    check_parity(compute, ["cpu"], draws=draws)


if __name__ == "__main__":
    for each in CASES:
        require_parity(each, draws=1)
    print(_native.STATUS)
