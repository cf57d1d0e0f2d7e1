"""Books of Project Gutenberg, parted into sentences and words as in Rae et al. 2018 (section 4.2.3, appendix A.5).

The paper takes 2,042 books, of which 13 are for test and 12 for validation, and calls `<unk>` what stands fewer than
five times in the 2,017 books for training: 175 million tokens, and a vocabulary of 242,621. With `folder` the books are
those that a user has: the paper's are the English ones that lay under /1 of Gutenberg's mirrors on 2 January 2018, and
`PAPER_VALIDATION` and `PAPER_TEST` are held out of them. Without it they are the 106 books of the data set `gutenberg`,
and the split is ours: in the order of their ids, of every twenty books the tenth is for validation and the last for
test, five books each. By NLTK 3.10.4 they have 13,305,814, 598,376 and 692,782 tokens and a vocabulary of 40,550.

NLTK finds the words, and the ends of sentences by what it learns of abbreviations in the training books, since its
model of English is a download of its own. Curly quotes become straight ones first, so that `don't` is one thing.
"""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fastweights.errors import DataError, one_line
from fastweights.folders import check_text, find_files
from fastweights.tasks import datasets
from fastweights.tasks._archives import read_members
from fastweights.tasks.text._corpus import SPLITS, Corpus, check_vocabulary_size, prepare
from fastweights.tasks.text._prose import Prose, find_nltk

# fmt: off
PAPER_VALIDATION = (11399, 10003, 1202, 12213, 11177, 12856, 10516, 11635, 12315, 11804, 11249, 11163)
PAPER_TEST = (11959, 12211, 10912, 11015, 12585, 10827, 10268, 11670, 126, 1064, 11774, 12505, 11931)
# fmt: on

Splits = Mapping[str, Iterable[int]]

_LONGEST = 2**26  # bytes of a book: the Bible has 2**22
# Characters from the middle of a book: twice as many move 0.1 % of the ends of sentences, a quarter of them 12 %.
_SAMPLE = 20_000


def load(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    splits: Splits | None = None,
    least_count: int = 5,
    greatest_size: int | None = None,
) -> Corpus:
    """Load books in three splits, by their ids, in lower case and with `<eos>` at the end of a sentence.

    The 106 books are looked for as `datasets.get` does. A `folder` has others instead, named pg11.txt, 11.txt or
    11-0.txt; what stands before and after a book by Gutenberg is left out, and so are bytes that are not UTF-8, as the
    paper does. `splits` gives the ids of the books for train, validation and test; the module says which these are
    otherwise. The first call takes minutes, as NLTK parts some 60,000 words a second; later ones take milliseconds.

    Shapes: `train`, `validation` and `test` [N] int32; `vocabulary.counts` [V] int64.

    Raises:
        DataError: as `datasets.get`; NLTK is not installed (the extra `text`); there is no such folder, or it has no
            books; or a book that is to be held out, or named in `splits`, is not there.
        ValueError: `splits` are not these three, or share a book; or a number is out of range.

    Examples:
        >>> from fastweights.tasks.text import gutenberg
        >>> gutenberg.load("/data")  # doctest: +SKIP
        Corpus(gutenberg: train 13,305,814, validation 598,376, test 692,782 tokens; vocabulary 40,550)
    """
    check_vocabulary_size(least_count, greatest_size)
    version = find_nltk()
    books = _Archive(datasets.get("gutenberg", data_dir)) if folder is None else _Folder(Path(folder).expanduser())
    if splits is None:
        held_out = {book for split in books.held_out.values() for book in split}
        splits = {"train": [book for book in books.ids if book not in held_out], **books.held_out}
    chosen = _check_splits(splits, books)

    @functools.cache
    def learn() -> Prose:
        texts = books.read(chosen["train"])
        return Prose(text[len(text) // 2 : len(text) // 2 + _SAMPLE] for text in texts)

    def read(split: str) -> Iterator[tuple[str, int]]:
        prose = learn()
        for text in books.read(chosen[split]):
            yield prose.tokenize(text), 1

    return prepare(
        "gutenberg",
        books.files,
        read,
        settings={
            "folder": str(books.path.resolve()),
            "nltk": version,
            "splits": {split: sorted(ids) for split, ids in chosen.items()},
        },
        open_vocabulary=True,
        least_count=least_count,
        greatest_size=greatest_size,
        total=sum(map(len, chosen.values())),
    )


def read_books(ids: Sequence[int], data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the texts of some of the 106 books as they are, in the order of their ids given.

    Raises:
        DataError: as `datasets.get`, or a book is not there.
    """
    books = _Archive(datasets.get("gutenberg", data_dir))
    if missing := sorted(set(ids).difference(books.ids)):
        raise DataError(f"{books.path}: it has no book {missing[0]}; `index.tsv` beside it lists those that there are")
    return [next(books.read({book})) for book in ids]


class _Archive:
    """The 106 books of the data set."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gutenberg_en.tar.xz"
        index = folder / "index.tsv"
        self.files = [self.path, index]
        try:
            lines = index.read_text(encoding="utf-8").splitlines()[1:]
            self.ids = sorted(int(line.partition("\t")[0]) for line in lines)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{index}: cannot be read: {one_line(error)}; expected lines that begin with an id"
            ) from error
        self.held_out = {"validation": self.ids[9::20], "test": self.ids[19::20]}

    def read(self, ids: set[int]) -> Iterator[str]:
        """Yield the texts of books, in the order of the archive."""
        missing = set(ids)
        for name, content in read_members(self.path):
            book = _id_of(name)
            if book in missing:
                missing.remove(book)
                yield _decode(self.path, name, content)
        if missing:
            raise DataError(f"{self.path}: it has no book {min(missing)}, which the index names")


class _Folder:
    """Books that a user has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise DataError(f"there is no folder {path}; expected one with books")
        self.held_out = {"validation": PAPER_VALIDATION, "test": PAPER_TEST}
        paths: dict[int, Path] = {}
        for file in find_files(path, "**/*.txt"):  # 11-0.txt, which is UTF-8, comes before 11-8.txt and 11.txt
            book = _id_of(file.name)
            if book is not None:
                paths.setdefault(book, file)
        if not paths:
            raise DataError(f"{path}: there are no books in it; expected pg11.txt, 11.txt or 11-0.txt")
        self._paths = paths
        self.ids = sorted(paths)
        self.files = [paths[book] for book in self.ids]

    def read(self, ids: set[int]) -> Iterator[str]:
        """Yield the texts of books, in the order of their ids."""
        for book in sorted(ids):
            path = self._paths[book]
            try:
                with path.open("rb") as file:
                    content = file.read(_LONGEST + 1)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
            if len(content) > _LONGEST:
                raise DataError(f"{path}: more than {_LONGEST:,} bytes; expected a book")
            text = content.decode(errors="ignore")
            check_text(text, path)
            yield _cut_marks(text)


def _id_of(name: str) -> int | None:
    match = re.fullmatch(r"(?:pg)?(\d+)(?:-\w+)?\.txt", name.lower())
    return int(match[1]) if match else None


def _decode(path: Path, name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: its member {name} is not UTF-8: {error.reason} at byte {error.start:,}") from error


def _cut_marks(text: str) -> str:
    """Return what stands between the two lines by which Gutenberg marks the book itself; all where there are none."""
    start = re.search(r"START OF (?:THIS|THE) PROJECT GUTENBERG EBOOK.*", text)
    text = text[start.end() :] if start else text
    end = re.search(r".*END OF (?:THIS|THE) PROJECT GUTENBERG EBOOK", text)
    return text[: end.start()] if end else text


def _check_splits(splits: Splits, books: _Archive | _Folder) -> dict[str, set[int]]:
    if set(splits) != set(SPLITS):
        raise ValueError(f"splits must be train, validation and test, got {', '.join(splits) or 'none'}")
    chosen = {split: set(splits[split]) for split in SPLITS}
    everything = set().union(*chosen.values())
    if len(everything) < sum(map(len, chosen.values())):
        raise ValueError("a book must be in one of the splits alone; expected ids that differ")
    if missing := sorted(everything.difference(books.ids)):
        raise DataError(
            f"{books.path}: {len(missing):,} books of the splits are not among its {len(books.ids):,}, such as "
            f"{', '.join(map(str, missing[:5]))}: get them, or give `splits` of books that are there"
        )
    return chosen
