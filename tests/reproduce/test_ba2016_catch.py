import dataclasses
import sys

import pytest
from PIL import Image, ImageSequence

from fastweights import cli
from fastweights.errors import RunError
from fastweights.reproduce.ba2016.catch import PRESETS, RANGES, TITLES, TOP, Settings, check, draw, run, schedule
from fastweights.reproduce.ba2016.show_catch import show_episode
from fastweights.runs import load_run
from fastweights.tasks import catch as task

from .helpers import TINY, result, settings_in

SMALL: Settings = TINY["ba2016/catch"].settings


def test_each_seed_draws_settings_and_the_best_five_have_a_row_and_a_panel(tmp_path):
    seeds = tuple(range(1, TOP + 2))
    run(dataclasses.replace(SMALL, models=("irnn", "fast-weights"), seeds=seeds, draw_settings=True), tmp_path)
    drawn = [settings_in(tmp_path / f"fast-weights-seed{seed}") for seed in seeds]
    assert all(RANGES["learning_rate"][0] <= each["learning_rate"] <= RANGES["learning_rate"][1] for each in drawn)
    for name in ("learning_rate", "entropy", "decay", "rate"):
        assert len({each[name] for each in drawn}) == len(seeds)
    irnn = settings_in(tmp_path / "irnn-seed1")
    assert irnn["learning_rate"] == drawn[0]["learning_rate"]  # the models are compared at the same ones
    assert "decay" not in irnn

    folder = load_run(tmp_path)
    rows = {(row.model, row.metric): row for row in folder.rows}
    for title in ("IRNN", "Fast weights"):
        results = [member.result for member in folder.members if member.model == title and member.result]
        assert rows[title, "test return"].ours == tuple(each["test_return"] for each in results)
        best = sorted(results, key=lambda each: each["validation_loss"])[:TOP]
        assert rows[title, f"test return, best {TOP}"].ours == tuple(each["test_return"] for each in best)
        assert rows[title, "test return"].floor == task.floor(4) == 0
    assert [(curve.best, curve.spread) for curve in folder.curves] == [(None, True), (TOP, True)]


def test_the_seeds_of_a_preset_without_draws_share_its_settings(tmp_path):
    assert draw(SMALL, 3) == SMALL
    run(dataclasses.replace(SMALL, models=("lstm",)), tmp_path)
    assert [row["metric"] for row in result(tmp_path)["rows"]] == ["test return"]
    assert [curve["best"] for curve in result(tmp_path)["curves"]] == [None]
    with pytest.raises(RunError, match="size"):  # returns of two games have no mean
        run(dataclasses.replace(SMALL, models=("lstm",), size=5), tmp_path)


def test_the_presets_are_the_papers_two_games():
    games = {(preset.size, preset.visible) for preset in PRESETS.values()}
    assert games == {(16, 3), (24, 5)}
    for preset in PRESETS.values():
        assert preset.models == tuple(TITLES)
        assert preset.hidden_size == 128
        plan = schedule(preset)
        frames = plan.epochs * plan.updates * plan.batch_size * plan.steps
        assert frames == pytest.approx(preset.frames, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"visible": 5}, r"visible must be a number of frames from 1 to 4 \(size\), got 5"),
        ({"size": 1}, "size must be an integer of at least 2, got 1"),
        ({"decay": 1.5}, r"decay must lie between 0 and 1, got 1\.5"),
        ({"entropy": -1.0}, r"entropy must be finite and not negative, got -1\.0"),
        ({"games": 0}, "games must be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(RunError, match=message):
        check(dataclasses.replace(SMALL, **change))


def test_without_gymnasium_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "fastweights.tasks.catch_environments", raising=False)
    with pytest.raises(RunError, match=r"Catch needs gymnasium .*pip install '.\[rl\]'"):
        check(SMALL)


def test_an_episode_is_drawn_as_a_moving_picture(tmp_path):
    run(dataclasses.replace(SMALL, models=("fast-weights",)), tmp_path / "run")
    file = show_episode(tmp_path / "run")
    assert file == tmp_path / "run" / "episode.gif"
    with Image.open(file) as picture:
        assert (
            len(list(ImageSequence.Iterator(picture))) == SMALL.size - 1
        )  # the last frame is blank, and nothing is decided on it
    assert cli.main(["show", "attention", str(tmp_path / "run"), "--output", str(tmp_path / "same.gif")]) == 0
    assert (tmp_path / "same.gif").read_bytes() == file.read_bytes()
    other = tmp_path / "other.gif"
    assert cli.main(["show", "attention", str(tmp_path / "run"), "--output", str(other), "--example", "2"]) == 0
    assert other.read_bytes() == show_episode(tmp_path / "run", tmp_path / "second.gif", example=2).read_bytes()
    assert other.read_bytes() != file.read_bytes()
    with pytest.raises(RunError, match=r"--output .*episode\.svg is not the name of a GIF file, such as episode\.gif"):
        show_episode(tmp_path / "run", tmp_path / "episode.svg")
    run(dataclasses.replace(SMALL, models=("lstm",)), tmp_path / "lstm")
    with pytest.raises(RunError, match="holds no trained agent with fast weights"):
        show_episode(tmp_path / "lstm")
