import dataclasses

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from fastweights.errors import DataError, RunError
from fastweights.memory import attend
from fastweights.reproduce.sprechmann2018 import incremental_classes
from fastweights.reproduce.sprechmann2018._stream import (
    Features,
    Images,
    Method,
    StreamLearner,
    _choose_query,
    choose_examples,
    load_images,
    points,
    write_picture,
)
from fastweights.reproduce.sprechmann2018.incremental_classes import (
    EXPERIMENT,
    REPORTED,
    ResNet,
    Settings,
    area,
    rows,
    run,
)
from fastweights.runs import Member
from fastweights.tasks.mini_imagenet import augment
from fastweights.training import epoch_order

from .helpers import TINY as EVERY
from .helpers import records, result

TINY: Settings = EVERY[EXPERIMENT].settings
METHOD = Method(
    "mbpa", 1e-2, capacity=40, neighbours=3, mixing=0.3, steps=2, local_learning_rate=0.05, optimizer="rmsprop"
)

pytestmark = pytest.mark.usefixtures("made_up")


@pytest.fixture
def features():
    """Six classes, three of them old, in eight dimensions: 20 examples of each to learn from, 4 to test on."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(6, 8, generator=generator)

    def part(count):
        labels = torch.arange(6).repeat_interleave(count)
        return centres[labels] + 0.3 * torch.randn(6 * count, 8, generator=generator), labels

    head = nn.Linear(8, 6)
    with torch.no_grad():
        head.weight.zero_()[:3] = centres[:3]
        head.bias.zero_()
    return Features({"train": part(20), "validation": part(4), "test": part(4)}, 3, head)


def stream(features, scarce=1.0, **changes):
    method = dataclasses.replace(METHOD, **changes)
    return StreamLearner(features, method, seed=5, scarce=scarce, batch_size=16)


def test_images_are_split_by_class_and_number():
    data = load_images(dataclasses.replace(TINY, images_per_class=8))
    assert len(data.names) == 18
    assert data.images.shape == (18 * 8, 3, 84, 84)
    assert data.part.view(18, 8).tolist() == [[2, 2, 2, 1, 1, 0, 0, 0]] * 18
    assert data.labels.view(18, 8)[:, 0].tolist() == list(range(18))
    with pytest.raises(ValueError, match="class n0 has 5 images, 3 for the test and 2 for validation"):
        load_images(dataclasses.replace(TINY, images_per_class=5))


def test_classes_of_a_folder_may_differ_in_number(tmp_path):
    for name, count in (("a", 7), ("b", 9), ("c", 6), ("d", 6)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (20, 20)).save(tmp_path / name / f"{number}.png")
    own = dataclasses.replace(TINY, images=tmp_path, images_per_class=8)
    data = load_images(own)
    assert data.part.tolist() == [2, 2, 2, 1, 1, 0, 0, 2, 2, 2, 1, 1, 0, 0, 0, *[2, 2, 2, 1, 1, 0] * 2]
    assert data.images.shape == (27, 3, 84, 84)
    (tmp_path / "c").rename(tmp_path / ".c")
    with pytest.raises(ValueError, match="3 classes cannot be split into old and new ones: give at least four"):
        load_images(own)


def test_the_network_takes_bytes_and_any_size():
    network = ResNet(2).eval()
    images = torch.randint(256, (3, 3, 40, 40), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(network(images), network(images.float() / 255))
        assert network(images).shape == (3, network.features) == (3, 16)


def test_augmented_images_are_parts_of_the_image():
    torch.manual_seed(0)
    across = torch.linspace(0.3, 0.7, 32).expand(200, 3, 32, 32)  # darker to the left
    found = augment(across, 24)
    assert found.shape == (200, 3, 24, 24)
    assert 0 <= found.min() <= found.max() <= 1
    mirrored = (found[:, 0, 12, 0] > found[:, 0, 12, -1]).float().mean()
    assert 0.35 < mirrored < 0.65
    assert torch.allclose(found[:, :, 0], found[:, :, -1], atol=1e-5)  # it is the same from top to bottom
    assert found[:, 0, 12, 12].std() > 0.05  # other parts, other light
    assert found.min() < 0.2  # darker than any part was
    unlit = augment(across, 24, light=0.0)
    assert 0.3 - 1e-5 <= unlit.min() <= unlit.max() <= 0.7 + 1e-5
    torch.manual_seed(0)
    assert torch.equal(augment((255 * across).byte(), 24), augment((255 * across).byte().float() / 255, 24)) is False
    torch.manual_seed(0)
    assert torch.equal(found, augment(across, 24))


def test_the_softmax_layer_learns_as_a_plain_loop_does(features):
    ours = stream(features, model="parametric")
    ours.learn(11)
    ours.learn(19)  # in two parts, past the end of a pass of 8 steps
    inputs, labels = features.parts["train"]
    head = nn.Linear(8, 6)
    head.load_state_dict(features.head.state_dict())
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    batches = [batch for epoch in range(3) for batch in epoch_order(120, 5, epoch).split(16)]
    for batch in batches[:19]:
        optimizer.zero_grad()
        F.cross_entropy(head(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    assert torch.equal(ours.head.weight, head.weight)
    assert len(ours.store) == 0
    assert torch.equal(ours.log_probs(inputs), head(inputs).log_softmax(1))


def test_the_memory_holds_what_was_shown_last(features):
    ours = stream(features, capacity=40)
    ours.learn(6)
    inputs, labels = features.parts["train"]
    shown = epoch_order(120, 5, 0)[: 6 * 16][-40:]
    assert torch.equal(ours.store.keys, inputs[shown])
    assert torch.equal(ours.store.values, labels[shown])


def test_the_mixture_is_equation_5_of_its_parts(features):
    inputs, _ = features.parts["test"]
    ours = stream(features, model="mixture")
    assert torch.equal(ours.log_probs(inputs), ours.head(inputs).log_softmax(1))  # nothing to remember yet
    ours.learn(5)
    memory = attend(ours.store.search(inputs, 3), 6)
    expected = 0.3 * ours.head(inputs).softmax(1) + 0.7 * memory
    assert torch.allclose(ours.log_probs(inputs).exp(), expected, atol=1e-6)
    alone = stream(features, model="non-parametric")
    alone.learn(5)
    assert torch.allclose(alone.log_probs(inputs).exp(), memory, atol=1e-6)


def test_mbpa_without_a_local_rate_is_the_parametric_model(features):
    inputs, _ = features.parts["test"]
    still, moving = stream(features, local_learning_rate=0.0), stream(features)
    plain = stream(features, model="parametric")
    for each in (still, plain, moving):
        each.learn(5)
    assert torch.allclose(still.log_probs(inputs), plain.log_probs(inputs), atol=1e-6)
    assert not torch.allclose(moving.log_probs(inputs), plain.log_probs(inputs), atol=1e-2)


def test_scores_are_of_the_classes_that_they_name(features):
    scores = stream(features, model="parametric").scores("test")
    assert scores["novel_accuracy"] < scores["pretrained_accuracy"]
    assert scores["accuracy"] == pytest.approx((scores["novel_accuracy"] + scores["pretrained_accuracy"]) / 2)
    nothing = stream(features, model="non-parametric").scores("test")
    assert nothing["loss"] == pytest.approx(torch.tensor(6.0).log().item(), abs=1e-5)


def test_every_other_new_class_is_scarce():
    labels = torch.arange(6).repeat(20)
    assert torch.equal(choose_examples(labels, 2, 1.0), torch.arange(120))
    assert labels[choose_examples(labels, 2, 0.1)].bincount().tolist() == [20, 20, 20, 2, 20, 2]
    assert labels[choose_examples(labels, 2, 0.01)].bincount().tolist() == [20, 20, 20, 1, 20, 1]  # none is left out


def test_the_picture_shows_a_new_class_that_mbpa_alone_names(features, tmp_path):
    ours = stream(features, learning_rate=1e-6, mixing=1.0, optimizer="sgd", local_learning_rate=5.0, steps=10)
    ours.learn(8)
    answers, query = _choose_query(ours)
    label = features.parts["test"][1][query]
    assert label >= 3
    assert [int(answer[query].argmax()) == label for answer in answers.values()] == [True, False, False]
    part = torch.cat([torch.full((6 * count,), index) for index, count in enumerate((20, 4, 4))])
    labels = torch.cat([features.parts[name][1] for name in ("train", "validation", "test")])
    data = Images(torch.zeros(len(part), 3, 8, 8, dtype=torch.uint8), labels, part, [f"$n{i}" for i in range(6)])
    write_picture(tmp_path / "neighbours.png", ours, data)
    with Image.open(tmp_path / "neighbours.png") as picture:
        assert picture.size == (1170, 520)
    still = stream(features, local_learning_rate=0.0)
    still.learn(8)
    write_picture(tmp_path / "nothing.png", still, data)
    assert not (tmp_path / "nothing.png").exists()


def test_areas_and_points():
    curve = [(0.0, 0.0), (0.1, 20.0), (1.0, 50.0), (3.0, 60.0)]
    assert area(curve, 0.1) == pytest.approx(10.0)
    assert area(curve, 3.0) == pytest.approx((1.0 + 31.5 + 110.0) / 3)
    assert points(3.0) == [0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
    assert set(REPORTED) < set(points(20.0))


def test_a_run_ends_in_a_table(tmp_path):
    run(TINY, tmp_path)
    table = result(tmp_path)["rows"]
    assert len(table) == 2 * 2 * 2 * 4  # subsets, kinds, 0.1 and 0.3 passes, methods
    assert all(len(row["ours"]) == 1 for row in table)
    assert all(row["paper"] is None for row in table)  # the paper has no number from so few images


def test_the_papers_numbers_stand_beside_as_many_images_of_a_class():
    settings = {"model": "MbPA", "images_per_class": 200, "test_images": 40, "validation_images": 20}
    found = rows([Member("mbpa-seed2", settings, {}, [], None)], {"MbPA": "mbpa"}, 3.0, scarce=False, paper=True)
    top = {row["metric"]: row["paper"] for row in found if "top-1" in row["metric"]}
    # A tenth of ImageNet is 128 images of a class, and a pass over mini-ImageNet 140.
    assert top == {
        f"{subset}, top-1 after {mark:g} epochs, %": paper if mark == 1.0 else None
        for subset, paper in (("novel", 46.2), ("pre-trained", 68.5))
        for mark in REPORTED
    }


def test_what_a_killed_run_had_measured_is_not_measured_again(tmp_path, monkeypatch):
    settings = dataclasses.replace(TINY, models=("mbpa",))
    run(settings, tmp_path / "whole")
    scores, calls = StreamLearner.scores, []

    def killed(self, part):
        calls.append(part)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return scores(self, part)

    monkeypatch.setattr(StreamLearner, "scores", killed)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "broken")
    assert len(records(tmp_path / "broken" / "mbpa-seed1")) == 3
    run(settings, tmp_path / "broken")
    assert len(calls) == 4 + len(points(0.3)) - 3 + 1
    assert records(tmp_path / "broken" / "mbpa-seed1") == records(tmp_path / "whole" / "mbpa-seed1")


def test_networks_are_shared_by_presets(tmp_path):
    kept = dataclasses.replace(TINY, encoders=tmp_path / "encoders", models=("parametric",))
    run(kept, tmp_path / "one")
    (network,) = (tmp_path / "encoders").iterdir()
    before = (network / "metrics.jsonl").read_bytes()
    several = dataclasses.replace(kept, models=("mbpa", "parametric"), neighbours=(2, 4))
    run(several, tmp_path / "two")
    assert (network / "metrics.jsonl").read_bytes() == before
    models = {row["model"] for row in result(tmp_path / "two")["rows"]}
    assert models == {"MbPA, 2 neighbours", "MbPA, 4 neighbours", "Parametric"}
    run(dataclasses.replace(kept, width=3), tmp_path / "three")
    assert len(list((tmp_path / "encoders").iterdir())) == 2  # side by side


def test_fresh_removes_nothing_before_the_images_are_read(tmp_path):
    settings = dataclasses.replace(TINY, models=("parametric",))
    run(settings, tmp_path)
    kept = records(tmp_path / "parametric-seed1")
    (tmp_path / "images" / "a").mkdir(parents=True)
    for wrong in ({"images": tmp_path / "images"}, {"images": tmp_path / "nowhere"}, {"images_per_class": 5}):
        with pytest.raises((DataError, RunError)):
            run(dataclasses.replace(settings, **wrong), tmp_path, fresh=True)
        assert records(tmp_path / "parametric-seed1") == kept
    run(settings, tmp_path, fresh=True)
    assert records(tmp_path / "parametric-seed1") == kept  # the same numbers


def test_a_finished_run_needs_no_network(tmp_path, monkeypatch):
    run(TINY, tmp_path)
    monkeypatch.setattr(incremental_classes, "embed", lambda *arguments: pytest.fail("embedded again"))
    run(TINY, tmp_path)


@pytest.mark.parametrize(("epochs", "marks"), [(0.3, [0.1, 0.3]), (1.0, [0.1, 1.0]), (3.5, [0.1, 1.0, 3.0, 3.5])])
def test_the_end_of_the_stream_is_in_the_table(epochs, marks):
    found = rows([], {"MbPA": "mbpa"}, epochs, scarce=True, paper=False)
    assert [row["metric"] for row in found] == [
        f"{subset}, {kind} after {mark:g} epochs, %"
        for subset in ("novel", "pre-trained", "scarce novel")
        for kind in ("top-1", "area under the curve")
        for mark in marks
    ]
    assert all(row["paper"] is None for row in found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0.0}, "epochs must be more than 0"),
        ({"scarce": 0.0}, "scarce must be a fraction"),
        ({"mixing": 1.5}, "mixing must lie between 0 and 1, got 1.5"),
        ({"neighbours": (0,)}, "neighbours must be an integer of at least 1, got 0"),
        ({"capacities": ()}, "capacities is empty"),
        ({"learning_rates": (-1.0,)}, "learning rates must be positive"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, rmsprop, adam, got 'lion'"),
        ({"images_per_class": 5}, "class n0 has 5 images"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(RunError, match=words):
        run(dataclasses.replace(TINY, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
