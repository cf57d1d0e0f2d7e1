"""Corpora of words to learn a language from: the published ones, and any folder of text files.

A corpus is three streams of tokens and a vocabulary with the counts of the training text. The first call of `load`
reads the text and puts the tokens into the user's cache as integers; later calls map them from there, in milliseconds.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from fastweights.checks import check_choice, check_sizes
from fastweights.errors import DataError
from fastweights.tasks import datasets
from fastweights.tasks._corpus import END, UNKNOWN, Corpus, Vocabulary, prepare, read_text

__all__ = ["END", "UNKNOWN", "Corpus", "Vocabulary", "cut_streams", "load"]


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
}


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """Load a corpus by the name of its data set: ptb or wikitext-2.

    The files are looked for as `datasets.get` does. Their words are taken as they are, and every end of a line is the
    token `<eos>`. The sizes must be the published ones.

    Shapes: `train`, `validation` and `test` [N] int32; `vocabulary.counts` [V] int64.

    Raises:
        DataError: as `datasets.get`; or a file cannot be read, is not UTF-8, or has not the published number of tokens.
        ValueError: there is no such corpus.

    Examples:
        >>> from fastweights.tasks import text
        >>> corpus = text.load("wikitext-2")  # doctest: +SKIP
        >>> corpus  # doctest: +SKIP
        Corpus(wikitext-2: train 2,088,628, validation 217,646, test 245,569 tokens; vocabulary 33,278)
        >>> corpus.vocabulary.decode(corpus.test[1:5])  # doctest: +SKIP
        ['=', 'Robert', '<unk>', '=']
    """
    check_choice(PUBLISHED, name=name)
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

    return prepare(name, list(files.values()), read, settings={}, check=check)


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
    if steps < 2:
        raise ValueError(
            f"a stream of {len(stream):,} tokens cannot be cut into {batch_size:,} of two tokens or more: batch_size "
            f"can be at most {len(stream) // 2:,} here"
        )
    return stream[: steps * batch_size].view(batch_size, steps).t()
