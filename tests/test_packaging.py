"""What the package is made of: kernels where there is a compiler, plain Python where there is none."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ["pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "csrc", "models", "src"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


@pytest.fixture
def source(tmp_path):
    """A copy of what the package is built from."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(source: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "FASTWEIGHTS_REQUIRE_KERNELS"}
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(source / "wheels"), str(source)]
    return subprocess.run(words, capture_output=True, text=True, env=kept | environment, timeout=600)


def wheel(source: Path) -> Path:
    (found,) = (source / "wheels").glob("*.whl")
    return found


def test_a_wheel_holds_the_kernels_and_serves_every_python(source):
    # What a wheel holds does not depend on how long the compiler thinks.
    recipe = source / "CMakeLists.txt"
    recipe.write_text(recipe.read_text().replace("-O3", "-O0"))
    done = build(source, FASTWEIGHTS_REQUIRE_KERNELS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-py3-none-linux" in wheel(source).name
    names = zipfile.ZipFile(wheel(source)).namelist()
    assert "fastweights/libfastweights.so" in names
    assert "fastweights/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "docs", "csrc", "models"))]
    assert {name for name in names if name.endswith(".safetensors")} == {
        f"fastweights/weights/{name}/model.safetensors" for name in ("omniglot", "schlag2017-gated")
    }


def test_a_broken_kernel_fails_the_build_where_kernels_are_required(source):
    for path in (source / "csrc").glob("*.cpp"):
        path.write_text("")
    (source / "csrc" / "associative.cpp").write_text("this is no C++\n")
    done = build(source, FASTWEIGHTS_REQUIRE_KERNELS="1")
    assert done.returncode != 0
    assert "associative.cpp" in done.stdout + done.stderr
    assert not list(source.glob("wheels/*.whl"))


def test_without_a_compiler_the_package_is_plain_python(source):
    done = build(source, CXX="/no/such/compiler")
    assert done.returncode == 0, done.stdout + done.stderr
    assert wheel(source).name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel(source)).namelist()
    assert "fastweights/nn/fast_weights_rnn.py" in names
    assert not [name for name in names if name.endswith(".so")]
