"""Omniglot's few-shot splits and turned classes."""

import pytest
import torch

from fastweights.tasks import omniglot


def data(classes=1623):
    """As the real one: 964 classes of 30 alphabets, then 659 of 20."""
    generator = torch.Generator().manual_seed(0)
    alphabet = torch.cat([
        torch.cat([torch.arange(30), torch.randint(0, 30, (934,), generator=generator)]).sort().values,
        torch.cat([torch.arange(30, 50), torch.randint(30, 50, (639,), generator=generator)]).sort().values,
    ])  # fmt: skip
    images = torch.zeros(classes, 1, 1, 1, dtype=torch.uint8)
    return omniglot.Omniglot(images, [f"a{index}" for index in range(50)], alphabet[:classes], [""] * classes, 964)


@pytest.mark.parametrize("by", ["class", "alphabet"])
def test_every_class_is_in_one_part(by):
    split = omniglot.few_shot_split(data(), by=by)
    assert torch.equal(torch.cat(split).sort().values, torch.arange(1623))


def test_by_class_the_parts_have_the_papers_sizes_and_alphabets_in_common():
    found = data()
    split = omniglot.few_shot_split(found)
    assert [len(part) for part in split] == [1100, 100, 423]
    assert set(found.alphabet[split.train].tolist()) & set(found.alphabet[split.test].tolist())


def test_by_alphabet_no_two_parts_have_an_alphabet_in_common():
    found = data()
    split = omniglot.few_shot_split(found, by="alphabet")
    train, validation, test = (set(found.alphabet[part].tolist()) for part in split)
    assert (len(train), len(validation), len(test)) == (27, 3, 20)
    assert len(train | validation | test) == 50
    assert split.test.tolist() == list(range(964, 1623))


def test_the_seed_decides():
    first, again, other = (omniglot.few_shot_split(data(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.test, again.test)
    assert not torch.equal(first.test, other.test)


def test_what_cannot_be_parted_is_refused():
    with pytest.raises(ValueError, match="by must be one of class, alphabet, got 'letter'"):
        omniglot.few_shot_split(data(), by="letter")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the split needs Omniglot's 1623 classes, got 20"):
        omniglot.few_shot_split(data(20))


def test_a_turned_class_is_a_class_of_its_own():
    images = torch.randint(0, 256, (3, 20, 5, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    turned = omniglot.rotate(images)
    assert turned.shape == (12, 20, 5, 5)
    assert torch.equal(turned[:3], images)
    for quarter in range(4):
        corner = [(0, 0), (0, -1), (-1, -1), (-1, 0)][quarter]  # what comes to the upper left, anticlockwise
        assert torch.equal(turned[3 * quarter : 3 * quarter + 3, :, 0, 0], images[..., corner[0], corner[1]])


@pytest.mark.data
def test_the_real_alphabets(omniglot_root):
    found = omniglot.load(omniglot_root)
    split = omniglot.few_shot_split(found, by="alphabet")
    names = {found.alphabets[index] for index in found.alphabet[split.test].tolist()}
    assert len(names) == 20
    assert "Greek" not in names
    assert 80 <= len(split.validation) <= 140
