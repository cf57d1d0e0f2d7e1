import math
from itertools import permutations

import pytest
import torch

from fastweights.tasks import recall as task


def sample(count, *arguments, seed=0, **settings):
    return task.sample(count, *arguments, generator=torch.Generator().manual_seed(seed), **settings)


@pytest.mark.parametrize(
    ("steps", "pairs", "updates", "vocabulary_size"), [(64, 4, 0, 8192), (16, 4, 0, 18), (40, 8, 4, 8192), (6, 1, 1, 8)]
)
@pytest.mark.parametrize("fill", [True, False])
def test_every_key_is_asked_for_once_and_the_last_value_counts(steps, pairs, updates, vocabulary_size, fill):
    shown, half = 2 * (pairs + updates), vocabulary_size // 2
    settings = {"updates": updates, "vocabulary_size": vocabulary_size, "random_non_queries": fill}
    examples = sample(200, steps, pairs, **settings)
    assert examples.inputs.shape == examples.targets.shape == (200, steps)
    assert examples.inputs.dtype == examples.targets.dtype == torch.int64
    for inputs, targets in zip(*(field.tolist() for field in examples), strict=True):
        keys, values = inputs[0:shown:2], inputs[1:shown:2]
        assert len(set(keys[:pairs])) == pairs
        assert set(keys[pairs:]) <= set(keys[:pairs])
        assert len(set(keys[pairs:])) == updates
        assert len(set(values)) == pairs + updates
        assert all(1 <= key < half <= value < vocabulary_size for key, value in zip(keys, values, strict=True))
        held = dict(zip(keys, values, strict=True))  # a later value takes the place of an earlier one
        asked = [step for step, target in enumerate(targets) if target != task.IGNORED]
        assert sorted(inputs[step] for step in asked) == sorted(held)
        assert all(targets[step] == held[inputs[step]] for step in asked)
        assert all(step >= shown and step % 2 == 0 for step in asked)
        others = [inputs[step] for step in range(shown, steps) if step not in asked]
        assert all(0 <= token < vocabulary_size for token in others)
        assert fill or not any(others)


def test_the_example_of_the_docstring_is_one():
    lines = {line.split()[0]: line for line in str(task.__doc__).splitlines() if line.startswith("    ")}
    inputs, targets = ([lines[name][13 + 3 * i : 16 + 3 * i].strip() for i in range(12)] for name in lines)
    held = dict(zip(inputs[0:4:2], inputs[1:4:2], strict=True))
    assert {step: target for step, target in enumerate(targets) if target} == {6: held["5"], 10: held["3"]}
    assert (inputs[6], inputs[10]) == ("5", "3")


def test_keys_values_and_the_updated_pairs_are_uniform():
    count = 20_000
    inputs, _ = sample(count, 24, 4, updates=1, vocabulary_size=26)
    updated = (inputs[:, :8:2] == inputs[:, 8:9]).nonzero()[:, 1]
    draws = [(inputs[:, place] - 1, 12) for place in (0, 2, 6)] + [(inputs[:, place] - 13, 13) for place in (1, 7, 9)]
    for values, classes in [*draws, (updated, 4), (inputs[:, 23], 26)]:
        counts = torch.bincount(values, minlength=classes).double()
        assert counts.sum() == count
        # Chi squared has mean classes - 1 and variance twice that: five standard deviations.
        chi = ((counts - count / classes) ** 2 / (count / classes)).sum().item()
        assert chi < classes - 1 + 5 * math.sqrt(2 * (classes - 1))


def chances(rates, pairs):
    """The chance that a place is that of each pair: the sum over the orders in which the places can be drawn."""
    table = torch.zeros(len(rates), pairs, dtype=torch.float64)
    for order in permutations(range(len(rates)), pairs):
        chance, left = 1.0, sum(rates)
        for place in order:
            chance, left = chance * rates[place] / left, left - rates[place]
        for pair, place in enumerate(order):
            table[place, pair] += chance
    return table


def test_places_follow_the_power_law_drawn_without_replacement():
    count, places, pairs = 40_000, 5, 3
    inputs, targets = sample(count, 2 * (places + pairs), pairs)
    expected = count * chances([1 / (place + 1) ** 0.99 for place in range(places)], pairs)
    asked = targets[:, 2 * pairs :: 2] != task.IGNORED
    for pair in range(pairs):
        at = (inputs[:, 2 * pairs :: 2] == inputs[:, 2 * pair : 2 * pair + 1]) & asked
        counts = at.sum(0).double()
        assert counts.sum() == count
        assert ((counts - expected[:, pair]) ** 2 / expected[:, pair]).sum() < places - 1 + 5 * math.sqrt(2 * places)


@pytest.mark.parametrize(("places", "pairs", "power_a"), [(5, 3, 0.01), (6, 2, 0.01), (4, 4, 0.5), (3, 1, 1.0)])
def test_floor_is_that_of_the_likeliest_pair_at_each_place(places, pairs, power_a):
    of_pairs = chances([(place + 1) ** (power_a - 1) for place in range(places)], pairs)
    for updates in range(pairs + 1):
        table = torch.zeros(places, pairs + updates, dtype=torch.float64)  # of each value to be the answer there
        orders = list(permutations(range(pairs), updates))  # the pairs that get another value
        for order in orders:
            held = list(range(pairs))
            for value, pair in enumerate(order, pairs):
                held[pair] = value
            table[:, held] += of_pairs / len(orders)
        floor = task.floor(2 * (places + pairs + updates), pairs, updates=updates, power_a=power_a)
        assert floor.accuracy == pytest.approx(table.amax(1).sum().item() / pairs, rel=1e-10)
        shares = table / table.sum(1, keepdim=True)
        nats = -torch.special.xlogy(table, shares).sum().item() / pairs
        assert floor.cross_entropy == pytest.approx(nats, rel=1e-10, abs=1e-10)
        assert floor.error == pytest.approx(100 * (1 - floor.accuracy))


def test_a_model_that_knows_no_key_cannot_tell_which_pairs_got_another_value():
    assert task.floor(64, 4, updates=4).accuracy == pytest.approx(1 / 4)
    assert 1 / 4 < task.floor(64, 4, updates=1).accuracy < task.floor(64, 4).accuracy


def test_the_floor_is_that_of_any_vocabulary(monkeypatch):
    expected = task.floor(64, 4)
    monkeypatch.setattr(task, "VOCABULARY_SIZE", 20)  # fewer tokens than steps
    assert task.floor(64, 4) == expected


def test_the_generator_alone_decides():
    first, same, other = sample(20), sample(20), sample(20, seed=1)
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first.inputs, other.inputs)
    assert len(sample(0).inputs) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": -1}, "count must be an integer of at least 0, got -1"),
        ({"steps": 14}, "steps must be even and at least 16, for 4 pairs and 4 queries of two steps each, got 14"),
        ({"steps": 17}, "steps must be even and at least 16, .* got 17"),
        ({"steps": 22, "updates": 4}, "steps must be even and at least 24, for 8 pairs and 4 queries"),
        ({"pairs": 0}, "pairs must be an integer of at least 1, got 0"),
        ({"updates": 5}, "updates must be at most the 4 pairs, got 5"),
        ({"vocabulary_size": 64}, "vocabulary_size must be an integer of at least 65, got 64"),
        ({"power_a": 0.0}, r"power_a must be positive and finite, got 0\.0"),
        ({"power_a": 1000.0}, r"power_a must lie between 0 and 10, got 1000\.0"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sample(**{"count": 3, "steps": 64, "pairs": 4} | settings)
    if settings.keys() <= {"steps", "pairs", "updates", "power_a"}:
        with pytest.raises(ValueError, match=message):
            task.floor(**{"steps": 64, "pairs": 4} | settings)
