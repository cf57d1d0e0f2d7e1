"""The registry of data sets: where they are found, what is checked, and what a download may never do."""

import dataclasses
import gc
import gzip
import hashlib
import http.server
import io
import lzma
import os
import stat
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from fastweights.cli import main
from fastweights.errors import DataError
from fastweights.tasks import _archives, datasets

LABELS = b"0123456789" * 50
MEMBERS = {"images/a.txt": b"first", "images/b.txt": b"second"}
PLAIN_SET, FREE_SET = "tiny-text", "tiny-digits"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def members_sha256(members: dict[str, bytes]) -> str:
    """The digest of an archive, written out from its definition."""
    return sha256("".join(f"{name}\0{sha256(data)}\n" for name, data in sorted(members.items())).encode())


def zip_bytes(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def tar_xz_bytes(members: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda member: None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            change(member)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def png_bytes(image: Image.Image, level: int = 9) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=level)
    return stream.getvalue()


def read(path: Path, data: bytes, *, pixels: bool = False) -> _archives.Content:
    path.write_bytes(data)
    return _archives.read_content(path, path.name, pixels=pixels)


class Server:
    """Files served on the loopback interface; a name without a file is answered by 404."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut_short = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                outer.asked.append(name)
                if name not in outer.files:
                    self.send_error(404)
                    return
                data = outer.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if outer.cut_short else data)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No test but those of the real files sees the user's own data, or a proxy."""
    if request.node.get_closest_marker("data") is None:
        monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
        monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
        monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Two small sets: one that cannot be downloaded, one that the server has."""
    plain = datasets.DataSet(
        PLAIN_SET,
        "Tiny text",
        "no open licence",
        "https://example.org/text",
        "one word a line",
        (
            datasets.DataFile("train.txt", 5, sha256(b"a\nb\nc")),
            datasets.DataFile("test.txt", 1, sha256(b"d")),
        ),
    )
    free = datasets.DataSet(
        FREE_SET,
        "Tiny digits",
        "free to use",
        "https://example.org/digits",
        "labels and images",
        (
            datasets.DataFile("labels.gz", len(LABELS), sha256(LABELS), server.url("labels.gz")),
            datasets.DataFile("images.zip", 2, members_sha256(MEMBERS), server.url("images.zip")),
        ),
    )
    monkeypatch.setitem(datasets.DATASETS, PLAIN_SET, plain)
    monkeypatch.setitem(datasets.DATASETS, FREE_SET, free)
    server.files.update({"labels.gz": gzip.compress(LABELS), "images.zip": zip_bytes(MEMBERS)})


def put_plain(root: Path, *, names: tuple[str, ...] = ("train.txt", "test.txt")) -> Path:
    folder = root / PLAIN_SET
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes({"train.txt": b"a\nb\nc", "test.txt": b"d"}[name])
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argument, variable, cache = tmp_path / "argument", tmp_path / "variable", tmp_path / "cache" / "fastweights"
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(variable))
    argument.mkdir()
    in_cache = put_plain(cache)
    assert datasets.locate(PLAIN_SET, argument) == in_cache
    in_variable = put_plain(variable)
    assert datasets.locate(PLAIN_SET, argument) == in_variable
    in_argument = put_plain(argument)
    assert datasets.locate(PLAIN_SET, argument) == in_argument
    assert datasets.locate(PLAIN_SET, str(argument)) == in_argument
    assert datasets.locate(PLAIN_SET) == in_variable
    monkeypatch.setenv("FASTWEIGHTS_DATA", "")
    assert datasets.locate(PLAIN_SET) == in_cache


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("FASTWEIGHTS_DATA", "~/data")
    folder = put_plain(tmp_path / "data")
    assert datasets.locate(PLAIN_SET) == folder


@pytest.mark.parametrize("call", [datasets.locate, datasets.get, datasets.check, lambda _, root: datasets.status(root)])
@pytest.mark.parametrize("mistyped", ["nowhere", "file"])
def test_a_folder_that_is_not_there_is_refused_first(
    call: Callable[[str, Path], object], mistyped: str, tmp_path: Path, server: Server
) -> None:
    """Also where another place has the set, or a download would have made the folder."""
    datasets.get(FREE_SET)
    server.asked.clear()
    (tmp_path / "file").write_bytes(b"")
    before = names_in(tmp_path)
    with pytest.raises(DataError, match=f"^there is no folder {tmp_path / mistyped} to look for data sets in: "):
        call(FREE_SET, tmp_path / mistyped)
    assert names_in(tmp_path) == before
    assert server.asked == []


def test_a_half_present_set_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_plain(tmp_path / "half", names=("train.txt",))
    whole = put_plain(tmp_path / "whole")
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "whole"))
    assert datasets.locate(PLAIN_SET, tmp_path / "half") == whole


def test_a_half_present_set_alone_is_missing_what_it_lacks(tmp_path: Path) -> None:
    folder = put_plain(tmp_path, names=("train.txt",))
    with pytest.raises(DataError) as caught:
        datasets.locate(PLAIN_SET, tmp_path)
    assert f"put test.txt into {folder} " in str(caught.value)
    results = datasets.check(PLAIN_SET, tmp_path)
    assert [(result.path.name, result.ok) for result in results] == [("train.txt", True), ("test.txt", False)]
    assert results[1].found == "missing"


@pytest.mark.parametrize("find", [datasets.locate, datasets.get])
def test_missing_says_all_that_is_needed(find: Callable[[str, Path], Path], tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find(PLAIN_SET, tmp_path)
    message = str(caught.value)
    assert message == (
        "data set tiny-text (Tiny text; licence: no open licence) is missing: get it from https://example.org/text and "
        f"put train.txt, test.txt into {tmp_path / PLAIN_SET} (one word a line); another place can be named with "
        "--data-dir or FASTWEIGHTS_DATA"
    )
    assert not (tmp_path / PLAIN_SET).exists()


def test_missing_names_the_command_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing: run `fastweights data get tiny-digits`, or get it from https://"):
        datasets.locate(FREE_SET, tmp_path)


@pytest.mark.parametrize("call", [datasets.locate, datasets.get, datasets.check])
def test_an_unknown_name_gets_the_close_ones_and_the_list(call: Callable[[str], object]) -> None:
    with pytest.raises(DataError) as caught:
        call("wikitext2")
    message = str(caught.value)
    assert message.startswith("unknown data set 'wikitext2': did you mean wikitext-2? The data sets are fer2013, ")
    assert message.endswith(", wikitext-2")
    with pytest.raises(DataError, match=r"^unknown data set 'zzz': The data sets are fer2013"):
        call("zzz")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="no folder is closed to this user")
def test_a_folder_that_may_not_be_entered_has_no_data(tmp_path: Path) -> None:
    put_plain(tmp_path).chmod(0)
    try:
        with pytest.raises(DataError, match="is missing"):
            datasets.locate(PLAIN_SET, tmp_path)
    finally:
        (tmp_path / PLAIN_SET).chmod(stat.S_IRWXU)


def test_status_has_a_row_for_every_set(tmp_path: Path) -> None:
    folder = put_plain(tmp_path)
    rows = {row.name: row for row in datasets.status(tmp_path)}
    assert set(rows) == set(datasets.DATASETS)
    assert rows[PLAIN_SET] == datasets.DataStatus(PLAIN_SET, "Tiny text", "no open licence", folder, False)
    assert rows["mnist"] == datasets.DataStatus("mnist", "MNIST handwritten digits", "free to use", None, True)


def test_the_registry_holds_the_eight_sets() -> None:
    real = {name: each for name, each in datasets.DATASETS.items() if name not in (PLAIN_SET, FREE_SET)}
    names = ["fer2013", "gutenberg", "mini-imagenet", "mnist", "omniglot", "ptb", "reuters21578", "wikitext-2"]
    assert sorted(real) == names
    assert sorted(name for name, each in real.items() if each.downloadable) == ["mnist", "omniglot"]
    for name, each in real.items():
        assert each.name == name
        for file in each.files:
            assert len(file.sha256) == 64
            assert file.url is None or (file.url.startswith("https://") and file.url.endswith("/" + file.name))


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, fastweights.tasks.datasets; print({'torch', 'pooch', 'PIL', 'numpy'} & set(sys.modules))"
    source = Path(_archives.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "set()"


def test_a_good_download(tmp_path: Path, server: Server) -> None:
    folder = datasets.get(FREE_SET, tmp_path / "new" / "root", make_folder=True)
    assert folder == tmp_path / "new" / "root" / FREE_SET
    assert names_in(folder) == ["images.zip", "labels.gz"]
    assert gzip.decompress((folder / "labels.gz").read_bytes()) == LABELS
    assert all(result.ok and result.found == result.expected for result in datasets.check(FREE_SET, folder.parent))
    assert datasets.locate(FREE_SET, folder.parent) == folder
    assert datasets.get(FREE_SET, folder.parent) == folder
    assert server.asked == ["labels.gz", "images.zip"]


def test_the_command_makes_the_folder_that_it_downloads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "new" / "root"
    assert main(["data", "get", FREE_SET, "--data-dir", str(root)]) == 0
    assert capsys.readouterr().out == f"{FREE_SET}: {root / FREE_SET}\n"
    assert names_in(root / FREE_SET) == ["images.zip", "labels.gz"]


def test_downloads_go_to_the_variable_else_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert datasets.get(FREE_SET) == tmp_path / "cache" / "fastweights" / FREE_SET
    (tmp_path / "cache" / "fastweights" / FREE_SET / "labels.gz").unlink()
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "variable"))
    assert datasets.get(FREE_SET) == tmp_path / "variable" / FREE_SET


def test_only_what_is_missing_is_downloaded(tmp_path: Path, server: Server) -> None:
    folder = datasets.get(FREE_SET, tmp_path)
    (folder / "images.zip").unlink()
    server.asked.clear()
    datasets.get(FREE_SET, tmp_path)
    assert server.asked == ["images.zip"]


def test_another_packing_of_the_same_content_is_good(tmp_path: Path, server: Server) -> None:
    server.files["labels.gz"] = gzip.compress(LABELS[:100], 1) + gzip.compress(LABELS[100:], 9)
    server.files["images.zip"] = zip_bytes(dict(reversed(MEMBERS.items())), zipfile.ZIP_STORED)
    assert names_in(datasets.get(FREE_SET, tmp_path)) == ["images.zip", "labels.gz"]


def test_wrong_content_is_refused(tmp_path: Path, server: Server) -> None:
    server.files["labels.gz"] = gzip.compress(b"something else")
    with pytest.raises(DataError) as caught:
        datasets.get(FREE_SET, tmp_path)
    assert str(caught.value) == (
        f"download of {server.url('labels.gz')} refused: wrong content: 14 bytes, sha256 {sha256(b'something else')}; "
        f"expected 500 bytes, sha256 {sha256(LABELS)}"
    )
    assert names_in(tmp_path / FREE_SET) == []


def test_a_bad_download_leaves_the_good_files_alone(tmp_path: Path, server: Server) -> None:
    folder = datasets.get(FREE_SET, tmp_path)
    (folder / "images.zip").unlink()
    before = (folder / "labels.gz").read_bytes()
    server.files = {"labels.gz": b"worse", "images.zip": b"worse"}
    with pytest.raises(DataError, match=r"images\.zip refused: damaged archive: File is not a zip file; expected 2 "):
        datasets.get(FREE_SET, tmp_path, verify=True)
    assert names_in(folder) == ["labels.gz"]
    assert (folder / "labels.gz").read_bytes() == before


def test_verify_replaces_what_is_wrong_and_nothing_else(tmp_path: Path, server: Server) -> None:
    folder = datasets.get(FREE_SET, tmp_path)
    (folder / "labels.gz").write_bytes(b"damaged")
    server.asked.clear()
    assert datasets.get(FREE_SET, tmp_path) == folder
    assert server.asked == []
    datasets.get(FREE_SET, tmp_path, verify=True)
    assert server.asked == ["labels.gz"]
    assert all(result.ok for result in datasets.check(FREE_SET, tmp_path))


def test_a_wrong_file_stays_while_no_better_one_comes(tmp_path: Path, server: Server) -> None:
    folder = datasets.get(FREE_SET, tmp_path)
    (folder / "labels.gz").write_bytes(b"damaged")
    server.files["labels.gz"] = b"worse"
    with pytest.raises(DataError, match="refused: damaged archive: Not a gzipped file"):
        datasets.get(FREE_SET, tmp_path, verify=True)
    assert (folder / "labels.gz").read_bytes() == b"damaged"
    assert names_in(folder) == ["images.zip", "labels.gz"]


def test_verify_of_what_cannot_be_downloaded_says_what_is_wrong(tmp_path: Path) -> None:
    folder = put_plain(tmp_path)
    assert datasets.get(PLAIN_SET, tmp_path, verify=True) == folder
    (folder / "test.txt").write_bytes(b"e")
    with pytest.raises(DataError) as caught:
        datasets.get(PLAIN_SET, tmp_path, verify=True)
    assert str(caught.value).startswith(f"{folder / 'test.txt'}: wrong content: 1 bytes, sha256 {sha256(b'e')}; expect")


def assert_download_failed(caught: pytest.ExceptionInfo[DataError], url: str, folder: Path) -> str:
    message = str(caught.value)
    assert message.startswith(f"download of {url} into {folder} failed: ")
    assert "\n" not in message
    return message


def test_a_server_that_does_not_have_the_file(tmp_path: Path, server: Server) -> None:
    del server.files["images.zip"]
    with pytest.raises(DataError) as caught:
        datasets.get(FREE_SET, tmp_path)
    assert "404" in assert_download_failed(caught, server.url("images.zip"), tmp_path / FREE_SET)
    assert names_in(tmp_path / FREE_SET) == ["labels.gz"]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_connection_that_breaks_off(tmp_path: Path, server: Server) -> None:
    server.cut_short = True
    with pytest.raises(DataError) as caught:
        datasets.get(FREE_SET, tmp_path)
    assert_download_failed(caught, server.url("labels.gz"), tmp_path / FREE_SET)
    assert names_in(tmp_path / FREE_SET) == []
    # The downloader leaves the broken socket to the collector, which must not find it in another test.
    del caught
    gc.collect()


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object, url: str, output_file: Path, pooch: None) -> None:
        output_file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        datasets.get(FREE_SET, tmp_path)
    assert names_in(tmp_path / FREE_SET) == []


def test_a_place_that_cannot_be_written(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        datasets.get(FREE_SET, tmp_path / "file", make_folder=True)
    assert_download_failed(caught, server.url("labels.gz"), tmp_path / "file" / FREE_SET)
    assert server.asked == []


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
    monkeypatch.setitem(datasets.DATASETS, "one", datasets.DataSet("one", "One", "none", "", "", (file,)))
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


def test_a_download_with_an_evil_member_is_refused(tmp_path: Path, server: Server) -> None:
    server.files["images.zip"] = zip_bytes({**MEMBERS, "../evil": b"x"})
    with pytest.raises(DataError, match=r"images\.zip refused: refused: the member '\.\./evil' would lie outside"):
        datasets.get(FREE_SET, tmp_path)
    assert names_in(tmp_path / FREE_SET) == ["labels.gz"]
    assert names_in(tmp_path) == [FREE_SET]


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


def test_records_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        datasets.DATASETS["mnist"].name = "other"  # type: ignore[misc]


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name in datasets.DATASETS if name not in (PLAIN_SET, FREE_SET)])
def test_the_real_files_have_the_right_content(name: str) -> None:
    root = os.environ.get("FASTWEIGHTS_DATA")
    if not root:
        pytest.skip("FASTWEIGHTS_DATA is not set")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"FASTWEIGHTS_DATA has no {name}")
    assert [(result.path.name, result.found) for result in datasets.check(name, root)] == [
        (file.name, file.expected) for file in datasets.DATASETS[name].files
    ]
