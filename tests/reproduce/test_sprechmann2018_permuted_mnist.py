"""Permuted MNIST: its tasks, its rows and its resuming, on made-up digits; on the real ones, a few tasks."""

import dataclasses

import pytest
import torch

from fastweights.cli import main
from fastweights.errors import RunError
from fastweights.reproduce.sprechmann2018.permuted_mnist import (
    EXPERIMENT,
    NetworkLearner,
    PermutedTasks,
    RandomMemory,
    Settings,
    check,
    run,
)
from fastweights.runs import load_run
from fastweights.tasks import mnist

from .helpers import TINY as EVERY
from .helpers import KilledError, kill_before, records, result

TINY: Settings = dataclasses.replace(EVERY[EXPERIMENT].settings, tasks=3, tested=(1, 2))


@pytest.fixture
def digits(made_up):
    return mnist.load()


def test_a_run_writes_a_row_for_each_model_and_memory(digits, tmp_path):
    run(dataclasses.replace(TINY, seeds=(1, 2)), tmp_path)
    rows = {(row["model"], row["metric"]): row["ours"] for row in result(tmp_path)["rows"]}
    assert [model for model, metric in rows if metric == "test accuracy"] == [
        "MLP", "EWC", "MbPA, 5 a task", "MbPA, 20 a task", "MbPA, memories at random, 20 a task",
        "MbPA + EWC, 5 a task", "MbPA + EWC, 20 a task",
    ]  # fmt: skip
    last = records(tmp_path / "mbpa-20-seed2")[-1]
    assert rows["MbPA, 20 a task", "test accuracy"][1] == last["test_accuracy"]
    assert last["test_accuracy"] == pytest.approx(sum(last["accuracies"]) / 3)
    assert all(time > 0 for (_, metric), ours in rows.items() for time in ours if metric == "milliseconds a query")
    assert [record["tasks"] for record in records(tmp_path / "mlp-seed1")] == [1, 2, 3, 3]
    assert [len(record["accuracies"]) for record in records(tmp_path / "mbpa+ewc-5-seed1")] == [1, 2, 3, 3]
    (curve,) = load_run(tmp_path).curves
    assert (curve.key, curve.against, curve.spread) == ("test_accuracy", "tasks", True)
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "learning_curves.svg").exists()


def test_tested_after_some_numbers_of_tasks_and_after_the_last(digits, tmp_path):
    run(dataclasses.replace(TINY, models=("mbpa",), memories=(5,), tested=(7, 2)), tmp_path)
    assert [record["tasks"] for record in records(tmp_path / "mbpa-5-seed1")] == [2, 3, 3]


def test_one_training_serves_all_that_only_adapt(digits, tmp_path):
    run(dataclasses.replace(TINY, models=("mbpa",)), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-seed1")) == ["mbpa-20-seed1", "mbpa-5-seed1", "mlp-seed1"]
    before = (tmp_path / "mlp-seed1" / "metrics.jsonl").read_bytes()
    run(dataclasses.replace(TINY, models=("mbpa", "mlp", "random")), tmp_path)
    assert (tmp_path / "mlp-seed1" / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_goes_on_to_the_same_numbers_at_the_end_of_a_row_too(digits, tmp_path, monkeypatch):
    settings = dataclasses.replace(TINY, tasks=2, models=("ewc", "mbpa+ewc"), memories=(5,), tested=(1,))
    members = ("ewc-seed1", "mbpa+ewc-5-seed1")
    run(settings, tmp_path / "whole")
    whole = [records(tmp_path / "whole" / member) for member in members]
    for step, call in (("record", 5), ("checkpoint", 4)):
        folder = tmp_path / step
        with monkeypatch.context() as patch:
            kill_before(step, call, patch)
            with pytest.raises(KilledError):
                run(settings, folder)
        run(settings, folder)
        assert [records(folder / member) for member in members] == whole


def test_other_settings_are_refused_where_they_matter(digits, tmp_path):
    run(dataclasses.replace(TINY, models=("mlp", "mbpa")), tmp_path)
    run(dataclasses.replace(TINY, models=("mlp",), strength=5.0, rate=0.5, steps=3), tmp_path)
    with pytest.raises(RunError, match=r"mbpa-5-seed1 holds a run with other settings: rate was 0\.\d+, now 0\.9"):
        run(dataclasses.replace(TINY, models=("mlp", "mbpa"), rate=0.9), tmp_path)
    with pytest.raises(RunError, match="mlp-seed1 holds a run with other settings: hidden_size was 8, now 9"):
        run(dataclasses.replace(TINY, hidden_size=9), tmp_path)


def test_every_task_has_a_permutation_and_examples_of_its_own(digits):
    tasks = PermutedTasks(digits, TINY, 1)
    learnt = {(image.numpy().tobytes(), label) for image, label in zip(*_learnt(digits), strict=True)}
    undone = []
    for task in range(3):
        images, labels = tasks.training(task)
        assert images.shape == (60, 784)
        assert (images.min().item(), images.max().item()) == (0, 1)
        undone.append(torch.empty_like(images))
        undone[-1][:, mnist.permutation(1, task)] = images
        own = zip(undone[-1], labels.tolist(), strict=True)
        assert all((image.numpy().tobytes(), label) in learnt for image, label in own)
        assert not any(torch.equal(mnist.permutation(1, task), mnist.permutation(1, other)) for other in range(task))
    assert not torch.equal(undone[0], undone[1])
    assert all(
        torch.equal(part, whole[:7]) for part, whole in zip(tasks.training(0, 7), tasks.training(0), strict=True)
    )
    assert tasks.held_out(0)[0].shape == (10, 784)


def test_elastic_weight_consolidation_holds_the_weights_of_the_first_task(digits, tmp_path):
    weights = {}
    for strength in (None, 0.0, 1e4):
        settings = dataclasses.replace(TINY, strength=strength or 0.0)
        torch.manual_seed(1)
        learner = NetworkLearner(PermutedTasks(digits, settings, 1), tmp_path, "", consolidate=strength is not None)
        for count in (1, 2):
            learner.learn(count)
        weights[strength] = [after["2.weight"] for after in learner.after_tasks]
    plain, none, strong = weights.values()
    assert all(map(torch.equal, plain, none))
    assert torch.equal(plain[0], strong[0])  # nothing is to be held yet
    assert (strong[1] - strong[0]).norm() < 0.7 * (plain[1] - plain[0]).norm()


def _learnt(digits):
    """All but the last 50, which are for validation."""
    return digits.train_images[:150].flatten(1).float() / 255, digits.train_labels[:150].tolist()


def test_settings_are_chosen_by_images_that_nothing_is_learnt_of(digits, tmp_path):
    validating = dataclasses.replace(TINY, split="validation", models=("mlp",), queries=50)
    images, _ = PermutedTasks(digits, validating, 1).held_out(0)
    undone = torch.empty_like(images)
    undone[:, mnist.permutation(1, 0)] = images
    expected = digits.train_images[150:].flatten(1).float() / 255
    assert torch.equal(undone.sort(0).values, expected.sort(0).values)
    run(validating, tmp_path)
    last = records(tmp_path / "mlp-seed1")[-1]
    assert last["validation_error"] == pytest.approx(100 * (1 - last["validation_accuracy"]))
    assert "test_accuracy" not in last


def test_entries_at_random_are_drawn_evenly_and_none_twice():
    store = RandomMemory(50, 3, seed=0)
    store.write(torch.randn(30, 3), torch.arange(30))
    queries = torch.zeros(2000, 3)
    found = store.search(queries, 6)
    assert found.indices.shape == (2000, 6)
    assert all(len(set(row)) == 6 for row in found.indices.tolist())
    assert found.indices.flatten().bincount(minlength=30).float().std() < 40  # of 400 each
    assert torch.equal(found.values, found.indices)
    assert torch.equal(found.keys, store.keys[found.indices])
    assert torch.allclose(found.weights, torch.full((2000, 6), 1 / 6))
    assert torch.allclose(found.distances, found.keys.square().sum(2))
    assert store.search(queries, 99).indices.shape == (2000, 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memories": ()}, "memories is empty: give at least one value"),
        ({"tasks": 0}, "tasks must be an integer of at least 1, got 0"),
        ({"memories": (5, 0)}, "memories must be an integer of at least 1, got 0"),
        ({"memories": (100,)}, r"memories must be at most the 60 examples, got \(100,\)"),
        ({"memories": (5, 5)}, "memories has 5 twice"),
        ({"examples": 50_001}, "examples must be at most 50,000, got 50001"),
        ({"queries": 10_001}, "queries must be at most 10,000, got 10001"),
        ({"rate": -1.0}, r"rate must be finite and not negative, got -1\.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite and not negative, got nan"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(RunError, match=message):
        check(dataclasses.replace(TINY, **change))


@pytest.mark.data
@pytest.mark.usefixtures("mnist_root")
def test_on_real_digits_memories_recover_what_was_forgotten(tmp_path):
    settings = Settings(tasks=5, examples=2000, epochs=5, memories=(200,), queries=50, tested=(5,))
    run(dataclasses.replace(settings, models=("mlp", "mbpa")), tmp_path)
    forgotten, recovered = (records(tmp_path / f"{name}-seed1")[-1]["accuracies"] for name in ("mlp", "mbpa-200"))
    assert min(forgotten[0], recovered[-1]) > 0.3
    assert recovered[0] > forgotten[0] + 0.05
