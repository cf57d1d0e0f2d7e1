"""Corpora of words to learn a language from: the published ones, and any folder of text files.

A corpus is three streams of tokens and a vocabulary with the counts of the training text. The first call of `load`
reads the text and puts the tokens into the user's cache as integers; later calls map them from there, in milliseconds.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fastweights.checks import check_choice, check_sizes
from fastweights.errors import DataError
from fastweights.folders import find_files
from fastweights.tasks import datasets
from fastweights.tasks.text import dated_news, gutenberg
from fastweights.tasks.text._corpus import END, UNKNOWN, Corpus, Vocabulary, check_vocabulary_size, prepare, read_text
from fastweights.tasks.text._prose import Prose, find_nltk

__all__ = ["END", "UNKNOWN", "Corpus", "Vocabulary", "cut_streams", "load", "load_folder"]


@dataclass(frozen=True)
class Published:
    """The files of a published corpus, a sentence or paragraph a line, and the sizes that everybody reports."""

    files: Mapping[str, str]
    tokens: Mapping[str, int]  # ends of lines among them
    vocabulary_size: int


def _wiki(train: int, vocabulary_size: int) -> Published:
    files = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
    return Published(files, {"train": train, "validation": 217_646, "test": 245_569}, vocabulary_size)


PUBLISHED = {
    "ptb": Published(
        {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"},
        # 887,521, 70,390 and 78,669 words, and the ends of 42,068, 3,370 and 3,761 sentences.
        {"train": 929_589, "validation": 73_760, "test": 82_430},
        10_000,
    ),
    "wikitext-2": _wiki(2_088_628, 33_278),
    "wikitext-103": _wiki(103_227_021, 267_735),
}
_PROSE = {"gutenberg": gutenberg.load, "reuters21578": dated_news.load_reuters}

_Part = tuple[Path, int, int | None]  # a part of a file: from the first byte to before the second; None is the end
_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "test": "test"}
_SAMPLE = 20_000  # characters of a piece of text, from which prose is learnt


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """Load a corpus by the name of its data set: ptb, wikitext-2, wikitext-103, gutenberg or reuters21578.

    The files are looked for as `datasets.get` does. The words of the first three are taken as they are, every end of a
    line is the token `<eos>`, and the sizes must be the published ones. The others are prose that NLTK parts into
    sentences and words: see `gutenberg.load` and `dated_news.load_reuters`, which have settings.

    Shapes: `train`, `validation` and `test` [N] int32; `vocabulary.counts` [V] int64.

    Raises:
        DataError: as `datasets.get`; a file cannot be read, is not UTF-8, or has not the published number of tokens; or
            NLTK (the extra `text`) is not installed, for those that need it.
        ValueError: there is no such corpus.

    Examples:
        >>> from fastweights.tasks import text
        >>> corpus = text.load("wikitext-2")  # doctest: +SKIP
        >>> corpus  # doctest: +SKIP
        Corpus(wikitext-2: train 2,088,628, validation 217,646, test 245,569 tokens; vocabulary 33,278)
        >>> corpus.vocabulary.decode(corpus.test[1:5])  # doctest: +SKIP
        ['=', 'Robert', '<unk>', '=']
    """
    check_choice([*PUBLISHED, *_PROSE], name=name)
    if name in _PROSE:
        return _PROSE[name](data_dir)
    published = PUBLISHED[name]
    folder = datasets.get(name, data_dir)
    files = {split: folder / file for split, file in published.files.items()}

    def read(split: str) -> Iterator[tuple[str, int]]:
        return read_text(files[split])

    def check(tokens: Mapping[str, int], vocabulary_size: int) -> None:
        for split, expected in published.tokens.items():
            if tokens[split] != expected:
                raise DataError(f"{files[split]}: {tokens[split]:,} tokens with ends of lines; expected {expected:,}")
        if vocabulary_size != published.vocabulary_size:
            raise DataError(
                f"{files['train']}: {vocabulary_size:,} different tokens with {END}; expected "
                f"{published.vocabulary_size:,}"
            )

    settings = {"folder": str(folder.resolve())}
    return prepare(name, list(files.values()), read, settings=settings, open_vocabulary=False, check=check)


def load_folder(
    folder: str | os.PathLike[str],
    *,
    least_count: int = 2,
    greatest_size: int | None = None,
    vocabulary: Vocabulary | None = None,
    prose: bool = False,
    pattern: str = "**/*.txt",
) -> Corpus:
    """Load a folder of text files in UTF-8, whose words are parted by white space; an end of a line is `<eos>`.

    With `prose` NLTK finds the words and the ends of sentences instead, and all letters become small, as for the books
    of `gutenberg`.

    The files or folders train, validation (or valid) and test are the three splits, if there are such:
    `my_texts/train.txt` or `my_texts/train/*.txt`. Else the last tenth of the files, in the order of their names, is
    for test and the tenth before it for validation; and fewer than ten files are cut so between two lines, as if they
    were one.

    The vocabulary has the words that stand at least `least_count` times in the training text, and no more than
    `greatest_size` in all; every other word is `<unk>`. With the `vocabulary` of a trained model the text is encoded
    for that model instead, and the counts are those of the model's training.

    Shapes: `train`, `validation` and `test` [N] int32; `vocabulary.counts` [V] int64.

    Raises:
        DataError: there is no such folder, no file in it matches `pattern`, one cannot be read or is not UTF-8, a split
            is missing or has no words, a few files have too few lines to be cut into three, more than half of a split
            is not in the `vocabulary`, or NLTK (the extra `text`) is not installed and asked for.
        ValueError: a number is out of range, or the `vocabulary` is none, or has no `<eos>` or no `<unk>`.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from fastweights.tasks import text
        >>> with TemporaryDirectory() as folder:
        ...     for split, words in (("train", "the cat and the dog\\n"), ("validation", "the cat"), ("test", "a cat")):
        ...         _ = Path(folder, f"{split}.txt").write_text(words)
        ...     corpus = text.load_folder(folder)
        >>> corpus.vocabulary.words, corpus.vocabulary.decode(corpus.test)
        (['<unk>', 'the', '<eos>'], ['<unk>', '<unk>', '<eos>'])
    """
    check_vocabulary_size(least_count, greatest_size)
    if vocabulary is not None and not isinstance(vocabulary, Vocabulary):
        raise ValueError(f"vocabulary must be a Vocabulary, such as a corpus has, got {type(vocabulary).__name__}")
    for token in (END, UNKNOWN):
        if vocabulary is not None and token not in vocabulary.numbers:
            raise ValueError(f"vocabulary must have {token}, as every corpus's has; got {vocabulary!r}")
    folder = Path(folder).expanduser()
    parts = _split_folder(folder, pattern)

    def read_lines(split: str) -> Iterator[tuple[str, int]]:
        return itertools.chain.from_iterable(read_text(*part) for part in parts[split])

    @functools.cache
    def learn() -> Prose:
        return Prose(piece[:_SAMPLE] for piece, _ in read_lines("train"))

    def read_prose(split: str) -> Iterator[tuple[str, int]]:
        return ((learn().tokenize(piece), size) for piece, size in read_lines(split))

    return prepare(
        folder.resolve().name,
        sorted({path for split in parts.values() for path, *_ in split}),
        read_prose if prose else read_lines,
        settings={"folder": str(folder.resolve()), "pattern": pattern, "nltk": find_nltk() if prose else None},
        open_vocabulary=True,
        least_count=least_count,
        greatest_size=greatest_size,
        vocabulary=vocabulary,
    )


def _split_folder(folder: Path, pattern: str) -> dict[str, list[_Part]]:
    """Return the parts of files that each split is made of."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; expected one with text files")
    names = [path.relative_to(folder) for path in find_files(folder, pattern)]
    if not names:
        raise DataError(f"{folder}: no file matches {pattern!r}; expected text files")
    splits: dict[str, list[_Part]] = {"train": [], "validation": [], "test": []}
    heads = [name.parts[0].partition(".")[0] for name in names]
    if any(head in _NAMES for head in heads):
        for name, head in zip(names, heads, strict=True):
            if head not in _NAMES:
                raise DataError(
                    f"{folder / name}: is it for training, validation or test? There are files or folders with these "
                    "names beside it; expected every text in one of them"
                )
            splits[_NAMES[head]].append((folder / name, 0, None))
        if missing := [split for split, parts in splits.items() if not parts]:
            raise DataError(f"{folder}: there is no text for {' and '.join(missing)}, as {missing[0]}.txt would be")
    elif (tenth := len(names) // 10) > 0:
        for split, chosen in (
            ("train", names[: -2 * tenth]),
            ("validation", names[-2 * tenth : -tenth]),
            ("test", names[-tenth:]),
        ):
            splits[split] = [(folder / name, 0, None) for name in chosen]
    else:
        sizes = [(folder / name).stat().st_size for name in names]
        cuts = (0.8 * sum(sizes), 0.9 * sum(sizes))
        begin = 0
        for name, size in zip(names, sizes, strict=True):
            path = folder / name
            first, second = (_next_line(path, round(cut) - begin, size) for cut in cuts)
            for split, start, stop in (("train", 0, first), ("validation", first, second), ("test", second, size)):
                if start < stop:
                    splits[split].append((path, start, stop))
            begin += size
        missing = [split for split, parts in splits.items() if not parts]
        if missing and sum(sizes):
            files = "its only file has" if len(names) == 1 else f"its {len(names)} files have"
            raise DataError(
                f"{folder}: {files} no line that begins where {' and '.join(missing)} would, in the last fifth: end "
                "sentences or paragraphs with a line, or give train.txt, validation.txt and test.txt"
            )
    return splits


def _next_line(path: Path, place: int, size: int) -> int:
    """Return where the first line begins at or after a place, 0 or the size of the file where that is outside of it."""
    if place <= 0 or place >= size:
        return min(max(place, 0), size)
    with path.open("rb") as file:
        file.seek(place - 1)  # the end of a line, where one begins just there
        while block := file.readline(2**16):
            if block.endswith(b"\n"):
                break
        return file.tell()


def cut_streams(stream: Tensor, batch_size: int) -> Tensor:
    """Cut a stream into parts of one length, which are read side by side: [N] -> [N // batch_size, batch_size].

    Column b is the b-th part. The result is a view; up to `batch_size` - 1 tokens at the stream's end are left out.

    Raises:
        ValueError: `batch_size` is not positive, or the parts would be shorter than two tokens, one to read and one to
            predict.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.text import cut_streams
        >>> cut_streams(torch.arange(7), 2)
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
    """
    check_sizes(batch_size=batch_size)
    steps = len(stream) // batch_size
    if len(stream) < 2:
        raise ValueError(f"a stream must have at least two tokens, one to read and one to predict; got {len(stream)}")
    if steps < 2:
        raise ValueError(
            f"a stream of {len(stream):,} tokens cannot be cut into {batch_size:,} streams of two tokens or more: give "
            f"{len(stream) // 2:,} at most"
        )
    return stream[: steps * batch_size].view(batch_size, steps).t()
