import dataclasses
import json
import os
import re

import pytest

from fastweights import sweep
from fastweights.errors import RunError
from fastweights.runs import RunFolder
from tests.sweep import fake_experiment
from tests.sweep.fake_experiment import Settings
from tests.sweep.helpers import begun, contents, params, plan


@pytest.mark.parametrize("name", ["p%41q", "what?", "a{b}", "two words#@"])
def test_a_search_goes_into_the_folder_of_its_name(fake, tmp_path, name):
    (tmp_path / "pAq").mkdir()
    asked = plan(tmp_path / name, "steps=1:3", sampler="grid", trials=None)
    sweep.run(asked)
    assert (asked.output / "study.db").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["pAq", name])


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_search_ends_is_written_and_is_not_run_again(fake, tmp_path, sampler):
    words = ["steps=1:3", "kind=smooth,rough"] if sampler == "grid" else ["x=0:8", "steps=1:3", "limit=none,1"]
    asked = plan(tmp_path, *words, sampler=sampler, trials=None if sampler == "grid" else 5)
    left_behind = asked.output / ".sweep.json.killed.part"  # by a worker that died as it wrote
    asked.output.mkdir(exist_ok=True)
    left_behind.touch()
    os.utime(left_behind, (0, 0))
    rows = sweep.run(asked)
    assert [row.state for row in rows] == ["finished"] * asked.total
    record = json.loads((asked.output / "sweep.json").read_text())
    assert not left_behind.exists()
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


def test_a_trial_is_worth_the_mean_of_its_members(fake, tmp_path, monkeypatch):
    def run_two(settings, folder, **options):
        fake_experiment.run(settings, folder, **options)
        with RunFolder(folder / "second", {"model": "Formula", "hidden_size": settings.sizes[0], "seed": 2}) as member:
            member.append({"kind": "result", "validation_error": 100.0, "test_error": 50.0, "validation_loss": 0})

    monkeypatch.setattr(fake_experiment.MODULE, "run", run_two)
    rows = sweep.run(plan(tmp_path, "steps=1,2", sampler="grid", trials=None))
    scores = {row.params["steps"]: (row.value, row.test_score) for row in rows}
    assert scores == {steps: ((9 + steps / 10 + 100) / 2, (10 + steps / 10 + 50) / 2) for steps in (1, 2)}


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
    asked = plan(tmp_path, "x=2,9.5", "steps=4,1", sampler="grid")
    rows = sweep.run(asked)
    assert sorted(row.state for row in rows) == ["failed"] * 3 + ["finished"]
    reasons = {(row.params["x"], row.params["steps"]): row.reason for row in rows}
    assert reasons[9.5, 1] == "the loss became NaN in epoch 1"
    assert reasons[2.0, 4] == "these settings cannot run: 4 steps are too many where x is 2"
    assert reasons[2.0, 1] is None
    assert sweep.run(asked) == rows
    with pytest.raises(RunError, match="all 2 trials have failed; the error of the first: the loss became NaN"):
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
