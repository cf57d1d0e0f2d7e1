"""Parity of the kernel of the delta family with its reference, also as a program: tests/ops/test_levels.py runs it."""

import torch
from torch import Tensor

from fastweights.ops import _native

from ..parity import DRAWS, check_parity
from .cases import RULES, Case, run

# Around a chunk of 64 steps, and sizes that fill registers and that do not.
CASES = [
    *(Case(rule, 65, 20, 18, batch=1, ragged=False) for rule in RULES),
    Case("gated_delta", 1),
    Case("gated_delta", 1, 20, 150, batch=1),
    Case("delta", 1, ragged=True, initial=False),
    Case("gated_delta", 63, 16, 96, batch=1, heads=1),
    Case("gated_delta", 64, 96, 16, batch=1, heads=1),
    Case("decay", 130, ragged=True, restarted=True, batch=3),
    Case("gated_delta", 150, 33, 7, ragged=True, restarted=True, batch=3, heads=1),
    Case("gated_delta", 100, initial=False, strongest=30.0),
    Case("decay", 70, 20, 5, heads=21, key_heads=1, ragged=True, batch=3),
    Case("decay", 70, 20, 5, heads=21, key_heads=1, restarted=True, weighed=True),
    Case("gated_delta", 70, 6, 5, heads=20, key_heads=1, restarted=True, ragged=True),
    Case("decay", 1, 20, 7, weighed=True),
    Case("decay", 70, 20, 7, weighed=True, channels=True),
    Case("gated_delta", 70, 6, 5, heads=6, key_heads=2, restarted=True),
    Case("gated_delta", 70, 6, 5, heads=6, key_heads=2, channels=True),
    Case("gated_delta", 1, 20, 7, heads=6, key_heads=2),
    *(Case(rule, 65, 20, 18, batch=1, channels=True) for rule in ("decay", "gated_delta")),
    Case("gated_delta", 1, 20, 150, batch=1, channels=True),
    Case("decay", 1, ragged=True, initial=False, channels=True),
    Case("decay", 130, ragged=True, restarted=True, batch=3, channels=True),
    Case("gated_delta", 150, 33, 7, ragged=True, restarted=True, batch=3, heads=1, channels=True),
    Case("gated_delta", 100, 16, 16, initial=False, strongest=80.0, channels=True),
    Case("dplr", 1, 20, 150, batch=1),
    Case("dplr", 1, ragged=True, initial=False),
    Case("dplr", 63, 16, 96, batch=1, heads=1),
    Case("dplr", 64, 96, 16, batch=1, heads=1),
    Case("dplr", 130, ragged=True, restarted=True, batch=3),
    Case("dplr", 150, 33, 7, ragged=True, restarted=True, batch=3, heads=1),
    Case("dplr", 100, 16, 16, initial=False, strongest=80.0),
]


def require_parity(case: Case, draws: int = DRAWS) -> None:
    def compute(impl: str, draw: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return run(case, dtype, impl, draw)

    check_parity(compute, ["cpu"], draws=draws)


if __name__ == "__main__":
    for each in CASES:
        require_parity(each, draws=1)
    print(_native.STATUS)
