import json
import math
import shutil
from resource import RLIM_INFINITY

import pytest

from fastweights.errors import BusyError, RunError
from fastweights.runs import RunFolder, describe_environment, save_checkpoint


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


def test_a_run_writes_settings_environment_metrics_and_checkpoint(tmp_path):
    with RunFolder(tmp_path / "a" / "b", {"model": "LSTM", "sizes": (1, 2)}) as folder:
        assert folder.load() is None
        folder.note_environment()
        folder.append({"kind": "epoch", "epoch": 1})
        folder.save({"step": 3})
    assert json.loads((tmp_path / "a/b/settings.json").read_text()) == {"model": "LSTM", "sizes": [1, 2]}
    assert json.loads((tmp_path / "a/b/environment.json").read_text()).keys() == describe_environment().keys()
    with RunFolder(tmp_path / "a" / "b", {"model": "LSTM", "sizes": (1, 2)}) as folder:
        state = folder.load()
    assert state is not None
    assert state["step"] == 3


def test_a_run_begins_with_its_first_checkpoint_and_goes_on_from_its_last(tmp_path):
    first = {"step": 0}
    with RunFolder(tmp_path, {}) as folder:
        assert folder.begin(first) is first
        assert folder.load() == {"step": 0, "metrics_bytes": 0}
        environment = (tmp_path / "environment.json").read_bytes()
        assert json.loads(environment).keys() == describe_environment().keys()
        folder.save({"step": 1}, {"epoch": 1})
        (tmp_path / "environment.json").write_text("{}")
        before = contents(tmp_path)
        assert folder.begin(first) == {"step": 1, "metrics_bytes": len('{"epoch": 1}\n')}
    assert contents(tmp_path) == before  # nothing is written over


def test_records_after_the_last_checkpoint_are_dropped_on_resume(tmp_path):
    settings = {"seed": 1}
    with RunFolder(tmp_path, settings) as folder:
        folder.append({"epoch": 1})
        folder.save({"step": 1})
        folder.append({"epoch": 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')  # killed in the middle of a line
    with RunFolder(tmp_path, settings) as folder:
        before = (tmp_path / "metrics.jsonl").read_bytes()
        state = folder.load()
        assert state is not None
        assert (tmp_path / "metrics.jsonl").read_bytes() == before  # to look is not to change
        folder.rewind(state)
        folder.append({"epoch": 2, "again": True})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [{"epoch": 1}, {"epoch": 2, "again": True}]


def test_changed_settings_are_refused_with_the_difference_and_nothing_is_touched(tmp_path):
    with RunFolder(tmp_path, {"learning_rate": 0.001, "epochs": 3, "old": 1}) as folder:
        folder.append({"epoch": 1})
        folder.save({"step": 1})
    before = contents(tmp_path)
    changed = RunFolder(tmp_path, {"learning_rate": 0.002, "epochs": 3, "new": 2})
    for attempt in (changed.check, changed.__enter__):
        with pytest.raises(RunError) as caught:
            attempt()
        message = str(caught.value)
        assert "learning_rate was 0.001, now 0.002; old was 1, now absent; new was absent, now 2" in message
        assert "epochs" not in message
        assert "start over" in message
    assert contents(tmp_path) == before


def test_damaged_settings_are_refused(tmp_path):
    (tmp_path / "settings.json").write_text('{"seed": ')
    with pytest.raises(RunError, match=r"cannot read .*settings\.json .*start over"):
        RunFolder(tmp_path, {"seed": 1}).check()
    assert (tmp_path / "settings.json").read_text() == '{"seed": '


def test_metrics_cut_behind_the_back_of_the_checkpoint_are_refused(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.append({"epoch": 1})
        folder.save({"step": 1})
    (tmp_path / "metrics.jsonl").write_text("")
    with RunFolder(tmp_path, {}) as folder, pytest.raises(RunError, match=r"has 0 bytes, the checkpoint .* at 13"):
        folder.load()


def test_metrics_that_a_disk_gave_back_as_zeros_are_refused(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.append({"epoch": 1})
        folder.save({"step": 1})
    (tmp_path / "metrics.jsonl").write_bytes(bytes(13))
    with (
        RunFolder(tmp_path, {}) as folder,
        pytest.raises(RunError, match="has no end of a line at byte 13, where"),
    ):
        folder.load()


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    with (
        RunFolder(tmp_path, {"seed": 1}),
        pytest.raises(RunError, match="another process is training in"),
        RunFolder(tmp_path, {"seed": 1}),
    ):
        raise AssertionError("the second lock was given")
    with RunFolder(tmp_path, {"seed": 1}):
        pass  # free again


def test_a_folder_is_asked_whether_it_is_free_and_stays_as_it_is(tmp_path):
    mine, other = RunFolder(tmp_path / "run", {"seed": 1}), RunFolder(tmp_path / "run", {"seed": 2})
    other.require_free()
    assert not (tmp_path / "run").exists()  # nobody trains where there is nothing
    with mine, pytest.raises(BusyError, match=r"another process is training in .*run: wait for it"):
        other.require_free()
    before = contents(tmp_path / "run")
    other.require_free()
    assert contents(tmp_path / "run") == before
    with mine:  # whoever has asked does not keep it
        pass


def test_a_run_that_the_disk_does_not_let_go_is_a_clear_error(tmp_path, monkeypatch):
    mine, other = RunFolder(tmp_path, {"seed": 1}), RunFolder(tmp_path, {"seed": 2})
    with mine:
        pass

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(RunError, match=r"cannot remove .*: Permission denied"):
            other.remove()
    with mine:  # the other has let go of it
        pass


def test_a_folder_that_could_not_be_opened_is_not_locked(tmp_path, full_disk):
    refused = RunFolder(tmp_path, {"seed": 1})
    full_disk(0)
    with pytest.raises(RunError, match=r"cannot write into .*File too large"):
        refused.__enter__()
    full_disk(RLIM_INFINITY)
    with RunFolder(tmp_path, {"seed": 1}):
        pass


@pytest.mark.parametrize("state", [{"step": 1}, {"step": 1, "metrics_bytes": -1}, {"metrics_bytes": "13"}])
def test_a_checkpoint_of_no_run_is_refused_and_kept(tmp_path, state):
    with RunFolder(tmp_path, {}) as folder:
        save_checkpoint(tmp_path / "checkpoint.pt", state)
        before = contents(tmp_path)
        with pytest.raises(RunError, match=r"checkpoint\.pt is not a checkpoint of a run: .*start over"):
            folder.begin({"step": 0})
    assert contents(tmp_path) == before


def test_fresh_removes_a_run_and_only_a_run(tmp_path):
    with RunFolder(tmp_path / "run", {"seed": 1}) as folder:
        folder.append({"epoch": 1})
    RunFolder(tmp_path / "run", {"seed": 2}).remove()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    RunFolder(tmp_path / "mine", {"seed": 2}).remove()
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"cannot write into .*file.*: (File exists|Not a directory); .*another folder"):
        RunFolder(tmp_path / place, {}).__enter__()
    assert (tmp_path / "file").read_text() == "mine"


def test_records_that_the_disk_refuses_are_a_clear_error(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunError, match=r"cannot write into .*: No space left on device; .* leave room on the disk"):
            folder.append({"epoch": 1})


def test_a_record_that_did_not_fit_leaves_no_part_of_itself(tmp_path, full_disk):
    with RunFolder(tmp_path, {"model": "x", "seed": 1}) as folder:
        folder.append({"kind": "epoch", "epoch": 1})
        full_disk(4096)
        with pytest.raises(RunError, match=r"cannot write into .*File too large"):
            folder.append({"kind": "epoch", "epoch": 2, "note": "y" * 20_000})
        full_disk(RLIM_INFINITY)
        folder.append({"kind": "result", "test_error": 2.5})
        assert folder.read_result() == {"kind": "result", "test_error": 2.5}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["epoch", "result"]


def test_metrics_without_a_checkpoint_are_refused_and_kept(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.append({"epoch": 1})
        with pytest.raises(RunError, match=r"has metrics\.jsonl but no checkpoint\.pt to resume from: .*start over"):
            folder.load()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"epoch": 1}\n'


@pytest.mark.parametrize("name", ["checkpoint.pt", "metrics.jsonl"])
def test_a_run_without_its_settings_is_refused_until_it_is_removed(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=r"holds a run without its settings\.json: .*start over"):
        RunFolder(tmp_path, {"seed": 1}).check()
    RunFolder(tmp_path, {"seed": 1}).remove()
    assert not tmp_path.exists()


def test_settings_that_are_no_object_are_refused(tmp_path):
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(RunError, match=r"settings\.json holds a list, not settings"):
        RunFolder(tmp_path, {}).check()


def test_what_a_killed_process_had_begun_to_write_is_swept_away(tmp_path):
    (tmp_path / ".checkpoint.pt.123.part").write_text("half")
    with RunFolder(tmp_path, {}):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "settings.json"]


def test_a_finished_run_is_known_without_its_checkpoint(tmp_path):
    with RunFolder(tmp_path / "run", {"seed": 1}) as folder:
        assert folder.read_result() is None
        folder.append({"kind": "epoch", "epoch": 1})
        assert folder.read_result() is None
        folder.append({"kind": "result", "test_error": 2.5})
    assert RunFolder(tmp_path / "run", {"seed": 1}).read_result() == {"kind": "result", "test_error": 2.5}
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "res')
    assert folder.read_result() is None


def test_a_path_may_be_text(tmp_path):
    with RunFolder(f"{tmp_path}/run", {}) as folder:
        folder.append({"epoch": 1})
    assert folder.path == tmp_path / "run"
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_decides_how_may_change_and_what_decides_what_may_not(tmp_path):
    with RunFolder(tmp_path, {"seed": 1, "half": True}):
        pass
    RunFolder(tmp_path, {"seed": 1, "half": False}, may_change=("half",)).check()
    with pytest.raises(RunError, match="settings: half was True, now False"):
        RunFolder(tmp_path, {"seed": 1, "half": False}).check()
    with pytest.raises(RunError, match=r"settings: seed was 1, now 2\."):
        RunFolder(tmp_path, {"seed": 2, "half": False}, may_change=("half",)).check()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ([1], TypeError, r"settings must be a dict of plain JSON values, got \[1\]"),
        ({"seed": 1, "rate": math.nan}, ValueError, "the setting rate is NaN, which equals nothing"),
        ({"path": object()}, TypeError, "not JSON serializable"),
    ],
)
def test_settings_that_could_not_be_compared_are_refused(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        RunFolder(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(ValueError, match="path must name a folder, got ''"):
        RunFolder("", {"seed": 1})


def test_infinite_settings_may_be_resumed(tmp_path):
    with RunFolder(tmp_path, {"clip_norm": math.inf}):
        pass
    RunFolder(tmp_path, {"clip_norm": math.inf}).check()
