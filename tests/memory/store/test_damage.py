"""A saved memory that was cut, flipped or mixed up: what is whole is read, and what is not is refused."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastweights import memory
from fastweights.errors import MemoryFileError
from fastweights.memory.store import disk
from tests.memory.store.saved import everything, loaded, opened, rows

START = 28  # bytes that a log begins with


def test_a_log_cut_short_anywhere_is_refused(path):
    """Three writes that returned: fewer are not to be loaded without a word, as from a folder that was half copied."""
    whole = (path / "memory.log").read_bytes()
    for size in range(len(whole)):
        (path / "memory.log").write_bytes(whole[:size])
        said = "does not begin like the log" if size < START else r"memory.log was cut short.*good copy.*repair=True"
        with pytest.raises(MemoryFileError, match=said):
            memory.EpisodicMemory.load(path)
        if size % 20 == 0:
            before = everything(path)
            with pytest.raises(MemoryFileError, match=said):
                memory.EpisodicMemory.open(path)
            assert everything(path) == before
    (path / "memory.log").write_bytes(whole)
    assert loaded(path) == [0, 1, 2]


def test_a_write_that_never_returned_is_cut_off_and_told(path, caplog):
    """As a killed writer leaves it: its record is there, whole or in part, and not acknowledged."""
    whole = (path / "memory.log").read_bytes()
    with memory.EpisodicMemory.open(path) as store:
        store.write(rows(3), torch.tensor([3]))
    longer = (path / "memory.log").read_bytes()
    for size in range(len(whole), len(longer) + 1):
        (path / "memory.log").write_bytes(whole[:START] + longer[START:size])
        caplog.clear()
        assert loaded(path) == ([0, 1, 2] if size < len(longer) else [0, 1, 2, 3])
        torn = len(whole) < size < len(longer)
        assert ("ends inside a change that was never acknowledged" in caplog.text) == torn
        assert ("the 3 changes before it were found" in caplog.text) == torn
    (path / "memory.log").write_bytes(whole[:START] + longer[START:-1])
    with memory.EpisodicMemory.open(path) as store:
        assert (path / "memory.log").read_bytes() == whole[:START] + longer[START:-1]  # opening changes nothing
        store.write(rows(8), torch.tensor([8]))
    assert loaded(path) == [0, 1, 2, 8]


def test_nothing_of_a_longer_write_that_was_killed_stays_behind_a_shorter_one(tmp_path):
    path = tmp_path / "store"
    with opened(path, 1000) as store:
        store.write(rows(0, 1), torch.tensor([0, 1]))
    whole = (path / "memory.log").read_bytes()
    with opened(path, 1000) as store:
        store.write(rows(*range(500)), torch.arange(500))
    longer = (path / "memory.log").read_bytes()
    (path / "memory.log").write_bytes(whole[:START] + longer[START:-100])
    with memory.EpisodicMemory.open(path) as store:
        store.write(rows(2), torch.tensor([2]))
        assert loaded(path) == [0, 1, 2]
        store.write(rows(3), torch.tensor([3]))
    assert loaded(path) == [0, 1, 2, 3]


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
        with pytest.raises(MemoryFileError, match=r"is damaged|was cut short"):
            memory.EpisodicMemory.load(path)
        if place % 50 == 0:
            before = everything(path)
            with pytest.raises(MemoryFileError, match="good copy of the whole folder"):
                memory.EpisodicMemory.open(path)
            assert everything(path) == before


@pytest.mark.parametrize("damage", ["flipped", "cut", "zeros"])
def test_the_advice_of_the_error_works(path, damage, caplog):
    whole = bytearray((path / "memory.log").read_bytes())
    record = (len(whole) - START) // 3
    wrong = {
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "cut": whole[:-1],
        "zeros": whole[:-record] + bytes(record),
    }
    (path / "memory.log").write_bytes(wrong[damage])
    with pytest.raises(MemoryFileError, match=r"changes up to there \(2\): EpisodicMemory.open\(.*repair=True\)"):
        memory.EpisodicMemory.load(path)
    with memory.EpisodicMemory.open(path, repair=True) as store:
        assert store.values.tolist() == [0, 1]
        assert "keeping the changes up to there (2)" in caplog.text
        store.write(rows(8), torch.tensor([8]))
    assert loaded(path) == [0, 1, 8]


def test_a_memory_of_the_first_log_format_is_read_and_goes_on_in_the_new_one(tmp_path):
    path = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "old_memory", path)
    before = everything(path)
    store = memory.EpisodicMemory.load(path)
    assert (store.values.tolist(), store.tags) == ([3, 4, 5, 6, 7, 8], ("new",))
    assert everything(path) == before
    with memory.EpisodicMemory.open(path, 6, 2) as store:
        store.write(rows(9), torch.tensor([9]))
        store.undo("new")
    assert loaded(path) == [0, 1, 3, 4, 8, 9]
    log = (path / "memory.log").read_bytes()
    (path / "memory.log").write_bytes(log[:-1])
    with pytest.raises(MemoryFileError, match="was cut short"):
        memory.EpisodicMemory.load(path)


def test_a_pickle_is_refused(path):
    torch.save({"keys": torch.zeros(2)}, path / "memory.safetensors")
    with pytest.raises(MemoryFileError, match=r"memory.safetensors is damaged .*good copy of the whole folder"):
        memory.EpisodicMemory.load(path)


def test_everything_is_on_the_disk_before_and_after_it_is_renamed(tmp_path, monkeypatch):
    """The kernel's order: a file's bytes, its new name, the folder that has the name."""
    calls, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    with opened(tmp_path / "store") as store:
        store.write(rows(1), torch.tensor([1]))
        store.save(tmp_path / "copy")
    store.save(tmp_path / "copy")
    renamed = [index for index, (kind, _) in enumerate(calls) if kind == "replace"]
    assert len(renamed) == 6  # twice the memory and its log for `copy`, once for `store`
    folders = {path.stat().st_ino for path in (tmp_path / "store", tmp_path / "copy")}
    for index in renamed:
        assert ("fsync", calls[index][1]) in calls[:index]
        after = calls[index + 1]
        assert after[0] == "fsync"
        assert after[1] in folders
    written = (tmp_path / "store" / "memory.log").stat().st_ino
    assert ("fsync", written) in calls[renamed[1] :]  # the write itself


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": 10**13},
        {"generation": "x"},
        {"mark": "../x"},
        {"tags": [[["a"], "b"]]},
        {"start_of_numbers": 1},
        {"keys": math.nan},
        {"numbers": [2, 1, 0]},
    ],
    ids=str,
)
def test_a_memory_that_a_stranger_made_is_refused_in_one_line(tmp_path, wrong):
    """The checksum fits: it tells what was damaged, not what was meant."""
    memory.EpisodicMemory(4, 2).save(tmp_path)
    store = memory.EpisodicMemory(4, 2)
    store.write(torch.ones(3, 2), torch.arange(3))
    store.save(tmp_path)
    path = tmp_path / "memory.safetensors"
    metadata, tensors = disk.read_safetensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    facts = json.loads(metadata["memory"])
    del facts["crc32"]
    if "keys" in wrong:
        tensors["memory.keys"][1] = wrong["keys"]
    elif "numbers" in wrong:
        tensors["memory.numbers"] = torch.tensor(wrong["numbers"])
    else:
        facts |= wrong
    facts["crc32"] = disk.checksum(facts, tensors)
    save_file(tensors, path, {"format": disk.FORMAT, "memory": json.dumps(facts)})
    with pytest.raises(MemoryFileError, match=r"memory\.safetensors is damaged") as refused:
        memory.EpisodicMemory.load(tmp_path)
    assert "\n" not in str(refused.value)
