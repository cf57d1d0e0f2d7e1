"""What the tests of all Triton kernels share: whether they run here, in the interpreter or on a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fastweights.ops import _triton

ROOT = Path(__file__).parents[2]


def skip_unless_available(device: str) -> None:
    reason = _triton.unavailable(torch.empty(0, device=device))
    if reason is not None:
        pytest.skip(reason)


@contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that PyTorch allocates begins as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills with NaN what is left uninitialised
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def child(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
