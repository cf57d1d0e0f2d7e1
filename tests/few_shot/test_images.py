"""Images as tensors and as files: sizes, modes, ink and what is refused."""

import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from fastweights.errors import ExamplesError
from fastweights.few_shot.images import Kind, read_pixels
from fastweights.tasks import omniglot
from fastweights.tasks.image_files import area_means

GREY = Kind(1, 28, True)
COLOUR = Kind(3, 28, False)


@pytest.fixture
def file(tmp_path):
    """Saves an image and gives its path."""

    def save(image, name="image.png", **options):
        image.save(tmp_path / name, **options)
        return tmp_path / name

    return save


def drawing(mode="L", size=28):
    """Black ink on the upper half of the left third, white paper."""
    pixels = np.full((size, size), 255, np.uint8)
    pixels[: size // 2, : size // 3] = 0
    return Image.fromarray(pixels).convert(mode)


def read(path, kind=GREY, resize=False):
    return read_pixels([path], kind, resize=resize)[0]


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGB", "RGBA", "LA", "CMYK"])
def test_dark_ink_on_light_paper_is_turned_over_whatever_the_mode(file, mode):
    path = file(drawing(mode), "image.tiff")
    found = read(path)
    assert found.shape == (1, 28, 28)
    assert found.dtype == torch.uint8
    assert (found[0, :14, :9] == 255).all()
    assert found.sum() == 255 * 14 * 9
    assert torch.equal(read(str(path)), found)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGB", "RGBA", "LA"])
def test_an_image_in_memory_is_read_as_its_file_is(file, tmp_path, mode):
    image = drawing(mode, 90)
    path = file(image)
    assert torch.equal(read(image, resize=True), read(path, resize=True))
    with Image.open(path) as opened:
        assert torch.equal(read(opened, resize=True), read(path, resize=True))
    with pytest.raises(ExamplesError, match=r"^image 0 has 90 x 90 pixels, the network takes 28 x 28"):
        read(image)
    with pytest.raises(ExamplesError, match=r"^image 0 has the mode F"):
        read(image.convert("L").convert("F"), resize=True)
    (tmp_path / "cut.png").write_bytes(path.read_bytes()[:-30])
    with Image.open(tmp_path / "cut.png") as cut, pytest.raises(ExamplesError, match=r"^image 0 cannot be read"):
        read(cut, resize=True)


def test_a_speck_on_a_large_page_is_blank(file):
    page = np.full((2000, 2000), 255, np.uint8)
    page[5:7, 5:7] = 0
    with pytest.raises(
        ExamplesError, match=r"image\.png is blank, mostly ink, or has ink along its edges: at 112 x 112 pixels, no ink"
    ):
        read(file(Image.fromarray(page)), resize=True)
    page[500:520, 500:800] = 0
    assert read(file(Image.fromarray(page)), resize=True).max() > 128


def test_what_is_transparent_is_paper(file):
    layers = np.zeros((28, 28, 4), np.uint8)  # black all over, and seen on the left
    layers[4:, :9, 3] = 255
    found = read(file(Image.fromarray(layers)))
    assert found.sum() == 255 * 24 * 9


def test_photographs_stay_as_they_are(file):
    found = read(file(Image.new("RGB", (28, 28), (10, 20, 30))), COLOUR)
    assert found[:, 0, 0].tolist() == [10, 20, 30]
    assert read(file(Image.new("L", (28, 28), 7)), COLOUR)[:, 5, 5].tolist() == [7, 7, 7]


def test_files_of_another_size_are_resized_only_when_asked(file):
    path = file(drawing(size=84))
    message = "image.png has 84 x 84 pixels, the network takes 28 x 28: give resize=True"
    with pytest.raises(ExamplesError, match=message):
        read(path)
    found = read(path, resize=True)
    assert torch.equal(found[0, :14, :9], torch.full((14, 9), 255, dtype=torch.uint8))
    assert torch.equal(read(file(drawing(size=14), "small.png"), resize=True)[0, :14, 10:], found[0, :14, 10:])


def test_a_drawing_is_kept_whole_and_of_a_photograph_the_middle(file):
    wide = np.full((28, 84), 255, np.uint8)
    wide[:, :6] = 0
    path = file(Image.fromarray(wide))
    found = read(path, resize=True)[0]
    assert found[:9].sum() == found[-9:].sum() == 0  # paper above and below
    assert (found[12:16, :2] == 255).all()
    middle = read(path, COLOUR, resize=True)
    assert (middle == 255).all()


def test_colour_is_refused_for_grey_unless_asked(file):
    drawing = Image.new("RGB", (28, 28), (250, 255, 255))
    drawing.putpixel((3, 5), (90, 20, 20))
    path = file(drawing)
    with pytest.raises(ExamplesError, match=r"image\.png is in colour, the network takes grey: give resize=True"):
        read(path)
    assert read(path, resize=True).nonzero().tolist() == [[0, 5, 3]]


@pytest.mark.parametrize(("paper", "ink"), [(255, 0), (240, 60), (200, 120), (255, 150), (0, 255), (60, 150)])
def test_paper_and_ink_of_a_scan_are_neither_white_nor_black(file, paper, ink):
    drawing = np.full((56, 56), paper, np.uint8)
    drawing[10:40, 20:26] = ink
    drawing[10:12, 20:26] = (paper + ink) // 2
    found = read(file(Image.fromarray(drawing)), resize=True)
    assert int(found[0, :4].max()) == int(found[0, :, :9].max()) == 0
    assert int(found[0, 5, 10]) in range(127, 130)
    assert int(found[0, 6:20, 10:13].min()) >= 254


def scan(width, size=1000, paper=255, ink=0, noise=0.0):
    """Two strokes of a width in thousandths of the side, [size,size]."""
    image = Image.new("L", (size, size), 255)
    points = [[(250, 300), (700, 420), (400, 800)], [(600, 200), (350, 650)]]
    for stroke in points:
        scaled = [(x * size // 1000, y * size // 1000) for x, y in stroke]
        ImageDraw.Draw(image).line(scaled, fill=0, width=width * size // 1000)
    found = ink + (paper - ink) * np.asarray(image).astype(float) / 255
    return (found + np.random.default_rng(0).normal(0, noise, found.shape)).round().clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("width", [8, 20, 50])
def test_a_scan_is_cut_out_and_drawn_as_omniglot_is(file, width):
    page = np.full((1400, 1100), 235.0)
    page[300:1300, 60:1060] = scan(width, paper=235, ink=60)
    page = page + np.random.default_rng(0).normal(0, 4, page.shape)
    found = read(file(Image.fromarray(page.round().clip(0, 255).astype(np.uint8))), resize=True)
    rows, columns = (places.unique() for places in (found[0] > 40).nonzero().T)
    assert int(found.max()) > 140
    assert max(len(rows), len(columns)) in range(17, 22)  # two thirds of the image, and in the middle of it
    for places in (rows, columns):
        assert abs(int(places[0] + places[-1]) - 27) <= 2


def test_red_ink_is_none_in_red_light(file):
    drawn = np.full((1000, 1000, 3), 235, np.uint8)
    drawn[..., 1:] = np.minimum(drawn[..., 1:], scan(30)[..., None])
    red, green, blue = read(file(Image.fromarray(drawn)), COLOUR._replace(ink=True), resize=True)
    assert red.max() == 0
    assert torch.equal(green, blue)
    assert green.max() > 230


@pytest.mark.parametrize("size", [28, 105])
@pytest.mark.parametrize("light", [False, True])
def test_clean_drawings_are_read_to_the_bit_as_they_are(file, size, light):
    drawn = scan(50, size=size)
    drawn[drawn < 255] = 0
    expected = area_means(torch.from_numpy(255 - drawn)[None], 28)
    assert torch.equal(read(file(Image.fromarray(255 - drawn if light else drawn)), resize=True), expected)


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_every_drawing_of_omniglot_is_read_as_the_data_set_has_it(file):
    large, small = omniglot.load(size=105).images[::40, 3], omniglot.load().images[::40, 3]
    for drawn, expected in zip(large, small, strict=True):
        for image in (drawn, 255 - drawn):
            assert torch.equal(read(file(Image.fromarray(image.numpy())), resize=True)[0], expected)


@pytest.mark.parametrize("paper", [240, 255])
@pytest.mark.parametrize("size", [1000, 300])
@pytest.mark.parametrize("noise", [3, 5, 8, 12])
def test_the_noise_of_a_scanner_is_no_ink(file, noise, size, paper):
    page = np.random.default_rng(1).normal(paper, noise, (size, size)).round().clip(0, 255).astype(np.uint8)
    with pytest.raises(ExamplesError, match="is blank"):
        read(file(Image.fromarray(page)), resize=True)


def test_uneven_light_is_refused(file):
    for light in (np.linspace(1, 0.3, 1000), np.where(np.arange(1000) < 400, 0.6, 1)):
        with pytest.raises(ExamplesError, match=r"image\.png has uneven paper: light it evenly, and leave paper"):
            read(file(Image.fromarray((scan(30, ink=120) * light).astype(np.uint8))), resize=True)


def test_a_long_and_narrow_image_takes_no_more_memory_than_its_pixels(file):
    strip = np.full((40, 60_000), 255, np.uint8)  # the square about it would have 3,600 million
    strip[:, 25_000:35_000] = 0
    path = file(Image.fromarray(strip))
    assert read(path, COLOUR, resize=True).max() == 0
    with pytest.raises(ExamplesError, match=r"image\.png is blank, .* has ink along its edges: at 56 x 1 pixels"):
        read(path, resize=True)


@pytest.mark.parametrize("size", [28, 105, 300])
@pytest.mark.parametrize("edges", ["left bottom", "left bottom right top"])
def test_a_drawing_cut_along_its_ink_is_asked_for_with_paper_about_it(file, size, edges):
    drawing = np.full((size, size), 255, np.uint8)
    width = size // 10
    turns = ["left", "top", "right", "bottom"]  # a quarter each brings that edge to the left
    for edge in edges.split():
        np.rot90(drawing, turns.index(edge))[:, :width] = 0
    with pytest.raises(ExamplesError, match=r"has ink along its edges: .*; leave paper around the drawing"):
        read(file(Image.fromarray(drawing)), resize=True)
    assert read(file(Image.fromarray(np.pad(drawing, size, constant_values=255))), resize=True).max() > 128


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "image.png")
    with pytest.raises(ExamplesError, match=r"there is no file .*image\.png"):
        read(tmp_path / "image.png")


@pytest.mark.parametrize("least", [240, 255])
def test_a_blank_page_is_refused(file, least):
    page = np.full((28, 28), 255, np.uint8)
    page[3, 4] = least
    with pytest.raises(
        ExamplesError, match=r"image\.png is blank, mostly ink, or has ink along its edges: at 28 x 28 pixels, no"
    ):
        read(file(Image.fromarray(page)))


def test_a_blank_tensor_is_refused():
    drawings = torch.zeros(3, 1, 28, 28)
    drawings[[0, 2], :, 4:24, 13:15] = 1
    for blank in (drawings, (255 * drawings).byte()):
        with pytest.raises(ExamplesError, match="image 1 is blank: its darkest ink is 0 of 1"):
            read_pixels(blank, GREY._replace(ink=True), resize=False)
        assert read_pixels(blank, GREY._replace(ink=False), resize=False).shape == (3, 1, 28, 28)


def test_what_is_mostly_ink_is_refused(file):
    with pytest.raises(ExamplesError, match="is blank, mostly ink, or has ink along its edges"):
        read(file(Image.new("L", (28, 28), 20)))
    framed = np.full((28, 28), 255, np.uint8)
    framed[3:-3, 3:-3] = 0
    with pytest.raises(ExamplesError, match=r"image\.png is blank, mostly ink, or has ink along its edges"):
        read(file(Image.fromarray(framed)))
    with pytest.raises(ExamplesError, match="image 1 is mostly ink: in tensors, ink is 1"):
        read_pixels(torch.stack([torch.zeros(1, 28, 28), torch.full((1, 28, 28), 0.9)]), GREY, resize=False)
    assert read_pixels(torch.full((1, 3, 28, 28), 0.9), COLOUR, resize=False).shape == (1, 3, 28, 28)


def test_an_image_is_upright_as_viewers_show_it(file):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise
    found = read(file(drawing(), "turned.png", exif=exif))
    assert (found[0, :9, 14:] == 255).all()


def test_files_that_cannot_be_read(file, tmp_path):
    (tmp_path / "words.png").write_text("no image")
    whole = file(drawing()).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    file(Image.fromarray(np.zeros((28, 28), np.int32)), "deep.tiff")
    # Text where a whole number belongs, and a quarter's turn, after which Pillow cannot write the first again.
    tags = b"\0\1\2\0\4\0\0\0abc\0" + b"\x12\1\3\0\1\0\0\0\6\0\0\0"
    file(drawing(), "tag.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\2\0" + tags + bytes(4))
    for name, message in (
        ("words.png", "words.png cannot be read as an image: cannot identify"),
        ("cut.png", "cut.png cannot be read as an image"),
        ("nowhere.png", "nowhere.png cannot be read as an image: .*No such file"),
        ("tag.jpg", "tag.jpg cannot be read as an image: required argument"),
        (f"{'a' * 300}.png", "a.png cannot be read as an image: .*name too long"),
        ("deep.tiff", "deep.tiff has the mode I: save it with 8 bits a channel, grey or RGB"),
    ):
        with pytest.raises(ExamplesError, match=message):
            read(tmp_path / name)


def test_an_image_that_would_fill_memory_is_refused(file, monkeypatch):
    path = file(Image.new("L", (100, 100), 255))
    for most in (6000, 4000):  # of which Pillow warns, and which it refuses, as more than twice as many
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(ExamplesError, match=r"image\.png cannot be read as an image: Image size \(10000 pixels\)"):
            read(path, resize=True)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            torch.zeros(2, 1, 32, 32),
            r"images must be \[N,1,28,28\], as the network was trained on; got \[2, 1, 32, 32\]",
        ),
        (torch.zeros(2, 3, 28, 28), r"got \[2, 3, 28, 28\]"),
        (torch.zeros(1, 28, 28), r"got \[1, 28, 28\]"),
        (torch.tensor(1.0), "got a single number"),
        (torch.stack([torch.zeros(1, 28, 28), torch.full((1, 28, 28), torch.nan)]), "image 1 has NaN in it"),
        (torch.full((2, 1, 28, 28), 200.0), "must lie between 0 and 1, got 200 to 200: divide them"),
        (torch.full((2, 1, 28, 28), -0.5), "got -0.5 to -0.5"),
        (
            torch.zeros(2, 1, 28, 28, dtype=torch.long),
            "images must be uint8, or floating point of 0 to 1; got torch.int64",
        ),
        (np.zeros((2, 1, 28, 28), object), "images must be uint8, or floating point of 0 to 1; got object"),
        (
            torch.eye(28, dtype=torch.uint8)[None, None],
            "uint8 images must range from 0 to 255, got 0 to 1: multiply them by 255",
        ),
        (torch.zeros(0, 1, 28, 28), "there are no images"),
        ([], "there are no images"),
        ("image.png", "or a list of files; got 'image.png'"),
        (3, "or a list of files; got 3"),
        ([torch.zeros(1, 28, 28)], "must hold image files or images of PIL, got a Tensor in it"),
    ],
)
def test_images_that_are_refused(images, message):
    with pytest.raises(ExamplesError, match=message):
        read_pixels(images, GREY, resize=False)


def test_a_black_photograph_is_one():
    black = torch.zeros(2, 3, 28, 28, dtype=torch.uint8)
    assert torch.equal(read_pixels(black, COLOUR, resize=False), black)


def test_tensors_are_not_resized():
    with pytest.raises(ExamplesError, match="resize is for image files"):
        read_pixels(torch.zeros(2, 1, 32, 32), GREY, resize=True)


@pytest.mark.parametrize(("side", "size"), [(5, 3), (3, 5), (4, 4), (35, 12)])
def test_the_mean_over_areas(side, size):
    images = torch.randint(256, (2, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    fine = images.double().repeat_interleave(size, 2).repeat_interleave(size, 3)
    expected = torch.nn.functional.avg_pool2d(fine, side)
    assert (area_means(images, size).double() - expected).abs().max() <= 0.5 + 1e-9
