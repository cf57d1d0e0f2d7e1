import json
import os
import sys

import pytest

from fastweights import cli, sweep
from fastweights.errors import FastWeightsError
from tests.sweep.helpers import EXPERIMENT, TINY, plan, trials


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search"], "expected at least one argument"),
        ([], "there is nothing to search: give --search NAME=LOW:HIGH"),
        (["--search", "learning_rat=1:2"], "no setting 'learning_rat': did you mean learning_rate?"),
        (["--search", "lr=1:2"], "no setting 'lr': did you mean learning_rate?"),
        (["--search", "decay=0.8,0.9", "--trials", "x"], "argument --trials: invalid int value: 'x'"),
        (["--search", "decay=0.8,0.9", "--trials", "0"], "--trials must lie between 1 and 100,000, got 0"),
        (["--search", "decay=0.8,0.9", "--sampler", "gird"], "invalid choice: 'gird'"),
        (["--search", "decay=0.8,0.9", "--workers", "0"], "'0' is not a whole number from 1 to 256"),
        (["--search", "decay=0.8,0.9", "--preset", "huge"], "there is no preset 'huge'; choose from quick, paper"),
        (
            ["--search", "decay=0.8,0.9", "--epochs", "0"],
            "these settings cannot run: epochs must be an integer of at least 1, got 0",
        ),
        (["--search", "decay=0.8,0.9", "--decay=0.9"], "decay is searched, and --decay=0.9 fixes it"),
        (["--search", "layer_norm=True,False", "--no-layer-norm"], "searched, and --no-layer-norm fixes it"),
        (["--search", "decay=0.8,0.9", "--epoch", "1"], "--epoch; did you mean --epochs?"),
        (["--search", "decay=0.8,0.9", "--storage", "study.db"], "'study.db' is no URL such as sqlite:///study.db"),
        (
            ["--search", "decay=0.8,0.9", "--storage", "nosql://u:secret@h/d"],
            "cannot use the storage nosql://u:***@h/d",
        ),
        (["--search", "decay=0.8,0.9", "--storage", "mysql://h/d"], "--storage needs the database's driver"),
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
    with pytest.raises(FastWeightsError, match=r"a sweep needs optuna \(.*\): `pip install '\.\[sweep\]'` in"):
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
