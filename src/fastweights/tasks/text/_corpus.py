"""A corpus as numbers: a vocabulary, and three streams of tokens that lie in files and are mapped into memory.

A text becomes numbers once. The words of the training text are numbered as they first appear, in one pass, and written
as numbers; then they are counted and numbered again, the most frequent first. Neither step holds more than a piece of
the text, and the distinct words, in memory. Everything is written into a folder beside its place in the user's cache,
which gets its name when all of it is there.
"""

import collections
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_integers, check_sizes
from fastweights.errors import DataError, one_line
from fastweights.files import name_part, remove_parts
from fastweights.folders import check_text
from fastweights.tasks.datasets import user_cache

logger = logging.getLogger(__name__)

END = "<eos>"  # the end of a sentence
UNKNOWN = "<unk>"  # a word that the vocabulary does not have
SPLITS = ("train", "validation", "test")

Pieces = Iterable[tuple[str, int]]
"""A text in pieces that are cut at white space, a sentence a line, and how much of the progress each piece is."""

_Integers = np.ndarray[Any, np.dtype[Any]]

_FORMAT = 1  # version of the files in the cache: another number leaves older files alone
_BLOCK = 2**18  # bytes of text, or tokens, that are worked on at once: they stay in the processor's cache
_DAY = 86400.0


class _WithUnknown(dict[str, int]):
    """Numbers of words, that of `<unk>` for every other."""

    def __missing__(self, word: str) -> int:
        return self[UNKNOWN]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The words of a corpus, the most frequent of its training text first, and how often each stands there.

    Shapes: counts [V] int64.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.text import Vocabulary
        >>> vocabulary = Vocabulary(["the", "<eos>", "<unk>", "cat"], torch.tensor([9, 4, 2, 1]))
        >>> vocabulary.encode(["the", "dog", "<eos>"])
        tensor([0, 2, 1])
        >>> vocabulary.decode(torch.tensor([0, 3])), len(vocabulary), vocabulary.unknown
        (['the', 'cat'], 4, 2)
    """

    words: list[str]
    counts: Tensor

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self):,} words: {', '.join(self.words[:3])}, ...)"

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each word; where there is an `<unk>`, `numbers[word]` of any other word is its number."""
        numbers = {word: number for number, word in enumerate(self.words)}
        return _WithUnknown(numbers) if UNKNOWN in numbers else numbers

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the words in their order: a model that keeps it can tell the vocabulary of another corpus."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    @property
    def unknown(self) -> int | None:
        """The number of `<unk>`, which stands for every other word; None where the corpus has no such token."""
        return self.numbers.get(UNKNOWN)

    def encode(self, words: Iterable[str]) -> Tensor:
        """Return the numbers of words: [n] int64.

        Raises:
            ValueError: `words` is one string, or a word is not in a vocabulary that has no `<unk>`.
        """
        if isinstance(words, str):
            raise ValueError(
                f"words must be a list of words, got the text {words[:40]!r}: split it first, for example with .split()"
            )
        try:
            return torch.tensor([self.numbers[word] for word in words], dtype=torch.int64)
        except KeyError as error:
            raise ValueError(
                f"the word {error.args[0]!r} is not in the vocabulary, which has no {UNKNOWN} for such words"
            ) from None

    def decode(self, numbers: Tensor | Sequence[int]) -> list[str]:
        """Return the words of numbers, [n] of any integer type.

        Raises:
            ValueError: a number is not in the vocabulary.
        """
        found = torch.as_tensor(numbers).tolist()
        if wrong := [number for number in found if not 0 <= number < len(self)]:
            raise ValueError(f"numbers must be indices of words, 0 to {len(self) - 1:,}, got {wrong[0]:,}")
        return [self.words[number] for number in found]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three streams of tokens, one sentence after another, each closed by `<eos>`.

    The streams are mapped from files: only what is read of them takes memory.

    Shapes: train [N], validation [M] and test [L], all int32: numbers of the vocabulary.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.text import Corpus, Vocabulary
        >>> vocabulary = Vocabulary(["the", "cat", "<eos>"], torch.tensor([2, 1, 1]))
        >>> Corpus("tiny", vocabulary, torch.tensor([0, 1, 0, 2]), torch.tensor([0, 2]), torch.tensor([1, 2]))
        Corpus(tiny: train 4, validation 2, test 2 tokens; vocabulary 3)
    """

    name: str
    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor
    test: Tensor

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(getattr(self, split)):,}" for split in SPLITS)
        return f"Corpus({self.name}: {sizes} tokens; vocabulary {len(self.vocabulary):,})"


def prepare(
    name: str,
    sources: Sequence[Path],
    read: Callable[[str], Pieces],
    *,
    settings: Mapping[str, Any],
    open_vocabulary: bool,
    least_count: int = 1,
    greatest_size: int | None = None,
    vocabulary: Vocabulary | None = None,
    total: int | None = None,
    check: Callable[[dict[str, int], int], None] | None = None,
) -> Corpus:
    """Return a corpus from the user's cache; it is made and put there first if the cache does not have it yet.

    `read` gives the text of a split. With an open vocabulary every text can be encoded: it has the words that stand at
    least `least_count` times in the training text, and of these, `<eos>` and `<unk>` the `greatest_size` most frequent;
    all others are `<unk>`. Otherwise it has every word of the training text, and another one in validation or test is
    an error. A `vocabulary` that is given, and has an `<unk>`, is taken as it is, with its counts.

    `settings` say where the sources are and all else that the tokens depend on, besides the sources' names, sizes and
    times. `total` is how much progress there is to make, the bytes of the sources where it is not given. `check` is
    given the number of tokens of each split and the size of the vocabulary, and may refuse them.

    Raises:
        DataError: a split has no words or is of another corpus, or there is no room for the tokens. What `read` and
            `check` raise comes through.
    """
    stamps = [(str(path.resolve()), *_stamp(path)) for path in sources]
    wanted = vocabulary and (vocabulary.digest, vocabulary.counts.tolist())
    place = f"{name}-{_digest(settings, least_count, greatest_size, wanted, _FORMAT)}-"
    with _open_cache(name) as cache:
        folder = cache / f"{place}{_digest(stamps)}"
        corpus = _map(name, folder)
        if corpus is not None:
            return corpus
        part = name_part(folder)
        try:
            part.mkdir()
            began = time.monotonic()
            with _show_progress(name, total or sum(size for _, size, _ in stamps)) as advance:
                _write(part, name, read, advance, open_vocabulary, least_count, greatest_size, vocabulary, check)
            with contextlib.suppress(OSError):  # another process was faster: its folder is as good
                os.rename(part, folder)
            corpus = _map(name, folder)
            assert corpus is not None
        except OSError as error:
            raise DataError(
                f"{name} cannot be prepared in {cache}: {one_line(error)}; XDG_CACHE_HOME names another place"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old in cache.iterdir():  # made of the same sources before they changed
            if old.name.startswith(place) and old != folder:
                shutil.rmtree(old, ignore_errors=True)
        logger.info("%r is prepared in %.1f s", corpus, time.monotonic() - began)
        return corpus


def check_vocabulary_size(least_count: int, greatest_size: int | None) -> None:
    """Refuse what is not a least count of words, or leaves no word besides `<eos>` and `<unk>`."""
    check_sizes(least_count=least_count)
    if greatest_size is not None:
        check_integers(3, greatest_size=greatest_size)


def read_text(path: Path, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, int]]:
    """Yield a text file of any size, or the bytes from `start` to `stop` of it, in pieces, each with its bytes.

    Pieces are cut at white space. A last line without an end is given one, and a byte order mark is left out.

    Raises:
        DataError: the file cannot be read, is no text in UTF-8, or has a word of more than 262,144 bytes.
    """
    offset, rest, ended = start, b"", True
    try:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(_BLOCK if stop is None else min(_BLOCK, stop - file.tell())):
                block = rest + block
                cut = 1 + max(block.rfind(b"\n"), block.rfind(b" "), block.rfind(b"\t"))
                piece, rest = block[:cut], block[cut:]
                if len(rest) > _BLOCK:
                    raise DataError(
                        f"{path}, line {_count_lines(path, offset + cut)}: a word of more than {_BLOCK:,} bytes; "
                        "expected text, with words separated by spaces or ends of lines"
                    )
                yield _decode(path, piece, offset), len(piece)
                offset += len(piece)
                ended = not rest and piece.endswith(b"\n")
        if not ended:
            yield f"{_decode(path, rest, offset)}\n", len(rest)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _decode(path: Path, piece: bytes, offset: int) -> str:
    try:
        text = piece.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        place = offset + piece.index(error.object) + error.start
        raise DataError(
            f"{path}, line {_count_lines(path, place)}: the byte 0x{byte:02x} is not UTF-8 ({error.reason}); expected "
            "text in UTF-8"
        ) from error
    check_text(text, path)
    return text


def _count_lines(path: Path, place: int) -> int:
    """Return the number of the line that a byte stands in."""
    lines = 1
    with path.open("rb") as file:
        while block := file.read(min(_BLOCK, place - file.tell())):
            lines += block.count(b"\n")
    return lines


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    return status.st_size, status.st_mtime_ns


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _open_cache(name: str) -> Iterator[Path]:
    """Give the folder of prepared texts; where there can be none, one whose files live as long as they are mapped."""
    try:
        cache = user_cache() / "text"
        cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise PermissionError(f"{cache} cannot be written")
        remove_parts(cache, seconds=_DAY)
    except (ModuleNotFoundError, OSError) as error:
        logger.warning("%s is prepared each time, without a cache: %s", name, one_line(error))
        with tempfile.TemporaryDirectory(prefix="fastweights-") as folder:
            yield Path(folder)
    else:
        yield cache


def _map(name: str, folder: Path) -> Corpus | None:
    """Return the corpus that a folder holds, None where it is not there or not whole."""
    try:
        sizes = json.loads((folder / "sizes.json").read_bytes())
        whole = all((folder / file).stat().st_size == size for file, size in sizes.items())
        words = (folder / "words.txt").read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, ValueError):
        return None
    if not whole:
        logger.warning("%s is damaged and is made again", folder)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    counts = torch.from_numpy(np.fromfile(folder / "counts.int64", np.int64))
    # Not shared: whoever writes into a stream changes a copy of it in memory, and never the file.
    streams = {
        split: torch.from_file(
            str(folder / f"{split}.int32"), shared=False, size=sizes[f"{split}.int32"] // 4, dtype=torch.int32
        )
        for split in SPLITS
    }
    return Corpus(name, Vocabulary(words, counts), **streams)


def _write(
    folder: Path,
    name: str,
    read: Callable[[str], Pieces],
    advance: Callable[[int], None],
    open_vocabulary: bool,
    least_count: int,
    greatest_size: int | None,
    vocabulary: Vocabulary | None,
    check: Callable[[dict[str, int], int], None] | None,
) -> None:
    """Write the files of a corpus: three streams, the words, their counts, and the sizes of all these."""
    files = {split: folder / f"{split}.int32" for split in SPLITS}
    tokens = {}
    if vocabulary is None:
        first_seen: dict[str, int] = collections.defaultdict(itertools.count().__next__)
        tokens["train"] = _encode(name, "train", read, first_seen, files["train"], advance)
        counts = _count(files["train"], len(first_seen))
        words, counts, ranks = _rank(list(first_seen), counts, open_vocabulary, least_count, greatest_size)
        del first_seen
        _renumber(files["train"], ranks)
        numbers = {word: number for number, word in enumerate(words)}
        if open_vocabulary:
            numbers = _WithUnknown(numbers)
    else:
        words, counts, numbers = vocabulary.words, vocabulary.counts.numpy(), vocabulary.numbers
    for split in SPLITS if vocabulary is not None else SPLITS[1:]:
        tokens[split] = _encode(name, split, read, numbers, files[split], advance)
        unknown = 0 if vocabulary is None else int(_count(files[split], len(words))[vocabulary.unknown])
        if unknown > tokens[split] / 2:
            raise DataError(
                f"{name}: {unknown:,} of the {tokens[split]:,} words and ends of sentences of {split} are not in "
                f"the vocabulary of {len(words):,} words ({', '.join(words[:5])}, ...): is it of another corpus, or "
                "one whose words are written or parted otherwise?"
            )
    if check is not None:
        check(tokens, len(words))
    (folder / "words.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")
    counts.tofile(folder / "counts.int64")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")


def _encode(
    name: str,
    split: str,
    read: Callable[[str], Pieces],
    numbers: dict[str, int],
    path: Path,
    advance: Callable[[int], None],
) -> int:
    """Write a split's words as numbers, int32; return how many there are, ends of sentences among them."""
    count = ends = 0
    with path.open("wb") as file:
        for piece, amount in read(split):
            words = piece.replace("\n", f" {END} ").split()
            try:
                # One call for all words of the piece: nothing is done in Python for each of them.
                np.fromiter(map(numbers.__getitem__, words), np.int32, len(words)).tofile(file)
            except KeyError as error:
                raise DataError(
                    f"{name}: the word {error.args[0]!r} of {split} is not in the training text: are the files of one "
                    "corpus, and whole?"
                ) from None
            count += len(words)
            ends += piece.count("\n")
            advance(amount)
    if count == ends:
        raise DataError(f"{name}: there are no words in the text of {split}; expected words separated by white space")
    return count


def _count(path: Path, size: int) -> _Integers:
    counts = np.zeros(size, np.int64)
    with path.open("rb") as file:
        while block := file.read(4 * _BLOCK):
            counts += np.bincount(np.frombuffer(block, np.int32), minlength=size)
    return counts


def _rank(
    words: list[str], counts: _Integers, open_vocabulary: bool, least_count: int, greatest_size: int | None
) -> tuple[list[str], _Integers, _Integers]:
    """Return the vocabulary's words and counts, the most frequent first, and for each old number the new one."""
    kept = np.arange(len(words))
    if open_vocabulary:
        if UNKNOWN not in words:
            words, counts = [*words, UNKNOWN], np.append(counts, 0)
        always = np.array([number for number, word in enumerate(words) if word in (END, UNKNOWN)])
        others = np.setdiff1d(np.flatnonzero(counts >= least_count), always)
        if greatest_size is not None:
            others = others[np.argsort(-counts[others], kind="stable")][: greatest_size - len(always)]
        kept = np.union1d(always, others)
        counts[words.index(UNKNOWN)] += counts.sum() - counts[kept].sum()
    order = kept[np.argsort(-counts[kept], kind="stable")]
    ranks = np.full(len(words), -1, np.int32)
    ranks[order] = np.arange(len(order))
    if open_vocabulary:
        ranks[ranks < 0] = ranks[words.index(UNKNOWN)]
    return [words[number] for number in order], counts[order], ranks


def _renumber(path: Path, ranks: _Integers) -> None:
    with path.open("r+b") as file:
        while block := file.read(4 * _BLOCK):
            file.seek(-len(block), os.SEEK_CUR)
            file.write(ranks[np.frombuffer(block, np.int32)].tobytes())
            file.flush()


@contextlib.contextmanager
def _show_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that moves a bar on a terminal; elsewhere it does nothing."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"preparing {title}", total=total)
        yield lambda amount: bar.advance(task, amount)
