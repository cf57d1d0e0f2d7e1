"""The platforms of the wheels, how their kernels are called on this machine, and what tests kernels."""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
_SYSROOT, _MUSL = Path("/usr/aarch64-linux-gnu"), Path("/lib/ld-musl-x86_64.so.1")  # where Debian has them


@dataclass(frozen=True)
class Platform:
    """A platform by its wheel's tag, with zig's name for it and the file that holds the kernels."""

    tag: str
    target: str
    library: str = "libfastweights.so"

    def __str__(self) -> str:
        return self.tag

    def wheel(self) -> Path:
        """Return the wheel, or skip the test where there is none."""
        found = list(DIST.glob(f"fastweights-*-py3-none-{self.tag}.whl"))
        if not found:
            pytest.skip("there are no wheels in dist/: run make wheels")
        return found[0]

    def unpack(self, folder: Path) -> Path:
        """Return the library of the wheel, unpacked into the folder."""
        with zipfile.ZipFile(self.wheel()) as wheel:
            return Path(wheel.extract(f"fastweights/{self.library}", folder))

    def runner(self) -> list[str]:
        """Return what a program of the platform is started with here; skip the test where it cannot be."""
        if self.tag.endswith("aarch64"):
            if shutil.which("qemu-aarch64") is None or not _SYSROOT.exists():
                pytest.skip("there is no qemu-aarch64 (Debian: qemu-user), or no C library for it (libc6-arm64-cross)")
            return ["qemu-aarch64", "-L", str(_SYSROOT)]
        if self.tag.startswith("musllinux") and not _MUSL.exists():
            pytest.skip("there is no musl (Debian: musl)")
        if self.tag.startswith("win"):
            wine = shutil.which("wine64") or shutil.which("wine64", path="/usr/lib/wine")
            if wine is None:
                pytest.skip("there is no wine (Debian: wine64)")
            return [wine]
        return []

    def compile_caller(self, folder: Path) -> Path:
        """Compile `caller.cpp` for the platform with the compiler of the wheels."""
        pytest.importorskip("ziglang", reason="the compiler of the wheels is not installed: run make wheels")
        target = folder / "caller.exe"
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            "-target",
            self.target,
            "-dynamic",
            "-std=c++17",
            "-O1",
            "-s",
        ]
        flags = ["-Wall", "-Wextra", "-Werror"]
        subprocess.run([*command, *flags, str(Path(__file__).with_name("caller.cpp")), "-o", str(target)], check=True)
        return target


GLIBC = Platform("manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28")
ARM = Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28")
MUSL = Platform("musllinux_1_2_x86_64", "x86_64-linux-musl")
MACOS = Platform("macosx_11_0_arm64", "aarch64-macos.11.0")
WINDOWS = Platform("win_amd64", "x86_64-windows-gnu", "libfastweights.dll")
PLATFORMS = [GLIBC, ARM, MUSL, MACOS, WINDOWS]

# The tests of the kernels.
SUITES = {
    "associative": "tests/ops/associative/test_kernel.py",
    "conv_block": "tests/ops/conv_block/test_kernels.py",
    "delta": "tests/ops/delta/test_kernel.py",
    "gated": "tests/ops/gated/test_kernel.py",
    "hebbian": "tests/ops/hebbian/test_kernel.py",
    "stream": "tests/memory/predictors/test_stream_mbpa.py",
}
