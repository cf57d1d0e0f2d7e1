"""Kernels at every instruction set, in processes of their own, amid memory that holds no zeros."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.ops import _native

from .parity import needs_kernel

pytestmark = [
    needs_kernel,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86-64 has more than one copy"),
]

_ROOT = Path(__file__).parents[2]
_LEVELS = ["baseline", "x86-64-v3", "x86-64-v4"]
_KERNELS = ("associative", "conv_block", "delta", "hebbian", "recurrent_delta", "selective_scan", "short_convolution")
_PROGRAM = f"""
import runpy
for kernel in {_KERNELS}:
    runpy.run_module(f"tests.ops.{{kernel}}.parity", run_name="__main__")
"""


# Without torch, which takes a second to import.
_HIGHEST = """
import ctypes, sys
name = ctypes.CDLL(sys.argv[1]).fastweights_instruction_set
name.restype = ctypes.c_char_p
print(name().decode())
"""


def highest() -> str:
    """Return the level of this processor, whatever level these tests run at."""
    assert _native.LIBRARY is not None
    environment = {name: value for name, value in os.environ.items() if name != "FASTWEIGHTS_CPU_LEVEL"}
    command = [sys.executable, "-c", _HIGHEST, _native.LIBRARY._name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("level", "poison"),
    [("baseline", "128"), pytest.param("x86-64-v3", "255", marks=pytest.mark.slow), ("x86-64-v4", "128")],
)
def test_every_instruction_set_with_poisoned_memory(level: str, poison: str) -> None:
    # glibc fills what free takes with one byte and what malloc gives with its complement.
    environment = {**os.environ, "MALLOC_PERTURB_": poison, "FASTWEIGHTS_CPU_LEVEL": level}
    # One process for all kernels: most of its time is the import of torch.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [min(level, highest(), key=_LEVELS.index)] * len(_KERNELS)


_OF_GCC = """
#include <stdio.h>
int main(void) {
    const char *v3 = __builtin_cpu_supports("x86-64-v3") ? "x86-64-v3" : "baseline";
    puts(__builtin_cpu_supports("x86-64-v4") ? "x86-64-v4" : v3);
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_the_highest_level_is_the_one_that_gcc_finds(tmp_path: Path) -> None:
    (tmp_path / "level.c").write_text(_OF_GCC)
    subprocess.run(["gcc", "-o", tmp_path / "level", tmp_path / "level.c"], check=True)
    found = subprocess.run([tmp_path / "level"], capture_output=True, text=True, check=True).stdout
    assert found.strip() == highest()
