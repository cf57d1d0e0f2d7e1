import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy
import torch

from fastweights import cli, reproduce, sweep
from fastweights.errors import FastWeightsError, RunError
from fastweights.sweep import Choices, Plan, Range, board, database, search
from fastweights.sweep.space import Value
from tests import fake_experiment
from tests.fake_experiment import Settings

ROOT = Path(__file__).parent.parent
EXPERIMENT = "ba2016/associative-retrieval"
TINY = ["--models", "fast-weights", "--hidden-sizes", "4", "--train-examples", "300", "--validation-examples", "50"]
TINY += ["--test-examples", "50", "--epochs", "1", "--embedding-size", "5", "--checkpoint-seconds", "0"]
QUICK = {"heartbeat": 1, "grace": 2}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(reproduce, "load", lambda name: fake_experiment.MODULE)
    monkeypatch.setattr(search, "POLL_SECONDS", 0.02)
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", careless)
    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", careless)


def careless(connection, record):
    connection.execute("PRAGMA synchronous=OFF")  # twenty waits for the disk a trial are most of a test


def plan(folder, *words, settings=None, **more):
    space = sweep.parse(Settings, words or ["x=0:10"])
    return Plan(fake_experiment.NAME, settings or Settings(), space, folder / "sweep", **more)


def params(rows):
    return [row.params for row in rows if row.state == "finished"]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begun(row, folder):
    return (folder / row.folder / "begun").read_text().count("begun")


# What may be searched


@pytest.mark.parametrize(
    ("word", "dimension"),
    [
        ("x=0.1:0.5", Range(0.1, 0.5)),
        ("x=-1:1", Range(-1.0, 1.0)),
        ("x=1e-4:1e-2:log", Range(0.0001, 0.01, True)),
        ("x=1,2.5", Choices((1.0, 2.5))),
        ("x=3", Choices((3.0,))),
        ("steps=1:3", Range(1, 3)),
        ("steps=1:64:log", Range(1, 64, True)),
        ("steps=1, 5", Choices((1, 5))),
        ("kind=rough,smooth", Choices(("rough", "smooth"))),
        ("sizes=4,8", Choices((4, 8))),
        ("sizes=4:8", Range(4, 8)),
        ("switch=true,False", Choices((True, False))),
        ("limit=none,0.5", Choices((None, 0.5))),
        ("limit=0.5:1", Range(0.5, 1.0)),
        ("word=b:c,d", Choices(("b:c", "d"))),
        ("--x=1,2", Choices((1.0, 2.0))),
    ],
)
def test_a_search_space_takes_the_types_of_the_settings(word, dimension):
    (found,) = sweep.parse(Settings, [word]).values()
    assert found == dimension
    assert repr(found) == repr(dimension)  # 1 is not 1.0, and not True


def test_a_setting_of_several_values_gets_one():
    applied = sweep.applied(Settings(), {"sizes": 8, "x": 1.0})
    assert applied == Settings(sizes=(8,), x=1.0)
    fields: dict[str, Value] = {"learning_rate": 0.1, "models": "lstm", "layer_norm": False}
    real = sweep.applied(reproduce.load(EXPERIMENT).Settings(), fields)
    assert (real.learning_rate, real.models, real.layer_norm) == (0.1, ("lstm",), False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to search: give --search NAME=LOW:HIGH"),
        (["x"], "--search takes NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C, got 'x'"),
        (["step=1"], "the experiment has no setting 'step': did you mean steps?"),
        (["threads=1,2"], "threads decides how fast a run is"),
        (["x=1:2", "x=3"], "x is searched twice"),
        (["x=2:1"], "x=2:1: the low end must be below the high end"),
        (["x=1:1"], "for one value give x=1.0"),
        (["x=0:1:log"], "must begin above 0, not at 0.0"),
        (["x=1:2:lin"], "x=1:2:lin is no range: give x=LOW:HIGH or x=LOW:HIGH:log"),
        (["x=1:2:log:log"], "is no range"),
        (["x=1:inf"], "x takes finite numbers, got 'inf'"),
        (["x=nan,1"], "x takes finite numbers, got 'nan'"),
        (["x="], "x takes finite numbers, got ''"),
        (["x=1,,2"], "x takes finite numbers, got ''"),
        (["x=-1e308:1e308"], "too wide for a float"),
        (["steps=1.5:3"], "steps takes whole numbers, got '1.5'"),
        (["steps=1:99999999999999999999"], "must lie within 9,007,199,254,740,992"),
        (["steps=1,1"], "steps=1,1 holds 1 twice"),
        (["kind=rough,tough"], "kind takes smooth, rough, got 'tough'"),
        (["switch=yes"], "switch takes true or false, got 'yes'"),
        (["limit=none,x"], "limit takes finite numbers or none, got 'x'"),
        (["word="], "word takes words, got ''"),
        (["pair=1,2"], "pair takes more than a number"),
        (["table=1"], "table takes more than a number"),
    ],
)
def test_a_search_space_that_cannot_be_is_refused(words, message):
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        sweep.parse(Settings, words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (["x=0:1"], {"sampler": "grid"}, "a grid has no end over x=0.0:1.0: list choices, such as x=A,B,C"),
        (["steps=1:9:log"], {"sampler": "grid"}, "a grid takes every integer of steps=1:9:log: leave out :log"),
        (["steps=1:999999"], {"sampler": "grid"}, "the grid has 999,999 points"),
        (["steps=1:4"], {"sampler": "grid", "trials": 5}, "the grid has 4 points: give at most --trials 4"),
        (["x=0:1"], {"trials": 0}, "--trials must lie between 1 and 100,000, got 0"),
        (["x=0:1"], {"sampler_seed": -1}, "--sampler-seed must lie between 0"),
        (["x=0:1"], {"metric": "test_error"}, "settings are chosen by validation, never by the test score"),
        (["x=0:1"], {"settings": Settings(steps=0)}, "these settings cannot run: steps must be at least 1, got 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fake, tmp_path, words, more, message):
    with pytest.raises(RunError, match=re.escape(message)):
        plan(tmp_path, *words, **more)
    assert list(tmp_path.iterdir()) == []


# What a search does


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_search_ends_is_written_and_is_not_run_again(fake, tmp_path, sampler):
    words = ["steps=1:3", "kind=smooth,rough"] if sampler == "grid" else ["x=0:8", "steps=1:3", "limit=none,1"]
    asked = plan(tmp_path, *words, sampler=sampler, trials=None if sampler == "grid" else 5)
    rows = sweep.run(asked)
    assert [row.state for row in rows] == ["finished"] * asked.total
    record = json.loads((asked.output / "sweep.json").read_text())
    assert record["trials"] == [dataclasses.asdict(row) for row in rows]
    assert record["search"] == {name: str(dimension) for name, dimension in asked.space.items()}
    assert (asked.output / "sweep.svg").read_text().startswith("<?xml")
    for row in rows:
        x, steps = row.params.get("x", 0.0), row.params["steps"]
        assert isinstance(x, float)
        assert isinstance(steps, int)
        score = (x - 3) ** 2 + steps / 10
        assert (row.value, row.test_score) == (score, score + 1)
        assert begun(row, asked.output) >= 1
    if sampler == "grid":
        points = {(row.params["steps"], row.params["kind"]) for row in rows}
        assert points == {(steps, kind) for steps in (1, 2, 3) for kind in ("smooth", "rough")}
    before = contents(asked.output / "trials")
    assert sweep.run(asked) == rows
    assert contents(asked.output / "trials") == before


@pytest.mark.parametrize(("sampler", "count"), [("tpe", 12), ("random", 4)])  # TPE draws at random 10 times
def test_a_search_that_goes_on_draws_what_an_unbroken_one_does(fake, tmp_path, sampler, count):
    whole = sweep.run(plan(tmp_path / "whole", "x=0:8", "steps=1:9", sampler=sampler, trials=count))
    for trials in (2, count):
        broken = sweep.run(plan(tmp_path / "broken", "x=0:8", "steps=1:9", sampler=sampler, trials=trials))
        assert params(broken) == params(whole)[:trials]
    assert sweep.run(plan(tmp_path / "broken", "x=0:8", "steps=1:9", sampler=sampler, trials=3)) == broken
    other = sweep.run(plan(tmp_path / "other", "x=0:8", "steps=1:9", sampler=sampler, trials=1, sampler_seed=1))
    assert params(other)[0] != params(whole)[0]
    assert len({str(row.params) for row in whole}) == count


def test_the_table_and_the_command_are_of_the_best(fake, tmp_path):
    asked = plan(tmp_path, "x=1,2,4.5", "sizes=4,8", sampler="grid")
    rows = sweep.run(asked)
    assert sweep.command(asked, rows) in {
        "fastweights reproduce fake/formula --x 2.0",
        "fastweights reproduce fake/formula --x 2.0 --sizes 8",
    }
    table = sweep.console_table(asked, rows)
    assert list(map(str, table.columns[1].cells)) == ["1.1", "1.1", "2.35", "2.35", "4.1", "4.1"]
    assert str(next(iter(table.columns[2].cells))) == "2.1"
    assert "Trials: 6 finished. The test score is shown only" in str(table.caption)
    highest = dataclasses.replace(asked, direction="maximize", output=tmp_path / "highest")
    assert "--x 1.0" in str(sweep.command(highest, sweep.run(highest)))


def test_trials_without_a_value_are_told_and_do_not_end_the_search(fake, tmp_path):
    asked = plan(tmp_path, "x=2,9.5", "steps=0,1", sampler="grid")
    rows = sweep.run(asked)
    assert sorted(row.state for row in rows) == ["failed"] * 3 + ["finished"]
    reasons = {(row.params["x"], row.params["steps"]): row.reason for row in rows}
    assert reasons[9.5, 1] == "the loss became NaN in epoch 1"
    assert reasons[2.0, 0] == "these settings cannot run: steps must be at least 1, got 0"
    assert reasons[2.0, 1] is None
    assert sweep.run(asked) == rows
    with pytest.raises(RunError, match="all 2 trials have failed, the first so: the loss became NaN"):
        sweep.run(plan(tmp_path / "all", "x=9.5,9.6", sampler="grid"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": ["x=0:7"]}, "--search x was 0.0:8.0, now 0.0:7.0"),
        ({"words": ["x=0:8", "steps=1:2"]}, "--search steps was absent, now 1:2"),
        ({"sampler": "random"}, "--sampler was tpe, now random"),
        ({"sampler_seed": 3}, "--sampler-seed was 0, now 3"),
        ({"metric": "validation_loss"}, "--metric was validation_error, now validation_loss"),
        ({"direction": "maximize"}, "--direction was minimize, now maximize"),
        ({"settings": Settings(word="b")}, "word was a, now b"),
    ],
)
def test_another_search_in_the_same_folder_is_refused(fake, tmp_path, change, message):
    sweep.run(plan(tmp_path, "x=0:8", trials=1))
    before = contents(tmp_path)
    words = change.pop("words", ["x=0:8"])
    with pytest.raises(RunError, match=re.escape(message)):
        sweep.run(plan(tmp_path, *words, **({"trials": 1} | change)))
    assert contents(tmp_path) == before


def test_what_decides_no_number_may_change(fake, tmp_path):
    rows = sweep.run(plan(tmp_path, "x=0:8", trials=1))
    assert sweep.run(plan(tmp_path, "x=0:8", trials=1, settings=Settings(threads=2, x=5.0))) == rows


def test_a_metric_that_is_not_measured_ends_the_search(fake, tmp_path):
    with pytest.raises(RunError, match="no 'validation_eror' to choose by; --metric can be validation_error or valid"):
        sweep.run(plan(tmp_path, "x=0:8", trials=3, metric="validation_eror"))


def test_an_interrupted_trial_is_run_again_with_its_values(fake, tmp_path, monkeypatch):
    asked = plan(tmp_path, "x=0:8", trials=3)
    monkeypatch.setattr(fake_experiment.MODULE, "run", interrupt_in("2"))
    with pytest.raises(KeyboardInterrupt):
        sweep.run(asked)
    assert [row["state"] for row in json.loads((asked.output / "sweep.json").read_text())["trials"]] == ["finished"]
    monkeypatch.setattr(fake_experiment.MODULE, "run", fake_experiment.run)
    rows = sweep.run(asked)
    assert [(row.state, row.reason) for row in rows] == [
        ("finished", None),
        ("lost", "interrupted"),
        ("finished", None),
        ("finished", None),
    ]
    assert rows[1].params == rows[2].params
    assert rows[1].folder == rows[2].folder
    assert params(rows) == params(sweep.run(plan(tmp_path / "whole", "x=0:8", trials=3)))


def interrupt_in(count):
    calls = iter(range(1, 10))

    def run(settings, folder, **more):
        if next(calls) == int(count):
            raise KeyboardInterrupt
        fake_experiment.run(settings, folder, **more)

    return run


def test_a_full_disk_ends_the_search_and_keeps_the_trial(fake, tmp_path, monkeypatch):
    def full(settings, folder, **more):
        raise RunError("cannot write: No space left on device") from OSError(28, "No space left on device")

    monkeypatch.setattr(fake_experiment.MODULE, "run", full)
    with pytest.raises(RunError, match="No space left on device"):
        sweep.run(plan(tmp_path, "x=0:8", trials=2))
    monkeypatch.setattr(fake_experiment.MODULE, "run", fake_experiment.run)
    assert [row.state for row in sweep.run(plan(tmp_path, "x=0:8", trials=2))] == ["lost", "finished", "finished"]


# Several workers


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


def start(words, seconds=QUICK, **more):
    command = [sys.executable, "-m", "tests.fake_experiment", json.dumps(seconds | more), "sweep", *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trials(folder):
    with contextlib.suppress(OSError):
        return json.loads((folder / "sweep.json").read_text())["trials"]
    return []


def test_two_workers_share_a_grid_and_one_may_be_killed(tmp_path):
    output = tmp_path / "sweep"
    words = [fake_experiment.NAME, "--search", "steps=1:8", "--sampler", "grid", "--seconds", "0.6", "--output", output]
    workers = [start(words), start(words)]
    while len(trials(output)) < 4:
        time.sleep(0.05)
    time.sleep(0.3)
    done = {row["number"] for row in trials(output) if row["state"] == "finished"}
    untouched = {row["folder"]: contents(output / row["folder"]) for row in trials(output) if row["number"] in done}
    workers[0].send_signal(signal.SIGKILL)
    _, errors = workers[1].communicate(timeout=60)
    workers[0].communicate()
    assert workers[1].returncode == 0, errors
    rows = trials(output)
    finished = [row for row in rows if row["state"] == "finished"]
    assert sorted(row["params"]["steps"] for row in finished) == list(range(1, 9))
    assert len({row["worker"] for row in finished}) == 2
    lost = [row for row in rows if row["state"] == "lost"]
    assert len(lost) <= 1
    counts = [(output / row["folder"] / "begun").read_text().count("begun") for row in finished]
    assert sorted(counts) == [1] * (8 - len(lost)) + [2] * len(lost)
    for folder, files in untouched.items():
        assert contents(output / folder) == files


def test_the_command_line_searches(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", EXPERIMENT, "--search", "learning_rate=0.1", "--sampler", "grid", *TINY]) == 0
    printed = capsys.readouterr().out
    folder = "runs/sweeps/ba2016/associative-retrieval/quick"
    assert f"the best again: fastweights reproduce {EXPERIMENT} --models fast-weights" in printed
    assert "--learning-rate 0.1" in printed
    assert f"trials: {folder}/sweep.json\nfigure: {folder}/sweep.svg\n" in printed
    (row,) = trials(tmp_path / folder)
    assert json.loads((tmp_path / folder / row["folder"] / "fast-weights-4-seed1" / "settings.json").read_text())[
        "learning_rate"
    ] == float(row["params"]["learning_rate"])


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


# What a user mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search"], "expected at least one argument"),
        ([], "there is nothing to search: give --search NAME=LOW:HIGH"),
        (["--search", "learning_rat=1:2"], "no setting 'learning_rat': did you mean learning_rate?"),
        (["--search", "decay=0.8,0.9", "--trials", "x"], "argument --trials: invalid int value: 'x'"),
        (["--search", "decay=0.8,0.9", "--trials", "0"], "--trials must lie between 1 and 100,000, got 0"),
        (["--search", "decay=0.8,0.9", "--sampler", "gird"], "invalid choice: 'gird'"),
        (["--search", "decay=0.8,0.9", "--workers", "0"], "'0' is not a whole number from 1 to 256"),
        (["--search", "decay=0.8,0.9", "--preset", "huge"], "there is no preset 'huge'; choose from quick, paper"),
        (["--search", "decay=0.8,0.9", "--epochs", "0"], "these settings cannot run: epochs must be at least 1, got 0"),
        (["--search", "decay=0.8,0.9", "--epoch", "1"], "--epoch, 1; perhaps you meant --epochs"),
        (["--search", "decay=0.8,0.9", "--storage", "study.db"], "it is no URL such as sqlite:///study.db"),
        (
            ["--search", "decay=0.8,0.9", "--storage", "nosql://u:secret@h/d"],
            "cannot use the storage nosql://u:***@h/d",
        ),
        (["--search", "decay=0.8,0.9", "--storage", "mysql://h/d"], "--storage needs the database's driver"),
        (["--search", "decay=0.8,0.9", "--output", "what?"], "a question mark would end the database's address"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", EXPERIMENT, *words]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "message"), [("file", "cannot write into file"), ("damaged", "file is not a database")]
)
def test_an_output_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, capsys, output, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "study.db").write_text("not a database, but long enough to be read as one" * 9)
    assert cli.main(["sweep", EXPERIMENT, "--search", "decay=0.8,0.9", "--output", output]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert (tmp_path / "file").read_text() == "mine"


def test_without_optuna_the_error_says_how_to_get_it(fake, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FastWeightsError, match=r"a sweep needs optuna \(.*\): pip install 'fastweights\[sweep\]'"):
        sweep.run(plan(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_storage_of_ones_own_holds_several_searches(fake, tmp_path):
    url = f"sqlite:///{tmp_path / 'all.db'}"
    first = plan(tmp_path / "a", "x=0:8", trials=2, storage=url)
    assert len(sweep.run(first)) == 2
    second = plan(tmp_path / "b", "steps=1:3", sampler="grid", storage=url)
    assert len(sweep.run(second)) == 3
    assert len(sweep.run(first)) == 2
    assert not os.path.exists(first.output / "study.db")


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    printed = capsys.readouterr().out
    for phrase in ("The same command goes on where it stopped", "LOW:HIGH:log", "--workers", "--sampler grid"):
        assert phrase in printed
