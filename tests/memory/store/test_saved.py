"""A memory on the disk: what it holds, and who may write."""

import copy
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights import memory
from fastweights.errors import MemoryFileError
from fastweights.memory.store import _writer
from tests.memory.store.changes import KEY_SIZE, change, content, expected, make
from tests.memory.store.model import Model
from tests.memory.store.saved import everything, loaded, opened, rows


def test_what_was_written_is_there(path):
    assert loaded(path) == [0, 1, 2]
    with memory.EpisodicMemory.open(path) as store:
        store.write(rows(3, 4), torch.tensor([3, 4]))
        store.remove([1])
    assert loaded(path) == [1, 3, 4]
    with memory.EpisodicMemory.open(path) as store:
        assert store.tags == ("t",)
        store.undo("t")  # from one writer to the next
    assert loaded(path) == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_comes_back(dtype, tmp_path):
    keys, values = torch.randn(5, 3).to(dtype), torch.randn(5, 2, 2).bfloat16()
    options = {"value_shape": (2, 2), "value_dtype": torch.bfloat16, "dtype": dtype}
    with memory.EpisodicMemory.open(tmp_path / "log", 4, 3, **options) as store:
        store.write(keys, values)
        store.save(tmp_path / "whole")
    for name in ("log", "whole"):
        store = memory.EpisodicMemory.load(tmp_path / name)
        assert torch.equal(store.keys, keys[1:])
        assert torch.equal(store.values, values[1:])
        assert (store.capacity, store.value_shape, store.value_dtype) == (4, (2, 2), torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.lists(change, max_size=15), st.sampled_from([0, 200, 2**24]), st.integers(1, 5))
def test_a_saved_memory_has_the_same_history(tmp_path_factory, capacity, changes, smallest_log, sessions):
    path = tmp_path_factory.mktemp("saved") / "store"
    model = Model(capacity)
    before, _writer.SMALLEST_LOG = _writer.SMALLEST_LOG, smallest_log
    try:
        for session in range(sessions):
            with memory.EpisodicMemory.open(path, capacity, KEY_SIZE) as store:
                for one in changes[session::sessions]:
                    make(store, model, one)
            read = memory.EpisodicMemory.load(path)
            assert content(read) == expected(model)
            assert read.tags == store.tags
        read.save(path)
        read = memory.EpisodicMemory.load(path)
        for tag in read.tags:
            read.undo(tag)
            model.undo(tag)
        assert content(read) == expected(model)
    finally:
        _writer.SMALLEST_LOG = before


def test_a_log_that_has_outgrown_its_memory_is_folded(tmp_path, monkeypatch):
    monkeypatch.setattr(_writer, "SMALLEST_LOG", 2000)
    path = tmp_path / "store"
    with opened(path, 50) as store:
        for number in range(200):
            store.write(rows(number), torch.tensor([number]))
            assert (path / "memory.log").stat().st_size < 2000 + (path / "memory.safetensors").stat().st_size
            if number % 50 == 7:
                assert loaded(path) == store.values.tolist()
    assert loaded(path) == list(range(150, 200))


def test_one_writer_at_a_time_and_any_readers(path):
    with memory.EpisodicMemory.open(path) as store:
        with pytest.raises(MemoryFileError, match="is being written by this process already"):
            memory.EpisodicMemory.open(path)
        with pytest.raises(MemoryFileError, match="one writer at a time"):
            store.save(path)
        store.write(rows(3), torch.tensor([3]))
        assert loaded(path) == [0, 1, 2, 3]
    memory.EpisodicMemory.open(path).close()


def test_another_process_is_named(path):
    told, tell = os.pipe()
    with memory.EpisodicMemory.open(path):
        child = os.fork()
        if not child:
            try:
                memory.EpisodicMemory.open(path)
            except MemoryFileError as error:
                os.write(tell, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.close(tell)  # before the pipe is read: a child that was let in has written nothing
    assert f"is being written by process {os.getpid()}".encode() in os.read(told, 10_000)
    os.close(told)


def test_a_child_does_not_write_for_its_parent(path):
    with memory.EpisodicMemory.open(path) as store:
        child = os.fork()
        if not child:
            try:
                store.write(rows(9), torch.tensor([9]))
            except MemoryFileError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert loaded(path) == [0, 1, 2]


def test_a_closed_memory_is_searched_but_not_changed(path):
    store = memory.EpisodicMemory.open(path)
    store.close()
    store.close()
    assert store.search(rows(1), 1).values.tolist() == [[1]]
    with pytest.raises(MemoryFileError, match="is closed"):
        store.write(rows(1), torch.tensor([1]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"key_size": 3}, "key_size=2, not 3"),
        ({"capacity": 5}, "capacity=4, not 5"),
        ({"value_shape": (2,)}, r"value_shape=\[\], not \[2\]"),
        ({"value_dtype": torch.float32}, "value_dtype=torch.int64, not torch.float32"),
        ({"dtype": torch.float64}, "dtype=torch.float32, not torch.float64"),
    ],
)
def test_a_memory_of_another_kind_is_refused(path, given, said):
    before = everything(path)
    with pytest.raises(MemoryFileError, match=said):
        memory.EpisodicMemory.open(path, **given)
    assert everything(path) == before
    opened(path, value_shape=(), value_dtype=torch.long, dtype=torch.float32).close()


def test_where_there_is_no_memory(tmp_path):
    with pytest.raises(MemoryFileError, match="holds no saved memory"):
        memory.EpisodicMemory.load(tmp_path / "none")
    with pytest.raises(ValueError, match="give capacity and key_size to make one"):
        memory.EpisodicMemory.open(tmp_path / "none", 5)
    with pytest.raises(ValueError, match="capacity must be an integer"):
        memory.EpisodicMemory.open(tmp_path / "none", 0, 5)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(MemoryFileError, match="cannot write to"):
        memory.EpisodicMemory(4, 2).save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_refused_write_leaves_nothing_on_the_disk(path):
    with memory.EpisodicMemory.open(path) as store:
        before = (path / "memory.log").read_bytes()
        for keys, values in [(rows(float("nan")), torch.tensor([1])), (torch.zeros(1, 3), torch.tensor([1]))]:
            with pytest.raises(ValueError, match="keys"):
                store.write(keys, values)
        assert (path / "memory.log").read_bytes() == before


def test_a_copy_of_an_opened_memory_is_no_second_writer(path):
    with memory.EpisodicMemory.open(path) as store:
        other = copy.deepcopy(store)
        other.write(rows(7), torch.tensor([7]))
        store.write(rows(8), torch.tensor([8]))
        assert (other.values.tolist(), store.values.tolist()) == ([0, 1, 2, 7], [0, 1, 2, 8])
    assert loaded(path) == [0, 1, 2, 8]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_others_may_read_the_files_as_they_may_any_file(tmp_path, monkeypatch, mask, mode):
    monkeypatch.setattr(_writer, "SMALLEST_LOG", 0)
    before = os.umask(mask)
    try:
        with opened(tmp_path / "store") as store:
            for number in range(40):  # folded on the way
                store.write(rows(number), torch.tensor([number]))
            store.save(tmp_path / "copy")
    finally:
        os.umask(before)
    for name in ("store", "copy"):
        for file in ("memory.safetensors", "memory.log"):
            assert (tmp_path / name / file).stat().st_mode & 0o777 == mode


def test_a_writer_knows_its_folder_by_any_of_its_paths(tmp_path, monkeypatch):
    path, other = tmp_path / "store", tmp_path / "link"
    with memory.EpisodicMemory.open(path, 4, 2) as store:
        other.symlink_to(path)
        monkeypatch.chdir(tmp_path)
        for same in (path, str(path), "store", other, path / ".." / "store"):
            assert store.writes_to(same)
        assert not store.writes_to(tmp_path)
        assert not memory.EpisodicMemory.load(path).writes_to(path)
    assert not store.writes_to(path)  # closed
