"""Downloads of data sets: what they put in place, and what they may never do."""

import gzip
import zipfile
from pathlib import Path

import pytest

from fastweights.cli import main
from fastweights.errors import DataError
from fastweights.tasks import datasets

from .archives import LABELS, MEMBERS, sha256, zip_bytes
from .small_sets import FREE_SET, PLAIN_SET, Server, names_in, put_plain

pytestmark = pytest.mark.usefixtures("places", "registry")


def test_a_good_download(tmp_path: Path, server: Server) -> None:
    folder = datasets.get(FREE_SET, tmp_path / "new" / "root", make_folder=True)
    assert folder == tmp_path / "new" / "root" / FREE_SET
    assert names_in(folder) == ["images.zip", "labels.gz"]
    assert gzip.decompress((folder / "labels.gz").read_bytes()) == LABELS
    assert all(result.ok and result.found == result.expected for result in datasets.check(FREE_SET, folder.parent))
    assert datasets.locate(FREE_SET, folder.parent) == folder
    assert datasets.get(FREE_SET, folder.parent) == folder
    assert server.asked == ["labels.gz", "images.zip"]


def test_the_command_checks_the_folder_that_it_is_given_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_plain(tmp_path / "variable")
    (tmp_path / "given").mkdir()
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "variable"))
    assert main(["data", "check", "--data-dir", str(tmp_path / "given")]) == 0
    assert capsys.readouterr().out.startswith(f"no data set is in {tmp_path / 'given'}; ")
    assert main(["data", "check", PLAIN_SET, "--data-dir", str(tmp_path / "given")]) == 1
    assert f"{tmp_path / 'given' / PLAIN_SET / 'train.txt'}: missing; expected" in capsys.readouterr().out
    assert main(["data", "check"]) == 0
    assert capsys.readouterr().out.count(": ok\n") == 2
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "typo"))
    assert main(["data", "list"]) == 1
    assert f"FASTWEIGHTS_DATA is {tmp_path / 'typo'}, and there is no such folder" in capsys.readouterr().err


def test_the_command_makes_the_folder_that_it_downloads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "new" / "root"
    assert main(["data", "get", FREE_SET, "--data-dir", str(root)]) == 0
    assert capsys.readouterr().out == f"{FREE_SET}: {root / FREE_SET}\n"
    assert names_in(root / FREE_SET) == ["images.zip", "labels.gz"]
    (root / FREE_SET / "labels.gz").write_bytes(b"damaged")
    assert main(["data", "get", FREE_SET, "--data-dir", str(root)]) == 0  # what is wrong is replaced
    assert all(result.ok for result in datasets.check(FREE_SET, root))


def test_downloads_go_to_the_variable_else_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert datasets.get(FREE_SET) == tmp_path / "cache" / "fastweights" / FREE_SET
    (tmp_path / "cache" / "fastweights" / FREE_SET / "labels.gz").unlink()
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path / "variable"))
    assert datasets.get(FREE_SET, make_folder=True) == tmp_path / "variable" / FREE_SET


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
    assert message.endswith(f"name the folder that holds {folder.name}/ with --data-dir or FASTWEIGHTS_DATA")
    assert "\n" not in message
    return message


def test_a_server_that_does_not_have_the_file(tmp_path: Path, server: Server) -> None:
    del server.files["images.zip"]
    with pytest.raises(DataError) as caught:
        datasets.get(FREE_SET, tmp_path)
    assert "404" in assert_download_failed(caught, server.url("images.zip"), tmp_path / FREE_SET)
    assert names_in(tmp_path / FREE_SET) == ["labels.gz"]


def test_a_connection_that_breaks_off(tmp_path: Path, server: Server) -> None:
    server.cut_short = True
    with pytest.raises(DataError) as caught:
        datasets.get(FREE_SET, tmp_path)
    assert_download_failed(caught, server.url("labels.gz"), tmp_path / FREE_SET)
    assert names_in(tmp_path / FREE_SET) == []


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


def test_a_download_with_an_evil_member_is_refused(tmp_path: Path, server: Server) -> None:
    server.files["images.zip"] = zip_bytes({**MEMBERS, "../evil": b"x"})
    with pytest.raises(DataError, match=r"images\.zip refused: refused: the member '\.\./evil' would lie outside"):
        datasets.get(FREE_SET, tmp_path)
    assert names_in(tmp_path / FREE_SET) == ["labels.gz"]
    assert names_in(tmp_path) == [FREE_SET]
