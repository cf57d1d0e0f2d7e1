import math
from itertools import permutations

import pytest
import torch

from fastweights.tasks import state_tracking as task


def sample(count, steps, group, seed=0):
    return task.sample(count, steps, group, generator=torch.Generator().manual_seed(seed))


def test_parity_is_whether_the_ones_so_far_are_odd():
    inputs, targets = sample(100, 30, "parity")
    for bits, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert answers == [sum(bits[: step + 1]) % 2 for step in range(30)]


@pytest.mark.parametrize(("group", "things"), [("S3", 3), ("S5", 5)])
def test_products_are_those_of_the_maps(group, things):
    orders = list(permutations(range(things)))
    assert task.size(group) == len(orders)
    inputs, targets = sample(300, 9, group)
    for word, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        state = tuple(range(things))
        for element, answer in zip(word, answers, strict=True):
            state = tuple(orders[element][place] for place in state)
            assert orders[answer] == state
    assert orders[0] == tuple(range(things))  # the identity
    first, second = torch.tensor([[1, 2]]), torch.tensor([[2, 1]])
    assert task.products(first, group)[0, 1] != task.products(second, group)[0, 1]


@pytest.mark.parametrize("group", task.GROUPS)
def test_elements_and_products_are_uniform_and_the_floor_is_reached_by_the_newest_element(group):
    count, elements = 30_000, task.size(group)
    inputs, targets = sample(count, 3, group)
    assert inputs.dtype == targets.dtype == torch.int64
    for values in (inputs[:, 0], inputs[:, 2], targets[:, 1], targets[:, 2]):
        counts = torch.bincount(values, minlength=elements).double()
        assert ((counts - count / elements) ** 2 / (count / elements)).sum() < elements + 5 * math.sqrt(2 * elements)
    right = (inputs == targets).double().mean().item()
    floor = task.floor(3, group)
    assert abs(right - floor.accuracy) < 4 * math.sqrt(0.25 / (2 * count))
    assert floor.cross_entropy == pytest.approx(2 / 3 * math.log(elements))
    assert floor.bits == pytest.approx(2 / 3 * math.log2(elements))
    assert floor.error == pytest.approx(100 * (1 - floor.accuracy))


def test_the_generator_alone_decides():
    first, same, other = sample(20, 8, "S5"), sample(20, 8, "S5"), sample(20, 8, "S5", seed=1)
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 4, "S3"), "count must be an integer of at least 0, got -1"),
        ((2, 0, "S3"), "steps must be an integer of at least 1, got 0"),
        ((2, 4, "A5"), "group must be one of parity, S3, S5, got 'A5'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample(*arguments)
    if arguments[0] > 0:
        with pytest.raises(ValueError, match=message):
            task.floor(*arguments[1:])


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        (torch.tensor([[0, -1]]), ValueError, "inputs must lie between 0 and 5, elements of S3, got -1 to 0"),
        (torch.tensor([[7, 2]]), ValueError, "inputs must lie between 0 and 5, elements of S3, got 2 to 7"),
        (torch.tensor([1, 2]), ValueError, r"inputs must be \[N,T\] with at least one step, got shape \(2,\)"),
        (torch.zeros(2, 0).long(), ValueError, r"with at least one step, got shape \(2, 0\)"),
        (torch.tensor([[0.0, 1.0]]), TypeError, r"inputs must be integers, got torch\.float32"),
    ],
)
def test_what_has_no_product_is_refused(inputs, kind, message):
    with pytest.raises(kind, match=message):
        task.products(inputs, "S3")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_words_of_any_integers_have_their_products(dtype):
    words = torch.tensor([[3, 3, 3], [1, 2, 0]])
    assert torch.equal(task.products(words.to(dtype), "S3"), task.products(words, "S3"))
