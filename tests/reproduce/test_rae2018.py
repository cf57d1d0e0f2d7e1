"""The curriculum and the rare classes of Omniglot, on a few drawings; on the real ones, a level."""

import dataclasses

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError
from fastweights.report.table import console_table, table_rows
from fastweights.reproduce.rae2018 import omniglot_curriculum as curriculum
from fastweights.reproduce.rae2018 import rare_classes as rare
from fastweights.runs import load_run
from fastweights.tasks import omniglot

from .helpers import TINY, members_of, records, result, settings_in

CURRICULUM = dataclasses.replace(TINY[curriculum.EXPERIMENT].settings, seeds=(1, 2), most_steps=400)
RARE: rare.Settings = TINY[rare.EXPERIMENT].settings


@pytest.fixture
def strokes(monkeypatch):
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
    monkeypatch.setattr(curriculum, "FROM", 6)
    return small


def test_the_curriculum_writes_its_table_its_figure_and_the_ratio(strokes, tmp_path):
    curriculum.run(CURRICULUM, tmp_path)
    rows = {(row["metric"], row["model"]): row["ours"] for row in result(tmp_path)["rows"]}
    levels = {}
    for member in members_of(tmp_path):
        last = records(member)[-1]
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
    run = load_run(tmp_path)
    assert {row.paper for row in table_rows(run)} == {"-"}
    assert [str(column.header).replace("\n", " ") for column in console_table(run).columns] == [
        "model", "hidden units", "metric", "ours",
    ]  # fmt: skip
    assert [(curve.key, curve.against, curve.spread) for curve in run.curves] == [
        ("classes", "step", True),
        ("level_steps", "level", True),
    ]
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "two standard deviations" in page
    assert "Floor" not in page


def test_learning_rates_can_be_added_later(strokes, tmp_path):
    one = dataclasses.replace(CURRICULUM, models=("softmax",), seeds=(1,))
    curriculum.run(one, tmp_path)
    before = records(tmp_path / "softmax-0.008-seed1", keep_seconds=True)
    curriculum.run(dataclasses.replace(one, models=("softmax", "hebbian"), learning_rates=(8e-3, 6e-3)), tmp_path)
    assert records(tmp_path / "softmax-0.008-seed1", keep_seconds=True) == before
    models = {row["model"] for row in result(tmp_path)["rows"]}
    assert models == {
        "Softmax", "Hebbian Softmax", "Softmax, learning rate 0.006", "Hebbian Softmax, learning rate 0.006",
    }  # fmt: skip


def test_smoothing_does_not_concern_the_softmax(strokes, tmp_path):
    """Its run is the same whatever Hebbian Softmax is set to: it is not asked to start over."""
    one = dataclasses.replace(CURRICULUM, models=("softmax",), seeds=(1,))
    curriculum.run(one, tmp_path)
    curriculum.run(dataclasses.replace(one, gamma=0.5, limit=3, objective="svm", counting="running_mean"), tmp_path)
    with pytest.raises(RunError, match="batch_size was 8, now 4"):
        curriculum.run(dataclasses.replace(one, batch_size=4), tmp_path)


def test_a_curriculum_that_does_not_get_there_has_no_number(strokes, tmp_path):
    curriculum.run(dataclasses.replace(CURRICULUM, seeds=(1,), most_steps=2), tmp_path)
    assert result(tmp_path)["rows"] == []
    assert main(["report", str(tmp_path)]) == 0


def test_both_heads_see_the_same(strokes):
    train, held_out = curriculum.split_drawings(strokes, 1)
    assert train.shape == (12, 15, 1, 28, 28)
    assert held_out.shape == (12, 5, 1, 28, 28)
    order = [int((strokes.images[:, 0] == image[0, 0]).flatten(1).all(1).nonzero()[0]) for image in held_out]
    assert sorted(order) == list(range(12))
    assert order != sorted(order)
    for place, index in enumerate(order):
        assert torch.equal(held_out[place, :, 0], strokes.images[index, :5])
        assert torch.equal(train[place, :, 0], strokes.images[index, 5:])
    assert not torch.equal(curriculum.split_drawings(strokes, 2)[0], train)


@pytest.mark.parametrize(
    ("module", "change", "words"),
    [
        (curriculum, {"learning_rates": ()}, "learning_rates is empty"),
        (curriculum, {"learning_rates": (0.1, -1.0)}, "learning_rate must be positive and finite, got -1"),
        (curriculum, {"learning_rates": (8e-3, 0.008)}, r"learning_rates has 0\.008 twice: give each value once"),
        (curriculum, {"last_classes": 1624}, "last_classes must be at most 1,623, got 1624"),
        (curriculum, {"last_classes": 30}, "last_classes must be more than first_classes, 30, got 30"),
        (curriculum, {"test_every": 0}, "test_every must be an integer of at least 1, got 0"),
        (curriculum, {"gamma": 2.0}, "gamma must be between 0 and 1, got 2|gamma must lie between 0 and 1, got 2"),
        (curriculum, {"dropout": 1.0}, "dropout must be a probability less than 1, got 1"),
        (curriculum, {"degrees": -1.0}, "degrees must be finite and not negative, got -1"),
        (curriculum, {"smoothing": 1.0}, "smoothing must be 0 or more and less than 1, got 1"),
        (curriculum, {"threshold": 1.0}, "threshold must be an accuracy"),
        (curriculum, {"models": ("softmax", "hebbian", "softmax")}, "models has softmax twice: give each value once"),
        (rare, {"classes": 7}, "classes must be between 8 and 1,623, got 7"),
        (rare, {"classes": 1624}, "classes must be between 8 and 1,623, got 1624"),
        (rare, {"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        (rare, {"gamma": 1.5}, "gamma must be between 0 and 1, got 1.5|gamma must lie between 0 and 1, got 1.5"),
        (rare, {"limit": -1}, "limit must not be negative, got -1|limit must be an integer of at least 0, got -1"),
        (rare, {"dropout": 1.0}, r"dropout must be a probability less than 1, got 1\.0"),
    ],
)
def test_settings_that_cannot_run_are_refused(module, change, words):
    with pytest.raises(RunError, match=words):
        module.check(dataclasses.replace(module.Settings(), **change))


@pytest.mark.data
@pytest.mark.usefixtures("omniglot_root")
def test_real_drawings(tmp_path):
    words = ["--seeds", "1", "--last-classes", "35", "--output", str(tmp_path)]
    assert main(["reproduce", curriculum.EXPERIMENT, *words]) == 0
    assert [records(member)[-1]["classes"] for member in members_of(tmp_path)] == [35, 35]


@pytest.mark.parametrize("classes", [8, 20, 300, 1623])
def test_the_tail_is_long_and_every_bucket_has_classes(classes):
    counts = rare.count_drawings(classes)
    assert counts[0] == rare.MOST
    assert counts[-1] == 1
    assert (counts.diff() <= 0).all()
    for least, most in rare.BUCKETS:
        assert ((counts >= least) & (counts <= most)).any()
    assert sum(((counts >= least) & (counts <= most)).sum() for least, most in rare.BUCKETS) == classes


@pytest.mark.usefixtures("made_up")
def test_drawings_of_the_rare_are_few_and_those_of_the_test_the_papers():
    parts = rare.split_drawings(RARE)
    images, labels = parts["train"]
    assert labels.bincount().tolist() == rare.count_drawings(18).tolist()
    assert images.shape[1:] == (1, 28, 28)
    assert 0.9 < images.max() <= 1
    assert parts["validation"][1].bincount().tolist() == [3] * 18
    buckets = [labels for name, (_, labels) in parts.items() if name.startswith("test_")]
    assert torch.equal(torch.cat(buckets).sort().values, parts["test"][1])
    assert (rare.count_drawings(18)[parts["test_3_to_5_drawings"][1]] - 4).abs().max() == 1
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    _, test = omniglot.curriculum_split(omniglot.load())
    assert torch.equal(parts["test"][0], test[order].flatten(0, 1).unsqueeze(1).float() / 255)


def test_both_heads_start_alike_and_one_smooths():
    networks = []
    for model in ("softmax", "hebbian"):
        torch.manual_seed(3)
        networks.append(rare.make_classifier(model, RARE))
    assert all(map(torch.equal, networks[0].state_dict().values(), networks[1].state_dict().values()))
    assert [network.head.limit for network in networks] == [0, RARE.limit]


@pytest.mark.usefixtures("made_up")
def test_rare_classes_have_a_row_for_each_bucket_and_head(tmp_path):
    rare.run(dataclasses.replace(RARE, seeds=(1, 2)), tmp_path)
    rows = result(tmp_path)["rows"]
    assert [row["metric"] for row in rows[::2]] == [
        "test error, %",
        "test 1 drawing error, %",
        "test 2 drawings error, %",
        "test 3 to 5 drawings error, %",
        "test 6 to 12 drawings error, %",
    ]
    assert [row["model"] for row in rows[:2]] == ["Softmax", "Hebbian Softmax"]
    last = {member.name: records(member)[-1] for member in members_of(tmp_path)}
    assert rows[3]["ours"] == [last[f"hebbian-seed{seed}"]["test_1_drawing_error"] for seed in (1, 2)]
    assert last["softmax-seed1"]["test_loss"] != last["hebbian-seed1"]["test_loss"]


def test_the_settings_of_one_head_do_not_concern_the_other_nor_where_the_drawings_lie(made_up, tmp_path):
    plain = dataclasses.replace(RARE, models=("softmax",), data_dir=tmp_path / "here")
    rare.run(plain, tmp_path)
    assert "data_dir" not in settings_in(tmp_path / "softmax-seed1")
    rare.run(dataclasses.replace(plain, gamma=0.5, limit=3, data_dir=tmp_path / "there"), tmp_path)
    assert made_up == [tmp_path / "here", tmp_path / "there"]
    rare.run(RARE, tmp_path)
    learning_rates = [settings_in(tmp_path / f"{model}-seed1")["learning_rate"] for model in ("softmax", "hebbian")]
    assert learning_rates == [RARE.learning_rate, RARE.hebbian_learning_rate]
    with pytest.raises(RunError, match=r"hebbian-seed1 holds a run with other settings: limit was \d+, now 3"):
        rare.run(dataclasses.replace(RARE, limit=3), tmp_path)
