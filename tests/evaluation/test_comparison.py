"""The comparison of two classifiers: closed forms, a loop in NumPy, and what is refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fastweights.evaluation import calibration_error, compare


def examples(count=400, classes=7):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, classes, generator=generator)
    targets = torch.where(
        torch.rand(count, generator=generator) < 0.6, logits.argmax(1), torch.randint(0, classes, (count,))
    )
    return logits, targets


def test_the_calibration_error_is_that_of_a_loop():
    logits, targets = examples()
    probabilities = torch.softmax(logits.double(), 1).numpy()
    confidence, answers = probabilities.max(1), probabilities.argmax(1)
    found = 0.0
    for index in range(15):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        if inside.any():
            accuracy = (answers[inside] == targets.numpy()[inside]).mean()
            found += inside.mean() * abs(accuracy - confidence[inside].mean())
    assert calibration_error(logits, targets) == pytest.approx(100 * found, rel=1e-9)


def test_a_classifier_that_is_right_as_often_as_it_says_is_calibrated():
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64).expand(8, 2)  # three to one
    assert calibration_error(logits, torch.tensor([0, 0, 0, 1] * 2)) == pytest.approx(0, abs=1e-9)
    assert calibration_error(logits, torch.ones(8, dtype=torch.long)) == pytest.approx(75)


def test_scores_in_closed_form():
    """Logits of zero: every class has the same probability, and the first is answered."""
    targets = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    found = compare(lambda x: torch.zeros(len(x), 3), lambda x: torch.zeros(len(x), 4), (targets, targets), [3])
    for measured, classes in ((found.before, 3), (found.after, 4)):
        assert measured.old.examples == 6
        assert measured.old.accuracy == pytest.approx(100 / 3)
        assert measured.old.cross_entropy == pytest.approx(math.log(classes))
        assert measured.old.calibration_error == pytest.approx(100 * abs(1 / 3 - 1 / classes), abs=1e-9)
        assert (measured.new.examples, measured.new.accuracy) == (2, 0)
        assert measured.all.accuracy == pytest.approx(25)
        assert measured.milliseconds > 0
        assert measured.milliseconds_alone > 0
    assert found.before.new.cross_entropy == math.inf  # it does not know the class
    assert found.after.new.cross_entropy == pytest.approx(math.log(4))


def test_times_are_the_milliseconds_of_one_query(monkeypatch):
    """By a clock that stands still but while a classifier computes, a time for each call and one for each input."""
    now = 0.0
    monkeypatch.setattr("fastweights.evaluation.comparison.time", SimpleNamespace(perf_counter=lambda: now))

    def taking(call, query):
        def classify(x):
            nonlocal now
            now += (call + query * len(x)) / 1000
            return torch.zeros(len(x), 2)

        return classify

    targets = torch.arange(10) % 2
    found = compare(taking(8.0, 3.0), taking(4.0, 0.5), (targets, targets), [1], batch_size=4)  # the last batch is of 2
    assert [found.before.milliseconds, found.after.milliseconds] == pytest.approx([8 / 4 + 3, 4 / 4 + 0.5])
    assert [found.before.milliseconds_alone, found.after.milliseconds_alone] == pytest.approx([8 + 3, 4 + 0.5])


def test_batches_do_not_matter_and_modules_are_left_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5))
    split = examples(101)
    whole = compare(model, model.eval(), split, [0, 6], batch_size=1000)
    model.train()
    model[0].eval()  # frozen by its owner
    pieces = compare(model, model, split, [0, 6], batch_size=10)
    assert [part.training for part in model.modules()] == [True, False, True]
    assert (whole.batch_size, pieces.batch_size) == (101, 10)
    for measured in (*pieces[:2], whole.after):
        assert np.allclose(measured.old, whole.before.old, rtol=1e-5)
        assert np.allclose(measured.new, whole.before.new, rtol=1e-5)


def test_modules_are_left_as_they_were_when_it_raises():
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity()).train()
    model[2].eval()
    with pytest.raises(ValueError, match="after gives logits that are NaN or infinite"):
        compare(model, lambda x: x * math.nan, examples(), [0])
    assert [part.training for part in model.modules()] == [True, True, True, False]


def test_the_table_has_every_number_once():
    lines = str(compare(nn.Identity(), nn.Identity(), examples(), [5, 6], batch_size=20)).splitlines()
    assert len(lines) == 1 + 3 * 3 + 2
    assert len({len(line) for line in lines}) == 1
    assert [line[:22].strip() for line in lines[1:5]] == ["accuracy, %", "", "", "cross entropy, nats"]
    assert "20 at once" in lines[-2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": (torch.eye(3), torch.tensor([0, 1]))}, r"for each of 3 inputs, got \[2\]"),
        ({"split": (torch.eye(3), torch.eye(3))}, "class index for each of 3 inputs"),
        ({"split": (torch.eye(3), torch.tensor([0, 2, 5]))}, "classes 0 to 2, and the targets are 0 to 5"),
        ({"new_classes": [7]}, r"no example of new classes; new_classes are \[7\]"),
        ({"new_classes": [0, 1, 2]}, "no example of old classes"),
        ({"after": lambda x: x * math.nan}, "after gives logits that are NaN or infinite"),
        ({"before": lambda x: x.sum(1)}, r"before must give logits \[3,V\] of inputs, got \[3\]"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 1.5}, r"batch_size must be an integer of at least 1, got 1\.5"),
        ({"batch_size": "10"}, "batch_size must be an integer of at least 1, got '10'"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    given = {"before": nn.Identity(), "after": nn.Identity(), "split": (torch.eye(3), torch.tensor([0, 1, 2]))}
    with pytest.raises(ValueError, match=message):
        compare(**({**given, "new_classes": [2]} | change))
