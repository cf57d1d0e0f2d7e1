"""The neural cache against the loop over time of its equation."""

import math

import numpy
import pytest
import torch

from fastweights.memory import NeuralCache, neural_cache

CLASSES, FEATURES = 7, 5


def stream(count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator).to(dtype)
    return h, torch.randint(0, CLASSES, (count,), generator=generator)


def loop(h, targets, capacity, theta):
    """Equation 1 of Rae et al. 2018, one position at a time."""
    h, targets, scores = h.numpy(), targets.numpy(), []
    for t in range(len(h)):
        first = 0 if capacity is None else max(0, t - capacity)
        weights = [math.exp(theta * float(h[t] @ h[i])) for i in range(first, t)]
        right = sum(weight for weight, i in zip(weights, range(first, t), strict=True) if targets[i] == targets[t])
        scores.append(1 / CLASSES if not weights else right / sum(weights))
    with numpy.errstate(divide="ignore"):
        return torch.from_numpy(numpy.log(numpy.array(scores)))


@pytest.mark.parametrize("capacity", [1, 2, 9, 40, 300, None])
@pytest.mark.parametrize("theta", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("pairs", [1, 400, 2**22])
def test_is_the_loop_over_time(monkeypatch, capacity, theta, pairs):
    monkeypatch.setattr(neural_cache, "_PAIRS", pairs)
    h, targets = stream(120)
    expected = loop(h, targets, capacity, theta)
    cache = NeuralCache(capacity, CLASSES, theta)
    torch.testing.assert_close(cache.log_prob(h, targets), expected)
    kept = 120 if capacity is None else min(120, capacity)
    assert len(cache) == kept
    assert torch.equal(cache.activations, h[-kept:])
    assert torch.equal(cache.labels, targets[-kept:])


@pytest.mark.parametrize("sizes", [[1] * 120, [50, 1, 69], [0, 119, 0, 1], [120]])
@pytest.mark.parametrize("capacity", [3, 40, None])
def test_a_stream_in_pieces_is_the_whole(sizes, capacity):
    h, targets = stream(120)
    whole = NeuralCache(capacity, CLASSES).log_prob(h, targets)
    cache = NeuralCache(capacity, CLASSES)
    parts = [cache.log_prob(*part) for part in zip(h.split(sizes), targets.split(sizes), strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_a_position_never_sees_itself_or_what_comes_after():
    h, targets = stream(60)
    before = NeuralCache(20, CLASSES).log_prob(h, targets)
    h[40:], targets[41:] = 100.0, 3
    after = NeuralCache(20, CLASSES).log_prob(h, targets)
    assert torch.equal(before[:40], after[:40])


def test_probabilities_of_all_classes_have_the_sum_one():
    h, targets = stream(30)
    total = 0.0
    for label in range(CLASSES):
        cache = NeuralCache(10, CLASSES)
        cache.log_prob(h[:-1], targets[:-1])
        total += float(cache.log_prob(h[-1:], torch.tensor([label])).exp())
    assert total == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_scored_in_single(dtype):
    h, targets = stream(80, dtype=dtype)
    scores = NeuralCache(30, CLASSES).log_prob(h, targets)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), loop(h.double(), targets, 30, 0.3), rtol=1e-5, atol=1e-5)


def test_large_activations_do_not_overflow():
    h, targets = stream(50)
    scores = NeuralCache(20, CLASSES).log_prob(1000 * h, targets)
    assert not torch.isnan(scores).any()
    assert (scores <= 1e-9).all()


def test_gradients_are_not_followed_and_what_is_remembered_is_a_copy():
    h, targets = stream(20)
    cache = NeuralCache(10, CLASSES)
    scores = cache.log_prob(h.requires_grad_(), targets)
    assert not scores.requires_grad
    with torch.no_grad():
        h.zero_()
    assert cache.activations.abs().sum() > 0
    cache.clear()
    assert len(cache) == 0
    assert float(cache.log_prob(torch.ones(1, 3), torch.tensor([0]))) == pytest.approx(-math.log(CLASSES))


def test_bad_input_is_refused_and_nothing_is_remembered():
    h, targets = stream(20)
    cache = NeuralCache(10, CLASSES)
    cache.log_prob(h, targets)
    kept = cache.activations.clone()
    bad = h.clone()
    bad[3, 1] = math.nan
    for wrong, labels, match in (
        (h[:, :4], targets, r"activations \[T,5\] and targets \[T\], got h \[20, 4\] and targets \[20\]"),
        (h, targets[:-1], r"got h \[20, 5\] and targets \[19\]"),
        (h, targets.float(), "int64, got torch.float32"),
        (h, targets + 3, r"target \d+ at \d+ is not one of the 7 classes, 0 to 6"),
        (bad, targets, "finite"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.log_prob(wrong, labels)
    assert torch.equal(cache.activations, kept)
    for options, match in (
        ((0, 7, 0.3), r"capacity \(None for no limit\) must be an integer of at least 1, got 0"),
        ((True, 7, 0.3), "must be an integer of at least 1, got True"),
        ((10, 0, 0.3), "num_classes must be an integer of at least 1, got 0"),
        ((10, 7, math.inf), "theta must be finite, got inf"),
    ):
        with pytest.raises(ValueError, match=match):
            NeuralCache(*options)


@pytest.mark.parametrize("first", [True, False])
def test_a_stream_goes_on_in_and_out_of_inference_mode(first):
    h, targets = stream(120)
    whole = NeuralCache(40, CLASSES).log_prob(h, targets)
    cache, parts = NeuralCache(40, CLASSES), []
    for start, inference in ((0, first), (50, not first), (51, first), (100, not first)):
        end = {0: 50, 50: 51, 51: 100, 100: 120}[start]
        with torch.inference_mode(inference):
            parts.append(cache.log_prob(h[start:end].clone(), targets[start:end].clone()))
    torch.testing.assert_close(torch.cat([part.clone() for part in parts]), whole)


def test_another_precision_is_refused_and_nothing_of_it_is_remembered():
    h, targets = stream(3)
    for first, other in ((torch.float32, torch.float64), (torch.float64, torch.bfloat16)):
        cache = NeuralCache(None, CLASSES)
        cache.log_prob(h.to(first), targets)
        with pytest.raises(ValueError, match=r"remembers activations in torch.float.., got torch.float..: convert"):
            cache.log_prob(h.to(other), targets)
        assert len(cache) == 3
        assert float(cache.log_prob(h.to(first), targets).exp().max()) > 0
        cache.clear()
        cache.log_prob(h.to(other), targets)


@pytest.mark.parametrize(
    ("theta", "length", "match"),
    [(0.3, 1e20, "scale activations down"), (-1e38, 3.0, "scale activations or theta down")],
)
def test_activations_whose_products_would_overflow_are_refused(theta, length, match):
    h, targets = stream(20, dtype=torch.float32)
    cache = NeuralCache(10, CLASSES, theta)
    h *= 1e-3
    cache.log_prob(h, targets)
    kept = cache.activations.clone()
    h[13] = length
    with pytest.raises(ValueError, match=f"the activation at 13 is so long that .* overflow torch.float32: {match}"):
        cache.log_prob(h, targets)
    assert torch.equal(cache.activations, kept)
    exact = NeuralCache(10, CLASSES, theta).log_prob(h.double(), targets)
    assert not exact.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    h, targets = stream(80, dtype=dtype)
    plain = NeuralCache(30, CLASSES).log_prob(h, targets)
    with torch.autocast("cpu", torch.bfloat16):
        scores = NeuralCache(30, CLASSES).log_prob(h, targets)
    assert torch.equal(scores, plain)
    assert scores.dtype == torch.float32
