"""A disk that is full at any moment loses nothing of a saved memory."""

import errno
import os
import resource

import pytest
import torch

from fastweights import files, memory
from fastweights.errors import MemoryFileError
from fastweights.memory.store import _writer
from tests.memory.store.saved import loaded, opened, rows


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
    monkeypatch.setattr(_writer, "SMALLEST_LOG", 35_000)
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
    names = {".lock", "memory.log", "memory.safetensors"}
    assert {file.name for file in path.iterdir()} == {file.name for file in (tmp_path / "whole").iterdir()} == names
    begun = {file.name: file.stat().st_size for file in (tmp_path / "new").iterdir()}
    assert begun == {".lock": 0, "memory.log": 28}  # a log of no changes, which the next save begins anew
    memory.EpisodicMemory.load(path).save(tmp_path / "new")
    assert len(loaded(tmp_path / "new")) == 7400


def test_a_disk_that_is_full_between_the_folded_memory_and_its_log_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "store"

    def full(files):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path) as store:
        monkeypatch.setattr(_writer, "SMALLEST_LOG", 0)
        store._writer._fold_at = 0
        monkeypatch.setattr(_writer, "write_files", full)
        store.write(rows(0), torch.tensor([0]))  # is on the disk, in the new memory
        assert loaded(path) == [0]
        with pytest.raises(MemoryFileError, match="No space left on device"):
            store.write(rows(1), torch.tensor([1]))
        assert store.values.tolist() == loaded(path) == [0]
        monkeypatch.setattr(_writer, "write_files", files.write_files)
        store.write(rows(2), torch.tensor([2]))
    assert loaded(path) == [0, 2]
