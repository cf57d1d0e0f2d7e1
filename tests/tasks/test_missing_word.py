"""The missing word: every example against the lines of the files, and what must not be seen."""

import random
from pathlib import Path

import pytest
import torch

from fastweights.errors import DataError
from fastweights.tasks import datasets, missing_word
from fastweights.tasks.missing_word import BLANK, PADDING, UNKNOWN, MissingWord, Split

FILES = {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"}
WORDS = [f"{letter}{number}" for letter in "abc" for number in range(10)]
Lines = dict[str, list[str]]


def corpus() -> Lines:
    """Lines of 2 to 14 words, some common and some rare, some of them twice in a line; and all that is left out."""
    rng = random.Random(0)
    weights = [1 / (3 + rank) for rank in range(len(WORDS))]
    lines: Lines = {}
    for split, count in (("train", 120), ("validation", 40), ("test", 40)):
        lines[split] = [
            " ".join(rng.choices([*WORDS, "<unk>", "N", "$"], [*weights, 0.1, 0.1, 0.1], k=rng.randint(2, 14)))
            for _ in range(count)
        ]
    lines["test"] += ["only-in-test a0 a1", lines["validation"][0], lines["train"][0], "", "a0", "a1 a1", "b0 a1"]
    lines["validation"] += [lines["train"][1], lines["validation"][2]]
    lines["train"] += [lines["train"][3], "a0"]
    return lines


def write(root: Path, lines: Lines) -> None:
    (root / "ptb").mkdir(exist_ok=True)
    for split, name in FILES.items():
        (root / "ptb" / name).write_text("".join(f" {line} \n" for line in lines[split]), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with small files, of which few words are drawn and few are shown."""
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    for name, value in (("TEST_WORDS", 6), ("VALIDATION_WORDS", 3), ("COMMON", 2), ("LENGTH", 9)):
        monkeypatch.setattr(missing_word, name, value)
    write(tmp_path, corpus())
    return tmp_path


def distinct(lines: Lines) -> dict[str, list[list[str]]]:
    """The sentences of each split, each in one split and once."""
    seen: set[str] = set()
    found = {}
    for split in ("test", "validation", "train"):
        new = [line for line in dict.fromkeys(" ".join(line.split()) for line in lines[split]) if line not in seen]
        seen.update(new)
        found[split] = [line.split() for line in new if len(set(line.split())) > 1]
    return found


def shown(sentence: list[str], word: str, visible: set[str]) -> list[str]:
    """What an example should look like, in words."""
    begin = max(0, min(sentence.index(word) - missing_word.LENGTH // 2, len(sentence) - missing_word.LENGTH))
    cut = sentence[begin : begin + missing_word.LENGTH]
    cut += ["<pad>"] * (missing_word.LENGTH - len(cut))
    return ["<blank>" if each == word else each if each in visible else "<unk>" for each in cut]


def splits(data: MissingWord) -> dict[str, Split]:
    return {"train": data.train, "validation": data.validation, "test": data.test}


def test_the_papers_numbers_of_words_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    common = [f"c{number}" for number in range(96)]
    words = [*common, *(f"w{number}" for number in range(1200))]
    fillers = ["f0", "f1", "f2", "f3"]  # with those the most common hundred
    lines = {
        "train": [f"{word} {word} {filler}" for word in words for filler in fillers]
        + [f"{word} f0" for word in common],
        "validation": [f"{filler} {word}" for word in words for filler in fillers],
        "test": [f"{word} {filler} {word}" for word in words for filler in fillers],
    }
    write(tmp_path, lines)
    data = missing_word.load(tmp_path)
    assert [len(split.labels.unique()) for split in (data.train, data.validation, data.test)] == [100, 200, 1000]
    assert data.test.sentences[torch.arange(2)].shape == (2, 50)


def test_every_example_is_that_of_the_lines(root: Path) -> None:
    lines = corpus()
    assert {*lines["train"]} & {*lines["test"]}  # or it would not show that none is in two splits
    assert {*lines["validation"]} & {*lines["test"]}
    assert {*lines["train"]} & {*lines["validation"]}
    data = missing_word.load(root)
    sentences = distinct(lines)
    hidden = {*data.test.words, *data.validation.words}
    visible = {word for sentence in sentences["train"] for word in sentence}.difference(hidden)
    assert data.vocabulary == ["<pad>", "<blank>", "<unk>", *sorted(visible.difference({"<unk>"}))]
    for name, split in splits(data).items():
        found = [
            (split.words[label], group, [data.vocabulary[number] for number in row])
            for label, group, row in zip(
                split.labels.tolist(), split.groups.tolist(), split.sentences[:].tolist(), strict=True
            )
        ]
        assert found == [
            (word, group, shown(sentence, word, visible | {"<pad>"}))
            for word in split.words
            for group, sentence in enumerate(sentences[name])
            if word in sentence
        ]
    rows = torch.cat([split.sentences[:] for split in splits(data).values()])
    assert (rows == BLANK).any(1).all()
    assert (rows == BLANK).sum(1).max() > 1  # a word that stands twice
    assert (rows[:, -1] != PADDING).any()  # a long sentence
    assert (rows[:, -1] == PADDING).any()


def test_classes_are_words_with_enough_sentences_of_one_split_alone(root: Path) -> None:
    sentences = distinct(corpus())
    tokens = [word for sentence in sentences["train"] for word in sentence]
    common = sorted(WORDS, key=lambda word: (-tokens.count(word), word))[:2]
    for enough in (4, 5):
        data = missing_word.load(root, sentences=enough)
        for split in splits(data).values():
            assert split.words == sorted(set(split.words).intersection(WORDS))  # no <unk>, no N, no $
            assert split.labels.bincount(minlength=len(split.words)).min() >= enough
            assert split.labels.dtype == split.groups.dtype == split.sentences[0].dtype == torch.int64
        assert (len(data.test.words), len(data.validation.words)) == (6, 3)
        hidden = {*data.test.words, *data.validation.words}
        assert len(hidden) == 9
        assert not hidden.intersection(common)
        count = {word: sum(word in sentence for sentence in sentences["train"]) for word in WORDS}
        assert data.train.words == sorted(word for word in WORDS if word not in hidden and count[word] >= enough)


def test_words_of_the_test_are_seen_nowhere(root: Path) -> None:
    data = missing_word.load(root)
    hidden = {*data.test.words, *data.validation.words}
    assert not hidden.intersection(data.vocabulary)
    for split in splits(data).values():
        rows = split.sentences[:]
        assert rows.max() < len(data.vocabulary)
        for label, row in zip(split.labels.tolist(), rows.tolist(), strict=True):
            assert split.words[label] not in {data.vocabulary[number] for number in row}
    assert "only-in-test" not in data.vocabulary


def test_sentences_are_asked_for_like_a_tensor(root: Path) -> None:
    sentences = missing_word.load(root).train.sentences
    rows = sentences[:]
    assert rows.shape == (len(sentences), 9)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(len(sentences), (2, 3, 4), generator=generator)
    assert torch.equal(sentences[index], rows[index])
    assert torch.equal(sentences[5], rows[5])
    assert torch.equal(sentences[-1], rows[-1])
    assert torch.equal(sentences[torch.arange(len(sentences)) < 7], rows[:7])
    assert torch.equal(torch.stack([sentences[place] for place in range(len(sentences))]), rows)
    assert sentences[index[:0]].shape == (0, 3, 4, 9)
    with pytest.raises(IndexError):
        sentences[len(sentences)]


def test_the_draw_is_of_its_seed_alone(root: Path) -> None:
    one, same, other = (missing_word.load(root, seed=seed) for seed in (0, 0, 1))
    assert one.vocabulary == same.vocabulary
    for first, second in zip(splits(one).values(), splits(same).values(), strict=True):
        assert first.words == second.words
        assert torch.equal(first.sentences[:], second.sentences[:])
        assert torch.equal(first.labels, second.labels)
        assert torch.equal(first.groups, second.groups)
    assert other.test.words != one.test.words


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("sentences", 1, r"^sentences must be 2 or more, one to describe a word and one to ask about it, got 1$"),
        ("seed", -3, r"^seed must be an integer of at least 0, got -3$"),
    ],
)
def test_wrong_arguments_are_refused(root: Path, argument: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        missing_word.load(root, **{argument: value})


def test_a_missing_file_is_told_of(root: Path) -> None:
    (root / "ptb" / "ptb.valid.txt").unlink()
    with pytest.raises(DataError, match=r"data set ptb .* is missing: get it from https://.* put ptb\.valid\.txt into"):
        missing_word.load(root)


@pytest.mark.parametrize(
    ("split", "right"), [("test", "6 to draw"), ("validation", "3 to draw"), ("train", "1 to learn from")]
)
def test_too_few_words_are_told_of(root: Path, split: str, right: str) -> None:
    lines = corpus() | {split: ["a0 b0 c0"]}
    write(root, lines)
    with pytest.raises(DataError) as error:
        missing_word.load(root)
    assert str(error.value) == (
        f"{root / 'ptb' / FILES[split]}: 0 words that may be drawn have 4 or more sentences; expected at least {right}"
    )


def test_a_file_that_is_no_text_is_refused(root: Path) -> None:
    path = root / "ptb" / "ptb.train.txt"
    path.write_bytes(b"a0 \xff\n")
    with pytest.raises(DataError, match=r"ptb\.train\.txt: cannot be read: .*; expected one sentence a line"):
        missing_word.load(root)


@pytest.mark.data
def test_the_real_sentences(ptb_root: str) -> None:
    """Their counts, and with them the numbers of the module's text."""
    folder = datasets.get("ptb", ptb_root)
    text = {split: (folder / name).read_text(encoding="utf-8").splitlines() for split, name in FILES.items()}
    sentences = distinct(text)
    assert {split: len(each) for split, each in sentences.items()} == {
        "test": 3743,
        "validation": 3321,
        "train": 40920,
    }
    assert len(missing_word._candidates([tuple(each) for each in sentences["test"]], 4, [])) == 2447

    data = missing_word.load(ptb_root)
    assert [(len(split.words), len(split.sentences)) for split in splits(data).values()] == [
        (8707, 576_587),
        (200, 2066),
        (1000, 12_396),
    ]
    assert len(data.vocabulary) == 8793
    assert data.test.words[:6] == ["'ll", "'m", "'ve", "190-point", "52-week", "a."]
    hidden = {*data.test.words, *data.validation.words}
    assert sum(hidden.isdisjoint(sentence) for sentence in sentences["train"]) == 2754
    words = [word for sentence in sentences["train"] for word in sentence]
    assert sum(word in hidden for word in words) / len(words) == pytest.approx(0.164, abs=5e-4)
    lengths = torch.tensor([len(sentence) for sentence in sentences["train"]])
    assert (lengths[data.train.groups] > missing_word.LENGTH).double().mean().item() == pytest.approx(0.018, abs=5e-4)

    visible = {*data.vocabulary, "<pad>"}
    generator = torch.Generator().manual_seed(0)
    for name, split in splits(data).items():
        for index in torch.randint(len(split.sentences), (1000,), generator=generator):
            word = split.words[int(split.labels[index])]
            row = [data.vocabulary[number] for number in split.sentences[index].tolist()]
            assert row == shown(sentences[name][int(split.groups[index])], word, visible)
        assert split.labels.bincount().min() >= 4
        assert split.sentences[:100].eq(UNKNOWN).any()
