"""The few-shot tables of Munkhdalai & Trischler 2018: rows and refusals, on made-up data; a little real."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import FastWeightsError, RunError
from fastweights.few_shot import FewShotClassifier
from fastweights.reproduce.munkhdalai2018 import _episodes, ablation, omniglot, timing
from fastweights.reproduce.munkhdalai2018 import mini_imagenet as mini
from fastweights.reproduce.munkhdalai2018 import penn_treebank as penn
from fastweights.reproduce.trained import load_member
from fastweights.runs import load_run
from fastweights.tasks import mini_imagenet as mini_data
from fastweights.tasks import missing_word
from fastweights.training import train_episodes

from .helpers import TINY, records, result, settings_in

OMNIGLOT: omniglot.Settings = TINY[omniglot.EXPERIMENT].settings
MINI: mini.Settings = TINY[mini.EXPERIMENT].settings
ABLATION: ablation.Settings = TINY[ablation.EXPERIMENT].settings
PENN: penn.Settings = TINY[penn.EXPERIMENT].settings

pytestmark = pytest.mark.usefixtures("made_up")


def test_a_row_for_every_model_and_a_score_for_every_kind_of_tasks(tmp_path):
    settings = dataclasses.replace(OMNIGLOT, models=("hebbian", "gradient", "matching"), gradient_tasks_per_step=3)
    omniglot.run(settings, tmp_path)
    rows = {(row["model"], row["metric"]): row for row in result(tmp_path)["rows"]}
    kinds = ["2-way 1-shot", "2-way 2-shot", "3-way 1-shot", "3-way 2-shot"]
    assert {metric for _, metric in rows} == {f"{kind} test accuracy, %" for kind in kinds}
    assert {model for model, _ in rows} == {"Fast weights, Hebbian", "Fast weights, gradient", "Matching Networks"}
    last = records(tmp_path / "gradient-seed1")[-1]
    row = rows["Fast weights, gradient", "3-way 1-shot test accuracy, %"]
    assert (row["ours"], row["floor"]) == ([last["test_accuracy"]], pytest.approx(100 / 3))
    assert (last["tasks"], last["steps"]) == (12, 4)  # three an update, in place of two
    assert 0 <= last["test_interval"] < 60
    assert [curve.key for curve in load_run(tmp_path).curves] == ["3-way_1-shot_validation_accuracy"]
    assert main(["report", str(tmp_path)]) == 0


def test_turned_and_mirrored_characters_are_classes_to_learn_from():
    whole = omniglot.load(OMNIGLOT)
    none = omniglot.load(dataclasses.replace(OMNIGLOT, rotations=False, reflections=False))
    assert [int(data["train"].labels.max()) + 1 for data in (whole, none)] == [48, 6]
    images = {split: data.examples[torch.arange(len(data.examples))] for split, data in none.items()}
    for quarter in range(4):
        turned = torch.rot90(images["train"], quarter, (-2, -1))
        for mirrored in (0, 1):
            own = (whole["train"].labels // 6 == 4 * mirrored + quarter).nonzero().flatten()
            assert torch.equal(whole["train"].examples[own], turned.flip(-1) if mirrored else turned)
    assert torch.equal(whole["test"].examples[torch.arange(120)], images["test"])


def test_one_network_answers_tasks_of_every_number_of_classes_and_a_maml_those_of_its_own(tmp_path):
    omniglot.run(dataclasses.replace(OMNIGLOT, models=("matching", "maml")), tmp_path)
    members = {"matching-seed1": (4, [2, 3]), "maml-2way-seed1": (2, [2]), "maml-3way-seed1": (3, [3])}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == set(members)
    rows = {(row["model"], row["metric"]): row["ours"] for row in result(tmp_path)["rows"]}
    for member, (trained, tests) in members.items():
        settings = settings_in(tmp_path / member)
        assert (settings["training_ways"], settings["ways"]) == (trained, tests)
        assert (settings["training_shots"], settings["shots"]) == (1, [1, 2])
        last = records(tmp_path / member)[-1]
        for ways, shots in itertools.product(tests, (1, 2)):
            accuracy = last[f"{ways}-way_{shots}-shot_test_accuracy"]
            assert rows[settings["model"], f"{ways}-way {shots}-shot test accuracy, %"] == [accuracy]
        assert last["test_accuracy"] == last[f"{tests[-1]}-way_1-shot_test_accuracy"]


@pytest.mark.parametrize("model", ["prototypical", "maml", "maml-first-order", "fine-tuning"])
def test_every_rival_trains(tmp_path, model):
    omniglot.run(dataclasses.replace(OMNIGLOT, models=(model,), ways=(3,), shots=(1,)), tmp_path)
    (row,) = result(tmp_path)["rows"]
    (member,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert row["ours"] == [records(member)[-1]["test_accuracy"]]
    assert sum(line["kind"] == "epoch" for line in records(member)) == 2


def test_a_trained_network_is_a_classifier_to_be_shared(tmp_path):
    omniglot.run(dataclasses.replace(OMNIGLOT, models=("hebbian", "maml"), ways=(3,), shots=(1,)), tmp_path)
    classifier = load_member(tmp_path / "hebbian-seed1")
    assert isinstance(classifier, FewShotClassifier)
    best = torch.load(tmp_path / "hebbian-seed1" / "checkpoint.pt", weights_only=True)["best"]
    for name, tensor in classifier.network.state_dict().items():
        assert torch.equal(tensor, best[name])
    assert "8 tasks, seed 1" in classifier.trained_on
    with pytest.raises(RunError, match="is a MAML, but a classifier needs a FewShotNetwork"):
        load_member(next(tmp_path.glob("maml-*")))


def test_a_network_learns_the_characters_that_it_sees(tmp_path):
    learning = dataclasses.replace(
        OMNIGLOT, models=("hebbian",), ways=(3,), shots=(1,), tasks=960, tasks_per_step=8, validate_every=480,
        hidden_size=32, filters=16, learning_rate=3e-3, rotations=False, reflections=False, distortions=False,
        dropout=0.0,
    )  # fmt: skip
    omniglot.run(learning, tmp_path)
    losses = [line["train_loss"] for line in records(tmp_path / "hebbian-seed1") if line["kind"] == "epoch"]
    assert losses[-1] < 0.7  # by chance 1.10


def test_seeds_have_other_tasks(tmp_path):
    settings = dataclasses.replace(OMNIGLOT, models=("prototypical",), ways=(3,), shots=(1,), seeds=(1, 2))
    omniglot.run(settings, tmp_path)
    first, other = (records(tmp_path / f"prototypical-seed{seed}") for seed in (1, 2))
    assert other[-1]["test_loss"] != first[-1]["test_loss"]


def test_settings_are_refused_where_they_matter(tmp_path):
    settings = dataclasses.replace(OMNIGLOT, models=("matching",), ways=(3,), shots=(1,))
    omniglot.run(settings, tmp_path)
    omniglot.run(dataclasses.replace(settings, label_noise=0.3, maml_rate=0.3, second_order=True), tmp_path)
    with pytest.raises(RunError, match="matching-seed1 holds a run with other settings: pool was 6, now 5"):
        omniglot.run(dataclasses.replace(settings, pool=5), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ways": (1,)}, r"ways must be at least 2, got \(1,\)"),
        ({"training_ways": 2}, "training_ways must be at least the 3 ways of the tests, got 2"),
        ({"pool": 3}, "pool must be 0 or at least the 4 ways of training, got 3"),
        ({"tasks": 9}, "tasks must be a multiple of validate_every, got 9 and 4: give another validate_every too"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"maml_rate": 0.0}, "maml_rate must be more than 0 and less than 100, got 0.0"),
        ({"label_noise": float("nan")}, "label_noise must be at least 0 and less than 100, got nan"),
        ({"label_noise": -0.5}, "label_noise must be at least 0 and less than 100, got -0.5"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, got 1.0"),
        ({"averaging": -0.5}, "averaging must be at least 0 and less than 1, got -0.5"),
        ({"weight_decay": -1.0}, "weight_decay times the learning rate must be at least 0 and less than 1, got -1.0"),
        ({"filters": 0}, "filters must be an integer of at least 1, got 0"),
        ({"hidden_size": 2 * 10**9}, "these settings cannot run: .*can't allocate memory|not enough memory"),
        ({"training_ways": 49, "pool": 0}, "there are 48 classes: too few for tasks of 49"),
        ({"ways": (7,), "training_ways": 7, "pool": 0}, "there are 6 classes: too few for tasks of 7"),
        ({"training_shots": 0}, "training_shots must be an integer of at least 1, got 0"),
        ({"shots": (25,)}, "class 0 has 20 examples: too few for 25 described and 2 queries"),
        ({"training_shots": 25}, "class 0 has 20 examples: too few for 25 described and 1 queries"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_a_folder_is_made(tmp_path, change, message):
    with pytest.raises(FastWeightsError, match=message):
        omniglot.run(dataclasses.replace(OMNIGLOT, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_photographs_are_split_by_their_lists():
    data = mini.load(MINI)
    assert [len(part.examples) for part in data.values()] == [54, 54, 54]
    assert data["train"].labels[8:10].tolist() == [0, 1]


def test_parts_are_cut_out_of_images_in_training_alone(tmp_path, monkeypatch):
    asked, cut = [], mini_data.augment

    def augment(images, size, *, least_area, light, generator):
        asked.append((len(images), size))
        return cut(images, size, least_area=least_area, light=light, generator=generator)

    monkeypatch.setattr(mini_data, "augment", augment)
    settings = dataclasses.replace(MINI, models=("prototypical",))
    mini.run(settings, tmp_path / "first")
    assert len(asked) == 4
    assert all(count <= 6 * 2 and size == 84 for count, size in asked)
    mini.run(settings, tmp_path / "again")
    first, again = (records(tmp_path / run / "prototypical-seed1") for run in ("first", "again"))
    assert first == again  # the parts are those of the seed
    mini.run(dataclasses.replace(settings, cuts=False), tmp_path / "whole")
    assert len(asked) == 8


def test_every_bar_of_the_ablation(tmp_path):
    ablation.run(dataclasses.replace(ABLATION, models=tuple(ablation.TITLES)), tmp_path)
    rows = result(tmp_path)["rows"]
    assert [row["model"] for row in rows] == list(ablation.TITLES.values())
    assert [row["paper"] for row in rows] == [None] * 7  # the paper's are of five ways


def test_both_protocols_of_the_missing_word_and_what_learns_nothing(tmp_path):
    penn.run(dataclasses.replace(PENN, models=("hebbian", "matching"), tasks=4, validate_every=4, pool=5), tmp_path)
    rows = {(row["model"], row["metric"]): row for row in result(tmp_path)["rows"]}
    tests = [f"5-way {shots}-shot {test} accuracy, %" for shots in (1, 2) for test in ("test", "all-inclusive")]
    assert {metric for _, metric in rows} == set(tests)
    for test in tests:
        assert rows["Nearest context, untrained", test]["ours"] == [100.0]  # both neighbours tell the word
    assert rows["Fast weights, Hebbian", tests[0]]["paper"] == 43.75
    assert rows["Matching Networks", tests[1]]["paper"] is None
    assert settings_in(tmp_path / "hebbian-seed1")["hidden_size"] == 6


def test_the_same_words_serve_one_two_and_three_shots(monkeypatch):
    load, asked = missing_word.load, []

    def listen(data_dir, *, sentences):
        asked.append(sentences)
        return load(data_dir, sentences=sentences)

    monkeypatch.setattr(missing_word, "load", listen)
    for shots in ((1,), (1, 2, 3), (5,)):
        penn.load(dataclasses.replace(PENN, shots=shots))
    assert asked == [4, 4, 6]  # those that describe a word, and one to ask about it


def test_the_nearest_context_counts_neighbours_by_their_place():
    blank = missing_word.BLANK
    described = torch.tensor([[5, 6, blank, 7, 8], [9, 10, blank, 11, 12]])
    asked = torch.tensor([[13, 10, blank, 14, 15], [7, 6, blank, 14, 15], [blank, 11, 12, 0, 0]])
    examples = torch.cat([described, asked])
    logits = penn.NearestContext()(examples, torch.tensor([[0, 1]]), torch.tensor([[1, 0]]), torch.tensor([[2, 3, 4]]))
    assert logits.shape == (1, 3, 2)
    expected = torch.tensor([[[1 + 0.25 / 4, 0], [0, 1 + 0.25 * 2 / 4], [1.5 + 0.25, 0]]])
    assert torch.allclose(logits, expected)


def test_times_are_of_every_model_and_ratios_of_the_first(tmp_path):
    timing.run(timing.Settings(models=("hebbian", "matching"), filters=2, rounds=1, hidden_size=4, queries=2), tmp_path)
    rows = {(row["model"], row["metric"]): row["ours"][0] for row in result(tmp_path)["rows"]}
    hebbian, matching = "Fast weights, Hebbian", "Matching Networks"
    for phase in ("training", "inference", "training, 16 tasks of 20 classes at once"):
        ratio = rows[matching, f"{phase}: times {hebbian}"]
        assert ratio == pytest.approx(rows[matching, f"{phase}: ms a task"] / rows[hebbian, f"{phase}: ms a task"])
        assert rows[hebbian, f"{phase}: times {hebbian}"] == 1


def test_times_are_measured_again_where_they_were(tmp_path):
    settings = timing.Settings(models=("matching",), filters=2, rounds=1, hidden_size=4, queries=2)
    timing.run(settings, tmp_path)
    timing.run(settings, tmp_path)
    assert len(result(tmp_path)["rows"]) == 8
    assert len((tmp_path / "timing" / "metrics.jsonl").read_text().splitlines()) == 2
    with pytest.raises(RunError, match="holds a run with other settings: queries was 2, now 3"):
        timing.run(dataclasses.replace(settings, queries=3), tmp_path)


def test_models_that_share_nothing_are_timed_alone(tmp_path):
    settings = timing.Settings(models=("maml",), maml_steps=1, maml_test_steps=2, filters=2, rounds=1, hidden_size=4)
    timing.run(settings, tmp_path)
    (member,) = load_run(tmp_path).members
    assert member.result is not None
    assert {row["metric"].split(":")[0] for row in result(tmp_path)["rows"]} == {"training", "inference"}
    with pytest.raises(
        RunError, match=r"seeds must be a single seed, because weights and images are noise; got \(1, 2\)"
    ):
        timing.check(timing.Settings(seeds=(1, 2)))


def test_a_published_run_is_added_to_without_its_checkpoints(tmp_path, monkeypatch):
    settings = dataclasses.replace(OMNIGLOT, models=("prototypical",), ways=(3,), shots=(1,))
    omniglot.run(settings, tmp_path)
    (tmp_path / "prototypical-seed1" / "checkpoint.pt").unlink()
    trained = []

    def train(*arguments, **more):
        trained.append(more["seed"])
        return train_episodes(*arguments, **more)

    monkeypatch.setattr(_episodes, "train_episodes", train)
    omniglot.run(dataclasses.replace(settings, seeds=(1, 2), half=True), tmp_path)
    assert trained == [2]
    (row,) = result(tmp_path)["rows"]
    assert len(row["ours"]) == 2


def test_models_that_were_trained_before_stay_in_the_table(tmp_path):
    for model in ("matching", "hebbian"):
        omniglot.run(dataclasses.replace(OMNIGLOT, models=(model,)), tmp_path)
    rows = result(tmp_path)["rows"]
    assert {row["model"] for row in rows} == {"Matching Networks", "Fast weights, Hebbian"}
    assert all(len(row["ours"]) == 1 for row in rows)
    assert len(rows) == 2 * len(OMNIGLOT.ways) * len(OMNIGLOT.shots)


def test_dropout_is_of_fast_weights_alone(tmp_path):
    settings = dataclasses.replace(OMNIGLOT, models=("matching", "hebbian"), dropout=0.5)
    omniglot.run(settings, tmp_path)
    matching, hebbian = (settings_in(tmp_path / f"{model}-seed1") for model in settings.models)
    assert "dropout" not in matching
    assert hebbian["dropout"] == 0.5
    assert (matching["hidden_size"], hebbian["hidden_size"]) == (None, 6)
    data = omniglot.load(settings)
    shares = {
        model: layer.p
        for model in ("hebbian", "gradient", "maml", "matching", "prototypical", "fine-tuning")
        for layer in omniglot.network(settings, _episodes.TasksRow(model, 4, 1), data).modules()
        if isinstance(layer, torch.nn.Dropout)
    }
    assert list(shares.values()) == [0.5, 0.5, 0, 0, 0, 0]


def test_the_residual_encoder_has_no_settings_of_the_convolutional(tmp_path):
    few: dict[str, Any] = {"tasks": 2, "validate_every": 2, "validation_tasks": 2, "test_tasks": 2, "test_queries": 1}
    settings = dataclasses.replace(MINI, encoder="residual", models=("hebbian",), **few)
    mini.run(settings, tmp_path)
    assert {"filters", "dropout"}.isdisjoint(settings_in(tmp_path / "hebbian-seed1"))
    mini.run(dataclasses.replace(settings, filters=7, dropout=0.5), tmp_path)  # the same run, and finished
    assert mini.PRESETS["residual"].label_noise == 0


def test_the_residual_encoder_has_statistics_that_tasks_cannot_share():
    settings = dataclasses.replace(MINI, encoder="residual", models=("hebbian", "maml-first-order", "maml"))
    with pytest.raises(RunError, match="models has maml, maml-first-order, whose tasks would share the residual"):
        mini.check(settings)


@pytest.mark.data
@pytest.mark.slow
def test_a_minute_of_real_characters_is_far_above_chance(omniglot_root, tmp_path):
    settings = dataclasses.replace(
        omniglot.PRESETS["quick"], models=("hebbian",), data_dir=omniglot_root, tasks=12_800, validate_every=6400
    )
    omniglot.run(settings, tmp_path)
    accuracies = {row["metric"]: row["ours"][0] for row in result(tmp_path)["rows"]}
    assert accuracies["5-way 1-shot test accuracy, %"] > 70
    assert accuracies["20-way 1-shot test accuracy, %"] > 45
