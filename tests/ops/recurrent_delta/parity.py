"""Parity of the kernel of the recurrent delta rule, also as a program: tests/ops/test_levels.py runs it."""

import torch
from torch import Tensor

from fastweights.ops import _native

from ..parity import DRAWS, check_parity
from .cases import Case, StepCase, run, run_step

# Around a chunk of 16 steps and a team of 4 sequences, or of 16 where the weight is large, heads that fill registers
# and that do not, or half of those of AVX-512, and convolutions of fewer steps and of more.
CASES = [
    Case(1),
    Case(15, 8, 1, batch=1),
    Case(16, 32, 2, batch=4),
    Case(17, 34, 2, batch=5, ragged=True),
    Case(40, 12, 3, batch=9, ragged=True, restarted=True),
    Case(33, 40, 1, batch=2, restarted=True),
    Case(20, 24, 6),
    Case(2, taps=4),
    Case(17, 34, 2, batch=5, ragged=True, taps=2),
    Case(40, 12, 3, batch=9, ragged=True, restarted=True, taps=4),
    Case(33, 32, 1, batch=2, taps=1),
    Case(20, 6, 1, restarted=True, taps=7),
    Case(17, 32, 4, batch=5),
    Case(17, 27, 3, batch=5, taps=3),
    Case(3, 384, 12, batch=21, ragged=True, taps=2),
]

# Inputs, units and heads that fill registers and that do not, around a team of 4 sequences.
STEP_CASES = [
    StepCase(64, 64, 1, 1, 4),
    StepCase(64, 64, 4, 8, 4),
    StepCase(5, 6, 2, 3, 2),
    StepCase(33, 40, 1, 5, 1),
    StepCase(16, 48, 3, 4, 0),
    StepCase(1, 12, 3, 2, 3),
    StepCase(24, 32, 2, 21, 3),
    StepCase(9, 32, 4, 5, 3),
]


def require_step_parity(case: StepCase, draws: int = DRAWS) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run_step(case.inputs(dtype, draw), impl)

    check_parity(compute, ["cpu"], draws=draws)


def require_parity(case: Case, draws: int = DRAWS) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, draw)

    check_parity(compute, ["cpu"], draws=draws)


if __name__ == "__main__":
    for each in CASES:
        require_parity(each, draws=1)
    for one in STEP_CASES:
        require_step_parity(one, draws=1)
    print(_native.STATUS)
