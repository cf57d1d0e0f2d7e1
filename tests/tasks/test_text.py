"""Corpora of words: every stream against the words of the files, and what is refused."""

import collections
from pathlib import Path

import pytest
import torch

from fastweights.errors import DataError
from fastweights.tasks import text
from fastweights.tasks.text import Corpus

PTB = {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"}
TEXTS = {
    "train": " the cat sat \n the <unk> sat on N mats \n\n the end \n",
    "validation": " the cat \n",
    "test": " <unk> sat on the cat \n on the mats \n",
}


def write(root: Path, texts: dict[str, str] = TEXTS) -> None:
    (root / "ptb").mkdir(exist_ok=True)
    for split, name in PTB.items():
        (root / "ptb" / name).write_bytes(texts[split].encode())


def split_words(text: str) -> list[str]:
    return text.replace("\n", " <eos> ").split()


def decode(corpus: Corpus) -> dict[str, list[str]]:
    return {split: corpus.vocabulary.decode(getattr(corpus, split)) for split in TEXTS}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: None) -> Path:
    """A data folder with a treebank of three sentences, and its sizes for the published ones."""
    published = text.Published(PTB, {split: len(split_words(TEXTS[split])) for split in TEXTS}, 9)
    monkeypatch.setitem(text.PUBLISHED, "ptb", published)
    write(tmp_path)
    return tmp_path


def test_streams_are_the_words_of_the_files(root: Path):
    corpus = text.load("ptb", root)
    assert decode(corpus) == {split: split_words(TEXTS[split]) for split in TEXTS}
    assert {each.dtype for each in (corpus.train, corpus.validation, corpus.test)} == {torch.int32}


def test_the_vocabulary_is_that_of_training_the_most_frequent_first(root: Path):
    corpus = text.load("ptb", root)
    counts = collections.Counter(split_words(TEXTS["train"]))
    assert dict(zip(corpus.vocabulary.words, corpus.vocabulary.counts.tolist(), strict=True)) == counts
    assert corpus.vocabulary.counts.tolist() == sorted(counts.values(), reverse=True)
    assert torch.equal(corpus.train.bincount(minlength=len(corpus.vocabulary)), corpus.vocabulary.counts)
    assert corpus.vocabulary.words.index("<unk>") == corpus.vocabulary.unknown


def test_a_second_load_reads_no_text(root: Path, monkeypatch: pytest.MonkeyPatch):
    first = text.load("ptb", root)
    monkeypatch.setattr(text, "read_text", None)
    second = text.load("ptb", root)
    assert decode(second) == decode(first)
    assert torch.equal(second.vocabulary.counts, first.vocabulary.counts)


def test_a_changed_file_is_read_again_and_the_old_tokens_go(root: Path):
    text.load("ptb", root)
    write(root, {**TEXTS, "validation": "cat the\n"})
    corpus = text.load("ptb", root)
    assert decode(corpus)["validation"] == ["cat", "the", "<eos>"]
    assert len(list((root / "cache" / "fastweights" / "text").iterdir())) == 1


def test_who_writes_into_a_stream_changes_no_file(root: Path):
    text.load("ptb", root).train.zero_()
    assert decode(text.load("ptb", root))["train"] == split_words(TEXTS["train"])


def test_a_damaged_cache_is_made_again(root: Path):
    text.load("ptb", root)
    (stream,) = (root / "cache").rglob("train.int32")
    stream.write_bytes(b"\0" * 4)
    assert decode(text.load("ptb", root))["train"] == split_words(TEXTS["train"])


def test_without_a_cache_the_streams_are_mapped_all_the_same(root: Path):
    (root / "cache").write_text("a file where a folder should be")
    corpus = text.load("ptb", root)
    assert decode(corpus)["test"] == split_words(TEXTS["test"])


@pytest.mark.parametrize(
    ("split", "words", "message"),
    [
        ("train", TEXTS["train"] + "the cat\n", r"ptb\.train\.txt: 18 tokens with ends of lines; expected 15"),
        ("train", TEXTS["train"].replace("end", "cat"), "8 different tokens with <eos>; expected 9"),
        ("test", "a mouse \n", "the word 'a' of test is not in the training text"),
        ("validation", " \n \n", "no words in the text of validation"),
        ("validation", "", "no words in the text of validation"),
    ],
)
def test_files_of_another_corpus_are_refused_and_nothing_is_kept(root: Path, split: str, words: str, message: str):
    write(root, {**TEXTS, split: words})
    with pytest.raises(DataError, match=message):
        text.load("ptb", root)
    assert not list((root / "cache" / "fastweights" / "text").iterdir())


def test_what_is_not_utf8_is_named_by_its_line(root: Path):
    (root / "ptb" / "ptb.train.txt").write_bytes(b"the cat\nthe caf\xe9 \n")
    with pytest.raises(DataError, match=r"ptb\.train\.txt, line 2: the byte 0xe9 is not UTF-8"):
        text.load("ptb", root)


def test_an_unknown_corpus_is_refused():
    with pytest.raises(ValueError, match="name must be one of ptb, wikitext-2"):
        text.load("wikitext")


def test_words_become_numbers_and_words_again(root: Path):
    vocabulary = text.load("ptb", root).vocabulary
    numbers = vocabulary.encode(["cat", "dog", "<eos>"])
    assert numbers.dtype == torch.int64
    assert vocabulary.decode(numbers) == ["cat", "<unk>", "<eos>"]
    with pytest.raises(ValueError, match="words must be a list of words, got the text 'the cat'"):
        vocabulary.encode("the cat")
    closed = text.Vocabulary(["the", "cat"], torch.tensor([2, 1]))
    assert closed.unknown is None
    with pytest.raises(ValueError, match="the word 'dog' is not in the vocabulary, which has no <unk>"):
        closed.encode(["dog"])


def test_parallel_streams_follow_one_another():
    stream = torch.arange(23, dtype=torch.int32)
    streams = text.cut_streams(stream, 4)
    assert streams.shape == (5, 4)
    assert torch.equal(streams.t().flatten(), stream[:20])
    assert streams.data_ptr() == stream.data_ptr()


def test_a_stream_shorter_than_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"of 23 tokens cannot be cut into 12 of .*: batch_size can be at most 11"):
        text.cut_streams(torch.arange(23), 12)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        text.cut_streams(torch.arange(23), 0)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("ptb", (929_589, 73_760, 82_430), 10_000),
        ("wikitext-2", (2_088_628, 217_646, 245_569), 33_278),
    ],
)
def test_the_published_sizes(request: pytest.FixtureRequest, name: str, sizes: tuple[int, ...], words: int):
    corpus = text.load(name, request.getfixturevalue(f"{name.replace('-2', '2')}_root"))
    assert (len(corpus.train), len(corpus.validation), len(corpus.test)) == sizes
    assert len(corpus.vocabulary) == words
    assert corpus.vocabulary.counts.sum() == sizes[0]
