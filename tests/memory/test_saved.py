"""A memory on the disk: what it holds, who may write, and what happens when something is wrong with it."""

import errno
import os
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights import _files, memory
from fastweights.errors import MemoryFileError
from fastweights.memory import _folder
from tests.memory.changes import KEY_SIZE, change, content, expected, make
from tests.memory.model import Model


def rows(*numbers):
    return torch.tensor([[float(number), 0.0] for number in numbers])


def opened(path, capacity=4, **options):
    return memory.EpisodicMemory.open(path, capacity, 2, **options)


@pytest.fixture
def path(tmp_path):
    """A saved memory with a log of three records."""
    with opened(tmp_path / "store") as store:
        for number in range(3):
            store.write(rows(number), torch.tensor([number]), tag="t")
    return tmp_path / "store"


def loaded(path):
    return memory.EpisodicMemory.load(path).values.tolist()


def everything(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


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
    before, _folder.SMALLEST_LOG = _folder.SMALLEST_LOG, smallest_log
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
        _folder.SMALLEST_LOG = before


def test_a_log_that_has_outgrown_its_memory_is_folded(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "SMALLEST_LOG", 2000)
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
    assert f"is being written by process {os.getpid()}".encode() in os.read(told, 10_000)
    os.close(told)
    os.close(tell)


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


# Damage


def test_a_log_cut_short_anywhere_holds_the_whole_records_before(path):
    whole = (path / "memory.log").read_bytes()
    found = []
    for size in range(len(whole) + 1):
        (path / "memory.log").write_bytes(whole[:size])
        if size < 20:
            with pytest.raises(MemoryFileError, match="does not begin like the log"):
                memory.EpisodicMemory.load(path)
        else:
            found.append(loaded(path))
    assert [found.index(list(range(count))) for count in range(4)] == sorted(
        found.index(list(range(count))) for count in range(4)
    )
    assert all(one == list(range(len(one))) for one in found)
    assert found[-2] == [0, 1]
    (path / "memory.log").write_bytes(whole[:-1])
    with memory.EpisodicMemory.open(path) as store:
        assert (path / "memory.log").read_bytes() == whole[:-1]  # opening changes nothing
        store.write(rows(8), torch.tensor([8]))
    assert loaded(path) == [0, 1, 8]


def test_a_log_that_had_grown_without_its_content_is_cut_there(path):
    with (path / "memory.log").open("ab") as file:
        file.write(bytes(5000))
    assert loaded(path) == [0, 1, 2]
    with memory.EpisodicMemory.open(path) as store:
        store.write(rows(8), torch.tensor([8]))
    assert loaded(path) == [0, 1, 2, 8]


def test_a_flipped_bit_anywhere_in_the_log_is_found(path):
    whole = (path / "memory.log").read_bytes()
    for place in range(0, len(whole), 2):
        wrong = bytearray(whole)
        wrong[place] ^= 1 << (place % 8)
        (path / "memory.log").write_bytes(wrong)
        with pytest.raises(MemoryFileError, match="is damaged"):
            memory.EpisodicMemory.load(path)
        if place % 50 == 0:
            before = everything(path)
            with pytest.raises(MemoryFileError, match="good copy of the whole folder"):
                memory.EpisodicMemory.open(path)
            assert everything(path) == before


def test_the_advice_of_the_error_works(path):
    whole = bytearray((path / "memory.log").read_bytes())
    whole[-1] ^= 1
    (path / "memory.log").write_bytes(whole)
    with pytest.raises(MemoryFileError, match=r"truncate --size (\d+)") as error:
        memory.EpisodicMemory.load(path)
    os.truncate(path / "memory.log", int(str(error.value).split("--size ")[1].split("`")[0]))
    assert loaded(path) == [0, 1]


def test_a_flipped_bit_or_a_cut_anywhere_in_the_memory_is_found(tmp_path):
    store = memory.EpisodicMemory(4, 2)
    store.write(rows(0, 1, 2, 3), torch.arange(4))
    store.write(rows(4), torch.tensor([4]), tag="t")
    store.save(tmp_path)
    file = tmp_path / "memory.safetensors"
    whole = file.read_bytes()
    for place in range(0, len(whole), 3):
        wrong = bytearray(whole)
        wrong[place] ^= 1 << (place % 8)
        file.write_bytes(wrong)
        with pytest.raises(MemoryFileError, match=r"is damaged|is not an episodic memory"):
            memory.EpisodicMemory.load(tmp_path)
    for size in range(0, len(whole), 17):
        file.write_bytes(whole[:size])
        with pytest.raises(MemoryFileError, match="is damaged"):
            memory.EpisodicMemory.load(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(MemoryFileError, match="is damaged"):
        store.save(tmp_path)
    assert {name: before[name] for name in before} == everything(tmp_path)
    file.write_bytes(whole)
    assert loaded(tmp_path) == [1, 2, 3, 4]


def test_files_that_do_not_belong_together_are_refused(path, tmp_path):
    old = (path / "memory.safetensors").read_bytes()
    memory.EpisodicMemory.load(path).save(path)
    new = (path / "memory.safetensors").read_bytes()
    (path / "memory.safetensors").write_bytes(old)
    with pytest.raises(MemoryFileError, match="do not belong together"):
        memory.EpisodicMemory.load(path)
    (path / "memory.safetensors").write_bytes(new)
    assert loaded(path) == [0, 1, 2]
    (path / "memory.log").unlink()
    with pytest.raises(MemoryFileError, match=r"cannot read .*memory.log"):
        memory.EpisodicMemory.load(path)


def test_a_log_without_its_memory_is_left_alone(path):
    (path / "memory.safetensors").unlink()
    before = everything(path)
    with pytest.raises(MemoryFileError, match="with changes, but no"):
        opened(path)
    assert everything(path) == before


# A full disk


@pytest.fixture
def full_disk():
    """Limits the size of a file, as a full disk would: `full_disk(bytes)`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing(tmp_path, full_disk):
    path = tmp_path / "store"
    with opened(path, 100_000) as store:
        store.write(rows(*range(100)), torch.arange(100))
        full_disk(100_000)
        with pytest.raises(MemoryFileError, match=r"cannot write to .*File too large.*make room"):
            store.write(torch.zeros(50_000, 2), torch.zeros(50_000, dtype=torch.long))
        assert len(store) == 100
        store.write(rows(100), torch.tensor([100]))  # a smaller one fits
        assert loaded(path) == list(range(101))
        full_disk(resource.RLIM_INFINITY)
        store.write(torch.zeros(50_000, 2), torch.zeros(50_000, dtype=torch.long))
    assert len(loaded(path)) == 50_101


def test_a_full_disk_while_folding_or_saving_loses_nothing(tmp_path, full_disk, monkeypatch, caplog):
    path = tmp_path / "store"
    monkeypatch.setattr(_folder, "SMALLEST_LOG", 35_000)
    with opened(path, 10_000) as store:
        store.write(torch.zeros(2000, 2), torch.arange(2000))
        memory.EpisodicMemory.load(path).save(tmp_path / "whole")
        full_disk(40_000)
        store.write(torch.zeros(400, 2), torch.arange(400))  # fits the log, but the log is then to be folded
        assert "cannot fold" in caplog.text
        with pytest.raises(MemoryFileError, match="cannot write to"):
            store.save(tmp_path / "whole")
        with pytest.raises(MemoryFileError, match="cannot write to"):
            store.save(tmp_path / "new")
        assert loaded(path) == store.values.tolist()
        assert len(loaded(tmp_path / "whole")) == 2000
        full_disk(resource.RLIM_INFINITY)
        store.write(torch.zeros(5000, 2), torch.arange(5000))
    assert len(loaded(path)) == 7400
    assert not list(tmp_path.rglob("*.part"))


def test_a_disk_that_is_full_between_the_folded_memory_and_its_log_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "store"

    def full(files):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path) as store:
        monkeypatch.setattr(_folder, "SMALLEST_LOG", 0)
        store._folder._fold_at = 0
        monkeypatch.setattr(_folder, "write_files", full)
        store.write(rows(0), torch.tensor([0]))  # is on the disk, in the new memory
        assert loaded(path) == [0]
        with pytest.raises(MemoryFileError, match="No space left on device"):
            store.write(rows(1), torch.tensor([1]))
        assert store.values.tolist() == loaded(path) == [0]
        monkeypatch.setattr(_folder, "write_files", _files.write_files)
        store.write(rows(2), torch.tensor([2]))
    assert loaded(path) == [0, 2]


def test_a_kill_between_the_folded_memory_and_its_log_loses_nothing(path):
    log = (path / "memory.log").read_bytes()
    memory.EpisodicMemory.load(path).save(path)
    (path / "memory.log").write_bytes(log)  # the log from before, whose changes are all in the memory
    assert loaded(path) == [0, 1, 2]
    with memory.EpisodicMemory.open(path) as store:
        store.write(rows(3), torch.tensor([3]))
    assert loaded(path) == [0, 1, 2, 3]
