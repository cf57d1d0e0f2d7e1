"""Parity of the kernel of the short convolution, also as a program: tests/ops/test_levels.py runs it."""

import torch
from torch import Tensor

from fastweights.ops import _native

from ..parity import DRAWS, check_parity
from .cases import Case, run

# Around a block of 64 steps and a stripe of 128 channels; channels that fill registers and that do not; windows longer
# than the sequence.
CASES = [
    Case(1),
    Case(2, 3, 6, batch=3),
    Case(64, 16, 4, silu=False),
    Case(65, 129, 4, batch=1, plain=True),
    Case(130, 37, 3, batch=3),
    Case(66, 300, 1, silu=False, plain=True),
    Case(140, 8, 70, batch=1),
]


def require_parity(case: Case, draws: int = DRAWS) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, draw)

    check_parity(compute, ["cpu"], draws=draws)


if __name__ == "__main__":
    for each in CASES:
        require_parity(each, draws=1)
    print(_native.STATUS)
