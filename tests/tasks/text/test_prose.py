"""Books and news: what their sentences and words are, which split they are in, and what is refused."""

import gzip
import importlib.metadata
import io
import json
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from fastweights.errors import DataError
from fastweights.tasks import text
from fastweights.tasks.text import Corpus, dated_news, gutenberg

pytestmark = pytest.mark.usefixtures("places")

BOOK = "Mr. Smith didn\u2019t go. \u201cWhy?\u201d asked\nMr. Jones, and\r\nthey go on. On they go. "
SENTENCES = ["mr. smith did n't go .", "`` why ? ''", "asked mr. jones , and they go on .", "on they go ."]


def sentences(corpus: Corpus, split: str) -> list[str]:
    words = " ".join(corpus.vocabulary.decode(getattr(corpus, split)))
    return [sentence.strip() for sentence in words.split("<eos>")][:-1]


def put_books(root: Path, books: dict[int, str]) -> Path:
    """Write the archive and the index as the data set has them."""
    folder = root / "gutenberg"
    folder.mkdir()
    with lzma.open(folder / "gutenberg_en.tar.xz", "wb") as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for book, words in books.items():
            member = tarfile.TarInfo(f"pg{book}.txt")
            member.size = len(words.encode())
            archive.addfile(member, io.BytesIO(words.encode()))
    lines = ["id\ttitle", *(f"{book}\tA book" for book in sorted(books, reverse=True))]
    (folder / "index.tsv").write_text("\n".join(lines), encoding="utf-8")
    return root


class TestGutenberg:
    """Books."""

    def test_prose_becomes_lower_case_words_a_sentence_a_line(self, tmp_path: Path):
        root = put_books(tmp_path, {1: BOOK * 20, 2: BOOK, 3: BOOK})
        corpus = gutenberg.load(root, splits={"train": [1], "validation": [2], "test": [3]})
        assert sentences(corpus, "train") == SENTENCES * 20
        assert sentences(corpus, "test") == SENTENCES

    def test_books_can_be_read_as_they_are(self, tmp_path: Path):
        root = put_books(tmp_path, {1: BOOK, 2: "Two.", 3: "Three."})
        assert gutenberg.read_books([3, 1], root) == ["Three.", BOOK]
        with pytest.raises(DataError, match=r"it has no book 4; `index\.tsv` beside it lists those that there are"):
            gutenberg.read_books([1, 4], root)

    def test_of_twenty_books_the_tenth_and_the_last_are_held_out(self, tmp_path: Path):
        root = put_books(tmp_path, {book: f"w{book}." for book in range(1, 46)})
        corpus = text.load("gutenberg", root)
        assert len(corpus.train) == 3 * 41
        whole = gutenberg.load(root, least_count=1)
        assert {"w10", "w30", "w20", "w40"}.isdisjoint(whole.vocabulary.words)
        assert {f"w{book}" for book in range(1, 46) if book % 10} <= set(whole.vocabulary.words)
        assert sentences(corpus, "validation") == sentences(corpus, "test") == ["<unk> ."] * 2

    def test_words_seen_five_times_are_kept(self, tmp_path: Path):
        root = put_books(tmp_path, {1: "four " * 4 + "five " * 5, 2: "four six", 3: "five"})
        corpus = gutenberg.load(root, splits={"train": [1], "validation": [2], "test": [3]})
        assert corpus.vocabulary.words == ["five", "<unk>", "<eos>"]
        assert corpus.vocabulary.counts.tolist() == [5, 4, 1]
        assert sentences(corpus, "validation") == ["<unk> <unk>"]

    def test_what_is_too_long_for_a_book_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(gutenberg, "_LONGEST", 30)
        for book in range(3):
            (tmp_path / f"{book}.txt").write_text("word " * (book + 5))
        with pytest.raises(DataError, match=r"2\.txt: more than 30 bytes; expected a book"):
            gutenberg.load(folder=tmp_path, splits={"train": [0], "validation": [1], "test": [2]})

    def test_a_second_load_reads_no_book(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        root = put_books(tmp_path, {book: "a b a b." for book in range(20)})
        first = gutenberg.load(root)
        monkeypatch.setattr(gutenberg, "read_members", None)
        assert torch.equal(gutenberg.load(root).train, first.train)

    def test_a_folder_of_books_is_split_as_in_the_paper(self, tmp_path: Path):
        head, tail = (
            "*** START OF THIS PROJECT GUTENBERG EBOOK OZ ***\n",
            "\n*** END OF THIS PROJECT GUTENBERG EBOOK OZ ***",
        )
        for book in gutenberg.PAPER_VALIDATION:
            (tmp_path / f"{book}.txt").write_text("v")
        for book in gutenberg.PAPER_TEST:
            (tmp_path / f"pg{book}.txt").write_text("t")
        (tmp_path / "10000-0.txt").write_bytes(
            b"Licence\n" + head.encode() + b"a caf\xe9 a a a a" + tail.encode() + b"\nLicence"
        )
        (tmp_path / "10000-8.txt").write_text("an older file of the same book")
        (tmp_path / "notes.txt").write_text("no book")
        corpus = gutenberg.load(folder=tmp_path, least_count=1)
        assert sentences(corpus, "train") == ["a caf a a a a"]
        assert (len(corpus.validation), len(corpus.test)) == (24, 26)

    def test_books_that_are_not_there_are_named(self, tmp_path: Path):
        (tmp_path / "11.txt").write_text("a")
        with pytest.raises(DataError, match="25 books of the splits are not among its 1, such as 126, 1064, 1202"):
            gutenberg.load(folder=tmp_path)
        (tmp_path / "none").mkdir()
        with pytest.raises(DataError, match=r"there are no books in it; expected pg11\.txt"):
            gutenberg.load(folder=tmp_path / "none")
        with pytest.raises(DataError, match=r"there is no folder .*nowhere; expected one with books"):
            gutenberg.load(folder=tmp_path / "nowhere")
        with pytest.raises(ValueError, match="a book must be in one of the splits alone"):
            gutenberg.load(folder=tmp_path, splits={"train": [11], "validation": [11], "test": [12]})
        with pytest.raises(ValueError, match="splits must be train, validation and test, got train"):
            gutenberg.load(folder=tmp_path, splits={"train": [11]})
        with pytest.raises(ValueError, match="least_count must be an integer of at least 1, got 0"):
            gutenberg.load(folder=tmp_path, least_count=0)

    def test_an_archive_without_a_book_of_its_index_leaves_nothing(self, tmp_path: Path):
        root = put_books(tmp_path, {1: "a", 2: "b", 3: "c"})
        with (root / "gutenberg" / "index.tsv").open("a") as file:
            file.write("\n4\tA book")
        with pytest.raises(DataError, match="it has no book 4, which the index names"):
            gutenberg.load(root, splits={"train": [1, 4], "validation": [2], "test": [3]})
        assert not list((tmp_path / "cache" / "fastweights" / "text").iterdir())

    def test_without_nltk_the_extra_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def find_nothing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", find_nothing)
        with pytest.raises(DataError, match=r"by NLTK, which is not installed: `pip install '\.\[text\]'`"):
            gutenberg.load(tmp_path)


def test_a_folder_of_prose_is_parted_like_books(tmp_path: Path):
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.txt").write_text(BOOK * 20, encoding="utf-8")
    corpus = text.load_folder(tmp_path, prose=True)
    assert sentences(corpus, "train") == sentences(corpus, "test") == SENTENCES * 20


def put_reuters(root: Path, articles: Sequence[Mapping[str, object]]) -> Path:
    folder = root / "reuters21578"
    folder.mkdir()
    lines = "".join(f"{json.dumps(article)}\n" for article in articles)
    (folder / "reuters21578.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    return root


def article(date: str, title: str, body: str = "") -> dict[str, str]:
    return {"date": f"{date}T12:00:00", "title": title, "body": body}


class TestReuters:
    """News of 1987."""

    def test_articles_are_in_the_order_of_their_dates(self, tmp_path: Path):
        root = put_reuters(
            tmp_path,
            [
                article("1987-10-19", "CRASH"),
                article("1987-04-29", "LAST", "The end.\n Reuter"),
                article("1987-06-01", "JUNE"),
                article("1987-02-26", "FIRST", "The bank\nrose. It fell."),
                article("1987-03-01", "SECOND"),
                article("1987-10-20", "AFTER"),
            ],
        )
        corpus = dated_news.load_reuters(root, least_count=1)
        assert sentences(corpus, "train") == [
            *("first", "the bank rose .", "it fell .", "second", "last", "the end .", "reuter"),
        ]
        assert [len(corpus.validation), len(corpus.test)] == [2, 4]
        assert text.load("reuters21578", root).vocabulary.words == ["<unk>", "<eos>", "."]

    def test_articles_have_their_topics_and_the_collections_own_split(self, tmp_path: Path):
        about = {**article("1987-02-26", "FIRST", "The bank."), "topics": ["cocoa", "tea"], "split": "TRAIN"}
        plain = article("1987-03-01", "SECOND")
        articles = list(dated_news.read_reuters(put_reuters(tmp_path, [about, plain])))
        assert [(one.title, one.topics, one.split) for one in articles] == [
            ("FIRST", ("cocoa", "tea"), "TRAIN"),
            ("SECOND", (), ""),
        ]

    @pytest.mark.parametrize("line", ["{", '["a"]', '{"date": "1987-02-26"}'])
    def test_a_damaged_line_is_named(self, tmp_path: Path, line: str):
        root = put_reuters(tmp_path, [article("1987-02-26", "FIRST")])
        path = root / "reuters21578" / "reuters21578.jsonl.xz"
        path.write_bytes(lzma.compress(lzma.decompress(path.read_bytes()) + line.encode()))
        with pytest.raises(DataError, match=r"jsonl\.xz, line 2: .*; expected an article with date, title and body"):
            dated_news.load_reuters(root)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match=r"jsonl\.xz: cannot be read: Compressed file ended"):
            dated_news.load_reuters(root)


def gigaword(*paragraphs: str, headline: str = "A HEADLINE") -> bytes:
    body = "".join(f"<P>\n{paragraph}\n</P>\n" for paragraph in paragraphs)
    return gzip.compress(
        f'<DOC id="AFP_ENG_20000101.0001" type="story" >\n<HEADLINE>\n{headline}\n</HEADLINE>\n'
        f"<TEXT>\n{body}</TEXT>\n</DOC>\n".encode()
    )


class TestGigaWord:
    """News of a decade, where a user has it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name, words in (
            ("afp/afp_eng_199912", "too old"),
            ("xin/xin_eng_200001", "first x"),
            ("afp/afp_eng_200002", "second &AMP; &lt;b&gt;"),
            ("afp/afp_eng_200912", "a late month"),
            ("xin/xin_eng_201012", "the test. It is later."),
        ):
            path = tmp_path / "gigaword" / f"{name}.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gigaword(words))
        return tmp_path / "gigaword"

    def test_years_are_splits_and_paragraphs_end_sentences(self, folder: Path):
        corpus = dated_news.load_gigaword(folder)
        assert sentences(corpus, "train") == ["a headline", "first x", "a headline", "second & < b >"]
        assert sentences(corpus, "validation") == ["a headline", "a <unk> <unk>"]
        assert sentences(corpus, "test") == ["a headline", "<unk> <unk> <unk>", "<unk> <unk> <unk> <unk>"]

    def test_the_most_frequent_words_are_the_vocabulary(self, folder: Path):
        assert dated_news.load_gigaword(folder, greatest_size=4).vocabulary.words == ["<unk>", "<eos>", "a", "headline"]

    def test_years_that_are_missing_and_damage_are_named(self, folder: Path):
        (folder / "afp" / "afp_eng_200912.gz").rename(folder / "afp" / "afp_eng_200911.gz")
        with pytest.raises(DataError, match=r"no files of 200912 to 200912, .* for validation; .* afp_eng_200912\.gz"):
            dated_news.load_gigaword(folder)
        with pytest.raises(DataError, match=r"there is no folder .*nowhere; expected one with GigaWord's files"):
            dated_news.load_gigaword(folder / "nowhere")
        path = folder / "afp" / "afp_eng_200912.gz"
        path.write_bytes(gigaword("a" * 2**20))
        with pytest.raises(DataError, match=r"200912\.gz: a paragraph of more than 1,048,576 characters"):
            dated_news.load_gigaword(folder)
        path.write_bytes(gigaword("a b c")[:-12])
        with pytest.raises(DataError, match=r"200912\.gz: cannot be read: Compressed file ended"):
            dated_news.load_gigaword(folder)
        path.write_bytes(gzip.compress(b"<P>\na caf\xe9\n</P>"))
        with pytest.raises(DataError, match=r"200912\.gz: cannot be read: 'utf-8' codec"):
            dated_news.load_gigaword(folder)
        path.write_bytes(gzip.compress(b"<P>\nan end"))
        with pytest.raises(DataError, match=r"200912\.gz: it ends within an article"):
            dated_news.load_gigaword(folder)


@pytest.mark.data
class TestRealFiles:
    """What the tests above cannot know: that the real files are of this form."""

    def test_books(self, gutenberg_root: str):
        corpus = gutenberg.load(gutenberg_root, splits={"train": [41, 55], "validation": [99], "test": [1080]})
        assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == (63_916, 9_705, 3_998)

    def test_news(self, reuters21578_root: str, monkeypatch: pytest.MonkeyPatch):
        days = {"train": "1987-02-26", "validation": "1987-06-15", "test": "1987-04-05"}
        monkeypatch.setattr(dated_news, "REUTERS_SPLITS", {split: (day, day) for split, day in days.items()})
        corpus = dated_news.load_reuters(reuters21578_root)
        assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == (34_406, 11_923, 10_915)
        assert sentences(corpus, "train")[1].endswith(", comissaria smith said in its weekly review .")
