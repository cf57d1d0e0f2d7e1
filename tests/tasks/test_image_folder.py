"""A user's folder of images: sizes, modes, order and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from fastweights.errors import DataError
from fastweights.few_shot.images import Kind, read_pixels
from fastweights.tasks import image_folder


@pytest.fixture
def root(tmp_path):
    for name, count in (("dog", 3), ("cat", 2)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (100, 60), (50 * number, 0, 200)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_classes_and_images_are_in_the_order_of_their_names(root):
    data = image_folder.load(root, size=20)
    assert data.names == ["cat", "dog"]
    assert data.labels.tolist() == [0, 0, 1, 1, 1]
    assert data.images.shape == (5, 3, 20, 20)
    assert data.images.dtype == torch.uint8
    assert data.images[:, 0, 0, 0].tolist() == [0, 50, 0, 50, 100]
    assert (data.images[:, 2] == 200).all()


def test_the_middle_square_is_taken(tmp_path):
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, 20:60] = 255
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "1.png")
    assert (image_folder.load(tmp_path, size=40).images == 255).all()


@pytest.mark.parametrize(("mode", "colour"), [("L", 90), ("RGBA", (90, 90, 90, 255)), ("1", 1), ("P", 3), ("CMYK", 0)])
def test_every_mode_becomes_red_green_and_blue(root, mode, colour):
    Image.new(mode, (30, 30), colour).save(root / "cat" / "0.tiff")
    (root / "cat" / "0.tiff").rename(root / "cat" / "9.jpg")  # named as it is not
    data = image_folder.load(root, size=8)
    assert data.images.shape == (6, 3, 8, 8)


def test_other_files_are_passed_over_and_few_are_taken(root):
    (root / "notes.txt").write_text("hello")
    (root / "cat" / "Thumbs.db").write_text("hello")
    (root / "cat" / ".hidden.png").write_text("hello")
    (root / ".cache").mkdir()
    (root / "cat" / "more").mkdir()
    (root / "cat" / "0.png").write_bytes(b"no image")
    Image.new("RGB", (9, 9)).save(root / "cat" / "2.png")
    with pytest.warns(UserWarning, match="left out") as told:
        data = image_folder.load(root, size=8, most=2)
    assert data.labels.tolist() == [0, 0, 1, 1]
    assert data.images.shape == (4, 3, 8, 8)
    assert (data.images[0, 0] == 50).all()  # the next takes the place of the damaged one
    words = str(told[0].message)
    assert words.startswith(f"left out: 1 beside the folders of classes, such as {root}/notes.txt; 2 files and folders")
    assert f"such as {root}/cat/Thumbs.db: of a folder, the files in it itself that end in .bmp" in words
    assert f"; an image cannot be read: {root}/cat/0.png cannot be read as an image" in words


def test_sixteen_bits_become_eight_and_heic_is_named(root):
    deep = np.array([[0, 128], [32896, 65535]], dtype=np.uint16).repeat(4, 0).repeat(4, 1)
    Image.fromarray(deep).save(root / "cat" / "0.png")
    image = image_folder.load(root, size=8, channels=1).images[0, 0]
    assert image[::4, ::4].tolist() == [[0, 0], [128, 255]]
    (root / "cat" / "a.heic").touch()
    with pytest.warns(UserWarning, match=r"cat/a\.heic: .* \(save \.heic files as \.jpg or \.png\)"):
        image_folder.load(root, size=8)


def test_what_macos_packs_beside_the_classes_is_no_class(root):
    expected = image_folder.files(root)
    (root / "__MACOSX" / "cat").mkdir(parents=True)
    (root / "__MACOSX" / "cat" / "._1.png").touch()
    assert image_folder.files(root) == expected


def test_a_class_without_images_says_what_it_has_in_their_place(root):
    fox = root / "fox"
    (fox / "more").mkdir(parents=True)
    for name in ("a.heic", "b.HEIC", "more/1.png"):
        (fox / name).touch()
    with pytest.raises(DataError) as raised:
        image_folder.load(root)
    assert str(raised.value) == (
        f"{fox} has no image: its files should end in .bmp, .jpeg, .jpg, .png, .webp; 2 have other endings, such as "
        f"{fox}/a.heic (save .heic files as .jpg or .png); images lie one folder deeper, such as in {fox}/more"
    )


def test_what_is_wrong_is_said(root, tmp_path_factory):
    with pytest.raises(DataError, match="nowhere is not a folder"):
        image_folder.load(root / "nowhere")
    with pytest.raises(DataError, match="has a folder of images for 0 classes: at least two"):
        image_folder.load(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ValueError, match="most must be an integer of at least 1, got 0"):
        image_folder.load(root, most=0)
    for wrong in ({"size": 2.5}, {"size": "8"}, {"most": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be an integer of at least 1, got"):
            image_folder.load(root, **wrong)
    with pytest.raises(ValueError, match="channels must be 3, for red, green and blue, or 1, for grey; got 2"):
        image_folder.load(root, channels=2)
    for path in (root / "cat").iterdir():
        path.write_bytes(b"\x89PNG and no more")
    with pytest.raises(DataError, match=r"cat has no image that can be read: .*1\.png cannot be read as an image"):
        image_folder.load(root)
    (root / "fox").mkdir()
    with pytest.raises(DataError, match=r"fox has no image: its files should end in \.bmp"):
        image_folder.load(root)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("ink", [False, True])
def test_a_network_is_asked_about_what_it_was_trained_on(tmp_path, ink, channels):
    """Turned by its EXIF, half transparent, of any size: to the last bit as the classifier reads the same file."""
    shown = np.random.default_rng(0).integers(230, 256, size=(50, 70, 4), dtype=np.uint8)
    shown[10:20, 15:60, :3] //= 8
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(shown).save(tmp_path / name / "1.png", exif=exif)
        Image.fromarray(shown[..., :3]).save(tmp_path / name / "2.jpg", exif=exif)
    trained_on = image_folder.load(tmp_path, size=20, ink=ink, channels=channels).images
    paths = [path for found in image_folder.files(tmp_path).values() for path in found]
    asked = read_pixels(paths, Kind(channels=channels, size=20, ink=ink), resize=True)
    assert torch.equal(trained_on, asked)
    assert not torch.equal(trained_on[0], trained_on[1])
