import re
from typing import Any

import optuna
import pytest

from fastweights import reproduce, sweep
from fastweights.errors import RunError
from fastweights.sweep import Choices, Plan, Range
from fastweights.sweep.plan import Value
from tests.sweep import fake_experiment
from tests.sweep.fake_experiment import Settings
from tests.sweep.helpers import EXPERIMENT, plan


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


@pytest.mark.parametrize("dimension", [Range(1, 64), Range(1, 64, True), Range(0.5, 2.0), Range(0.5, 2.0, True)])
def test_a_range_is_drawn_from_as_it_was_asked_for(dimension):
    trial = optuna.create_study().ask()
    value = dimension.suggest("x", trial)
    drawn: Any = trial.distributions["x"]
    assert (drawn.low, drawn.high, drawn.log) == (dimension.low, dimension.high, dimension.log)
    assert type(value) is type(dimension.low)


def test_a_setting_of_several_values_gets_one(fake, tmp_path):
    settings = Plan(fake_experiment.NAME, Settings(), {}, tmp_path).with_values({"sizes": 8, "x": 1.0})
    assert settings == Settings(sizes=(8,), x=1.0)


def test_values_of_a_real_experiment(tmp_path):
    fields: dict[str, Value] = {"learning_rate": 0.1, "models": "lstm", "layer_norm": False}
    real = Plan(EXPERIMENT, reproduce.load(EXPERIMENT).Settings(), {}, tmp_path).with_values(fields)
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
        (["x=0:1"], {"metric": "nope"}, "no 'nope' to choose by; --metric can be validation_error or validation_loss"),
        (
            ["steps=0:3"],
            {},
            "--search steps=0:3 cannot run: these settings cannot run: steps must be at least 1, got 0",
        ),
        (["x=0:1"], {"settings": Settings(steps=0)}, "these settings cannot run: steps must be at least 1, got 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(fake, tmp_path, words, more, message):
    with pytest.raises(RunError, match=re.escape(message)):
        plan(tmp_path, *words, **more)
    assert list(tmp_path.iterdir()) == []
