"""Omniglot: what is read of the archives, and what is packed and when it is made again."""

import io
import logging
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.errors import DataError
from fastweights.tasks import _archives, datasets, omniglot

BACKGROUND = [("Latin", "character01"), ("Greek", "character02"), ("Greek", "character01")]  # not in order
EVALUATION = [("Avesta", "character01"), ("Greek", "character01")]  # the name of an alphabet of the background
Members = dict[str, bytes]


def drawing(seed: int) -> np.ndarray:
    """The ink of a drawing [105, 105], true or false."""
    return np.random.default_rng(seed).random((105, 105)) < 0.2


def png(ink: np.ndarray, mode: str = "1") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.where(ink, 0, 255).astype(np.uint8)).convert(mode).save(stream, "PNG")
    return stream.getvalue()


def members(stem: str, classes: list[tuple[str, str]], first: int = 0) -> Members:
    """All drawings of these classes, drawing n of class c made from seed `first` + 20 c + n - 1, the last one first."""
    return {
        f"{stem}/{alphabet}/{character}/{index:04}_{number:02}.png": png(drawing(first + 20 * index + number - 1))
        for index, (alphabet, character) in enumerate(classes)
        for number in range(20, 0, -1)
    }


def write(path: Path, content: Members) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


@pytest.fixture(scope="module")
def parts() -> tuple[Members, Members]:
    return members("images_background", BACKGROUND), members("images_evaluation", EVALUATION, first=1000)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[Members, Members]) -> Path:
    """A data folder with small archives, and a cache beside it."""
    files = (
        datasets.DataFile("images_background.zip", 60, "", "https://example.org/images_background.zip", pixels=True),
        datasets.DataFile("images_evaluation.zip", 40, "", "https://example.org/images_evaluation.zip", pixels=True),
    )
    small = datasets.DataSet("omniglot", "Small", "MIT", "https://example.org", "two zip files", files, 1)
    monkeypatch.setitem(datasets.DATASETS, "omniglot", small)
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    for file, content in zip(files, parts, strict=True):
        write(tmp_path / "data" / "omniglot" / file.name, content)
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The archives that were decoded since the test began."""
    names: list[str] = []

    def spy(path: Path, side: int):
        names.append(path.name)
        return _archives.read_images(path, side)

    monkeypatch.setattr(omniglot, "read_images", spy)
    return names


def packs(root: Path) -> list[Path]:
    return sorted((root.parent / "cache" / "fastweights" / "packed").glob("*"))


def same(one: omniglot.Omniglot, other: omniglot.Omniglot) -> bool:
    tensors = torch.equal(one.images, other.images) and torch.equal(one.alphabet, other.alphabet)
    rest = [(each.alphabets, each.names, each.background) for each in (one, other)]
    return tensors and rest[0] == rest[1]


def area_mean(ink: np.ndarray, size: int) -> np.ndarray:
    """The mean over the area of each pixel, by cutting every pixel until both grids fit: exact, and slow."""
    cuts = size // math.gcd(size, 105)
    fine = np.repeat(np.repeat(255 * ink.astype(np.int64), cuts, axis=0), cuts, axis=1)
    side = len(fine) // size
    sums: np.ndarray = fine.reshape(size, side, size, side).sum((1, 3))
    return (2 * sums + side**2) // (2 * side**2)


@pytest.mark.parametrize("size", [1, 7, 28, 32, 105])
def test_classes_and_drawings_are_in_order(root: Path, size: int) -> None:
    data = omniglot.load(root, size=size)
    assert data.images.shape == (5, 20, size, size)
    assert (data.images.dtype, data.alphabet.dtype) == (torch.uint8, torch.int64)
    assert data.names == [
        "Greek/character01",
        "Greek/character02",
        "Latin/character01",
        "Avesta/character01",
        "Greek/character01",
    ]
    assert data.alphabets == ["Greek", "Latin", "Avesta", "Greek"]
    assert data.alphabet.tolist() == [0, 0, 1, 2, 3]
    assert data.background == 3
    for index, seed in enumerate([40, 20, 0, 1000, 1020]):
        for number in (0, 1, 19) if size == 28 else (5,):
            ink = drawing(seed + number)
            assert np.array_equal(data.images[index, number].numpy(), area_mean(ink, size)), (index, number)


def test_ink_is_255_and_paper_0(root: Path, parts: tuple[Members, Members]) -> None:
    left = np.zeros((105, 105), dtype=bool)
    left[:, :30] = True
    name = next(iter(parts[0]))
    for mode in ("1", "L", "RGB"):  # as other tools pack the same pixels
        write(root / "omniglot" / "images_background.zip", {**parts[0], name: png(left, mode)})
        image = omniglot.load(root).images[2, 19]
        assert (image[:, :8] == 255).all()  # 30 pixels of 105 are 8 of 28
        assert (image[:, 8:] == 0).all()


def test_the_archives_are_decoded_once(root: Path, decoded: list[str]) -> None:
    folder = root / "omniglot"
    before = sorted(folder.iterdir())
    first = omniglot.load(root)
    assert decoded == ["images_background.zip", "images_evaluation.zip"]
    second = omniglot.load(root)
    assert len(decoded) == 2
    assert same(first, second)
    second.images.zero_()  # it may be written to, and nothing else changes
    assert same(first, omniglot.load(root))
    os.utime(folder / "images_background.zip", (0, 0))
    omniglot.load(root)
    assert len(decoded) == 2
    assert sorted(folder.iterdir()) == before
    assert len(packs(root)) == 1


def test_other_archives_and_sizes_are_never_mixed_up(
    root: Path, decoded: list[str], parts: tuple[Members, Members]
) -> None:
    first = omniglot.load(root)
    assert omniglot.load(root, size=14).images.shape[-1] == 14
    path = root / "omniglot" / "images_evaluation.zip"
    status, whole = path.stat(), path.read_bytes()
    name = list(parts[1])[-1]
    write(path, {**parts[1], name: parts[1][name][:-20] + bytes(20)})  # the same size, and a damaged drawing
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    with pytest.raises(DataError, match="damaged archive"):
        omniglot.load(root)
    write(path, members("images_evaluation", EVALUATION, first=2000))
    other = omniglot.load(root)
    assert torch.equal(first.images[:3], other.images[:3])
    assert not torch.equal(first.images[3:], other.images[3:])
    assert len(packs(root)) == 3
    decoded.clear()
    assert same(other, omniglot.load(root))
    path.write_bytes(whole)
    assert same(first, omniglot.load(root))
    assert decoded == []


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2  # among the images
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def another(data: bytes) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, images=np.zeros(3))
    return stream.getvalue()


@pytest.mark.parametrize("damage", [cut, flip, another, lambda data: b"", lambda data: bytes(len(data))])
def test_a_damaged_pack_is_made_again(
    root: Path, decoded: list[str], caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    first = omniglot.load(root)
    (pack,) = packs(root)
    whole = pack.read_bytes()
    pack.write_bytes(damage(whole))
    assert same(first, omniglot.load(root))
    assert len(decoded) == 4
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{pack} cannot be used and is made again"
    ]
    assert packs(root) == [pack]
    assert same(first, omniglot.load(root))
    assert len(decoded) == 4


def test_a_pack_damaged_at_any_byte_is_noticed_or_whole(root: Path, decoded: list[str]) -> None:
    first = omniglot.load(root, size=1)
    (pack,) = packs(root)
    whole = pack.read_bytes()
    for place in np.random.default_rng(0).integers(len(whole), size=40):
        pack.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert same(first, omniglot.load(root, size=1)), place
    assert len(decoded) > 2


def test_a_cache_that_cannot_be_written_is_no_error(
    root: Path, decoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (root.parent / "cache").write_text("a file where a folder would have to be")
    first = omniglot.load(root)
    assert same(first, omniglot.load(root))
    assert len(decoded) == 4
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert "so that it is made each time" in caplog.text


def test_without_pooch_there_is_no_cache(
    root: Path, decoded: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert len(omniglot.load(root).names) == 5
    assert "is made each time" in caplog.text
    assert packs(root) == []


Change = Callable[[Members], Members]
CHANGES: dict[str, Change] = {
    "it has no drawing Greek/character01/07": lambda all: {k: v for k, v in all.items() if not k.endswith("2_07.png")},
    "it has 40 drawings of 2 classes": lambda all: {k: v for k, v in all.items() if "Latin" not in k},
    "it has more than 60 drawings": lambda all: {
        **all,
        "images_background/Greek/character03/3_01.png": png(drawing(0)),
    },
    "it has two drawings Latin/character01/01": lambda all: {
        **all,
        "images_background/Latin/character01/9_01.png": png(drawing(0)),
    },
    "its member 'notes.txt' is not named like a drawing": lambda all: {"notes.txt": png(drawing(0)), **all},
    "its member 'images_evaluation/": lambda all: members("images_evaluation", BACKGROUND),
    "its member 'images_background/Latin/character01/0000_20.png' has 28 x 28 pixels": lambda all: {
        **all,
        next(iter(all)): png(drawing(0)[:28, :28]),
    },
    "damaged archive: the image 'images_background/Latin/character01/0000_20.png'": lambda all: {
        **all,
        next(iter(all)): b"no image",
    },
    "refused: the member '../evil' would lie outside": lambda all: {"../evil": b"", **all},
    "it has 0 drawings of 0 classes": lambda all: {},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_wrong_archive_is_named(root: Path, message: str, parts: tuple[Members, Members]) -> None:
    path = root / "omniglot" / "images_background.zip"
    write(path, CHANGES[message](parts[0]))
    with pytest.raises(DataError) as caught:
        omniglot.load(root)
    text = str(caught.value)
    assert text.startswith(f"{path}: {message}")
    assert text.endswith(
        "; expected 3 classes of 20 drawings, 01 to 20, 105 x 105 pixels: get it again from "
        "https://example.org/images_background.zip"
    )
    assert packs(root) == []


def test_what_is_no_archive_is_named(root: Path) -> None:
    path = root / "omniglot" / "images_evaluation.zip"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError) as caught:
        omniglot.load(root)
    assert str(caught.value).startswith(f"{path}: damaged archive: File is not a zip file; expected 2 classes of 20")


def test_unpacking_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_archives, "MAX_BYTES", 100_000)
    with pytest.raises(DataError, match=r"images_background\.zip: refused: it unpacks to more than 100,000 bytes"):
        omniglot.load(root)


@pytest.mark.parametrize("size", [0, -1, 106])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^size must lie between 1 and 105, .*got {size}$"):
        omniglot.load(size=size)


def test_the_split_of_the_curriculum(root: Path) -> None:
    data = omniglot.load(root)
    train, test = omniglot.curriculum_split(data)
    assert train.shape == (5, 15, 28, 28)
    assert test.shape == (5, 5, 28, 28)
    assert np.array_equal(test[0, 4].numpy(), area_mean(drawing(44), 28))
    assert np.array_equal(train[0, 0].numpy(), area_mean(drawing(45), 28))


def test_only_torch_and_numpy_are_imported() -> None:
    code = "import sys, fastweights.tasks.omniglot; print({'pooch', 'PIL', 'safetensors'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(_archives.__file__).parents[2])}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "set()"


@pytest.mark.data
def test_the_real_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[str], omniglot_root: str
) -> None:
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / project)
    data = omniglot.load(omniglot_root)
    assert same(data, omniglot.load(omniglot_root))
    assert len(decoded) == 2
    assert data.images.shape == (1623, 20, 28, 28)
    assert (len(data.names), len(data.alphabets), data.background) == (omniglot.CLASSES, 50, 964)
    assert len(set(data.names)) == 1623
    assert data.alphabet.bincount().sum() == 1623
    assert data.alphabet[963:965].tolist() == [29, 30]  # 30 alphabets are the background's
    assert [data.names[index] for index in (0, 963, 964, 1622)] == [
        "Alphabet_of_the_Magi/character01",
        "Tifinagh/character55",
        "Angelic/character01",
        "ULOG/character26",
    ]
    for name, alphabet in zip(data.names, data.alphabet.tolist(), strict=True):
        assert name.startswith(data.alphabets[alphabet] + "/character")

    # Another decoder of PNG, another way to the mean, and the archive's own numbers: 0709 is the first class by name.
    for index, number, archive, member in (
        (0, 1, "images_background.zip", "images_background/Alphabet_of_the_Magi/character01/0709_01.png"),
        (963, 20, "images_background.zip", "images_background/Tifinagh/character55/0964_20.png"),
        (964, 6, "images_evaluation.zip", "images_evaluation/Angelic/character01/0965_06.png"),
        (1622, 13, "images_evaluation.zip", "images_evaluation/ULOG/character26/1623_13.png"),
    ):
        with zipfile.ZipFile(Path(omniglot_root, "omniglot", archive)) as opened:
            grey = matplotlib.image.imread(io.BytesIO(opened.read(member)), format="png")
        assert grey.shape == (105, 105)
        assert 0 < (grey < 0.5).mean() < 0.2  # the ink
        assert np.array_equal(data.images[index, number - 1].numpy(), area_mean(grey < 0.5, 28))
