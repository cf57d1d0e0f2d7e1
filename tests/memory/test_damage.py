"""A saved memory that was cut, flipped or mixed up: what is whole is read, and what is not is refused."""

import os

import pytest
import torch

from fastweights import memory
from fastweights.errors import MemoryFileError
from tests.memory.saved import everything, loaded, opened, rows


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


def test_a_kill_between_the_folded_memory_and_its_log_loses_nothing(path):
    log = (path / "memory.log").read_bytes()
    memory.EpisodicMemory.load(path).save(path)
    (path / "memory.log").write_bytes(log)  # the log from before, whose changes are all in the memory
    assert loaded(path) == [0, 1, 2]
    with memory.EpisodicMemory.open(path) as store:
        store.write(rows(3), torch.tensor([3]))
    assert loaded(path) == [0, 1, 2, 3]
