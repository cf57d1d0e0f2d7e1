"""Finding and loading the compiled kernels."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fastweights.ops import _native


def test_load_missing(tmp_path: Path) -> None:
    library, reason = _native.load([tmp_path])
    assert library is None
    assert f"{_native.NAME} was not built" in reason
    assert "g++" in reason


def test_load_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / _native.NAME).write_text("not a library")
    library, reason = _native.load([tmp_path / "absent", tmp_path])
    assert library is None
    assert f"{tmp_path / _native.NAME} could not be loaded" in reason


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int fastweights_interface(void) { return 999; }\n", "interface 999, this package needs 31"),
        ("int something_else(void) { return 1; }\n", "could not be loaded"),
    ],
)
def test_load_another_library(source: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text(source)
    target = tmp_path / _native.NAME
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, tmp_path / "other.c"], check=True)
    library, found = _native.load([tmp_path])
    assert library is None
    assert str(target) in found
    assert reason in found


@pytest.mark.parametrize("shape", [(2, 256, 1100), (1, 1000, 1024), (2, 255, 1100), (3, 7, 5)])
def test_transposed_matrices_are_laid_out_whichever_way_is_the_faster(shape: tuple[int, int, int]) -> None:
    batch, rows, columns = shape
    turned = torch.randn(batch, columns, rows).mT
    for tensor in (turned, torch._neg_view(turned), turned.clone().requires_grad_()):
        found = _native.make_contiguous(tensor)
        assert found.is_contiguous()
        assert not found.is_neg()
        assert torch.equal(found, tensor)


def flags_of_memory(address: int) -> list[str]:
    """Return the flags that Linux keeps of the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    _native.LIBRARY is None or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="no kernels, or a system without large pages",
)
@pytest.mark.parametrize("size", [5 << 20, 64 << 20])
def test_large_tensors_are_asked_for_in_large_pages(size: int) -> None:
    tensor = torch.empty(size, dtype=torch.uint8)
    assert _native.in_large_pages(tensor) is tensor
    assert "hg" in flags_of_memory(tensor.data_ptr() + size // 2)
    assert tensor.fill_(1).sum() == size
