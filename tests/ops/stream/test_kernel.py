"""The step on a stream's neighbours: the definition against a NumPy loop over positions, the kernels against it."""

from typing import Any

import numpy as np
import pytest
import torch

from fastweights.ops.stream import Search, StreamRows, cpu, part_classes, reference
from tests.ops.parity import needs_kernel

CLASSES, FEATURES, ROWS, FIRST, COUNT = 70, 5, 60, 20, 13  # more classes than a part has; positions 20 to 32 of a round
EPSILON = 1e-3


def make_rows(dtype, stored=None, seed=0):
    """Return a ring that is full, the positions that are asked for too, and the logits at every row."""
    torch.manual_seed(seed)
    keys = torch.randn(ROWS, FEATURES, dtype=torch.float64).to(dtype)
    keys[FIRST + 4] = keys[FIRST + 2] = keys[FIRST - 3] = keys[5]  # some are equally far, and at no distance
    labels, logits = torch.randint(CLASSES, (ROWS,)), 3 * torch.randn(ROWS, CLASSES, dtype=torch.float64).to(dtype)
    width = part_classes(stored or dtype)
    predictions = torch.zeros(-(-CLASSES // width), ROWS, width, dtype=stored or dtype)
    reference.predict(logits.clone(), predictions, 0)
    return StreamRows(keys, keys.square().sum(1), labels, predictions), logits


def find_options(**changes):
    options: dict[str, Any] = {"first": FIRST, "seen": 3 * ROWS + FIRST, "capacity": 40, "neighbours": 8}
    return options | {"bias": True, "rate": 0.7, "relative": False, "epsilon": EPSILON} | changes


def step_in_numpy(rows, logits, options):
    """Return log p of each position's label after one step of gradient descent on its own neighbours, less before."""
    keys, labels = rows.keys.double().numpy(), rows.labels.numpy()
    p = np.exp(logits.double().numpy() - logits.double().logsumexp(1, keepdim=True).numpy())
    gains = []
    for q in range(COUNT):
        own = FIRST + q
        visible = min(options["seen"] + q, options["capacity"])
        entries = [(own - age) % ROWS for age in range(visible, 0, -1)]  # the oldest first, as sorted() leaves equals
        squares = {r: ((keys[r] - keys[own]) ** 2).sum() for r in entries}
        near = sorted(entries, key=lambda r: squares[r])[: options["neighbours"]]
        weights = np.array([1 / (EPSILON + squares[r]) for r in near])
        weights /= weights.sum()
        bias = float(options["bias"])
        rate = options["rate"]
        if options["relative"] and near:
            rate /= sum(w * (keys[r] @ keys[r] + bias) for w, r in zip(weights, near, strict=True))
        change = np.zeros(CLASSES)
        for weight, r in zip(weights, near, strict=True):
            change -= rate * weight * (keys[r] @ keys[own] + bias) * (p[r] - np.eye(CLASSES)[labels[r]])
        gains.append(change[labels[own]] - np.log((p[own] * np.exp(change)).sum()))
    return torch.tensor(np.array(gains))


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no bias": {"bias": False},
    "in units of the keys": {"relative": True, "rate": 8.0},
    "all that there are": {"neighbours": 40},
    "one": {"neighbours": 1, "capacity": 1},
    "across the end of the ring": {"capacity": 45, "neighbours": 20},
    "little was seen": {"seen": 3, "neighbours": 8},
    "nothing was seen": {"seen": 0, "neighbours": 3, "relative": True},
}
every_case = pytest.mark.parametrize("case", list(CASES))


def run(how, rows, options, given=None):
    products = rows.keys[FIRST : FIRST + COUNT] @ rows.keys.T
    found = how.find(products, rows, Search(**options))
    return found, how.adapt(found if given is None else given, rows, first=FIRST, classes=CLASSES)


@every_case
def test_the_definition_is_the_loop(case):
    options = find_options(**CASES[case])
    rows, logits = make_rows(torch.float64)
    torch.testing.assert_close(run(reference, rows, options)[1], step_in_numpy(rows, logits, options))


@needs_kernel
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernels_are_the_definition(case, dtype):
    options = find_options(**CASES[case])
    rows, _ = make_rows(dtype)
    (found, gains), (expected, expected_gains) = run(cpu, rows, options), run(reference, rows, options)
    tolerance: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    )
    torch.testing.assert_close(gains, expected_gains, **tolerance)
    assert found.counts.tolist() == expected.counts.tolist()
    for q, count in enumerate(found.counts.tolist()):  # in any order
        ours, theirs = (
            dict(zip(each.offsets[q, :count].tolist(), each.pulls[q, :count], strict=True))
            for each in (found, expected)
        )
        assert set(ours) == set(theirs)
        for row in ours:
            torch.testing.assert_close(ours[row], theirs[row], **tolerance)


@needs_kernel
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_what_is_kept_in_16_bits_is_the_same(scale):
    logits = scale * torch.randn(9, CLASSES, generator=torch.Generator().manual_seed(0))
    kept = [torch.zeros(3, ROWS, 32, dtype=torch.uint16) for _ in range(2)]
    for how, each in zip((cpu, reference), kept, strict=True):
        normalisers = how.predict(logits.clone(), each, 4)
        torch.testing.assert_close(normalisers, logits.logsumexp(1))
    read = torch.zeros(2, 9, CLASSES)
    for each, p in zip(kept, read, strict=True):
        reference.subtract(p, each, torch.arange(4, 13).unsqueeze(1), torch.full((9, 1), -1.0))
    torch.testing.assert_close(read[0], read[1], rtol=2**-8, atol=1e-30)
    torch.testing.assert_close(read[1], logits.softmax(1), rtol=2**-8, atol=1e-30)


@needs_kernel
@every_case
def test_predictions_in_16_bits_adapt_alike(case):
    options = find_options(**CASES[case])
    rows, logits = make_rows(torch.float32, torch.uint16)
    gains, expected = run(cpu, rows, options)[1], run(reference, rows, options)[1]
    torch.testing.assert_close(gains, expected, rtol=1e-4, atol=1e-4)
    labels = rows.labels[FIRST : FIRST + COUNT, None]
    before = logits[FIRST : FIRST + COUNT].log_softmax(1).gather(1, labels)[:, 0]
    exact = before + step_in_numpy(rows, logits, options)
    torch.testing.assert_close(gains.double(), exact, rtol=0, atol=3e-2)


@needs_kernel
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.uint16])
@pytest.mark.parametrize("lines", [1, 4])
def test_rows_are_subtracted_and_those_without_a_pull_are_not_read(stored, lines):
    torch.manual_seed(0)
    dtype = torch.float64 if stored == torch.float64 else torch.float32
    width = lines * part_classes(stored)
    parts = -(-CLASSES // width)
    predictions = torch.rand(parts, ROWS, width, dtype=dtype)
    predictions[:, 7] = torch.nan
    if stored == torch.uint16:
        predictions = (predictions.view(torch.int32) >> 16).to(torch.uint16)
    nearest, pulls = torch.randint(8, ROWS, (6, 3)), torch.randn(6, 3, dtype=dtype)
    nearest[2, 1], pulls[2, 1] = 7, 0
    pulls[4] = 0
    outputs = [torch.ones(6, CLASSES, dtype=dtype) for _ in range(2)]
    for how, each in zip((cpu, reference), outputs, strict=True):
        how.subtract(each, predictions, nearest, pulls)
    torch.testing.assert_close(*outputs)
    assert bool((outputs[1][4] == 1).all())
    assert bool(outputs[1].isfinite().all())
