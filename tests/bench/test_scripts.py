"""The scripts that time the Triton kernels go through all they do, on the CPU at tiny sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastweights.ops import _triton

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # in the interpreter
@pytest.mark.parametrize(("script", "counts"), [("associative", "6 rows with 16"), ("gated", "12 rows with 18")])
def test_dry_run(script: str, counts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = _triton.unavailable(torch.empty(0))
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}_gpu.py", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{counts} columns: in a dry run nothing is timed or written\n"
