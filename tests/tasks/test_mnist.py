"""MNIST: what is read of the idx files, and what is refused."""

import gzip
import struct
from pathlib import Path

import pytest
import torch

from fastweights.errors import DataError
from fastweights.tasks import datasets, mnist

NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
COUNTS = {"train": 7, "t10k": 3}


def pixels(part: str) -> torch.Tensor:
    seed = len(part)
    shape = (COUNTS[part], 28, 28)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digits(part: str) -> list[int]:
    return [9 - index for index in range(COUNTS[part])]


def content(name: str) -> bytes:
    part, kind, _ = name.split("-")
    if kind == "images":
        return struct.pack(">4I", 0x803, COUNTS[part], 28, 28) + pixels(part).numpy().tobytes()
    return struct.pack(">2I", 0x801, COUNTS[part]) + bytes(digits(part))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with small files, whose sizes are those that are expected."""
    files = tuple(
        datasets.DataFile(f"{name}-ubyte.gz", len(content(name)), "", f"https://example.org/{name}") for name in NAMES
    )
    small = datasets.DataSet("mnist", "Small", "free", "https://example.org", "four files", files, 1)
    monkeypatch.setitem(datasets.DATASETS, "mnist", small)
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    (tmp_path / "mnist").mkdir()
    for name in NAMES:
        write(tmp_path, name, content(name))
    return tmp_path


def write(folder: Path, name: str, data: bytes) -> None:
    (folder / "mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(data))


def test_images_and_labels_are_those_of_the_files(folder: Path) -> None:
    data = mnist.load(folder)
    assert torch.equal(data.train_images, pixels("train"))
    assert torch.equal(data.test_images, pixels("t10k"))
    assert data.train_labels.tolist() == digits("train")
    assert data.test_labels.tolist() == digits("t10k")
    assert (data.train_images.dtype, data.train_labels.dtype) == (torch.uint8, torch.int64)


def with_byte(data: bytes, place: int, value: int) -> bytes:
    return data[:place] + bytes([value]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "train-images-idx3",
            lambda data: with_byte(data, 2, 9),
            r"begins with \[2307, 7, 28, 28\], not with \[2051, 7",
        ),
        ("t10k-labels-idx1", lambda data: with_byte(data, 3, 3), r"begins with \[2051, 3\], not with \[2049, 3\]"),
        ("train-images-idx3", lambda data: with_byte(data, 7, 8), r"begins with \[2051, 8, 28, 28\]"),
        ("t10k-images-idx3", lambda data: with_byte(data, 15, 27), r"begins with \[2051, 3, 28, 27\]"),
        ("train-images-idx3", lambda data: data[:-1], "has 5,503 bytes, not 5,504"),
        ("train-labels-idx1", lambda data: data + b"1", "has 16 bytes or more, not 15"),
        ("train-labels-idx1", lambda data: data[:5], r"begins with \[\], not with \[2049, 7\]"),
        ("train-labels-idx1", lambda data: with_byte(data, 9, 10), "has a label 10; expected 0 to 9"),
        ("train-labels-idx1", lambda data: b"", r"begins with \[\]"),
    ],
)
def test_what_is_not_the_file_is_refused(folder: Path, name: str, change, message: str) -> None:
    write(folder, name, change(content(name)))
    with pytest.raises(DataError, match=message) as error:
        mnist.load(folder)
    assert f"{folder / 'mnist' / name}-ubyte.gz: " in str(error.value)
    assert f"get it again from https://example.org/{name}" in str(error.value)


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_a_truncated_file_is_refused(folder: Path, cut: int) -> None:
    path = folder / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz: cannot be read: .*expected 3 images of 28 x 28"):
        mnist.load(folder)


def test_a_file_that_is_not_compressed_is_refused(folder: Path) -> None:
    (folder / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(content("t10k-labels-idx1"))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz: cannot be read: Not a gzipped file"):
        mnist.load(folder)


def test_a_missing_file_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    monkeypatch.setattr(datasets, "_download", lambda _, file, folder: (_ for _ in ()).throw(DataError(file.name)))
    with pytest.raises(DataError, match=r"(t10k-labels|train-images)-idx"):
        mnist.load(folder)


def test_a_permutation_is_of_its_seed_and_task_alone() -> None:
    every = [mnist.permutation(seed, task) for seed in range(3) for task in range(3)]
    assert all(found.sort().values.tolist() == list(range(784)) for found in every)
    assert len({tuple(found.tolist()) for found in every}) == 9
    assert torch.equal(every[0], mnist.permutation(0, 0))
    assert every[0].tolist() != list(range(784))  # the first task is permuted as well
    with pytest.raises(ValueError, match="task must be an integer of at least 0, got -1"):
        mnist.permutation(1, -1)


@pytest.mark.data
def test_the_official_files(mnist_root: str) -> None:
    data = mnist.load(mnist_root)
    assert data.train_images.shape == (60_000, 28, 28)
    assert data.test_images.shape == (10_000, 28, 28)
    assert data.train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # Known of the data set: the mean and the deviation of a pixel of the training images.
    share = data.train_images.double() / 255
    assert share.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert share.std().item() == pytest.approx(0.3081, abs=1e-4)
