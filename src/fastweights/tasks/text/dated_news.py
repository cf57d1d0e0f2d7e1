"""News in the order of their dates: a model learns from the past and is tested on what came later (Rae et al. 2018).

GigaWord's fifth edition is licensed (LDC2011T07), and read where a user has it. As in the paper (section 4.3), all
articles of 2000 to 2009 are for training and all of 2010 for test, and the vocabulary has the 250,000 most frequent
words. The paper names no text for validation: here it is December 2009.

Reuters-21578 is the small stand-in. Its articles, which do not lie in the order of their dates, come from three seasons
of 1987, and each is a split: 26 February to 29 April for training, June for validation, and for test 19 and 20 October,
the days of the stock market crash. The headline of an article is a sentence of its own.

Sentences and words are found as in books (`gutenberg`).
"""

import functools
import gzip
import html
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fastweights.errors import DataError, one_line
from fastweights.folders import find_files
from fastweights.tasks import datasets
from fastweights.tasks.text._corpus import Corpus, Pieces, check_vocabulary_size, prepare
from fastweights.tasks.text._prose import Prose, find_nltk

REUTERS_SPLITS = {
    "train": ("1987-02-26", "1987-04-29"),
    "validation": ("1987-06-01", "1987-06-29"),
    "test": ("1987-10-19", "1987-10-20"),
}
GIGAWORD_SPLITS = {"train": ("200001", "200911"), "validation": ("200912", "200912"), "test": ("201001", "201012")}

_LONGEST = 2**20  # characters of a paragraph


class Article(NamedTuple):
    """An article of Reuters-21578, with its topics and its place in the collection's own split, such as TRAIN."""

    date: str
    title: str
    body: str
    topics: tuple[str, ...] = ()
    split: str = ""


def read_reuters(data_dir: str | os.PathLike[str] | None = None) -> Iterator[Article]:
    """Yield the articles of Reuters-21578, in the order of the file, which is looked for as `datasets.get` does.

    Raises:
        DataError: as `datasets.get`, or the file is damaged.

    Examples:
        >>> from fastweights.tasks.text import dated_news
        >>> next(dated_news.read_reuters("/data")).title  # doctest: +SKIP
        'BAHIA COCOA REVIEW'
    """
    path = datasets.get("reuters21578", data_dir) / "reuters21578.jsonl.xz"
    try:
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(_LONGEST), ""), start=1):
                try:
                    article = json.loads(line)
                    date, title, body = (str(article[name]) for name in ("date", "title", "body"))
                    yield Article(date, title, body, tuple(article.get("topics", ())), str(article.get("split", "")))
                except (ValueError, TypeError, KeyError) as error:
                    raise DataError(
                        f"{path}, line {number}: {one_line(error)}; expected an article with date, title and body"
                    ) from error
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def load_reuters(
    data_dir: str | os.PathLike[str] | None = None, *, least_count: int = 3, greatest_size: int | None = None
) -> Corpus:
    """Load Reuters-21578 in the order of the dates, in lower case and with `<eos>` at the end of a sentence.

    The file is looked for as `datasets.get` does. Words that stand fewer than `least_count` times in the training text
    are `<unk>`.

    Shapes: `train`, `validation` and `test` [N] int32; `vocabulary.counts` [V] int64.

    Raises:
        DataError: as `datasets.get`; NLTK is not installed (the extra `text`); or the file is damaged.
        ValueError: a number is out of range.

    Examples:
        >>> from fastweights.tasks.text import dated_news
        >>> dated_news.load_reuters("/data")  # doctest: +SKIP
        Corpus(reuters21578: train 2,616,130, validation 386,167, test 173,286 tokens; vocabulary 25,057)
    """
    path = datasets.get("reuters21578", data_dir) / "reuters21578.jsonl.xz"

    @functools.cache
    def articles() -> list[Article]:
        # Articles of one second stay in the order of the file.
        return sorted(read_reuters(data_dir), key=lambda article: article.date)

    def read(split: str) -> Iterator[tuple[str, int]]:
        first, last = REUTERS_SPLITS[split]
        for article in articles():
            if first <= article.date[:10] <= last:
                yield article.title, len(article.title)
                yield article.body, len(article.body)

    def sample() -> Iterator[str]:
        return (text for text, _ in itertools.islice(read("train"), 0, None, 9))

    (file,) = datasets.DATASETS["reuters21578"].files
    return _prepare(
        "reuters21578",
        path.parent,
        [path],
        read,
        sample,
        splits=REUTERS_SPLITS,
        least_count=least_count,
        greatest_size=greatest_size,
        total=file.size,
    )


def load_gigaword(
    folder: str | os.PathLike[str], *, least_count: int = 1, greatest_size: int | None = 250_000
) -> Corpus:
    """Load GigaWord in the order of its months, in lower case and with `<eos>` at the end of a sentence.

    `folder` has the compressed files, such as afp_eng_200001.gz, at any depth; those before 2000 are left out. The
    `greatest_size` most frequent words of training are the vocabulary. NLTK parts some 60,000 words a second, so that
    the first call takes most of a day for 4 billion; the tokens take 17 GB of the user's cache.

    Shapes: `train`, `validation` and `test` [N] int32; `vocabulary.counts` [V] int64.

    Raises:
        DataError: there is no such folder, or no file of a split in it; NLTK is not installed (the extra `text`); or a
            file is damaged.
        ValueError: a number is out of range.

    Examples:
        >>> from fastweights.tasks.text import dated_news
        >>> corpus = dated_news.load_gigaword("/data/gigaword_eng_5/data")  # doctest: +SKIP
        >>> len(corpus.vocabulary)  # doctest: +SKIP
        250000
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; expected one with GigaWord's files")
    files: dict[str, list[Path]] = {split: [] for split in GIGAWORD_SPLITS}
    for path in sorted(find_files(folder, "**/*_eng_??????.gz"), key=lambda path: (_month(path), path.name)):
        for split, (first, last) in GIGAWORD_SPLITS.items():
            if first <= _month(path) <= last:
                files[split].append(path)
    if missing := [split for split, paths in files.items() if not paths]:
        first, last = GIGAWORD_SPLITS[missing[0]]
        raise DataError(
            f"{folder}: no files of {first} to {last}, which are for {missing[0]}; expected GigaWord's, such as "
            f"afp_eng_{first}.gz"
        )

    def read(split: str) -> Iterator[tuple[str, int]]:
        for path in files[split]:
            yield from ((paragraph, 0) for paragraph in _read_gigaword(path))
            yield "", path.stat().st_size

    def sample() -> Iterator[str]:
        return (text for path in files["train"] for text in itertools.islice(_read_gigaword(path), 30))

    return _prepare(
        "gigaword",
        folder,
        list(itertools.chain(*files.values())),
        read,
        sample,
        splits=GIGAWORD_SPLITS,
        least_count=least_count,
        greatest_size=greatest_size,
    )


def _prepare(
    name: str,
    folder: Path,
    sources: list[Path],
    read: Callable[[str], Pieces],
    sample: Callable[[], Iterable[str]],
    *,
    splits: dict[str, tuple[str, str]],
    least_count: int,
    greatest_size: int | None,
    total: int | None = None,
) -> Corpus:
    """Return the corpus of news whose paragraphs `read` gives, split by split."""
    check_vocabulary_size(least_count, greatest_size)
    version = find_nltk()
    learn = functools.cache(lambda: Prose(sample()))

    def tokenize(split: str) -> Iterator[tuple[str, int]]:
        prose = learn()
        return ((prose.tokenize(paragraph), amount) for paragraph, amount in read(split))

    return prepare(
        name,
        sources,
        tokenize,
        settings={"folder": str(folder.resolve()), "nltk": version, "splits": splits},
        open_vocabulary=True,
        least_count=least_count,
        greatest_size=greatest_size,
        total=total,
    )


def _read_gigaword(path: Path) -> Iterator[str]:
    """Yield the headlines, datelines and paragraphs of a file's articles."""
    lines: list[str] = []
    size = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            while line := stream.readline(_LONGEST):
                if not line.startswith("<"):
                    lines.append(line)
                    size += len(line)
                    if size >= _LONGEST:
                        raise DataError(f"{path}: a paragraph of more than {_LONGEST:,} characters; expected news")
                elif lines:  # markup stands in lines of its own
                    yield html.unescape("".join(lines))
                    lines, size = [], 0
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    if lines:
        raise DataError(f"{path}: it ends within an article")


def _month(path: Path) -> str:
    return path.stem[-6:]
