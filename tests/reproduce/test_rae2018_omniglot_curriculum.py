"""The Omniglot curriculum: its table, its figure, and what it refuses, on a few drawings; on the real ones, a level."""

import dataclasses
import json

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError
from fastweights.report.table import console_table, table_rows
from fastweights.reproduce import rae2018_omniglot_curriculum as experiment
from fastweights.reproduce.rae2018_omniglot_curriculum import EXPERIMENT, PRESETS, Settings, check, data, run
from fastweights.runs import load_run
from fastweights.tasks import omniglot

TINY = Settings(
    seeds=(1, 2),
    first_classes=4,
    added_classes=2,
    last_classes=12,
    threshold=0.3,
    test_every=2,
    most_steps=400,
    batch_size=8,
)


@pytest.fixture
def drawings(monkeypatch):
    """Twelve classes, each a stroke of its own that no drawing puts in quite the same place."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(12, 20, 28, 28, dtype=torch.uint8)
    for index in range(12):
        for drawing in range(20):
            x, y = (torch.randint(3, (2,), generator=generator) + 5).tolist()
            images[index, drawing, y + index : y + index + 3, x : x + 18 - index] = 255
            images[index, drawing, y : y + 15, x + index : x + index + 2] = 255
    small = omniglot.Omniglot(images, ["Own"], torch.zeros(12, dtype=torch.int64), [f"Own/{i}" for i in range(12)], 12)
    monkeypatch.setattr(omniglot, "load", lambda data_dir: small)
    monkeypatch.setattr(experiment, "FROM", 6)
    return small


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_run_writes_its_table_its_figure_and_the_ratio(drawings, tmp_path):
    run(TINY, tmp_path)
    rows = {(row["metric"], row["model"]): row["ours"] for row in result(tmp_path)["rows"]}
    levels = {}
    for member in tmp_path.glob("*-seed*"):
        *_, last = map(json.loads, (member / "metrics.jsonl").read_text().splitlines())
        assert last["classes"] == 12
        levels[member.name] = dict(last["levels"])
    for seed in (1, 2):
        plain, hebbian = (levels[f"{model}-0.008-seed{seed}"] for model in ("softmax", "hebbian"))
        assert rows["steps to 6 classes", "Softmax"][seed - 1] == plain[6]
        past = {"Softmax": max(plain.values()) - plain[6], "Hebbian Softmax": max(hebbian.values()) - hebbian[6]}
        for model, steps in past.items():
            assert rows["steps from 6 to 12 classes", model][seed - 1] == steps
        fast = rows["times as fast, steps from 6 to 12 classes", "Hebbian Softmax"][seed - 1]
        assert fast == past["Softmax"] / past["Hebbian Softmax"]
    assert ("times as fast, steps to 6 classes", "Softmax") not in rows
    found = load_run(tmp_path)
    assert {row.paper for row in table_rows(found)} == {"-"}
    assert [str(column.header).replace("\n", " ") for column in console_table(found).columns] == [
        "model", "hidden units", "metric", "ours",
    ]  # fmt: skip
    assert [(curve.key, curve.against, curve.spread) for curve in found.curves] == [
        ("classes", "step", True),
        ("level_steps", "level", True),
    ]
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "two standard deviations" in page
    assert "Floor" not in page


def test_the_same_command_resumes_and_adds(drawings, tmp_path):
    one = dataclasses.replace(TINY, models=("softmax",), seeds=(1,))
    run(one, tmp_path)
    before = (tmp_path / "softmax-0.008-seed1" / "metrics.jsonl").read_bytes()
    run(dataclasses.replace(one, models=("softmax", "hebbian"), learning_rates=(8e-3, 6e-3)), tmp_path)
    assert (tmp_path / "softmax-0.008-seed1" / "metrics.jsonl").read_bytes() == before
    models = {row["model"] for row in result(tmp_path)["rows"]}
    assert models == {
        "Softmax", "Hebbian Softmax", "Softmax, learning rate 0.006", "Hebbian Softmax, learning rate 0.006",
    }  # fmt: skip


def test_what_smooths_does_not_concern_the_softmax(drawings, tmp_path):
    """Its run is the same whatever Hebbian Softmax is set to: it is not asked to start over."""
    one = dataclasses.replace(TINY, models=("softmax",), seeds=(1,))
    run(one, tmp_path)
    run(dataclasses.replace(one, gamma=0.5, limit=3, objective="svm", counting="running_mean"), tmp_path)
    with pytest.raises(RunError, match="batch_size was 8, now 4"):
        run(dataclasses.replace(one, batch_size=4), tmp_path)


def test_a_run_that_does_not_get_there_has_no_number(drawings, tmp_path):
    run(dataclasses.replace(TINY, seeds=(1,), most_steps=2), tmp_path)
    assert result(tmp_path)["rows"] == []
    assert main(["report", str(tmp_path)]) == 0


def test_both_heads_see_the_same(drawings):
    train, held_out = data(drawings, 1)
    assert train.shape == (12, 15, 1, 28, 28)
    assert held_out.shape == (12, 5, 1, 28, 28)
    order = [int((drawings.images[:, 0] == image[0, 0]).flatten(1).all(1).nonzero()[0]) for image in held_out]
    assert sorted(order) == list(range(12))
    assert order != sorted(order)
    for place, index in enumerate(order):
        assert torch.equal(held_out[place, :, 0], drawings.images[index, :5])
        assert torch.equal(train[place, :, 0], drawings.images[index, 5:])
    assert not torch.equal(data(drawings, 2)[0], train)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": ()}, "models is empty"),
        ({"learning_rates": ()}, "learning_rates is empty"),
        ({"learning_rates": (0.1, -1.0)}, "learning_rate must be positive and finite, got -1"),
        ({"last_classes": 1624}, "last_classes must be at most 1,623, got 1624"),
        ({"last_classes": 30}, "last_classes must be more than first_classes, 30, got 30"),
        ({"test_every": 0}, "test_every must be at least 1, got 0"),
        ({"gamma": 2.0}, "gamma must be between 0 and 1, got 2"),
        ({"dropout": 1.0}, "dropout must be a probability less than 1, got 1"),
        ({"degrees": -1.0}, "degrees must be finite and not negative, got -1"),
        ({"smoothing": 1.0}, "smoothing must be 0 or more and less than 1, got 1"),
        ({"threshold": 1.0}, "threshold must be an accuracy"),
        ({"models": ("softmax", "hebbian", "softmax")}, "models has softmax twice: give each once"),
        ({"learning_rates": (8e-3, 0.008)}, r"learning_rates has 0\.008 twice: give each once"),
        ({"seeds": (2, 1, 1)}, "seeds has 1 twice: give each once"),
        ({"seeds": (-1,)}, r"seeds must not be negative, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(change, words):
    with pytest.raises(RunError, match=words):
        check(dataclasses.replace(Settings(), **change))


def test_the_presets_and_the_command_line():
    for preset in PRESETS.values():
        check(preset)
    assert PRESETS["paper"].seeds == tuple(range(1, 11))  # figure 3: ten seeds


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_real_drawings(tmp_path):
    words = ["--seeds", "1", "--last-classes", "35", "--output", str(tmp_path)]
    assert main(["reproduce", EXPERIMENT, *words]) == 0
    for member in tmp_path.glob("*-seed1"):
        *_, last = map(json.loads, (member / "metrics.jsonl").read_text().splitlines())
        assert last["classes"] == 35
