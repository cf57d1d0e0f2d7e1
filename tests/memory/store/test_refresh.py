"""A reader that follows the writer of its memory."""

import copy
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights import memory
from fastweights.errors import MemoryFileError
from fastweights.memory.store import _writer
from fastweights.memory.store import ring as _store
from tests.memory.store.changes import KEY_SIZE, change, content, make
from tests.memory.store.model import Model
from tests.memory.store.saved import opened, rows


def everything_of(store):
    return content(store), store.numbers.tolist(), store.tags


def test_a_reader_sees_every_kind_of_change(path):
    reader = memory.EpisodicMemory.load(path)
    assert not reader.refresh()
    with memory.EpisodicMemory.open(path) as writer:
        for make_change in (
            lambda: writer.write(rows(3, 4), torch.tensor([3, 4]), tag="new"),
            lambda: writer.remove([1]),
            lambda: writer.undo("new"),
            lambda: writer.write(rows(5), torch.tensor([5]), tag="more"),
            lambda: writer.keep("more"),
            lambda: writer.rename_class(5, 7),
            lambda: writer.remove_class(7),
            writer.clear,
            lambda: writer.write(rows(6), torch.tensor([6])),
        ):
            make_change()
            assert reader.refresh()
            assert everything_of(reader) == everything_of(writer)
            assert not reader.refresh()
        assert not writer.refresh()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.lists(change, max_size=20), st.sampled_from([0, 200, 2**24]), st.integers(1, 4))
def test_any_changes_at_any_moment(tmp_path_factory, capacity, changes, smallest_log, every):
    path = tmp_path_factory.mktemp("followed") / "store"
    model = Model(capacity)
    before, _writer.SMALLEST_LOG = _writer.SMALLEST_LOG, smallest_log
    try:
        with memory.EpisodicMemory.open(path, capacity, KEY_SIZE) as writer:
            reader = memory.EpisodicMemory.load(path)
            for number, one in enumerate(changes):
                earlier = everything_of(reader)
                make(writer, model, one)
                if number % every == 0:
                    changed = reader.refresh()
                    assert everything_of(reader) == everything_of(writer)
                    assert changed or everything_of(reader) == earlier
            reader.refresh()
        for tag in reader.tags:  # what an undo needs was followed too
            reader.undo(tag)
            model.undo(tag)
        assert content(reader) == [(key, value) for _, key, value in model.entries()]
    finally:
        _writer.SMALLEST_LOG = before


def test_a_log_that_is_folded_meanwhile_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(_writer, "SMALLEST_LOG", 300)
    path = tmp_path / "store"
    with opened(path, 50) as writer:
        reader = memory.EpisodicMemory.load(path)
        model = memory.MbPA(torch.nn.Identity(), torch.nn.Linear(2, 40), reader, neighbours=3)
        for number in range(40):
            writer.write(rows(number), torch.tensor([number]))
            if number % 3 == 0:
                assert reader.refresh()
                assert reader.values.tolist() == writer.values.tolist()
                fresh = memory.MbPA(torch.nn.Identity(), model.output, memory.EpisodicMemory.load(path), neighbours=3)
                torch.testing.assert_close(model(rows(number)), fresh(rows(number)))


def test_a_memory_that_is_folded_or_saved_without_another_change_has_not_changed(path):
    reader = memory.EpisodicMemory.load(path)
    memory.EpisodicMemory.load(path).save(path)
    assert not reader.refresh()
    with memory.EpisodicMemory.open(path) as writer:
        writer.write(rows(3), torch.tensor([3]))
    assert reader.refresh()
    assert reader.values.tolist() == [0, 1, 2, 3]


def test_another_memory_that_is_put_in_place_is_read(path, tmp_path):
    reader = memory.EpisodicMemory.load(path)
    model = memory.MbPA(torch.nn.Identity(), torch.nn.Linear(2, 20), reader, neighbours=3)
    model(rows(0))  # keeps what it has computed of the entries
    with opened(tmp_path / "other", 9) as other:
        other.write(rows(9, 8, 7), torch.tensor([9, 8, 7]))
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "other", path)
    assert reader.refresh()
    assert (reader.values.tolist(), reader.capacity) == ([9, 8, 7], 9)
    fresh = memory.MbPA(torch.nn.Identity(), model.output, other, neighbours=3)
    torch.testing.assert_close(model(rows(9)), fresh(rows(9)))


def test_a_memory_of_the_same_keys_and_other_values_is_another(path, tmp_path):
    reader = memory.EpisodicMemory.load(path)
    identity, keys, others = reader.entries().identity, reader.keys, reader.values + 1
    with opened(tmp_path / "other", reader.capacity) as other:
        other.write(keys, others)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "other", path)
    assert reader.refresh()
    assert torch.equal(reader.keys, keys)
    assert torch.equal(reader.values, others)
    assert reader.entries().identity is not identity


@pytest.mark.parametrize("damage", ["flipped", "cut", "start"])
def test_damage_leaves_the_memory_as_it_was_and_can_be_mended(path, damage):
    reader = memory.EpisodicMemory.load(path)
    before, size = everything_of(reader), (path / "memory.log").stat().st_size
    with memory.EpisodicMemory.open(path) as writer:
        for number in (3, 4, 5):
            writer.write(rows(number), torch.tensor([number]))
    whole = bytearray((path / "memory.log").read_bytes())
    wrong = {
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "cut": whole[:-1],
        "start": bytes([whole[0] ^ 1]) + whole[1:],
    }
    assert len(whole) > size
    (path / "memory.log").write_bytes(wrong[damage])
    said = "does not begin like" if damage == "start" else r"changes up to there \(5\)"
    for _ in range(2):
        with pytest.raises(MemoryFileError, match=said):
            reader.refresh()
        assert everything_of(reader) == before
    (path / "memory.log").write_bytes(whole)
    assert reader.refresh()
    assert reader.values.tolist() == [2, 3, 4, 5]


def test_a_writer_that_was_refused_by_the_disk_takes_its_change_back(path):
    """The change was on the disk for a moment, and a reader saw it then."""
    whole = (path / "memory.log").read_bytes()
    with memory.EpisodicMemory.open(path) as writer:
        writer.write(rows(3), torch.tensor([3]))
        reader = memory.EpisodicMemory.load(path)
    with (path / "memory.log").open("r+b") as file:
        file.write(whole[:28])
        file.truncate(len(whole))
    with memory.EpisodicMemory.open(path) as writer:
        writer.write(rows(7), torch.tensor([7]))
    assert reader.refresh()
    assert reader.values.tolist() == [0, 1, 2, 7]


def test_a_deleted_folder_is_told_and_the_memory_still_searched(path):
    reader = memory.EpisodicMemory.load(path)
    shutil.rmtree(path)
    with pytest.raises(MemoryFileError, match="holds no saved memory"):
        reader.refresh()
    assert reader.search(rows(1), 1).values.tolist() == [[1]]


def test_who_cannot_follow_is_told_what_to_do(path):
    changed, converted, closed = memory.EpisodicMemory.load(path), memory.EpisodicMemory.load(path), opened(path)
    changed.remove([0])
    converted.to(dtype=torch.float64)
    closed.close()
    for store in (memory.EpisodicMemory(4, 2), changed, converted, closed):
        with pytest.raises(ValueError, match=r"load\(\) the saved one again"):
            store.refresh()


def test_a_copy_follows_by_itself(path):
    reader = memory.EpisodicMemory.load(path)
    copies = copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))
    with memory.EpisodicMemory.open(path) as writer:
        writer.write(rows(3), torch.tensor([3]))
    for one in copies:
        assert one.refresh()
        assert one.values.tolist() == [0, 1, 2, 3]
    assert reader.values.tolist() == [0, 1, 2]
    assert reader.refresh()


def test_an_interrupted_refresh_is_made_up_for_by_the_next(path, monkeypatch):
    reader = memory.EpisodicMemory.load(path)
    with memory.EpisodicMemory.open(path) as writer:
        writer.write(rows(3), torch.tensor([3]))
        writer.write(rows(4), torch.tensor([4]))
    with monkeypatch.context() as patch:
        patch.setattr("fastweights.memory.store.disk.squared_lengths", _interrupt_at_the_second())
        with pytest.raises(KeyboardInterrupt):
            reader.refresh()
    assert reader.refresh()
    assert reader.values.tolist() == [1, 2, 3, 4]


def _interrupt_at_the_second():
    calls = []

    def squared_lengths(vectors):
        calls.append(vectors)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return _store.squared_lengths(vectors)

    return squared_lengths
