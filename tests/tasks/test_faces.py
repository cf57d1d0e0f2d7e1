"""The faces of FER2013 and of Multi-PIE: what is read, how it is parted, and what is refused."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastweights.errors import DataError
from fastweights.tasks import faces

from .archives import zip_bytes


def jpeg(grey: int, side: int = 48) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (side, side), grey).save(stream, "JPEG")
    return stream.getvalue()


FER2013 = {
    "Training/happy/1.jpg": jpeg(10),
    "Training/sad/2.jpg": jpeg(20),
    "Training/sad/3.jpg": jpeg(20),  # twice within a part: both stay
    "Training/happy/4.jpg": jpeg(40),  # and twice in two parts: it stays in the later one
    "PublicTest/happy/5.jpg": jpeg(50),
    "PublicTest/sad/6.jpg": jpeg(40),
    "PublicTest/sad/7.jpg": jpeg(80),
    "PrivateTest/happy/8.jpg": jpeg(80),
    "PrivateTest/sad/9.jpg": jpeg(90),
}


@pytest.fixture
def folder(tmp_path: Path, places: None) -> Path:
    (tmp_path / "fer2013").mkdir()
    write(tmp_path, FER2013)
    return tmp_path


def write(folder: Path, members: dict[str, bytes]) -> None:
    (folder / "fer2013" / "fer2013_jpg.zip").write_bytes(zip_bytes(members))


def test_fer2013_is_read_and_no_picture_is_in_two_parts(folder: Path) -> None:
    for _ in range(2):  # the second time from the cache
        data = faces.load_fer2013(folder)
        assert data.images.shape == (7, 48, 48)
        assert (data.images.dtype, data.names) == (torch.uint8, ["happy", "sad"])
        found = {
            part: [(int(x[0, 0]), data.names[y]) for x, y in zip(*data.part(part), strict=True)] for part in faces.PARTS
        }
        assert found == {
            "train": [(10, "happy"), (20, "sad"), (20, "sad")],
            "validation": [(50, "happy"), (40, "sad")],
            "test": [(80, "happy"), (90, "sad")],
        }


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("Training/1.jpg", jpeg(1), "its member 'Training/1.jpg' is not named like a face, such as Training/happy"),
        ("Test/sad/1.jpg", jpeg(1), "its member 'Test/sad/1.jpg' is not named like a face"),
        ("Training/sad/old/1.jpg", jpeg(1), "its member 'Training/sad/old/1.jpg' is not named like a face"),
        ("Training/sad/1.jpg", jpeg(1, side=40), "its member 'Training/sad/1.jpg' has 40 x 40 pixels"),
        ("Training/sad/1.jpg", jpeg(1)[:-40], "damaged archive: the image 'Training/sad/1.jpg'"),
    ],
)
def test_what_is_not_fer2013_is_refused(folder: Path, name: str, data: bytes, message: str) -> None:
    write(folder, FER2013 | {name: data})
    with pytest.raises(DataError, match=message) as error:
        faces.load_fer2013(folder)
    assert "fer2013_jpg.zip: " in str(error.value)


def test_a_missing_fer2013_is_told_of(tmp_path: Path, places: None) -> None:
    with pytest.raises(DataError, match=r"data set fer2013 .* is missing"):
        faces.load_fer2013(tmp_path)


@pytest.fixture
def multi_pie(tmp_path: Path) -> Path:
    """Eight people as the disks have them: every recording of theirs, two cameras that are read and one that is not."""
    for person in range(1, 9):
        for session, recording in (("01", "02"), ("02", "03"), ("04", "02"), ("04", "03")):
            for camera in ("05_1", "14_0", "08_1"):
                name = f"{person:03}_{session}_{recording}_{camera.replace('_', '')}_07.png"
                place = tmp_path / f"session{session}" / "multiview" / f"{person:03}" / recording / camera
                place.mkdir(parents=True)
                Image.new("RGB", (96, 60), (person, person, person)).save(place / name)
    (tmp_path / "readme.txt").write_text("not a face")
    (tmp_path / "001_02_04_051_07.png").write_text("there is no such recording")
    return tmp_path


def test_multi_pie_has_three_cameras_and_its_people_are_in_one_part_each(multi_pie: Path) -> None:
    data = faces.load_multi_pie(multi_pie, test_identities=2, validation_identities=1)
    assert data.images.shape == (8 * 4 * 2, 48, 48)
    assert data.names == ["neutral", "smile", "surprise", "squint", "disgust", "scream"]
    assert data.labels.bincount().tolist() == [16, 16, 0, 16, 0, 16]
    people = [set(data.part(part)[0][:, 0, 0].tolist()) for part in faces.PARTS]
    assert [len(part) for part in people] == [5, 1, 2]
    assert set.union(*people) == set(range(1, 9))
    again, other = (faces.load_multi_pie(multi_pie, test_identities=2, validation_identities=1, seed=s) for s in (0, 3))
    assert torch.equal(again.parts, data.parts)
    assert not torch.equal(other.parts, data.parts)


def test_too_few_people_and_no_folder_are_refused(multi_pie: Path) -> None:
    with pytest.raises(
        DataError, match=r"of 8 identities in 64 images .* more than 40 are needed, 20 to test and 20 to"
    ):
        faces.load_multi_pie(multi_pie)
    with pytest.raises(DataError, match="nowhere is not a folder"):
        faces.load_multi_pie(multi_pie / "nowhere")
    with pytest.raises(ValueError, match="test_identities must be an integer of at least 1, got 0"):
        faces.load_multi_pie(multi_pie, test_identities=0)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        faces.load_multi_pie(multi_pie, seed=-1)
    data = faces.load_multi_pie(multi_pie, test_identities=1, validation_identities=1)
    with pytest.raises(ValueError, match="part must be one of train, validation, test, got 'dev'"):
        data.part("dev")
    next(multi_pie.rglob("*_04_03_051_07.png")).write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot be read as an image"):
        faces.load_multi_pie(multi_pie, test_identities=2, validation_identities=1)


@pytest.mark.data
def test_the_official_fer2013(fer2013_root: str) -> None:
    data = faces.load_fer2013(fer2013_root)
    assert [len(data.part(part)[1]) for part in faces.PARTS] == [28006, 3543, 3589]
    assert data.names == ["angry", "disgust", "fear", "happy", "neutral", "sad", "surprise"]
    assert data.part("test")[1].bincount().tolist() == [491, 55, 528, 879, 626, 594, 416]
