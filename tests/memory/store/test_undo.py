"""Random histories of a memory against a model that goes through the whole history every time."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastweights import memory
from fastweights.memory.store.ring import History
from tests.memory.store.changes import KEY_SIZE, change, content, expected, make
from tests.memory.store.model import Model


class Eager(History):
    """Drops what no undo can bring back after every write, where the history does so from time to time."""

    def add_overwritten(self, entries, memory_tags):
        self._prune_at = 0
        super().add_overwritten(entries, memory_tags)


FILLED = ("write", [(0, 0, 0), (1, 0, 1)], None)


@example(2, [FILLED, ("write", [(2, 0, 2), (2, 1, 2)], "a"), ("write", [(1, 1, 0)], None), ("undo", "a")], 0, Eager)
@settings(max_examples=200, deadline=None)
@given(st.integers(1, 7), st.lists(change, max_size=25), st.integers(-2, 2), st.sampled_from([History, Eager]))
def test_a_memory_is_what_its_history_makes_it(capacity, changes, query, history):
    store, model = memory.EpisodicMemory(capacity, KEY_SIZE), Model(capacity)
    store._state.history = history(capacity)
    for one in changes:
        make(store, model, one)
        assert content(store) == expected(model)
        assert set(store.tags) >= model.tags
    if len(store):
        found = store.search(torch.tensor([[float(query), 0.0]]), 4)
        indices, distances = model.search((query, 0), 4)
        assert found.indices.tolist() == indices.tolist()
        assert found.distances.tolist() == distances.tolist()


def rows(*numbers):
    return torch.tensor([[float(number), 0.0] for number in numbers])


def test_entries_that_a_tag_overwrote_come_back():
    store = memory.EpisodicMemory(3, 2)
    store.write(rows(0, 1, 2), torch.tensor([0, 1, 2]))
    store.write(rows(3, 4), torch.tensor([3, 4]), tag="t")
    store.write(rows(5), torch.tensor([5]))
    assert store.values.tolist() == [3, 4, 5]
    store.undo("t")
    assert store.values.tolist() == [1, 2, 5]
    assert store.tags == ()


def test_an_entry_that_comes_back_has_the_value_that_it_was_given_meanwhile():
    store = memory.EpisodicMemory(3, 2)
    store.write(rows(0, 1, 2), torch.tensor([7, 8, 7]))
    store.write(rows(3, 4), torch.tensor([7, 4]), tag="t")  # overwrites 0 and 1
    numbers = store.numbers.tolist()
    assert store.rename_class(7, 9) == 2
    assert store.values.tolist() == [9, 9, 4]
    assert store.numbers.tolist() == numbers
    store.undo("t")
    assert store.values.tolist() == [9, 8, 9]
    assert store.keys[:, 0].tolist() == [0, 1, 2]


def test_the_room_of_a_removed_entry_counts_in_the_history_without_the_tag():
    store = memory.EpisodicMemory(2, 2)
    store.write(rows(0, 1), torch.tensor([0, 1]))
    store.write(rows(2), torch.tensor([2]), tag="t")  # overwrites 0
    store.remove_class(1)
    store.write(rows(3), torch.tensor([3]))
    assert store.values.tolist() == [2, 3]
    store.undo("t")
    assert store.values.tolist() == [0, 3]


def test_what_one_tag_overwrote_stays_overwritten_by_another():
    store = memory.EpisodicMemory(2, 2)
    store.write(rows(0, 1), torch.tensor([0, 1]))
    store.write(rows(2), torch.tensor([2]), tag="a")
    store.write(rows(3), torch.tensor([3]), tag="b")
    store.undo("a")
    assert store.values.tolist() == [1, 3]
    store.undo("b")
    assert store.values.tolist() == [0, 1]


def test_what_is_held_is_bounded():
    store = memory.EpisodicMemory(100, 2)
    store.write(torch.randn(100, 2), torch.arange(100))
    for turn in range(3000):
        store.write(torch.randn(7, 2), torch.arange(7), tag=f"t{turn % 2}")
    history = store._state.history
    history.prune(store._state.ring.ordered_tags())
    assert history.held <= 200
    for _ in range(3000):
        store.write(torch.randn(7, 2), torch.arange(7))
    assert history.held <= 1024 + 100
    store.keep("t0")
    store.keep("t1")
    assert history.held == 0
    assert not history.changes


def test_a_tag_that_is_not_open_is_refused_with_those_that_are():
    store = memory.EpisodicMemory(3, 2)
    store.write(rows(1), torch.tensor([1]), tag="mine")
    with pytest.raises(ValueError, match="'yours'; open tags: 'mine'"):
        store.undo("yours")
    store.keep("mine")
    with pytest.raises(ValueError, match="open tags: none"):
        store.undo("mine")


def test_a_removed_entry_stays_removed_and_leaves_its_room():
    store = memory.EpisodicMemory(2, 2)
    store.write(rows(0, 1), torch.tensor([0, 1]))
    store.write(rows(2), torch.tensor([2]), tag="t")
    store.remove([0])
    assert store.remove_class(0) == 0  # overwritten, and forgotten for good all the same
    store.undo("t")
    assert len(store) == 0
