"""The kernels of wheels for other systems and processors pass the tests of kernels, called in an emulator."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..ops.test_levels import highest
from .platforms import ARM, MUSL, ROOT, SUITES, WINDOWS, Platform

pytestmark = pytest.mark.slow

# A process of their own does not call the kernels elsewhere, and calls from several threads wait for one another.
_LEFT_OUT = "not after_fork and not python_threads"
_LEVELS = ["baseline", "x86-64-v3", "x86-64-v4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def start_caller(platform: Platform, folder: Path) -> list[str]:
    """Return the command that calls the kernels of a wheel, compiled and unpacked once."""
    platform.wheel()  # where there is none, before anything is left in the folder that the next test would take
    runner, own = platform.runner(), folder / platform.tag
    if not own.exists():
        own.mkdir()
        platform.compile_caller(own)
        platform.unpack(own)
    return [*runner, str(own / "caller.exe"), str(own / "fastweights" / platform.library)]


def run_tests(platform: Platform, suite: str, folder: Path, wanted: str | None) -> str:
    """Run the tests of a kernel with those of a wheel, and return the instruction set that they were compiled for."""
    caller = start_caller(platform, folder)
    environment = {name: value for name, value in os.environ.items() if name != "FASTWEIGHTS_CPU_LEVEL"}
    environment |= {"FASTWEIGHTS_ELSEWHERE": " ".join(caller), "WINEDEBUG": "-all", "WINEPREFIX": str(folder / "wine")}
    if wanted is not None:
        environment["FASTWEIGHTS_CPU_LEVEL"] = wanted
    command = [sys.executable, "-m", "pytest", "-p", "tests.wheels.elsewhere", "-p", "no:cacheprovider", SUITES[suite]]
    done = subprocess.run(
        [*command, "-k", _LEFT_OUT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    level: str = re.findall("kernels: (.*), called in", done.stdout)[0]
    return level


@pytest.mark.parametrize("suite", SUITES)
def test_on_arm(suite: str, folder: Path) -> None:
    assert run_tests(ARM, suite, folder, None) == "neon"


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("level", _LEVELS)
def test_on_windows(level: str, suite: str, folder: Path) -> None:
    assert run_tests(WINDOWS, suite, folder, level) == min(level, highest(), key=_LEVELS.index)


@pytest.mark.parametrize("suite", SUITES)
def test_on_musl(suite: str, folder: Path) -> None:
    assert run_tests(MUSL, suite, folder, None) == highest()
