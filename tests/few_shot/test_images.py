"""Images as tensors and as files: sizes, modes, ink and what is refused."""

import os

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps

from fastweights.errors import ExamplesError
from fastweights.few_shot.images import Kind, counted, pixels
from fastweights.tasks._areas import area_means
from fastweights.tasks._ink import _evenly_lit

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
    return pixels(counted([path]), kind, resize=resize)[0]


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGB", "RGBA", "LA", "CMYK"])
def test_dark_ink_on_light_paper_is_turned_over_whatever_the_mode(file, mode):
    path = file(drawing(mode), "image.tiff")
    found = read(path)
    assert found.shape == (1, 28, 28)
    assert found.dtype == torch.uint8
    assert (found[0, :14, :9] == 255).all()
    assert found.sum() == 255 * 14 * 9
    assert torch.equal(read(str(path)), found)


def test_a_speck_on_a_large_page_is_blank(file):
    page = np.full((2000, 2000), 255, np.uint8)
    page[5:7, 5:7] = 0
    with pytest.raises(
        ExamplesError, match=r"image\.png is blank, or lit unevenly: its darkest stroke is 255 of 255 and its paper 255"
    ):
        read(file(Image.fromarray(page)), resize=True)
    page[5, :300] = 0  # a line of a pixel
    assert read(file(Image.fromarray(page)), resize=True).max() > 128


def test_what_is_transparent_is_paper(file):
    layers = np.zeros((28, 28, 4), np.uint8)  # black all over, and seen on the left
    layers[:, :9, 3] = 255
    found = read(file(Image.fromarray(layers)))
    assert found.sum() == 255 * 28 * 9


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


@pytest.mark.parametrize(("paper", "ink"), [(255, 0), (240, 60), (200, 120), (255, 150)])
def test_paper_and_ink_of_a_scan_are_neither_white_nor_black(file, paper, ink):
    drawing = np.full((56, 56), paper, np.uint8)
    drawing[10:40, 20:26] = ink
    drawing[10:12, 20:26] = (paper + ink) // 2
    found = read(file(Image.fromarray(drawing)), resize=True)
    assert int(found[0, :4].max()) == int(found[0, :, :9].max()) == 0
    assert int(found[0, 5, 10]) in range(127, 130)
    assert int(found[0, 6:20, 10:13].min()) == 255


def scan(width, size=1000, paper=255, ink=0, noise=0.0):
    """Two strokes of a width in thousandths of the side, [size,size]."""
    image = Image.new("L", (size, size), 255)
    points = [[(250, 300), (700, 420), (400, 800)], [(600, 200), (350, 650)]]
    for stroke in points:
        scaled = [(x * size // 1000, y * size // 1000) for x, y in stroke]
        ImageDraw.Draw(image).line(scaled, fill=0, width=width * size // 1000)
    found = ink + (paper - ink) * np.asarray(image).astype(float) / 255
    return (found + np.random.default_rng(0).normal(0, noise, found.shape)).round().clip(0, 255).astype(np.uint8)


def alike(found, expected):
    """How alike two drawings are, of 1."""
    return float(torch.corrcoef(torch.stack([found.double().flatten(), expected.double().flatten()]))[0, 1])


@pytest.mark.parametrize(
    "thin",
    [
        scan(2),
        scan(12),
        scan(22),
        scan(28),
        scan(36),
        scan(4, size=250),
        scan(2, paper=235, ink=30, noise=4),
        scan(4, paper=235, ink=150, noise=4),
        scan(50, paper=120, ink=20),
    ],
    ids=["2", "12", "22", "28", "36", "of a pixel", "noise", "pencil", "grey paper"],
)
def test_strokes_of_any_width_are_drawn_alike(file, thin):
    broad = read(file(Image.fromarray(scan(50))), resize=True).double()
    found = read(file(Image.fromarray(thin)), resize=True).double()
    assert found.max() > 250
    assert alike(found, broad) > 0.95
    assert 0.9 < found.mean() / broad.mean() < 1.15


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize(("width", "ink"), [(8, 40), (20, 40), (20, 150), (50, 40)])
def test_light_may_fall_off_across_the_page(file, width, ink, turn):
    drawn = scan(width, paper=240, ink=ink, noise=3)
    light = np.rot90(np.linspace(1, 0.5, 1000) * np.linspace(1, 0.9, 1000)[:, None], turn)
    even = read(file(Image.fromarray(drawn)), resize=True)
    dimmed = read(file(Image.fromarray((drawn * light).astype(np.uint8))), resize=True)
    assert alike(dimmed, even) > 0.99
    assert 0.98 < dimmed.double().mean() / even.double().mean() < 1.02


def test_even_light_is_left_alone_whatever_is_on_the_page():
    page = torch.from_numpy(scan(36))[None]
    page[:, 100:600, 50:400] = 0
    assert torch.equal(_evenly_lit(page), page)


def test_light_that_falls_off_otherwise_is_told_of(file):
    light = 1 - np.abs(np.linspace(-0.6, 0.6, 1000))
    with pytest.raises(ExamplesError, match=r"image\.png is blank, or lit unevenly: its darkest stroke is 0 of 255"):
        read(file(Image.fromarray((scan(30) * light).astype(np.uint8))), resize=True)


@pytest.mark.parametrize("thin", [2, 20, 38, 50])
@pytest.mark.parametrize(("count", "side"), [(5, 1), (50, 2), (200, 2)])
def test_dust_is_no_ink(file, thin, count, side):
    dusty = scan(thin)
    for y, x in np.random.default_rng(0).integers(0, 1000 - side, (count, 2)):
        dusty[y : y + side, x : x + side] = 0
    clean = read(file(Image.fromarray(scan(thin))), resize=True)
    assert alike(read(file(Image.fromarray(dusty)), resize=True), clean) > 0.96
    with pytest.raises(ExamplesError, match=r"image\.png is blank"):
        read(file(Image.fromarray(np.where(dusty < scan(thin), dusty, 255).astype(np.uint8))), resize=True)


def test_dots_are_no_dust(file):
    dotted = Image.fromarray(scan(4))
    ImageDraw.Draw(dotted).ellipse((850, 100, 857, 107), fill=0)
    found = read(file(dotted), resize=True)
    assert int(found[0, 2:4, 23:25].sum()) > 255
    assert int(read(file(Image.fromarray(scan(4))), resize=True)[0, 2:4, 23:25].sum()) == 0


def test_one_dark_spot_does_not_outshine_pencil(file):
    spotted = scan(12, paper=240, ink=150)
    expected = read(file(Image.fromarray(spotted)), resize=True)
    spotted[30:38, 60:68] = 0
    assert alike(read(file(Image.fromarray(spotted)), resize=True), expected) > 0.95


def test_a_glint_does_not_make_paper_ink(file):
    glinting = scan(50, paper=150, ink=60)
    expected = read(file(Image.fromarray(glinting)), resize=True)
    glinting[0, :200] = 255
    assert torch.equal(read(file(Image.fromarray(glinting)), resize=True), expected)


def test_red_ink_is_none_in_red_light(file):
    drawn = np.random.default_rng(0).normal(235, 4, (1000, 1000, 3)).round().clip(0, 255).astype(np.uint8)
    drawn[..., 1:] = np.minimum(drawn[..., 1:], scan(4)[..., None])
    red, green, blue = read(file(Image.fromarray(drawn)), COLOUR._replace(ink=True), resize=True)
    assert red.max() == 0
    assert torch.equal(green, blue)
    assert green.max() > 250


def test_strokes_as_broad_as_those_learnt_from_are_left_as_they_are(file):
    drawn = scan(50, size=105)
    expected = area_means(torch.from_numpy(255 - drawn)[None], 28)
    assert torch.equal(read(file(Image.fromarray(drawn)), resize=True), expected)


@pytest.mark.parametrize("paper", [240, 255])
@pytest.mark.parametrize("size", [1000, 300])
@pytest.mark.parametrize("noise", [3, 5, 8, 12])
def test_the_noise_of_a_scanner_is_no_ink(file, noise, size, paper):
    page = np.random.default_rng(1).normal(paper, noise, (size, size)).round().clip(0, 255).astype(np.uint8)
    with pytest.raises(ExamplesError, match=r"is blank|is mostly ink: \d+ % of it; paper must be even"):
        read(file(Image.fromarray(page)), resize=True)


def test_strokes_that_the_noise_hides_are_refused(file):
    with pytest.raises(ExamplesError, match=r"is blank: at 28 x 28 pixels its darkest ink is \d+ of 255; cut"):
        read(file(Image.fromarray(scan(2, paper=200, ink=80, noise=20))), resize=True)


def test_light_ink_on_grey_paper_is_refused(file):
    with pytest.raises(ExamplesError, match="is mostly dark"):
        read(file(Image.fromarray(scan(30, paper=150, ink=255, noise=8))), resize=True)


def test_a_long_and_narrow_image_takes_no_more_memory_than_its_pixels(file):
    strip = np.full((40, 60_000), 255, np.uint8)  # the square about it would have 3,600 million
    strip[:, 20_000:40_000] = 0
    found = read(file(Image.fromarray(strip)), resize=True)
    rows, columns = (part.unique().tolist() for part in found[0].nonzero().T)
    assert set(rows) <= {13, 14}
    assert min(columns) in (9, 8)
    assert max(columns) in (18, 19)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "image.png")
    with pytest.raises(ExamplesError, match=r"image\.png is no file"):
        read(tmp_path / "image.png")


@pytest.mark.parametrize("least", [240, 255])
def test_a_blank_page_is_refused(file, least):
    page = np.full((28, 28), 255, np.uint8)
    page[3, 4] = least
    with pytest.raises(
        ExamplesError,
        match=rf"image\.png is blank, or lit unevenly: its darkest stroke is {least} of 255 and its paper",
    ):
        read(file(Image.fromarray(page)))


def test_a_blank_tensor_is_refused():
    drawings = torch.zeros(3, 1, 28, 28)
    drawings[[0, 2], :, 4:24, 13:15] = 1
    for blank in (drawings, (255 * drawings).byte()):
        with pytest.raises(ExamplesError, match="image 1 is blank: its darkest ink is 0 of 1"):
            pixels(blank, GREY._replace(ink=True), resize=False)
        assert pixels(blank, GREY._replace(ink=False), resize=False).shape == (3, 1, 28, 28)


def test_what_is_mostly_dark_is_no_ink(file):
    with pytest.raises(ExamplesError, match="is mostly dark: an image file must show dark ink on light paper"):
        read(file(ImageOps.invert(drawing())))
    with pytest.raises(
        ExamplesError, match="is blank, or lit unevenly: its darkest stroke is 20 of 255 and its paper 20"
    ):
        read(file(Image.new("L", (28, 28), 20)))
    with pytest.raises(ExamplesError, match="image 1 is mostly ink: in tensors ink is 1"):
        pixels(torch.stack([torch.zeros(1, 28, 28), torch.full((1, 28, 28), 0.9)]), GREY, resize=False)
    assert pixels(torch.full((1, 3, 28, 28), 0.9), COLOUR, resize=False).shape == (1, 3, 28, 28)


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
        ("deep.tiff", "deep.tiff is of mode I: save it with 8 bits a channel, grey or RGB"),
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
        (torch.eye(28, dtype=torch.uint8)[None, None], "images of uint8 go to 255, got 0 to 1: multiply them by 255"),
        (torch.zeros(0, 1, 28, 28), "there are no images"),
        ([], "there are no images"),
        ("image.png", "or a list of files; got 'image.png'"),
        (3, "or a list of files; got 3"),
        ([torch.zeros(1, 28, 28)], "a list of images must be of image files, got a Tensor in it"),
    ],
)
def test_images_that_are_refused(images, message):
    with pytest.raises(ExamplesError, match=message):
        pixels(counted(images), GREY, resize=False)


def test_tensors_are_not_resized():
    with pytest.raises(ExamplesError, match="resize is for image files"):
        pixels(torch.zeros(2, 1, 32, 32), GREY, resize=True)


@pytest.mark.parametrize(("side", "size"), [(5, 3), (3, 5), (4, 4), (35, 12)])
def test_the_mean_over_areas(side, size):
    images = torch.randint(256, (2, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    fine = images.double().repeat_interleave(size, 2).repeat_interleave(size, 3)
    expected = torch.nn.functional.avg_pool2d(fine, side)
    assert (area_means(images, size).double() - expected).abs().max() <= 0.5 + 1e-9
