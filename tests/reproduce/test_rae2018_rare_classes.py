import dataclasses
import json

import pytest
import torch

from fastweights.errors import RunError
from fastweights.reproduce import command, load
from fastweights.reproduce.rae2018_rare_classes import (
    BUCKETS,
    EXPERIMENT,
    MOST,
    PRESETS,
    Settings,
    check,
    classifier,
    drawings,
    run,
    splits,
)
from fastweights.tasks import omniglot

TINY = Settings(classes=20, epochs=2, batch_size=32, checkpoint_seconds=0)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def made_up(request, monkeypatch):
    """In the place of Omniglot: 30 characters, each a pattern of dots, drawn with noise by twenty people."""
    if request.node.get_closest_marker("data"):
        return
    generator = torch.Generator().manual_seed(0)
    patterns = 255 * (torch.rand(30, 1, 28, 28, generator=generator) < 0.2)
    noise = torch.randint(0, 120, (30, omniglot.DRAWINGS, 28, 28), generator=generator)
    images = (patterns - noise).abs().to(torch.uint8)
    names = [f"Dots/character{number}" for number in range(30)]
    data = omniglot.Omniglot(images, ["Dots"], torch.zeros(30, dtype=torch.int64), names, 30)
    folders = []

    def load(data_dir=None):
        folders.append(data_dir)
        return data

    monkeypatch.setattr(omniglot, "load", load)
    return folders


def result(folder):
    return json.loads((folder / "result.json").read_text())


def last(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_the_command_finds_it():
    assert load(EXPERIMENT).PRESETS is PRESETS
    assert command(EXPERIMENT, "paper", PRESETS["paper"], PRESETS["paper"]).endswith("--preset paper")
    assert PRESETS["paper"].seeds == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("classes", [8, 20, 300, 1623])
def test_the_tail_is_long_and_every_bucket_has_classes(classes):
    counts = drawings(classes)
    assert counts[0] == MOST
    assert counts[-1] == 1
    assert (counts.diff() <= 0).all()
    for least, most in BUCKETS:
        assert ((counts >= least) & (counts <= most)).any()
    assert sum(((counts >= least) & (counts <= most)).sum() for least, most in BUCKETS) == classes


def test_drawings_are_parted_without_overlap():
    parts = splits(TINY)
    images, labels = parts["train"]
    assert labels.bincount().tolist() == drawings(20).tolist()
    assert images.shape[1:] == (1, 28, 28)
    assert 0.9 < images.max() <= 1
    assert parts["validation"][1].bincount().tolist() == [3] * 20
    assert parts["test"][1].bincount().tolist() == [5] * 20
    seen = [{image.numpy().tobytes() for image in parts[name][0]} for name in ("train", "validation", "test")]
    assert len(set.union(*seen)) == sum(map(len, seen))
    buckets = [labels for name, (_, labels) in parts.items() if name.startswith("test_")]
    assert torch.equal(torch.cat(buckets).sort().values, parts["test"][1])
    assert (drawings(20)[parts["test_3_to_5_drawings"][1]] - 4).abs().max() == 1


def test_the_paper_tests_on_the_same_drawings():
    every = dataclasses.replace(TINY, classes=30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    _, test = omniglot.curriculum_split(omniglot.load())
    assert torch.equal(splits(every)["test"][0], test[order].flatten(0, 1).unsqueeze(1).float() / 255)


def test_both_heads_start_alike_and_one_smooths():
    networks = []
    for model in ("softmax", "hebbian"):
        torch.manual_seed(3)
        networks.append(classifier(model, TINY))
    assert all(map(torch.equal, networks[0].state_dict().values(), networks[1].state_dict().values()))
    assert [network.head.limit for network in networks] == [0, TINY.limit]


def test_a_run_writes_a_row_for_each_bucket_and_head(tmp_path):
    run(dataclasses.replace(TINY, seeds=(1, 2)), tmp_path)
    rows = result(tmp_path)["rows"]
    assert [row["metric"] for row in rows[::2]] == [
        "test error, %",
        "test 1 drawing error, %",
        "test 2 drawings error, %",
        "test 3 to 5 drawings error, %",
        "test 6 to 12 drawings error, %",
    ]
    assert [row["model"] for row in rows[:2]] == ["Softmax", "Hebbian Softmax"]
    assert rows[3]["ours"] == [last(tmp_path / f"hebbian-seed{seed}")["test_1_drawing_error"] for seed in (1, 2)]
    first, second = (last(tmp_path / f"{model}-seed1") for model in ("softmax", "hebbian"))
    assert first["test_loss"] != second["test_loss"]


def test_the_settings_of_one_head_do_not_concern_the_other(tmp_path):
    run(dataclasses.replace(TINY, models=("softmax",)), tmp_path)
    run(dataclasses.replace(TINY, models=("softmax",), gamma=0.5, limit=3), tmp_path)
    run(TINY, tmp_path)
    with pytest.raises(RunError, match=r"hebbian-seed1 holds a run with other settings: limit was \d+, now 3"):
        run(dataclasses.replace(TINY, limit=3), tmp_path)


def test_where_the_drawings_lie_is_not_part_of_a_run(made_up, tmp_path):
    one = dataclasses.replace(TINY, models=("softmax",), data_dir=tmp_path / "here")
    run(one, tmp_path / "run")
    assert "data_dir" not in json.loads((tmp_path / "run" / "softmax-seed1" / "settings.json").read_text())
    run(dataclasses.replace(one, data_dir=tmp_path / "there"), tmp_path / "run")
    assert made_up == [tmp_path / "here", tmp_path / "there"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": 7}, "classes must be between 8 and 1,623, got 7"),
        ({"classes": 1624}, "classes must be between 8 and 1,623, got 1624"),
        ({"models": ()}, "models is empty: give at least one"),
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"gamma": 1.5}, r"gamma must be between 0 and 1, got 1\.5"),
        ({"limit": -1}, "limit must not be negative, got -1"),
        ({"dropout": 1.0}, r"dropout must be a probability less than 1, got 1\.0"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(RunError, match=message):
        check(dataclasses.replace(TINY, **change))
