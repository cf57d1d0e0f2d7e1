import itertools
import math
from collections import Counter

import pytest
import torch

from fastweights.tasks import associative_retrieval as task


@pytest.mark.parametrize("pairs", [1, 2, 4, 8, 26])
def test_every_sequence_is_a_question_with_its_answer(pairs):
    examples = task.sample(500, pairs, generator=torch.Generator().manual_seed(pairs))
    assert examples.inputs.shape == (500, 2 * pairs + 3)
    assert examples.inputs.dtype == examples.targets.dtype == torch.int64
    for inputs, target in zip(examples.inputs, examples.targets, strict=True):
        text = task.text(inputs)
        letters, digits, tail = text[0 : 2 * pairs : 2], text[1 : 2 * pairs : 2], text[2 * pairs :]
        assert len(set(letters)) == pairs
        assert letters.isalpha()
        assert digits.isdecimal()
        assert tail[:2] == "??"
        assert dict(zip(letters, digits, strict=True))[tail[2]] == str(target.item())


def test_letters_digits_and_queries_are_uniform():
    count = 26_000
    inputs, targets = task.sample(count, 4, generator=torch.Generator().manual_seed(0))
    asked = (inputs[:, 0:8:2] == inputs[:, -1:]).nonzero()[:, 1]
    for values, classes in ((inputs[:, 0], 26), (inputs[:, 6], 26), (inputs[:, 3] - 26, 10), (targets, 10), (asked, 4)):
        counts = torch.bincount(values, minlength=classes)
        assert counts.sum() == count
        expected = count / classes
        # Chi squared has mean classes - 1 and variance twice that: five standard deviations.
        chi = ((counts - expected) ** 2 / expected).sum().item()
        assert chi < classes - 1 + 5 * math.sqrt(2 * (classes - 1))


def test_splits_have_their_sizes_and_come_from_the_seed():
    first, again, other = (task.splits((30, 20, 10), seed=seed) for seed in (1, 1, 2))
    assert [len(split.targets) for split in first] == [30, 20, 10]
    for mine, same, different in zip(first, again, other, strict=True):
        assert torch.equal(mine.inputs, same.inputs)
        assert torch.equal(mine.targets, same.targets)
        assert not torch.equal(mine.inputs, different.inputs)
    for splits in (first, task.splits((20, 20, 20), seed=1)):
        for one, two in itertools.combinations(splits, 2):
            assert not (one.inputs[:, None] == two.inputs[None]).all(2).any()  # of millions of sequences
    assert task.SIZES == (100_000, 10_000, 20_000)


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_floor_equals_the_sum_over_all_digit_sequences(pairs):
    error = entropy = 0.0
    for digits in itertools.product(range(10), repeat=pairs):
        shares = [count / pairs for count in Counter(digits).values()]
        error += 1 - max(shares)
        entropy -= sum(share * math.log(share) for share in shares)
    floor = task.floor(pairs)
    assert floor.error == pytest.approx(100 * error / 10**pairs, rel=1e-12, abs=1e-12)
    assert floor.cross_entropy == pytest.approx(entropy / 10**pairs, rel=1e-12, abs=1e-12)


def test_floor_of_the_hard_variant_is_what_a_guesser_scores():
    inputs, targets = task.sample(100_000, 8, generator=torch.Generator().manual_seed(0))
    digits = inputs[:, 1:16:2] - 26
    counts = torch.nn.functional.one_hot(digits, 10).sum(1)
    error = 100 * (counts.argmax(1) != targets).double().mean().item()
    assert error == pytest.approx(task.floor(8).error, abs=0.6)  # four standard deviations of the sample


def test_bad_arguments_are_refused():
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"pairs must lie between 1 and 26 .*, got 27"):
        task.sample(5, 27, generator=generator)
    with pytest.raises(ValueError, match=r"pairs must lie between 1 and 26 .*, got 0"):
        task.floor(0)
    with pytest.raises(ValueError, match="count must be an integer of at least 0, got -1"):
        task.sample(-1, generator=generator)
