import dataclasses
import math
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from fastweights.errors import RunError
from fastweights.reproduce.popgym import memory_tasks
from fastweights.reproduce.popgym.memory_tasks import (
    FLOOR,
    PRESETS,
    TITLES,
    check,
    count_parameters,
    count_spaces,
    find_hidden_size,
    make_environments,
    make_layer,
    run,
    schedule,
    table,
)
from fastweights.runs import Member, load_run
from fastweights.training import ActorCritic

from .helpers import TINY

SMALL: memory_tasks.Settings = TINY["popgym/memory-tasks"].settings
# Of each environment: the numbers of an observation (one-hot, with the last action and a mark of the first step), and
# the actions.
SPACES = {
    "RepeatFirstEasy": (4 + 4 + 2, 4),
    "RepeatPreviousEasy": (4 + 4 + 2, 4),
    "CountRecallEasy": (2 + 2 + 27 + 2, 27),
    "HigherLowerEasy": (13 + 2 + 2, 2),
    "AutoencodeEasy": (2 + 4 + 4 + 2, 4),
    "ConcentrationEasy": (210, 52),
}


@pytest.mark.parametrize("name", FLOOR)
def test_all_models_have_equally_many_weights(name):
    for settings in PRESETS.values():
        sizes = {model: find_hidden_size(model, settings, *SPACES[name]) for model in TITLES}
        counts = [count_parameters(model, size, settings, *SPACES[name]) for model, size in sizes.items()]
        assert counts == pytest.approx([settings.parameters] * len(TITLES), rel=0.02)


def test_the_nearest_hidden_size_is_taken_and_never_none():
    tiny = dataclasses.replace(SMALL, parameters=1)
    sizes = {model: find_hidden_size(model, tiny, 10, 4) for model in TITLES}
    # One unit with layer normalization is refused, and passed over.
    assert sizes == {model: 1 if model in ("gru", "lstm") else 2 for model in TITLES}
    for model in TITLES:
        size = find_hidden_size(model, SMALL, 10, 4)
        assert size > 1
        away = [
            abs(count_parameters(model, near, SMALL, 10, 4) - SMALL.parameters) for near in (size, size - 1, size + 1)
        ]
        assert min(away) == away[0]


@pytest.mark.parametrize("name", FLOOR)
def test_the_environments_are_as_described_and_the_agents_have_the_weights_that_are_counted(name):
    pytest.importorskip("popgym")
    environments = make_environments(name, SMALL)
    assert count_spaces(environments) == SPACES[name]
    observations, _ = environments.reset(seed=1)
    assert set(observations.ravel().tolist()) == {0, 1}
    for model in TITLES:
        policy = ActorCritic(environments, make_layer(model, 7, SMALL))
        counted = count_parameters(model, 7, SMALL, *SPACES[name])
        assert sum(parameter.numel() for parameter in policy.parameters()) == counted


def test_recurrent_weights_start_as_they_are_set():
    for scale, start in ((None, 0.25), (0.5, 0.5)):
        layer = make_layer("fast-weights", 7, dataclasses.replace(SMALL, identity_scale=scale))
        torch.testing.assert_close(layer.weight_hh, start * torch.eye(7))


@pytest.mark.parametrize("name", FLOOR)
def test_actions_drawn_evenly_have_the_return_of_the_floor(name):
    pytest.importorskip("popgym")
    environments = make_environments(name, dataclasses.replace(SMALL, parallel=60))
    environments.reset(seed=1)
    environments.action_space.seed(1)
    total, ended = 0.0, 0
    while ended < 120:  # every episode of an environment has as many steps, but for luck that nobody has
        _, rewards, terminated, truncated, _ = environments.step(environments.action_space.sample())
        total += rewards.sum()
        ended += (terminated | truncated).sum()
    assert total / ended == pytest.approx(FLOOR[name], abs=0.05)


def test_the_presets_are_trained_for_their_frames():
    assert PRESETS["paper"].frames == 15_000_000
    for preset in PRESETS.values():
        assert preset.models == tuple(TITLES)
        for model in TITLES:
            plan = schedule(model, preset)
            assert plan.epochs * plan.updates * plan.batch_size * plan.steps == pytest.approx(preset.frames, rel=0.05)
    own = schedule("lstm", dataclasses.replace(SMALL, lstm_learning_rate=0.5, lstm_entropy=0.25))
    assert (own.learning_rate, own.entropy) == (0.5, 0.25)
    assert schedule("gru", SMALL).learning_rate == SMALL.gru_learning_rate


def member(title, seed, returns, test, name="AutoencodeEasy"):
    records = [
        {"frames": 100 * step, "train_return": value, "validation_return": 10 * value}
        for step, value in enumerate(returns, start=1)
    ]
    settings = {"model": title, "hidden_size": 5, "seed": seed, "environment": name}
    return Member(f"{title}-{seed}", settings, {}, records, None if test is None else {"test_return": test})


def test_the_table_has_the_highest_return_in_training_and_the_test_of_each_environment():
    told = table(
        [
            member("GRU", 1, (0.1, 0.3, 0.2), 0.15),
            member("GRU", 2, (0.2, 0.1, 0.4), 0.35),
            member("LSTM", 1, (1,), None),
        ]
    )
    rows = {(row["metric"], row["model"]): row for row in told["rows"]}
    assert set(rows) == {(f"{metric}, AutoencodeEasy", "GRU") for metric in ("highest training return", "test return")}
    assert rows["highest training return, AutoencodeEasy", "GRU"]["ours"] == [0.3, 0.4]
    assert rows["test return, AutoencodeEasy", "GRU"]["ours"] == [0.15, 0.35]
    assert {row["floor"] for row in told["rows"]} == {FLOOR["AutoencodeEasy"]}
    (panel,) = told["lines"]
    assert panel.title == "AutoencodeEasy"
    assert list(panel.series) == ["GRU"]
    assert panel.series["GRU"] == [pytest.approx(point) for point in ((100, 1.5), (200, 2.0), (300, 3.0))]


def test_environments_are_added_to_a_table(tmp_path):
    pytest.importorskip("popgym")
    one = dataclasses.replace(SMALL, models=("lstm",))
    run(one, tmp_path)
    run(dataclasses.replace(one, environments=("AutoencodeEasy",)), tmp_path)
    told = load_run(tmp_path)
    assert {row.metric.partition(", ")[2] for row in told.rows} == {"RepeatPreviousEasy", "AutoencodeEasy"}
    assert [panel.title for panel in told.lines] == ["RepeatPreviousEasy", "AutoencodeEasy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": 0}, "parameters must be an integer of at least 1, got 0"),
        ({"decay": 1.5}, r"decay must lie between 0 and 1, got 1\.5"),
        ({"gru_entropy": -1.0}, r"entropy must be finite and not negative, got -1\.0"),
        ({"delta_heads": 0}, "delta_heads must be an integer of at least 1, got 0"),
        ({"convolution": -1}, "convolution must be an integer of at least 0, got -1"),
        ({"environments": ()}, "environments is empty: give at least one value"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    pytest.importorskip("popgym")
    with pytest.raises(RunError, match=message):
        check(dataclasses.replace(SMALL, **change))


@pytest.mark.parametrize("missing", ["popgym", "gymnasium"])
def test_without_popgym_it_says_what_to_install(monkeypatch, missing):
    for name in [name for name in sys.modules if name.partition(".")[0] == "popgym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RunError, match=r"POPGym's tasks need popgym \(.*\): `pip install '.\[rl\]'`") as refusal:
        check(SMALL)
    assert "\n" not in str(refusal.value)


def test_the_page_tells_what_players_without_a_memory_have():
    page = (Path(__file__).parents[2] / "docs" / "popgym.md").read_text()
    # Of t cards as many are of one colour as is likeliest; the card after one of rank r is higher or lower.
    steps = [
        max(math.comb(26, k) * math.comb(26, t - k) for k in range(max(0, t - 26), min(26, t) + 1)) / math.comb(52, t)
        for t in range(1, 52)
    ]
    assert f"has a return of {2 * fmean(steps) - 1:.2f}." in page
    ranks = [abs((12 - rank) - rank) * 4 / 51 for rank in range(13)]
    assert f"has a return of {fmean(ranks) * 51 / 52:.2f};" in page
