import os
import subprocess
import sys

import pytest
import torch

from fastweights.errors import RunError
from fastweights.runs import load_checkpoint, save_checkpoint


def test_what_is_saved_is_loaded(tmp_path):
    weight = torch.arange(3.0)
    state = {"model": {"weight": weight}, "standing": {"step": 4}, "result": None}
    save_checkpoint(tmp_path / "new" / "checkpoint.pt", state)
    loaded = load_checkpoint(tmp_path / "new" / "checkpoint.pt")
    assert loaded is not None
    assert torch.equal(loaded["model"]["weight"], weight)
    assert loaded["standing"] == {"step": 4}
    assert os.listdir(tmp_path / "new") == ["checkpoint.pt"]


def test_no_checkpoint_is_none(tmp_path):
    assert load_checkpoint(tmp_path / "checkpoint.pt") is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text", "list"])
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"weight": torch.arange(1000.0)})
    data = path.read_bytes()
    middle = len(data) // 2
    if damage == "list":
        torch.save([1, 2], path)
    else:
        damaged = {
            "cut": data[:middle],
            "flipped": data[:100] + bytes(255 - byte for byte in data[100:200]) + data[200:],
            "empty": b"",
            "text": b"not a checkpoint",
        }
        path.write_bytes(damaged[damage])
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"checkpoint\.pt (is damaged|holds a list).*start over") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.replace

    def record_fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def record_rename(source, target):
        events.append(("rename", os.stat(source).st_ino, os.stat(source).st_size))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_rename)
    save_checkpoint(tmp_path / "checkpoint.pt", {"step": 1})
    file = (tmp_path / "checkpoint.pt").stat()
    assert events == [("fsync", file.st_ino, file.st_size), ("rename", file.st_ino, file.st_size)]


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("owned",))


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Malicious()}, "checkpoint.pt")
    with pytest.raises(RunError, match="is damaged") as caught:
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert "weights_only" not in str(caught.value)  # torch's advice would execute it
    assert not (tmp_path / "owned").exists()


def test_a_folder_in_the_place_of_the_checkpoint_is_a_clear_error(tmp_path):
    (tmp_path / "checkpoint.pt").mkdir()
    with pytest.raises(RunError, match=r"cannot read .*checkpoint\.pt: Is a directory"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(RunError, match=r"cannot write .*checkpoint\.pt: Is a directory"):
        save_checkpoint(tmp_path / "checkpoint.pt", {})
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


FULL_DISK = """
import pathlib, resource, sys, torch
from fastweights.errors import RunError
from fastweights.runs import load_checkpoint, save_checkpoint
path = pathlib.Path(sys.argv[1])
save_checkpoint(path, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # no file may grow past this: a full disk
try:
    save_checkpoint(path, {"step": 2, "weight": torch.zeros(100_000)})
except RunError as error:
    print(error)
print(load_checkpoint(path))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files by setrlimit")
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, check=True)
    error, state = done.stdout.splitlines()
    assert error.startswith(f"cannot write {path}: File too large; what was there before is untouched")
    assert state == "{'step': 1}"
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
