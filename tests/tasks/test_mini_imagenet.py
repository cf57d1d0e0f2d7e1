"""mini-ImageNet: what is read of the archive and its lists, and what is refused."""

import csv
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.errors import DataError
from fastweights.tasks import datasets, mini_imagenet

CLASSES = {"train": ["n3", "n1"], "val": ["n2"], "test": ["n9"]}
COLOURS = {"n3": (200, 30, 30), "n1": (30, 200, 30), "n2": (30, 30, 200), "n9": (120, 120, 120)}


def jpeg(colour: tuple[int, int, int], size: tuple[int, int] = (84, 84)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def write(folder: Path, members: dict[str, bytes], lists: dict[str, list[tuple[str, str]]]) -> None:
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    for name, rows in lists.items():
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("filename", "label"), *rows])


@pytest.fixture
def whole() -> tuple[dict[str, bytes], dict[str, list[tuple[str, str]]]]:
    """Four classes of two images, the second a little darker."""
    members, lists = {}, {}
    for split, names in CLASSES.items():
        lists[split] = [(f"{name}{number}.jpg", name) for name in names for number in range(2)]
        for file, name in lists[split]:
            red, green, blue = (channel - 10 * int(file[-5]) for channel in COLOURS[name])
            members[f"images/{file}"] = jpeg((red, green, blue))
    return members, lists


@pytest.fixture
def folder(tmp_path, monkeypatch, whole) -> Path:
    monkeypatch.setattr(mini_imagenet, "SPLITS", {"train": 2, "val": 1, "test": 1})
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    made: Path = tmp_path / "data" / "mini-imagenet"
    made.mkdir(parents=True)
    write(made, *whole)
    return made


def test_classes_and_images_are_in_the_order_of_the_lists(folder):
    data = mini_imagenet.load(folder.parent)
    assert data.images.shape == (4, 2, 3, 84, 84)
    assert data.images.dtype == torch.uint8
    assert data.names == ["n3", "n1", "n2", "n9"]
    assert data.splits.tolist() == [0, 0, 1, 2]
    for index, name in enumerate(data.names):
        for number in range(2):
            mean = data.images[index, number].float().mean((1, 2)).numpy()
            assert np.allclose(mean, np.array(COLOURS[name]) - 10 * number, atol=3)  # as JPEG keeps them


def test_the_pixels_are_packed_once(folder, monkeypatch):
    first = mini_imagenet.load(folder.parent)
    monkeypatch.setattr(mini_imagenet, "_decode", None)
    again = mini_imagenet.load(folder.parent)
    assert torch.equal(first.images, again.images)
    assert (first.names, first.splits.tolist()) == (again.names, again.splits.tolist())


def test_a_missing_image_is_named(folder, whole):
    members, lists = whole
    write(folder, {name: data for name, data in members.items() if name != "images/n21.jpg"}, lists)
    with pytest.raises(DataError, match=r"images\.zip: it has 7 images, without n21\.jpg"):
        mini_imagenet.load(folder.parent)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("images/n77.jpg", jpeg((0, 0, 0)), r"member 'images/n77\.jpg' is in no list"),
        ("images/n31.jpg", jpeg((0, 0, 0), (84, 80)), "has 84 x 80 pixels"),
        ("images/n31.jpg", b"no image", r"damaged archive: the image 'images/n31\.jpg'"),
    ],
)
def test_an_archive_with_other_members_is_refused(folder, whole, name, data, words):
    members, lists = whole
    write(folder, {**members, name: data}, lists)
    with pytest.raises(DataError, match=words):
        mini_imagenet.load(folder.parent)


def test_lists_that_do_not_part_the_classes_are_refused(folder, whole):
    members, lists = whole
    write(folder, members, {**lists, "val": lists["train"][:2]})
    with pytest.raises(DataError, match=r"val\.csv: it names 1 classes, 1 of them in the lists before"):
        mini_imagenet.load(folder.parent)
    write(folder, members, {**lists, "val": lists["val"] * 2 + [("n25.jpg", "n2")]})
    with pytest.raises(DataError, match="name 2 to 5 images of a class"):
        mini_imagenet.load(folder.parent)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n20.jpg,n2\n", "its first line is 'n20.jpg,n2'; expected 'filename,label'"),
        ("filename,label\nn20.jpg\n", r"val\.csv, line 2: 'n20\.jpg' is not a file name and a label"),
        ("", "its first line is ''"),
    ],
)
def test_a_damaged_list_is_named(folder, text, words):
    (folder / "val.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        mini_imagenet.load(folder.parent)


@pytest.mark.data
def test_the_real_files(mini_imagenet_root: str):
    assert all(check.ok for check in datasets.check("mini-imagenet", mini_imagenet_root))
    data = mini_imagenet.load(mini_imagenet_root)
    assert data.images.shape == (100, 200, 3, 84, 84)
    assert data.splits.bincount().tolist() == [64, 16, 20]
    assert data.names[0] == "n01532829"
    assert 100 < data.images[::10, ::10].float().mean() < 130
