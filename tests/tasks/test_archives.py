"""What is read out of a data file: its content's digest, and what no archive may do."""

import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from fastweights.errors import DataError
from fastweights.tasks import _archives, datasets

from .archives import LABELS, MEMBERS, members_sha256, png_bytes, sha256, tar_xz_bytes, zip_bytes


def read(path: Path, data: bytes, *, pixels: bool = False) -> _archives.Content:
    path.write_bytes(data)
    return _archives.read_content(path, path.name, pixels=pixels)


def test_digests_follow_their_definition(tmp_path: Path) -> None:
    stream = _archives.Content(sha256(LABELS), len(LABELS))
    assert read(tmp_path / "a.txt", LABELS) == stream
    assert read(tmp_path / "a.gz", gzip.compress(LABELS)) == stream
    assert read(tmp_path / "a.xz", lzma.compress(LABELS)) == stream
    archive = _archives.Content(members_sha256(MEMBERS), 2)
    assert read(tmp_path / "a.zip", zip_bytes(MEMBERS)) == archive
    assert read(tmp_path / "a.tar.xz", tar_xz_bytes(MEMBERS)) == archive


def test_folders_and_hidden_members_do_not_count(tmp_path: Path) -> None:
    clutter = {"images/": b"", "images/.DS_Store": b"x", "__MACOSX/images/._a.txt": b"x"}
    assert read(tmp_path / "a.zip", zip_bytes({**clutter, **MEMBERS})) == (members_sha256(MEMBERS), 2)
    dotted = {f"./{name}": data for name, data in MEMBERS.items()}
    assert read(tmp_path / "a.tar.xz", tar_xz_bytes({"images/.hidden": b"x", **dotted})) == (members_sha256(MEMBERS), 2)


def test_pixels_count_and_not_their_compression(tmp_path: Path) -> None:
    image = Image.new("1", (9, 5), 1)
    image.putpixel((3, 2), 0)
    content = read(tmp_path / "a.zip", zip_bytes({"a.png": png_bytes(image, 9)}), pixels=True)
    assert content == (members_sha256({"a.png": b"9 5\n" + image.convert("L").tobytes()}), 1)
    repacked = zip_bytes({"a.png": png_bytes(image.convert("L"), 0)})
    assert read(tmp_path / "b.zip", repacked, pixels=True) == content
    assert read(tmp_path / "b.zip", repacked) != content
    image.putpixel((3, 2), 1)
    assert read(tmp_path / "c.zip", zip_bytes({"a.png": png_bytes(image)}), pixels=True) != content


def test_images_are_bounded_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"^damaged archive: the image 'a\.png': cannot identify image file"):
        read(tmp_path / "a.zip", zip_bytes({"a.png": b"no image"}), pixels=True)
    data = png_bytes(Image.new("1", (40, 40)))
    with pytest.raises(DataError, match=r"^damaged archive: the image 'a\.png'"):
        read(tmp_path / "a.zip", zip_bytes({"a.png": data[:45]}), pixels=True)
    monkeypatch.setattr(_archives, "MAX_PIXELS", 1000)
    with pytest.raises(DataError, match=r"^refused: the image 'a\.png' has 40 x 40 pixels$"):
        read(tmp_path / "a.zip", zip_bytes({"a.png": data}), pixels=True)


@pytest.mark.parametrize("name", ["a.gz", "a.xz", "a.zip", "a.tar.xz"])
def test_a_damaged_archive_is_said_to_be_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        "a.gz": gzip.compress(LABELS),
        "a.xz": lzma.compress(LABELS),
        "a.zip": zip_bytes(MEMBERS),
        "a.tar.xz": tar_xz_bytes(MEMBERS),
    }[name]
    file = datasets.DataFile(name, 1, "0" * 64)
    monkeypatch.setitem(datasets.DATASETS, "one", datasets.DataSet("one", "One", "none", "", "", (file,), 1))
    (tmp_path / "one").mkdir()
    path = tmp_path / "one" / name
    flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0xFF]) + data[len(data) // 2 + 1 :]
    for damaged in (data[:-20], data[: len(data) // 2], data[:3], b"", b"\0" * 700, flipped):
        path.write_bytes(damaged)
        [result] = datasets.check("one", tmp_path)
        assert not result.ok
        assert result.path == path
        assert result.found.startswith(("damaged archive: ", "wrong content: "))
        assert "\n" not in result.found
    path.write_bytes(data[: len(data) // 2])
    [result] = datasets.check("one", tmp_path)
    assert result.found.startswith("damaged archive: ")


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^damaged archive: Compressed file ended before the end-of-stream marker"):
        read(tmp_path / "a.gz", gzip.compress(LABELS)[:-9])


@pytest.mark.parametrize(
    "name", ["../evil", "images/../../evil", "/etc/evil", "..\\evil", "C:\\evil", "c:evil", "//host/share/evil"]
)
def test_members_that_would_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    message = f"refused: the member {name!r} would lie outside the folder it is unpacked to"
    for path, data in (("a.zip", zip_bytes({name: b""})), ("a.tar.xz", tar_xz_bytes({name: b""}))):
        with pytest.raises(DataError) as caught:
            read(tmp_path / path, data)
        assert str(caught.value) == message


def test_links_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("images/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match=r"^refused: the member 'images/link' is a link or a device, not a file$"):
        read(tmp_path / "a.zip", stream.getvalue())
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):

        def change(member: tarfile.TarInfo, kind: bytes = kind) -> None:
            member.type = kind

        with pytest.raises(DataError, match=r"^refused: the member 'images/link' is a link or a device, not a file$"):
            read(tmp_path / "a.tar.xz", tar_xz_bytes({"images/link": b""}, change))


def test_a_bomb_is_stopped_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_archives, "MAX_BYTES", 2_000_000)
    zeros, halves = bytes(2_000_001), {"a": bytes(1_200_000), "b": bytes(1_200_000)}
    bombs = {
        "a.gz": gzip.compress(zeros),
        "a.xz": lzma.compress(zeros),
        "a.zip": zip_bytes(halves),
        "a.tar.xz": tar_xz_bytes(halves),
        "b.zip": zip_bytes({"a": zeros}),
    }
    for name, data in bombs.items():
        assert len(data) < 10_000
        with pytest.raises(DataError, match=r"^refused: it unpacks to more than 2,000,000 bytes$"):
            read(tmp_path / name, data)
    assert read(tmp_path / "c.gz", gzip.compress(zeros[:-1])).size == 2_000_000


def test_a_tar_header_of_any_size_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_archives, "MAX_BYTES", 100_000)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"comment": "x" * 300_000}
        archive.addfile(member)
    with pytest.raises(DataError, match=r"^refused: it unpacks to more than 100,000 bytes$"):
        read(tmp_path / "a.tar.xz", lzma.compress(stream.getvalue()))


@pytest.mark.parametrize("name", ["a.zip", "a.tar.xz"])
def test_the_number_of_members_is_bounded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = zip_bytes if name == "a.zip" else tar_xz_bytes
    monkeypatch.setattr(_archives, "MAX_MEMBERS", 20)
    assert read(tmp_path / name, pack({str(number): b"" for number in range(20)})).size == 20
    with pytest.raises(DataError, match=r"^refused: it has more than 20 members$"):
        read(tmp_path / name, pack({str(number): b"" for number in range(21)}))
