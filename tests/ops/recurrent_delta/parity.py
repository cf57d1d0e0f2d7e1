"""Parity of the kernel of the recurrent delta rule, also as a program: tests/ops/test_levels.py runs it."""

import torch
from torch import Tensor

from fastweights.ops import _native

from ..parity import DRAWS, check_parity
from .cases import Case, run

# Around a chunk of 16 steps and a team of 4 sequences, and heads that fill registers and that do not.
CASES = [
    Case(1),
    Case(15, 8, 1, batch=1),
    Case(16, 32, 2, batch=4),
    Case(17, 34, 2, batch=5, ragged=True),
    Case(40, 12, 3, batch=9, ragged=True, restarted=True),
    Case(33, 40, 1, batch=2, restarted=True),
    Case(20, 24, 6),
]


def require_parity(case: Case, draws: int = DRAWS) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, draw)

    check_parity(compute, ["cpu"], draws=draws)


if __name__ == "__main__":
    for each in CASES:
        require_parity(each, draws=1)
    print(_native.STATUS)
