"""Every wheel of dist/: what is in it, and what its library gives and needs."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fastweights.ops import _native

from ..ops.parity import needs_kernel
from .platforms import ARM, GLIBC, MACOS, MUSL, PLATFORMS, WINDOWS, Platform

pytestmark = pytest.mark.slow
each_wheel = pytest.mark.parametrize("platform", PLATFORMS, ids=str)

# The linker of macOS's format cannot hide them: C++'s operators new and delete, and two names of the format's own.
_OF_MACOS = re.compile(r"__Zn[wa]m|__Zd[la]Pv|__mh_dylib_header|___dso_handle")
_LIBRARIES = {
    GLIBC: {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"},
    ARM: {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-aarch64.so.1"},
    MUSL: {"libc.so"},
    MACOS: {"@rpath/libfastweights.so", "/usr/lib/libSystem.B.dylib"},
}


def parse(library: Path) -> Any:
    """Return a library of any system as lief reads it."""
    lief = pytest.importorskip("lief", reason="lief is not installed: run make wheels")
    return lief.parse(str(library))


def export(library: Any) -> set[str]:
    """Return the names that a library gives to others."""
    return {str(function.name) for function in library.exported_functions}


@each_wheel
def test_it_is_small_and_holds_the_package_and_the_kernels(platform: Platform) -> None:
    with zipfile.ZipFile(platform.wheel()) as wheel:
        entries = wheel.infolist()
    names = {entry.filename for entry in entries}
    assert {"fastweights/py.typed", "fastweights/nn/__init__.py", f"fastweights/{platform.library}"} <= names
    (metadata,) = {name.split("/")[0] for name in names} - {"fastweights"}
    assert metadata.endswith(".dist-info")
    assert not [name for name in names if name.endswith((".a", ".pdb", ".lib"))]
    assert sum(entry.compress_size for entry in entries) < 5e6


@needs_kernel
@each_wheel
def test_its_library_gives_the_entries_and_nothing_else(platform: Platform, tmp_path: Path) -> None:
    exported = export(parse(platform.unpack(tmp_path)))
    if platform == MACOS:
        exported = {name[1:] for name in exported if not _OF_MACOS.match(name)}
    # g++ has compiled the same sources, and lets parts of its own library be seen.
    assert _native.LIBRARY is not None
    ours = export(parse(Path(_native.LIBRARY._name)))
    assert exported == {name for name in ours if name.startswith("fastweights_")}


@pytest.mark.parametrize("platform", _LIBRARIES, ids=str)
def test_its_library_needs_the_system_alone(platform: Platform, tmp_path: Path) -> None:
    library = parse(platform.unpack(tmp_path))  # lief's lists read memory of it, and do not keep it
    found = {getattr(needed, "name", needed) for needed in library.libraries}
    assert found <= _LIBRARIES[platform]


def test_that_of_windows_needs_the_system_alone(tmp_path: Path) -> None:
    library = parse(WINDOWS.unpack(tmp_path))
    found = {needed.lower() for needed in library.libraries}
    assert {name for name in found if not name.startswith("api-ms-win-crt-")} == {"kernel32.dll"}


def test_that_of_macos_runs_on_its_version_and_is_signed(tmp_path: Path) -> None:
    library = parse(MACOS.unpack(tmp_path))
    assert list(library.build_version.minos) == [11, 0, 0]
    assert library.has_code_signature  # without one an Apple processor runs nothing


# On glibc auditwheel takes the file that its linker reads for musl's library, and fails.
@pytest.mark.parametrize("platform", [GLIBC, ARM], ids=str)
def test_auditwheel_finds_the_tag_right(platform: Platform) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed: run make wheels")
    command = [sys.executable, "-m", "auditwheel", "show", str(platform.wheel())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tags = re.findall(r'"(\w+linux_\w+)"', done.stdout)
    assert tags
    assert tags[0].split("_")[0] == platform.tag.split("_")[0]
    version = [int(part) for part in re.findall(r"_(\d+)_(\d+)_", tags[0])[0]]
    assert version <= [int(part) for part in re.findall(r"_(\d+)_(\d+)_", platform.tag)[0]]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
@pytest.mark.parametrize("platform", [GLIBC, MUSL, WINDOWS], ids=str)
def test_each_level_has_registers_of_its_own(platform: Platform, tmp_path: Path) -> None:
    # The name of a level proves nothing: a compiler that does not follow the attribute makes the slowest code thrice.
    library = platform.unpack(tmp_path)
    code = subprocess.run(["objdump", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    counts = {name: code.count(f"%{name}") for name in ("xmm", "ymm", "zmm")}
    assert min(counts.values()) > 10_000, counts
