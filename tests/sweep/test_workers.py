import signal
import subprocess
import sys
import threading
import time

import optuna
import pytest
from optuna.storages._heartbeat import HeartbeatThread

from fastweights import sweep
from fastweights.errors import RunError
from fastweights.sweep import search
from tests.sweep import fake_experiment
from tests.sweep.helpers import EXPERIMENT, TINY, begun, contents, params, plan, start, trials


def test_a_worker_that_was_thought_dead_does_no_harm(fake, tmp_path, monkeypatch):
    asked = plan(tmp_path, "steps=1:2", sampler="grid")

    def bury(settings, folder, **more):
        monkeypatch.setattr(fake_experiment.MODULE, "run", fake_experiment.run)
        study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{asked.output / 'study.db'}")
        (trial,) = study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)  # as another worker would
        optuna.storages.RetryHeartbeatStaleTrialCallback()(study, trial)
        fake_experiment.run(settings, folder, **more)

    monkeypatch.setattr(fake_experiment.MODULE, "run", bury)
    rows = sweep.run(asked)
    assert [row.state for row in rows] == ["lost", "finished", "finished"]
    assert sorted(str(row.params["steps"]) for row in rows[1:]) == ["1", "2"]
    assert sweep.run(asked) == rows


def test_a_trial_whose_worker_died_is_run_again_with_its_values(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "GRACE_SECONDS", 1)

    def die(settings, folder, **more):
        raise SystemExit  # without a word to optuna

    monkeypatch.setattr(fake_experiment.MODULE, "run", die)
    with pytest.raises(SystemExit):
        sweep.run(plan(tmp_path, "x=0:8", trials=2))
    monkeypatch.setattr(fake_experiment.MODULE, "run", fake_experiment.run)
    rows = sweep.run(plan(tmp_path, "x=0:8", trials=2))
    assert sorted(row.state for row in rows) == ["finished", "finished", "lost"]
    assert params(rows)[0] == rows[0].params or params(rows)[1] == rows[0].params
    whole = sweep.run(plan(tmp_path / "whole", "x=0:8", trials=2))
    assert sorted(map(str, params(rows))) == sorted(map(str, params(whole)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # SystemExit, which Python ignores
@pytest.mark.parametrize("where", ["start", "join"])
def test_an_interrupt_amid_optunas_own_lines_leaves_no_thread(fake, tmp_path, monkeypatch, where):
    whole = getattr(HeartbeatThread, where)

    def interrupt(self):
        if where == "start":
            whole(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(HeartbeatThread, where, interrupt)
    monkeypatch.setattr(search, "HEARTBEAT_SECONDS", 1)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        sweep.run(plan(tmp_path, "steps=1:2", sampler="grid"))
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


def test_a_grid_of_an_older_version_is_refused(fake, tmp_path):
    asked = plan(tmp_path, "steps=1:2", sampler="grid")
    sweep.run(asked)
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{asked.output / 'study.db'}")
    study.enqueue_trial({"steps": 1}, user_attrs={"place": 0})
    with pytest.raises(RunError, match=r"a grid that an older fastweights began: move its study\.db away"):
        sweep.run(asked)
    (asked.output / "study.db").unlink()
    assert [begun(row, asked.output) for row in sweep.run(asked)] == [2, 2]


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
    words += ["--epochs", "6", "--patience", "6"]  # so long that none is the last before it is interrupted
    command = [sys.executable, "-m", "fastweights", "sweep", *map(str, words), "--workers", "2"]
    # A command that a shell starts in the background ignores interrupts, and so would its children.
    first = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
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
