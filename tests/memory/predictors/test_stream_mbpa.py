"""MbPA over a stream against `MbPA` itself, asked and written to one position at a time, and against autograd."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights.memory import EpisodicMemory, MbPA, StreamMbPA
from fastweights.memory.predictors import stream_mbpa
from fastweights.memory.predictors.stream_mbpa import _cut_at_end
from fastweights.nn import HebbianSoftmax
from fastweights.ops import stream

CLASSES, FEATURES, LENGTH = 70, 5, 90  # more classes than a part of what is stored


def text(count=LENGTH, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    h = scale * torch.randn(count, FEATURES, dtype=torch.float64, generator=generator)
    labels = (CLASSES * torch.rand(count, generator=generator) ** 3).long()  # some often, some seldom
    return h.to(dtype), labels


def heads():
    torch.manual_seed(1)
    return {
        "linear": nn.Linear(FEATURES, CLASSES).double(),
        "hebbian": HebbianSoftmax(FEATURES, CLASSES, dropout=0.5, dtype=torch.float64),
    }


def ask_one_by_one(output, h, targets, capacity, **options):
    """Query and write an `MbPA`, position after position."""
    store = EpisodicMemory(capacity, h.shape[1], dtype=h.dtype)
    model, scores = MbPA(nn.Identity(), output, store, **options), []
    for key, target in zip(h.split(1), targets.split(1), strict=True):
        scores.append(model(key).log_softmax(1)[0, target])
        model.write(key, target)
    return torch.cat(scores)


def descend_one_by_one(output, h, targets, capacity, *, neighbours, lr):
    """Take one step of torch.optim on a copy of the output, position after position."""
    scores = []
    for t in range(len(h)):
        keys, values = h[max(0, t - capacity) : t], targets[max(0, t - capacity) : t]
        squares = (keys - h[t]).square().sum(1)
        near = squares.argsort(stable=True)[:neighbours]
        weights = 1 / (1e-3 + squares[near])
        network = copy.deepcopy(output).eval()
        if t:
            losses = F.cross_entropy(network(keys[near]), values[near], reduction="none")
            (weights / weights.sum() * losses).sum().backward()
            torch.optim.SGD(network.parameters(), lr=lr).step()
        scores.append(network(h[t]).log_softmax(0)[targets[t]].detach())
    return torch.stack(scores)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_was_remembered_is_back_after_a_text_that_filled_all_rows(steps):
    h, targets = text()
    other, labels = text(600, seed=5)  # more than the rows that there are
    model, expected = (StreamMbPA(heads()["linear"], 40, neighbours=8, lr=0.3, steps=steps) for _ in range(2))
    for each in (model, expected):
        each.log_prob(h[:60], targets[:60])
    with model.rewinding(len(other)):
        model.log_prob(other, labels)
    torch.testing.assert_close(model.log_prob(h[60:], targets[60:]), expected.log_prob(h[60:], targets[60:]))


@pytest.mark.parametrize(
    ("name", "capacity", "options"),
    [
        ("linear", 1, {"neighbours": 8}),
        ("linear", 40, {"neighbours": 8}),
        ("linear", 40, {"neighbours": 256, "lr": 1.0}),
        ("linear", 300, {"neighbours": 1}),
        ("hebbian", 7, {"neighbours": 8}),
        ("hebbian", 40, {"neighbours": 8, "penalty": 2.0}),
    ],
)
def test_is_mbpa_one_position_at_a_time(monkeypatch, name, capacity, options):
    output, (h, targets) = heads()[name], text()
    expected = ask_one_by_one(output, h, targets, capacity, **options)
    for block, compiled in ((1, True), (13, True), (2048, True), (13, False), (256, False)):
        monkeypatch.setattr(stream_mbpa, "_BLOCK", block)
        if not compiled:
            monkeypatch.setattr(stream, "unavailable", lambda like: "it is not to be used")
        model = StreamMbPA(output, capacity, **options)
        plain, adapted = model.score(h, targets)
        torch.testing.assert_close(adapted, expected)
        torch.testing.assert_close(plain, output.eval()(h).log_softmax(1).gather(1, targets.unsqueeze(1))[:, 0])
        assert len(model) == min(LENGTH, capacity)


@pytest.mark.parametrize("name", ["linear", "hebbian"])
@pytest.mark.parametrize("numbers", [1, 2**22])
def test_several_steps_are_those_of_mbpa(monkeypatch, name, numbers):
    monkeypatch.setattr(stream_mbpa, "_NUMBERS", numbers)
    options: dict[str, Any] = {"neighbours": 8, "steps": 4, "penalty": 0.3, "epsilon": 0.1}
    output, (h, targets) = heads()[name], text(40)
    adapted = StreamMbPA(output, 20, **options).log_prob(h, targets)
    torch.testing.assert_close(adapted, ask_one_by_one(output, h, targets, 20, **options))


def test_is_a_step_of_gradient_descent():
    output, (h, targets) = heads()["linear"], text()
    adapted = StreamMbPA(output, 40, neighbours=8, lr=0.7).log_prob(h, targets)
    torch.testing.assert_close(adapted, descend_one_by_one(output, h, targets, 40, neighbours=8, lr=0.7))


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_in_single_precision_also_where_the_same_comes_again(scale):
    output, (h, targets) = heads()["linear"].float(), text(dtype=torch.float32, scale=scale)
    h[50:70] = h[10:30]  # at no distance, where a product is all rounding
    h[70:80] = h[20:30] * (1 + 1e-3)
    adapted = StreamMbPA(output, 60).log_prob(h, targets)
    torch.testing.assert_close(adapted, ask_one_by_one(output, h, targets, 60), rtol=1e-5, atol=1e-5)


def test_any_number_of_threads_gives_the_same_answer(threads):
    output, (h, targets) = heads()["linear"].float(), text(300, dtype=torch.float32)
    scores = []
    for count in (1, 3):
        threads(count)
        scores.append(StreamMbPA(output, 200, neighbours=16).log_prob(h, targets))
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-6)


def test_predictions_in_16_bits_change_little():
    output, (h, targets) = heads()["linear"].float(), text(600, dtype=torch.float32, scale=2.0)
    exact = StreamMbPA(output, 200, neighbours=16, lr=1.0).log_prob(h, targets)
    adapted = StreamMbPA(output, 200, neighbours=16, lr=1.0, half=True).log_prob(h, targets)
    assert 0 < float((adapted - exact).square().mean().sqrt()) < 2e-3
    assert abs(float((adapted - exact).mean())) < 2e-4


@pytest.mark.parametrize("lr", [30.0, 1e4])
def test_large_steps_neither_overflow_nor_vanish(lr):
    output, (h, targets) = heads()["linear"], text(scale=2.0)
    expected = StreamMbPA(output, 40, neighbours=8, lr=lr).log_prob(h, targets)
    for half in (False, True):
        adapted = StreamMbPA(output.float(), 40, neighbours=8, lr=lr, half=half).log_prob(h.float(), targets)
        torch.testing.assert_close(adapted.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [50, 1, 39], [0, 89, 0, 1], [LENGTH]])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_stream_in_pieces_is_the_whole(monkeypatch, sizes, steps):
    monkeypatch.setattr(stream_mbpa, "_BLOCK", 20)
    output, (h, targets) = heads()["linear"], text()
    model = StreamMbPA(output, 30, neighbours=8, steps=steps)
    parts = [model.log_prob(*part) for part in zip(h.split(sizes), targets.split(sizes), strict=True)]
    torch.testing.assert_close(torch.cat(parts), StreamMbPA(output, 30, neighbours=8, steps=steps).log_prob(h, targets))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 50])
def test_room_grows_with_the_stream_up_to_its_bound(monkeypatch, steps, size):
    output, (h, targets) = heads()["linear"], text(300)
    expected = StreamMbPA(output, 100, neighbours=8, steps=steps).log_prob(h, targets)
    for name, value in (("_BLOCK", 32), ("_LEAST_BLOCK", 4)):
        monkeypatch.setattr(stream_mbpa, name, value)
    model = StreamMbPA(output, 100, neighbours=8, steps=steps)
    other, labels = text(200, seed=5)
    parts: list[torch.Tensor] = []
    room = []
    for some, those in zip(h.split(size), targets.split(size), strict=True):
        if len(parts) == 2:
            with model.rewinding(200):  # in which the room gets as large as it can, and its rows are used again
                model.log_prob(other, labels)
        parts.append(model.log_prob(some, those))
        room.append(model.nbytes)
        assert model.nbytes == sum(each.nbytes for each in vars(model).values() if isinstance(each, torch.Tensor))
    torch.testing.assert_close(torch.cat(parts), expected)
    assert room[0] < room[-1] / (2 if size < 50 else 1.2)
    model.clear()
    assert model.nbytes == 0
    model.log_prob(*text(1000, seed=6))
    assert model.nbytes == room[-1]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_position_never_sees_itself_or_what_comes_after(steps):
    output, (h, targets) = heads()["linear"], text()
    before = StreamMbPA(output, 30, neighbours=8, steps=steps).log_prob(h, targets)
    h[40:], targets[41:] = 3.0, 3
    after = StreamMbPA(output, 30, neighbours=8, steps=steps).log_prob(h, targets)
    torch.testing.assert_close(before[:40], after[:40])
    assert abs(float(before[40] - after[40])) > 1e-3


def test_probabilities_of_all_classes_have_the_sum_one():
    output, (h, targets) = heads()["linear"], text(30)
    total = 0.0
    for label in range(CLASSES):
        model = StreamMbPA(output, 10)
        model.log_prob(h[:-1], targets[:-1])
        total += float(model.log_prob(h[-1:], torch.tensor([label])).exp())
    assert total == pytest.approx(1)


def test_without_anything_remembered_it_is_the_output_itself():
    output, (h, targets) = heads()["linear"], text()
    model = StreamMbPA(output, 30)
    plain, adapted = model.score(h, targets)
    torch.testing.assert_close(adapted[0], plain[0])
    assert float((adapted[1:] - plain[1:]).abs().min()) > 0
    model.clear()
    assert len(model) == 0
    torch.testing.assert_close(model.log_prob(h, targets), adapted)


@pytest.mark.parametrize("first", [True, False])
def test_a_stream_goes_on_in_and_out_of_inference_mode(first):
    output, (h, targets) = heads()["linear"], text()
    with torch.inference_mode(first):
        model = StreamMbPA(output, 30)
    parts = []
    for start, end, inference in ((0, 50, first), (50, 51, not first), (51, 70, first), (70, 90, not first)):
        with torch.inference_mode(inference):
            parts.append(model.log_prob(h[start:end].clone(), targets[start:end].clone()))
    torch.testing.assert_close(torch.cat([part.clone() for part in parts]), StreamMbPA(output, 30).log_prob(h, targets))


def test_autocast_and_gradients_change_nothing():
    output, (h, targets) = heads()["linear"].float(), text(dtype=torch.float32)
    expected = StreamMbPA(output, 30).log_prob(h, targets)
    with torch.autocast("cpu", torch.bfloat16):
        scores = StreamMbPA(output, 30).log_prob(h.requires_grad_(), targets)
    assert torch.equal(scores, expected)
    assert not scores.requires_grad


def test_bad_input_is_refused_and_nothing_is_remembered():
    output, (h, targets) = heads()["linear"], text()
    model = StreamMbPA(output, 30)
    bad, far = h.clone(), h.clone()
    bad[70, 1], far[70, 1] = math.nan, 1e200
    for wrong, labels, match in (
        (h[:, :4], targets, r"activations \[T,5\] and targets \[T\], got h \[90, 4\] and targets \[90\]"),
        (h, targets[:-1], r"got h \[90, 5\] and targets \[89\]"),
        (h, targets.float(), "int64, got torch.float32"),
        (h, targets + CLASSES, r"target \d+ at 0 is not one of the 70 classes, 0 to 69"),
        (bad, targets, "finite"),
        (far, targets, "row 70 of h is so long that squared distances would overflow"),
    ):
        with pytest.raises(ValueError, match=match):
            model.log_prob(wrong, labels)
        assert len(model) == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity": 0}, "capacity must be an integer of at least 1, got 0"),
        ({"neighbours": 0}, "neighbours must be an integer of at least 1, got 0"),
        ({"steps": 1.5}, "steps must be an integer of at least 1, got 1.5"),
        ({"lr": -1.0}, "lr must be finite and not negative, got -1.0"),
        ({"epsilon": 0.0}, "epsilon must be positive and finite, got 0.0"),
        ({"output": nn.Sequential(nn.Linear(2, 3))}, r"a torch.nn.Linear or a HebbianSoftmax without hooks, got Seq"),
    ],
)
def test_refuses_settings(options, match):
    with pytest.raises(ValueError, match=match):
        StreamMbPA(**{"output": nn.Linear(2, 3), "capacity": 5} | options)


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [(0, 3, [0, 1, 2]), (5, 3, [5, 6, 7]), (8, 5, [8, 9, 0, 1, 2]), (4, 25, [4, 5, 6, 7, 8, 9, 0, 1, 2, 3])],
)
def test_what_a_call_puts_back_is_no_more_than_it_overwrites(first, count, expected):
    assert [row for run in _cut_at_end(first, count, 10) for row in range(10)[run]] == expected
