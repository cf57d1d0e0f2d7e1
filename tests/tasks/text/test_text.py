"""Corpora of words: every stream against the words of the files, and what is refused."""

import collections
import errno
import os
import subprocess
import sys
import time
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


def test_of_two_processes_that_prepare_at_once_the_first_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch):
    read = vars(text)["read_text"]

    def load_first(path: Path):
        monkeypatch.setattr(text, "read_text", read)
        text.load("ptb", root)
        return read(path)

    monkeypatch.setattr(text, "read_text", load_first)
    assert decode(text.load("ptb", root))["train"] == split_words(TEXTS["train"])
    assert len(list((root / "cache" / "fastweights" / "text").iterdir())) == 1


def test_what_a_killed_process_left_goes_a_day_later(root: Path):
    text.load("ptb", root)
    (folder,) = (root / "cache" / "fastweights" / "text").iterdir()
    for name, hours in (("old", 25), ("young", 1)):
        part = folder.with_name(f".ptb.{name}.part")
        part.mkdir()
        (part / "train.int32").write_bytes(b"half")
        for path in (part / "train.int32", part):
            os.utime(path, times=(time.time() - 3600 * hours,) * 2)
    # One that is still written to, as in the day that 4 billion words take.
    busy = folder.with_name(".ptb.busy.part")
    busy.mkdir()
    (busy / "train.int32").write_bytes(b"half")
    os.utime(busy, times=(time.time() - 3600 * 25,) * 2)
    text.load("ptb", root)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".ptb.busy.part", ".ptb.young.part", folder.name]


def test_a_full_disk_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch):
    def fill(self: Path, *arguments: object, **settings: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(DataError, match=r"ptb cannot be prepared in .*No space left on device; XDG_CACHE_HOME names"):
        text.load("ptb", root)
    assert not list((root / "cache" / "fastweights" / "text").iterdir())


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
    for number in (-1, 9):
        with pytest.raises(ValueError, match=f"numbers must be indices of words, 0 to 8, got {number}"):
            vocabulary.decode([0, number])
    assert vocabulary.digest == text.load("ptb", root).vocabulary.digest
    assert vocabulary.digest != text.Vocabulary(vocabulary.words[::-1], vocabulary.counts).digest
    closed = text.Vocabulary(["the", "cat"], torch.tensor([2, 1]))
    assert closed.unknown is None
    with pytest.raises(ValueError, match="the word 'dog' is not in the vocabulary, which has no <unk>"):
        closed.encode(["dog"])


def put(folder: Path, **texts: str) -> Path:
    """Write files, whose names are given with two underscores for a slash and without .txt."""
    for name, words in texts.items():
        path = folder / f"{name.replace('__', '/')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(words.encode())
    return folder


NAMED = {"train": "b b b a a c <unk>\n", "validation": "a d\n", "test": "c b"}


@pytest.mark.usefixtures("places")
class TestFolder:
    """Any folder of text files."""

    @pytest.mark.parametrize("names", [("train", "validation", "test"), ("train__1", "valid__x__2", "test__a")])
    def test_splits_are_named_by_files_or_folders(self, tmp_path: Path, names: tuple[str, ...]):
        folder = put(tmp_path / "texts", **dict(zip(names, NAMED.values(), strict=True)))
        corpus = text.load_folder(folder, least_count=1)
        assert decode(corpus) == {
            "train": ["b", "b", "b", "a", "a", "c", "<unk>", "<eos>"],
            "validation": ["a", "<unk>", "<eos>"],
            "test": ["c", "b", "<eos>"],
        }
        assert corpus.name == "texts"

    def test_rare_words_are_unknown(self, tmp_path: Path):
        folder = put(tmp_path / "texts", **NAMED)
        two = text.load_folder(folder)
        assert two.vocabulary.words == ["b", "a", "<unk>", "<eos>"]
        assert two.vocabulary.counts.tolist() == [3, 2, 2, 1]
        assert decode(two)["train"] == ["b", "b", "b", "a", "a", "<unk>", "<unk>", "<eos>"]
        three = text.load_folder(folder, least_count=1, greatest_size=3)
        assert three.vocabulary.words == ["<unk>", "b", "<eos>"]
        assert three.vocabulary.counts.tolist() == [4, 3, 1]
        for corpus in (two, three):
            assert torch.equal(corpus.train.bincount(), corpus.vocabulary.counts)

    def test_the_last_tenths_of_the_files_are_held_out(self, tmp_path: Path):
        corpus = text.load_folder(
            put(tmp_path, **{f"{number:02}": f"w{number}" for number in range(23)}), least_count=1
        )
        assert decode(corpus)["test"] == ["<unk>", "<eos>"] * 2
        assert corpus.vocabulary.words[1:] == [f"w{number}" for number in range(19)] + ["<unk>"]
        assert len(corpus.validation) == 4

    @pytest.mark.parametrize("sizes", [(200,), (150, 50), (20, 30, 150), (0, 195, 5), (1, 198, 1)])
    def test_few_files_are_cut_between_lines(self, tmp_path: Path, sizes: tuple[int, ...]):
        lines = iter([f"a{number} " + "b " * (number % 7) + "\n" for number in range(sum(sizes))])
        texts = {str(name): "".join(next(lines) for _ in range(size)) for name, size in enumerate(sizes)}
        corpus = text.load_folder(put(tmp_path, **texts), least_count=1)
        streams = corpus.train, corpus.validation, corpus.test
        assert sum(map(len, streams)) == len(split_words("".join(texts.values())))
        assert decode(corpus)["train"] == split_words("".join(texts.values()))[: len(corpus.train)]
        end = corpus.vocabulary.encode(["<eos>"])
        assert all(stream[-1] == end for stream in streams)
        assert [round(10 * len(stream) / sum(map(len, streams))) for stream in streams] == [8, 1, 1]

    def test_ten_equal_lines_are_cut_where_the_last_two_begin(self, tmp_path: Path):
        corpus = text.load_folder(put(tmp_path, one="a b\n" * 10), least_count=1)
        assert [len(stream) for stream in (corpus.train, corpus.validation, corpus.test)] == [24, 3, 3]

    def test_a_text_can_be_encoded_for_a_trained_model(self, tmp_path: Path):
        vocabulary = text.Vocabulary(["a", "b", "<eos>", "<unk>"], torch.tensor([50, 40, 30, 20]))
        corpus = text.load_folder(put(tmp_path / "own", **NAMED), vocabulary=vocabulary)
        assert decode(corpus)["test"] == ["<unk>", "b", "<eos>"]
        assert corpus.vocabulary.words == vocabulary.words
        assert torch.equal(corpus.vocabulary.counts, vocabulary.counts)

    def test_a_vocabulary_of_another_corpus_is_refused(self, tmp_path: Path):
        folder = put(tmp_path / "own", **NAMED)
        with pytest.raises(DataError, match=r"7 of the 8 words and ends .* vocabulary of 3 words \(x, <eos>, <unk>, "):
            text.load_folder(folder, vocabulary=text.Vocabulary(["x", "<eos>", "<unk>"], torch.ones(3).long()))
        folder = put(tmp_path / "tested", train="x\n", valid="x", test="y z")
        with pytest.raises(DataError, match="2 of the 3 words and ends of sentences of test are not in the vocabulary"):
            text.load_folder(folder, vocabulary=text.Vocabulary(["x", "<eos>", "<unk>"], torch.ones(3).long()))
        assert not list((tmp_path / "cache" / "fastweights" / "text").iterdir())
        with pytest.raises(ValueError, match="vocabulary must be a Vocabulary, such as a corpus has, got list"):
            text.load_folder(folder, vocabulary=["a", "<eos>", "<unk>"])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="vocabulary must have <unk>"):
            text.load_folder(folder, vocabulary=text.Vocabulary(["a", "<eos>"], torch.ones(2).long()))
        with pytest.raises(ValueError, match="vocabulary must have <eos>"):
            text.load_folder(folder, vocabulary=text.Vocabulary(["a", "<unk>"], torch.ones(2).long()))

    def test_each_way_to_prepare_a_text_is_kept(self, tmp_path: Path):
        folder = put(tmp_path / "own", **NAMED)
        for _ in range(2):
            assert [len(text.load_folder(folder, least_count=count).vocabulary) for count in (1, 2, 3)] == [5, 4, 3]
            for count in (10, 20):
                vocabulary = text.Vocabulary(["a", "b", "<eos>", "<unk>"], torch.full((4,), count))
                assert text.load_folder(folder, vocabulary=vocabulary).vocabulary.counts.tolist() == [count] * 4
        put(folder, train__more="b\n")
        assert len(text.load_folder(folder).train) == 10
        assert len(list((tmp_path / "cache" / "fastweights" / "text").iterdir())) == 5

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            ({}, r"no file matches '\*\*/\*\.txt'"),
            ({"train": "a", "test": "b"}, r"no text for validation, as validation\.txt would be"),
            ({"train": "a", "valid": "a", "test": "b", "notes": "c"}, r"notes\.txt: is it for training"),
            ({"train": "a", "valid": "", "test": "b"}, "no words in the text of validation"),
            ({"one": "a line alone"}, "texts: its only file has no line that begins where validation and test would"),
            ({"one": "a\n" * 60, "two": "b" * 20}, "texts: its 2 files have no line that begins where test would"),
            ({"one": ""}, "no words in the text of train"),
        ],
    )
    def test_what_cannot_be_split_is_refused(self, tmp_path: Path, texts: dict[str, str], message: str):
        (tmp_path / "texts").mkdir()
        with pytest.raises(DataError, match=message):
            text.load_folder(put(tmp_path / "texts", **texts))

    def test_what_is_no_folder_or_number_is_refused(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"there is no folder .*nowhere; expected one with text files"):
            text.load_folder(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="greatest_size must be an integer of at least 3, got 2"):
            text.load_folder(tmp_path, greatest_size=2)

    def test_long_lines_and_long_files_are_read_in_pieces(self, tmp_path: Path):
        words = [f"w{number % 977}é" for number in range(300_000)]
        long = " ".join(words)  # one line of megabytes, without an end
        corpus = text.load_folder(put(tmp_path, train=f"\ufeff{long}", valid="w0é", test="w1é"), least_count=1)
        assert decode(corpus)["train"] == [*words, "<eos>"]

    def test_what_is_no_text_is_refused_by_its_line(self, tmp_path: Path):
        folder = put(tmp_path, train="a\n" * 200_000 + "b" * 600_000, valid="a", test="a")
        with pytest.raises(DataError, match=r"train\.txt, line 200001: a word of more than 262,144 bytes"):
            text.load_folder(folder)
        (folder / "train.txt").write_bytes(b"a\n" * 200_000 + b"b \xff c\n")
        with pytest.raises(DataError, match=r"train\.txt, line 200001: the byte 0xff is not UTF-8"):
            text.load_folder(folder)
        (folder / "train.txt").write_bytes(b"a " * 200_000 + b"\xc3")
        with pytest.raises(DataError, match=r"train\.txt, line 1: the byte 0xc3 is not UTF-8 \(unexpected end"):
            text.load_folder(folder)


def test_parallel_streams_follow_one_another():
    stream = torch.arange(23, dtype=torch.int32)
    streams = text.cut_streams(stream, 4)
    assert streams.shape == (5, 4)
    assert torch.equal(streams.t().flatten(), stream[:20])
    assert streams.data_ptr() == stream.data_ptr()


def test_a_stream_shorter_than_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"of 23 tokens cannot be cut into 12 streams .*: give 11 at most"):
        text.cut_streams(torch.arange(23), 12)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        text.cut_streams(torch.arange(23), 0)
    with pytest.raises(ValueError, match=r"a stream must have at least two tokens, .* to predict; got 1"):
        text.cut_streams(torch.arange(1), 1)


PEAK = """
import sys
from fastweights.tasks import text

def find_peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = find_peak()
text.load_folder(sys.argv[1])
print(find_peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
def test_peak_memory_does_not_grow_with_the_text(tmp_path: Path):
    words = " ".join(f"w{number * number % 9973}" for number in range(500_000))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(text.__file__).parents[3]), environment.get("PYTHONPATH", "")]
    )
    kilobytes = []
    for name, copies in (("short", 2), ("long", 20)):
        folder = put(tmp_path / name, train=words * copies, validation="w1", test="w1")
        command = [sys.executable, "-c", PEAK, str(folder)]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        kilobytes.append(int(finished.stdout))
    assert kilobytes[1] < kilobytes[0] + 8_000  # ten million tokens more are 40 MB as numbers, and 50 MB as text


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
