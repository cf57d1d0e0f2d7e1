"""The wheel of this machine in a fresh environment without a compiler, with PyTorch and nothing else."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ..ops.test_levels import highest
from .platforms import GLIBC, ROOT, SUITES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux", reason="the wheel is for Linux x86-64"
    ),
]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder to work in."""

    folder: Path

    def run(self, *words: str, **environment: str) -> str:
        """Run a program of the environment, with no other on its path, and return what it prints."""
        programs = self.folder / "venv" / "bin"
        known = {"PATH": str(programs), "HOME": str(self.folder), "OMP_NUM_THREADS": "1"} | environment
        command = [str(programs / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=self.folder, env=known, capture_output=True, text=True, timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def link(self, name: str) -> None:
        """Put a package that this interpreter has, and all that it requires, into the environment."""
        (site,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
        for requirement in map(Requirement, distribution.requires or []):
            missing = not list(site.glob(f"{requirement.name.replace('-', '[-_]')}-*.dist-info"))
            if missing and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                self.link(requirement.name)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that has PyTorch and in which pip has installed the wheel, as anybody would."""
    wheel = GLIBC.wheel()
    made = Environment(tmp_path_factory.mktemp("fresh"))
    venv.create(made.folder / "venv", with_pip=True)
    made.link("torch")
    made.link("numpy")
    made.run("python", "-m", "pip", "install", "--quiet", str(wheel))
    return made


def test_the_kernels_are_in_use_at_the_level_of_any_compiler(environment: Environment) -> None:
    assert f"cpu: in use ({highest()})" in environment.run("fastweights", "env")


GUIDES = ("attend-to-the-recent-past", "bind-new-classes-from-one-example", "rare-classes")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/guides/{name}.md" for name in GUIDES)])
def test_the_code_of_the_docs_runs(page: str, environment: Environment) -> None:
    shutil.copytree(
        ROOT / "docs" / "guides" / "drawings", environment.folder / "docs" / "guides" / "drawings", dirs_exist_ok=True
    )
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    environment.run("python", "-c", "\n".join(block for block in blocks if "transformers" not in block))


@pytest.mark.parametrize("suite", [*SUITES.values(), "tests/ops/test_levels.py"])
def test_the_kernels_pass_their_tests(suite: str, environment: Environment) -> None:
    shutil.copytree(ROOT / "tests", environment.folder / "tests", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", environment.folder)
    for name in ("pytest", "hypothesis"):
        environment.link(name)
    assert re.search(r"\d+ passed", environment.run("python", "-m", "pytest", suite))
