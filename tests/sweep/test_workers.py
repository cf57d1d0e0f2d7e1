import signal
import subprocess
import sys
import time

import pytest

from fastweights import sweep
from fastweights.sweep import board, database, search
from tests.sweep import fake_experiment
from tests.sweep.helpers import EXPERIMENT, TINY, contents, plan, start, trials


def test_a_place_queued_twice_is_run_once(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "LEFT_SECONDS", 0.0)
    asked = plan(tmp_path, "steps=1:2", sampler="grid")
    one, two = board.Board(asked), board.Board(asked)
    one._queue([0, 1])
    two._queue([0, 1])
    first, second = one.claim(), two.claim()
    assert first is not None
    assert second is not None
    assert (first.user_attrs["place"], second.user_attrs["place"]) == (0, 1)
    assert one.claim() is None
    assert one.running() == 2
    for worker, trial in ((one, first), (two, second)):
        search._run_trial(worker, trial)
    rows = sweep.run(asked)
    assert sorted(str(row.params["steps"]) for row in rows) == ["1", "2"]


def test_a_trial_of_a_worker_that_died_before_its_first_sign_of_life_is_run_again(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(database, "GRACE_SECONDS", 1)
    asked = plan(tmp_path, "steps=1:2", sampler="grid")
    dead = board.Board(asked).claim()
    assert dead is not None
    rows = sweep.run(asked)
    assert sorted(row.state for row in rows) == ["finished", "finished", "lost"]
    assert [row.number for row in rows if row.state == "lost"] == [dead.number]


def test_a_worker_that_was_thought_dead_does_no_harm(fake, tmp_path):
    asked = plan(tmp_path, "steps=1:2", sampler="grid")
    slow = board.Board(asked)
    trial = slow.claim()
    assert trial is not None
    slow.study.tell(trial.number, state=slow._states.FAIL)  # another worker has buried it
    rows = sweep.run(asked)
    assert [row.state for row in rows].count("finished") == 2
    search._run_trial(slow, trial)
    assert sweep.run(asked) == rows


def test_two_workers_share_a_grid_and_one_may_be_killed(tmp_path):
    output = tmp_path / "sweep"
    words = [fake_experiment.NAME, "--search", "steps=1:6", "--sampler", "grid", "--seconds", "0.9", "--output", output]
    workers = [start(words), start(words)]
    assert workers[0].stderr is not None
    begins = (line for line in workers[0].stderr if " begins" in line)
    assert next(begins)
    assert next(begins)  # of its second trial
    time.sleep(0.3)  # of the 0.9 seconds that it takes
    done = {row["number"] for row in trials(output) if row["state"] == "finished"}
    untouched = {row["folder"]: contents(output / row["folder"]) for row in trials(output) if row["number"] in done}
    workers[0].send_signal(signal.SIGKILL)
    _, errors = workers[1].communicate(timeout=60)
    workers[0].communicate()
    assert workers[1].returncode == 0, errors
    rows = trials(output)
    finished = [row for row in rows if row["state"] == "finished"]
    assert sorted(row["params"]["steps"] for row in finished) == list(range(1, 7))
    assert len({row["worker"] for row in finished}) == 2
    lost = [row for row in rows if row["state"] == "lost"]
    assert len(lost) == 1
    counts = [(output / row["folder"] / "begun").read_text().count("begun") for row in finished]
    assert sorted(counts) == [1] * (6 - len(lost)) + [2] * len(lost)
    for folder, files in untouched.items():
        assert contents(output / folder) == files


@pytest.mark.slow
def test_a_killed_trial_goes_on_from_its_checkpoint(tmp_path):
    output = tmp_path / "sweep"
    words = [EXPERIMENT, "--search", "learning_rate=0.001,0.01", "--sampler", "grid", *TINY, "--output", output]
    words += ["--epochs", "15", "--patience", "15", "--train-examples", "1000"]
    killed = start(words, fake=False)
    assert killed.stderr is not None
    for line in killed.stderr:
        if "epoch 3:" in line:
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done = start(words, fake=False)
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    assert "resumes at step" in errors
    rows = trials(output)
    assert sorted(row["state"] for row in rows) == ["finished", "finished", "lost"]


@pytest.mark.slow
def test_workers_of_one_command_share_the_trials_and_stop_with_it(tmp_path):
    output = tmp_path / "sweep"
    words = [EXPERIMENT, "--search", "learning_rate=1e-4:1e-2:log", "--trials", "8", *TINY, "--output", output]
    command = [sys.executable, "-m", "fastweights", "sweep", *map(str, words), "--workers", "2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not trials(output):
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130
    assert errors.splitlines()[-1] == ("fastweights: interrupted; the same command goes on from the last checkpoint")
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    rows = trials(output)
    assert [row["state"] for row in rows].count("finished") == 8
    assert len({str(row["params"]) for row in rows if row["state"] == "finished"}) == 8
