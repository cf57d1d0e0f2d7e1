from typing import Any

import pytest
import torch

from fastweights.bench import hebbian_softmax
from fastweights.bench.hebbian_softmax import (
    OURS,
    PLAIN,
    RIVALS,
    SoftmaxCase,
    SoftmaxProblem,
    TrainingStep,
    require_parity,
)
from fastweights.bench.process import can_measure_peak, measure_peak
from fastweights.bench.published import Row
from fastweights.bench.run import explain_lack_of_memory
from fastweights.errors import FastWeightsError
from fastweights.nn import HebbianSoftmax
from fastweights.nn.hebbian_softmax import loss as softmax_loss
from tests.bench.helpers import Bend, make_row

SMALL = SoftmaxCase(40, 6, batch=30)


@pytest.mark.parametrize("largest", [1, 2**24])
def test_the_head_is_green(monkeypatch, largest):
    monkeypatch.setattr(softmax_loss, "LARGEST_LOGITS", largest)
    monkeypatch.setattr(softmax_loss, "ROWS_AT_ONCE", 7)
    require_parity(SMALL)
    monkeypatch.setattr(hebbian_softmax, "SCALE", 8.0)  # means beyond the norm of 10
    require_parity(SMALL)


def test_a_wrong_gradient_is_red(monkeypatch):
    exact = HebbianSoftmax.loss
    monkeypatch.setattr(HebbianSoftmax, "loss", lambda self, h, target: exact(self, Bend.apply(h), target))
    with pytest.raises(FastWeightsError, match="the gradient of h at"):
        require_parity(SMALL)

    def wrong(self, h, target):
        off = (self.weight - self.weight.detach()).sum()
        return exact(self, h, target) + 1e-3 * off

    monkeypatch.setattr(HebbianSoftmax, "loss", wrong)
    with pytest.raises(FastWeightsError, match="the gradient of the weight at"):
        require_parity(SMALL)


@pytest.mark.parametrize(
    ("weights", "counts", "message"),
    [
        ("present", None, "the smoothed weights at V=40, d=6 differ from algorithm 1"),
        ("absent", None, "of classes outside the batch changed"),
        (None, "present", "a class was counted wrongly"),
    ],
)
def test_wrong_smoothing_is_red(monkeypatch, weights, counts, message):
    present = torch.zeros(SMALL.classes, dtype=torch.bool).index_fill_(0, hebbian_softmax.draw_labels(SMALL)[0], True)
    rows = {"present": present, "absent": ~present, None: torch.zeros_like(present)}
    exact = HebbianSoftmax.memorize

    @torch.no_grad()
    def wrong(self):
        exact(self)
        self.weight[rows[weights]] *= 1.001
        self.counts[rows[counts]] += 1

    monkeypatch.setattr(HebbianSoftmax, "memorize", wrong)
    with pytest.raises(FastWeightsError, match=message):
        require_parity(SMALL)


def test_steps_train_and_smooth():
    """Past the limit a head only counts, and ends where the plain softmax does."""
    problem = SoftmaxProblem(SoftmaxCase(40, 6, batch=12))
    steps: dict[str, Any] = {rival: TrainingStep(problem, rival) for rival in RIVALS}
    for step in steps.values():
        for _ in range(hebbian_softmax.BATCHES):
            step()
    ours, plain, past = (step.module.weight.detach() for step in steps.values())
    torch.testing.assert_close(past, plain)
    assert not torch.allclose(ours, plain, atol=0.1)
    assert not torch.equal(plain, problem.weight)
    assert int(steps[OURS].module.counts.sum()) == hebbian_softmax.BATCHES * 12
    assert int(steps[hebbian_softmax.PAST_LIMIT].module.counts.sum()) == hebbian_softmax.BATCHES * 12 + 40


def test_labels_have_the_frequencies_of_zipf():
    case = SoftmaxCase(20, 2, batch=5000)
    counts = SoftmaxProblem(case).labels.flatten().bincount(minlength=20)
    assert float(counts[0] / counts[9]) == pytest.approx(10, rel=0.2)
    assert counts.min() > 0
    assert case.present == len(SoftmaxProblem(case).labels[0].unique())


def test_what_half_of_the_memory_cannot_hold_is_not_even_compared(monkeypatch):
    case = SoftmaxCase(1000, 10, batch=100)
    assert hebbian_softmax.count_kept_bytes(case, OURS) == 4 * (5 * 1000 * 10 + 3 * 100 * 1000)
    monkeypatch.setattr("fastweights.bench.run.machine_memory", lambda: 2**21)
    monkeypatch.setattr(hebbian_softmax, "SoftmaxProblem", lambda case: pytest.fail("made"))
    assert explain_lack_of_memory(hebbian_softmax.count_kept_bytes(SoftmaxCase(9, 6), OURS)) is None
    assert (
        explain_lack_of_memory(hebbian_softmax.count_kept_bytes(case, OURS))
        == "needs about 0 GiB, more than half of the machine's 0"
    )
    require_parity(case)


@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell its peak of memory")
@pytest.mark.slow
def test_the_head_keeps_little_more_than_a_plain_softmax():
    case = SoftmaxCase(4000, 64, batch=512)
    ours, other = (measure_peak(case, rival, 1) for rival in hebbian_softmax.MEMORY_RIVALS)
    assert isinstance(ours, int)
    assert isinstance(other, int)
    logits = 4 * case.batch * case.classes
    assert 2 * logits <= other <= 5 * logits
    assert ours <= other + case.added_bytes(present=512) + 4 * 2**20  # to the precision of the measurement


def row(rival: str, value: float | None, **more: Any) -> Row:
    sizes = {"batch": 1024, "classes": 1000, "hidden_size": 256, "present": 100}
    return make_row(hebbian_softmax.MEMORY_COLUMNS, rival, value, **sizes | more)


def test_steps_are_a_table():
    rows = [row(OURS, 9, commit="old")]
    rows += [row(name, value, threads=2) for name, value in zip(RIVALS, (3, 2, 1), strict=True)]
    rows += [row(name, value) for name, value in zip(RIVALS, (10.5, 10, 10.1), strict=True)]
    rows += [row(name, None, classes=267_735, skipped="too large") for name in RIVALS]
    text = hebbian_softmax.times_table(rows)
    assert "1024 activations in float32; Abacus, PyTorch 2.13.0, commit abc, 2026-01-02." in text
    assert text.splitlines()[4:7] == [
        "| 1 | 1000 | 256 | 10.50 | 10.00 | 1.05 | 10.10 | 1.01 |",
        "| 1 | 267735 | 256 | - | - | - | - | - |",
        "| 2 | 1000 | 256 | 3.00 | 2.00 | 1.50 | 1.00 | 0.50 |",
    ]
    assert "Not measured: fastweights at V=267735, d=256: too large; torch.nn.Linear at" in text


def test_memory_is_a_table_with_what_may_be_added():
    rows = [row(OURS, 21), row(PLAIN, 20), row(OURS, None, classes=33_278, skipped="too large")]
    lines = hebbian_softmax.peaks_table(rows).splitlines()
    added = (8 * 1000 + 4 * (1024 + 100) * 256) / 2**20
    assert added == pytest.approx(1.1, abs=0.01)
    assert lines[4:6] == [
        "| 1000 | 256 | 21.0 | 20.0 | 1.1 | 21.1 |",
        "| 33278 | 256 | - | - | 1.4 | - |",
    ]
    assert lines[-1] == "Not measured: fastweights at V=33278, d=256: too large."
