"""Members that several processes train side by side: the same numbers, whatever happens to a process."""

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.errors import BusyError, RunError
from fastweights.reproduce import _experiment, _members
from fastweights.reproduce.ba2016 import associative_retrieval as ba2016
from fastweights.reproduce.munkhdalai2018 import timing
from fastweights.reproduce.rae2018 import language
from fastweights.runs import Progress, RunFolder

from .helpers import TINY, records

SETTINGS = replace(TINY[ba2016.EXPERIMENT].settings, seeds=(1, 2))
COMMAND = [
    sys.executable, "-m", "fastweights", "reproduce", ba2016.EXPERIMENT, "--workers", "2", "--epochs", "80",
    "--patience", "80", "--train-examples", "300", "--validation-examples", "50", "--test-examples", "60",
    "--hidden-sizes", "8", "--checkpoint-seconds", "0", "--output",
]  # fmt: skip


def numbers(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return what every member has measured, but for how long it took."""
    return {
        member.parent.name: [
            {key: value for key, value in record.items() if key != "seconds"} for record in records(member.parent)
        ]
        for member in folder.glob("*/metrics.jsonl")
    }


def test_two_processes_measure_what_one_does(tmp_path):
    ba2016.run(SETTINGS, tmp_path / "one")
    ba2016.run(SETTINGS, tmp_path / "two", workers=2)
    assert len(numbers(tmp_path / "one")) == 6
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    assert (tmp_path / "two" / "result.json").read_bytes() == (tmp_path / "one" / "result.json").read_bytes()


def test_a_member_in_which_another_trains_is_left_out_by_workers_and_told_by_the_run(tmp_path):
    settings = replace(SETTINGS, seeds=(1,))
    members = ba2016.prepare(settings, tmp_path)
    busy, *others = members.folders
    held = RunFolder(members.folders[busy].path, members.folders[busy].settings)
    with held:
        assert len(list(_members.train_free(members, members.folders, Progress()))) == len(others)
        assert [members.folders[key].read_result() is None for key in (busy, *others)] == [True, False, False]
        with pytest.raises(BusyError, match="another process is training in"):
            ba2016.run(settings, tmp_path, fresh=True)
    assert not list(_members.train_free(members, others, Progress()))


@pytest.mark.usefixtures("made_up")
def test_a_trained_model_whose_scores_are_to_be_others_is_scored_again(tmp_path, monkeypatch):
    monkeypatch.setattr(_experiment, "working_beside", lambda *given: contextlib.nullcontext())
    tiny = TINY[language.EXPERIMENT].settings
    several = replace(tiny, seeds=(1, 2))
    language.run(several, tmp_path)
    language.run(replace(several, thetas=(0.25,)), tmp_path, workers=2)
    for member in tmp_path.glob("*/metrics.jsonl"):
        assert records(member.parent)[-1]["fitted"]["LSTM + cache"]["theta"] == 0.25


def test_what_measures_times_has_the_machine_to_itself(tmp_path):
    with pytest.raises(RunError, match="measures times: leave --workers out"):
        timing.run(TINY[timing.EXPERIMENT].settings, tmp_path, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_main_one_and_the_run_goes_on(tmp_path, ending):
    ours = str(tmp_path / "run")
    main = subprocess.Popen(
        [*COMMAND, ours],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def are_in_training() -> bool:
        texts = [path.read_text() for path in Path(ours).glob("*/metrics.jsonl")]
        return sum('"epoch"' in text and '"result"' not in text for text in texts) == 2

    wait_for(are_in_training)
    main.send_signal(ending)
    _, errors = main.communicate(timeout=60)
    assert main.returncode == (130 if ending == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in errors
    members = [RunFolder(path.parent, {}) for path in Path(ours).glob("*/settings.json")]
    assert len(members) >= 2

    def are_free() -> bool:
        try:
            for member in members:
                member.require_free()
        except BusyError:
            return False
        return True

    wait_for(are_free)
    subprocess.run([*COMMAND, ours], check=True, capture_output=True)
    subprocess.run([*COMMAND, str(tmp_path / "unbroken"), "--workers", "1"], check=True, capture_output=True)
    assert numbers(tmp_path / "unbroken") == numbers(Path(ours))


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise TimeoutError("nothing came of it in a minute")
