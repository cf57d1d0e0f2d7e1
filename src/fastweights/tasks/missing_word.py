"""The missing word: which of five words was left out of a sentence? (Vinyals et al. 2016, section 4.1.3)

Each of a task's words has been seen left out of one to three other sentences of the Penn Treebank, under a label that
means nothing beyond the task. Chance is 1 in 5. The words and the sentences of the test have not been seen in training
(also Munkhdalai & Trischler 2018, section 5.2). What the two texts leave open:

- Which words can be left out. Here what has a letter, and so neither `$` nor `&`, and is not one of the text's two
  stand-ins, `<unk>` for a rare word and `N` for a number. `n't` and `mr.` are words.
- Which are the 1,000 of the test. Vinyals et al. part 10,000 words into 9,000 and 1,000, but of the standard test
  file only 2,447 words stand in four sentences, which are three to describe a word and one to ask about it. Here the
  1,000 are drawn from these, so that the same words serve one, two and three shots, but for the 100 most common words
  of the training text; then 200 to validate on likewise from the validation file. The 8,707 others with four sentences
  in the training file are to learn from.
- How a word is kept unseen. Here every sentence shows `<unk>` for the words of the test and of validation, which have
  no number in the vocabulary; test sentences too, as nobody could have learnt what such a word means. That hides 16 %
  of the words of the training text. To drop the sentences that have one would leave 2,754 of 40,920; to draw words as
  common as `the` too would hide 32 to 41 % (seeds 0 to 4); to validate on 1,000 words, 27 to 28 %.
- Which sentences there are. Repetitions count once; a sentence of two files belongs to the test, then to validation;
  one that shows nothing but the missing word is left out.
- A word that stands twice in a sentence. Both places are blank, as the other would give the answer away.
- Long sentences. Here `LENGTH` words around the first blank, so that a few long ones do not cost every batch twice the
  time: 1.8 % of the examples to learn from are cut.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_integers
from fastweights.errors import DataError, one_line
from fastweights.tasks import datasets

PADDING, BLANK, UNKNOWN = 0, 1, 2  # the first of the vocabulary
TEST_WORDS = 1000
VALIDATION_WORDS = 200
COMMON = 100  # this many of the most common words always go to training
LENGTH = 50  # words of a sentence that are shown

_STAND_INS = ("<unk>", "N")  # the text's stand-ins for a rare word and for a number
_Sentence = tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Sentences:
    """Sentences with a missing word, blanked as they are asked for: an example is a word and a sentence that has it.

    Shapes: `sentences[index]` is [..., 50] int64 for an `index` of shape [...] int64, as it would be of a tensor
    [N, 50]; an int, a slice or a mask will do. The words are numbers of the vocabulary, BLANK wherever the missing word
    stands, and PADDING after the last.

    Raises:
        IndexError: as a tensor does.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.missing_word import Sentences
        >>> words = torch.tensor([3, 4, 5, 6])  # of a vocabulary of 6, so that 6 is a word that is never shown
        >>> start, length = torch.tensor([0, 0]), torch.tensor([4, 4])
        >>> sentences = Sentences(words, start, length, missing=torch.tensor([4, 6]), vocabulary_size=6)
        >>> sentences[torch.tensor([0, 1])][:, :6].tolist()
        [[3, 1, 5, 2, 0, 0], [3, 4, 5, 1, 0, 0]]
    """

    words: Tensor  # all sentences, one after another, int64; numbers past the vocabulary are words not to be seen
    start: Tensor  # [N] int64: where in them an example begins
    length: Tensor  # [N] int64
    missing: Tensor  # [N] int64
    vocabulary_size: int

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, index: Tensor | slice | int) -> Tensor:
        start, length, missing = (each[index].unsqueeze(-1) for each in (self.start, self.length, self.missing))
        offset = torch.arange(LENGTH, device=self.words.device)
        words = self.words[(start + offset).clamp(max=len(self.words) - 1)]
        seen = words.where(words < self.vocabulary_size, UNKNOWN)
        return seen.where(words != missing, BLANK).where(offset < length, PADDING)


class Split(NamedTuple):
    """The examples of one split, ordered by word and then by sentence."""

    sentences: Sentences  # N of them
    labels: Tensor  # [N] int64: which of `words` is missing
    groups: Tensor  # [N] int64: the number of the sentence: two examples of one must not meet in a task
    words: list[str]  # the split's classes


class MissingWord(NamedTuple):
    """The three splits, which share neither a word that is missing nor a sentence."""

    train: Split
    validation: Split
    test: Split
    vocabulary: list[str]  # the words of the indices: an embedding has as many rows


def load(data_dir: str | os.PathLike[str] | None = None, *, sentences: int = 4, seed: int = 0) -> MissingWord:
    """Load all examples of words with `sentences` or more sentences in their split's file.

    The files are looked for as `datasets.get` does. The words of the test and of validation are drawn with `seed`.

    Shapes: for each split of N examples, sentences [N, 50] (see `Sentences`), labels [N], groups [N], all int64.

    Raises:
        DataError: as `datasets.get`, or a file cannot be read or has too few words.
        ValueError: `sentences` is below 2, which is one to describe a word and one to ask about it, or `seed` is
            negative.

    Examples:
        >>> from fastweights.tasks import missing_word
        >>> data = missing_word.load("/data")  # doctest: +SKIP
        >>> index = torch.randint(len(data.test.sentences), (5, 3))  # doctest: +SKIP
        >>> data.test.sentences[index].shape, data.test.labels[index].shape  # doctest: +SKIP
        (torch.Size([5, 3, 50]), torch.Size([5, 3]))
        >>> try:
        ...     missing_word.load(sentences=1)
        ... except ValueError as error:
        ...     print(error)
        sentences must be 2 or more, one to describe a word and one to ask about it, got 1
    """
    if sentences < 2:
        raise ValueError(
            f"sentences must be 2 or more, one to describe a word and one to ask about it, got {sentences}"
        )
    check_integers(0, seed=seed)
    folder = datasets.get("ptb", data_dir)
    train_file, validation_file, test_file = (folder / f"ptb.{name}.txt" for name in ("train", "valid", "test"))
    test = _read(test_file)
    validation = _leave_out(_read(validation_file), test)
    train = _leave_out(_read(train_file), test, validation)

    frequency = Counter(word for sentence in train for word in sentence if _is_word(word))
    common = sorted(frequency, key=lambda word: (-frequency[word], word))[:COMMON]
    generator = np.random.default_rng(seed)
    test_words = _draw(test_file, test, TEST_WORDS, sentences, common, generator)
    validation_words = _draw(validation_file, validation, VALIDATION_WORDS, sentences, common + test_words, generator)
    hidden = test_words + validation_words
    train_words = _candidates(train, sentences, hidden)
    if not train_words:
        raise DataError(_describe_shortage(train_file, 0, sentences, "1 to learn from"))

    shown = {word for sentence in train for word in sentence}.difference(hidden, ["<unk>"])
    vocabulary = ["<pad>", "<blank>", "<unk>", *sorted(shown)]
    numbers = {word: number for number, word in enumerate([*vocabulary, *hidden])}
    return MissingWord(
        _split(train, train_words, numbers, len(vocabulary)),
        _split(validation, validation_words, numbers, len(vocabulary)),
        _split(test, test_words, numbers, len(vocabulary)),
        vocabulary,
    )


def _read(path: Path) -> list[_Sentence]:
    """Return the file's sentences, each once, without those that would show nothing but the missing word."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}; expected one sentence a line") from error
    return [each for each in dict.fromkeys(tuple(line.split()) for line in lines) if len(set(each)) > 1]


def _leave_out(sentences: Iterable[_Sentence], *others: Iterable[_Sentence]) -> list[_Sentence]:
    known = {sentence for other in others for sentence in other}
    return [sentence for sentence in sentences if sentence not in known]


def _is_word(token: str) -> bool:
    return token not in _STAND_INS and any(character.isalpha() for character in token)


def _candidates(text: Iterable[_Sentence], sentences: int, taken: Iterable[str]) -> list[str]:
    """Return the words with so many sentences that are not taken, in alphabetical order."""
    count = Counter(word for sentence in text for word in set(sentence))
    return sorted({word for word in count if count[word] >= sentences and _is_word(word)}.difference(taken))


def _draw(
    path: Path,
    text: Iterable[_Sentence],
    number: int,
    sentences: int,
    taken: Iterable[str],
    generator: np.random.Generator,
) -> list[str]:
    candidates = _candidates(text, sentences, taken)
    if len(candidates) < number:
        raise DataError(_describe_shortage(path, len(candidates), sentences, f"{number:,} to draw"))
    return sorted(candidates[index] for index in generator.permutation(len(candidates))[:number])


def _describe_shortage(path: Path, found: int, sentences: int, expected: str) -> str:
    return f"{path}: {found:,} words that may be drawn have {sentences} or more sentences; expected at least {expected}"


def _split(text: Sequence[_Sentence], classes: list[str], numbers: dict[str, int], vocabulary_size: int) -> Split:
    words = np.array([numbers.get(word, UNKNOWN) for sentence in text for word in sentence], np.int64)
    lengths = np.array([len(sentence) for sentence in text], np.int64)
    starts = lengths.cumsum() - lengths
    label_of = np.full(len(numbers), -1)
    missing_of = np.array([numbers[word] for word in classes])
    label_of[missing_of] = np.arange(len(classes))

    labels, groups = label_of[words], np.arange(len(text)).repeat(lengths)
    (places,) = (labels >= 0).nonzero()
    # Ordered by label and then by sentence, and of a word that stands twice in a sentence the first place.
    examples, first = np.unique(labels[places] * len(text) + groups[places], return_index=True)
    labels, groups = np.divmod(examples, len(text))
    before = places[first] - starts[groups]
    cut = (before - LENGTH // 2).clip(0, (lengths[groups] - LENGTH).clip(0))
    sentences = Sentences(
        torch.from_numpy(words),
        start=torch.from_numpy(starts[groups] + cut),
        length=torch.from_numpy(lengths[groups].clip(max=LENGTH)),
        missing=torch.from_numpy(missing_of[labels]),
        vocabulary_size=vocabulary_size,
    )
    return Split(sentences, torch.from_numpy(labels), torch.from_numpy(groups), classes)
