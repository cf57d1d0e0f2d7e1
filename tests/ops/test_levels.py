"""Kernels at every instruction set, in processes of their own, amid memory that holds no zeros."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.ops import _library

_ROOT = Path(__file__).parents[2]
_LEVELS = ["baseline", "x86-64-v3", "x86-64-v4"]


@pytest.mark.skipif(_library.MISSING is not None, reason=str(_library.MISSING))
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has more than one copy")
@pytest.mark.parametrize("kernel", ["associative", "hebbian", "pooling"])
@pytest.mark.parametrize(("level", "poison"), [("baseline", "128"), ("x86-64-v3", "255"), ("x86-64-v4", "128")])
def test_every_instruction_set_with_poisoned_memory(kernel: str, level: str, poison: str) -> None:
    # glibc fills what free takes with one byte and what malloc gives with its complement.
    environment = {**os.environ, "MALLOC_PERTURB_": poison, "FASTWEIGHTS_CPU_LEVEL": level}
    command = [sys.executable, "-m", f"tests.ops.{kernel}.parity"]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == min(level, str(_library.STATUS), key=_LEVELS.index)
