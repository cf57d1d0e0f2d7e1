"""Which files of a user's folder are read, and what is text: the same for every reader."""

import pytest

from fastweights.commands.adapt import read_texts
from fastweights.errors import DataError
from fastweights.folders import decode_text, find_files
from fastweights.tasks import text
from fastweights.tasks.text import gutenberg


@pytest.fixture
def folder(tmp_path):
    files = {
        "notes.txt": "notes", "LETTER.TXT": "letter", "READ.MD": "read", "within/more.txt": "more", "code.py": "code",
        ".git/description.txt": "hidden folder", ".trash/old.md": "thrown away", ".draft.txt": "hidden file",
        "._notes.txt": "\0",
    }  # fmt: skip
    for name, contents in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(contents)
    return tmp_path


def test_hidden_files_are_left_out_and_endings_count_in_any_case(folder):
    names = ["LETTER.TXT", "notes.txt", "within/more.txt"]
    assert [str(path.relative_to(folder)) for path in find_files(folder, "**/*.txt")] == names
    assert [path.name for path in find_files(folder, "**/*.[mM][dD]")] == ["READ.MD"]
    hidden = folder / ".hidden"
    hidden.mkdir()
    (hidden / "seen.txt").write_text("a folder that was asked for may be hidden itself")
    assert len(find_files(hidden)) == 1


def test_adapt_reads_them_and_says_what_it_leaves_out(folder):
    words, described = read_texts(folder)
    assert words == "letter\n\nread\n\nnotes\n\nmore"
    assert described == f"{folder}, 4 files, 1 left out, such as code.py"
    assert read_texts(folder, ["py"]) == ("code", f"{folder}, 1 file, 4 left out, such as LETTER.TXT")
    with pytest.raises(DataError, match=r"files that end in \.log; others are there, such as .*LETTER\.TXT: --suffix"):
        read_texts(folder, [".log"])


def test_a_corpus_has_the_same_files(folder):
    for name in ("train", "valid", "test"):
        (folder / "corpus").mkdir(exist_ok=True)
        (folder / "corpus" / f"{name}.TXT").write_text("a b a b\n" * 3)
        (folder / "corpus" / f"._{name}.txt").write_bytes(b"\0\xff")
    assert len(text.load_folder(folder / "corpus", least_count=1).train) == 15


def test_books_are_found_in_the_same_way(tmp_path):
    for name in ("PG11.TXT", "12-0.txt", ".13.txt"):
        (tmp_path / name).write_text("a book")
    assert gutenberg._Folder(tmp_path).ids == [11, 12]


def test_what_is_no_text_is_refused_by_every_reader(tmp_path):
    for wrong in (b"caf\xe9 " * 9, "words in UTF-16".encode("utf-16-le")):
        (tmp_path / "train.txt").write_bytes(wrong)
        for name in ("valid.txt", "test.txt"):
            (tmp_path / name).write_text("a b\n")
        with pytest.raises(DataError, match=r"train\.txt.*UTF-"):
            decode_text(wrong, tmp_path / "train.txt")
        with pytest.raises(DataError, match=r"train\.txt.*UTF-"):
            read_texts(tmp_path)
        with pytest.raises(DataError, match=r"train\.txt.*UTF-"):
            text.load_folder(tmp_path)
