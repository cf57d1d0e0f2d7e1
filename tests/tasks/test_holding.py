import pytest
import torch

from fastweights.tasks import holding
from fastweights.tasks.recall import IGNORED

DRAWS = {
    "sums": lambda count, generator: holding.sample_sums(count, 9, generator=generator),
    "copies": lambda count, generator: holding.sample_copies(count, 3, 4, symbols=5, generator=generator),
    "cards": lambda count, generator: holding.sample_cards(count, 2, 7, generator=generator),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_sum_is_that_of_one_number_of_each_half_and_due_at_the_end():
    inputs, targets = DRAWS["sums"](2000, generator())
    for (numbers, marks), answers in zip(inputs.transpose(1, 2).tolist(), targets.tolist(), strict=True):
        first, second = (step for step, mark in enumerate(marks) if mark)
        assert first < 4 <= second
        assert set(marks) == {0, 1}
        assert answers[-1] == pytest.approx(numbers[first] + numbers[second])
        assert answers[:-1] == [IGNORED] * 8
    assert (inputs[..., 1].mean(0) > 0).all()  # each step is marked in some
    error = ((targets[:, -1] - 1) ** 2).mean().item()
    assert error == pytest.approx(holding.SUM_VARIANCE, rel=0.1)


def test_a_copy_is_asked_for_symbol_by_symbol():
    inputs, targets = DRAWS["copies"](500, generator())
    for word, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert word[3:] == [5] * 4 + [6] * 3
        assert answers == [IGNORED] * 7 + word[:3]
    assert torch.bincount(inputs[:, :3].flatten(), minlength=5).min() > 250
    no_blank = holding.sample_copies(2, 2, 0, generator=generator()).inputs
    assert no_blank.tolist() == [[*word, 9, 9] for word in no_blank[:, :2].tolist()]


def test_a_card_comes_once_and_is_asked_for_by_its_suit():
    inputs, targets = DRAWS["cards"](500, generator())
    for cards, suits in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert len(set(cards)) == 7
        assert suits == [IGNORED] * 2 + [card // 13 for card in cards[:5]]
    assert set(inputs.unique().tolist()) == set(range(52))
    assert sorted(holding.sample_cards(1, generator=generator()).inputs[0].tolist()) == list(range(52))


@pytest.mark.parametrize("name", DRAWS)
def test_the_generator_alone_decides_and_none_can_be_drawn(name):
    first, same, other = (DRAWS[name](20, generator(seed)) for seed in (0, 0, 1))
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first.inputs, other.inputs)
    none = DRAWS[name](0, generator())
    assert none.inputs.shape == (0, *first.inputs.shape[1:])
    assert none.targets.shape == (0, *first.targets.shape[1:])
    assert none.targets.dtype == first.targets.dtype


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sums", (-1,), "count must be an integer of at least 0, got -1"),
        ("sums", (2, 1), "steps must be an integer of at least 2, got 1"),
        ("copies", (2, 0), "copied must be an integer of at least 1, got 0"),
        ("copies", (2, 2, -1), "blanks must be an integer of at least 0, got -1"),
        ("cards", (2, 0), "back must be an integer of at least 1, got 0"),
        ("cards", (2, 52), "back must lie between 1 and 51, got 52"),
        ("cards", (2, 8, 8), "dealt must lie between 9 and 52 with back=8, got 8"),
        ("cards", (2, 8, 53), "dealt must lie between 9 and 52 with back=8, got 53"),
    ],
)
def test_mistakes(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(holding, f"sample_{name}")(*arguments, generator=generator())


def test_there_are_symbols_to_copy():
    with pytest.raises(ValueError, match="symbols must be an integer of at least 1, got 0"):
        holding.sample_copies(2, symbols=0, generator=generator())
