"""Both caches against the loops over time of their equations, and against one another where they are the same."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastweights.memory import EpisodicMemory, FaissIndex, NeuralCache, UnboundedCache
from fastweights.memory.predictors import caches

CLASSES, FEATURES, LENGTH = 7, 5, 90


def stream(count=LENGTH, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(count, FEATURES, dtype=torch.float64, generator=generator).to(dtype)
    return h, torch.randint(0, CLASSES, (count,), generator=generator)


def unbounded(neighbours=8, bandwidth=None, capacity=1000, dtype=torch.float64):
    store = EpisodicMemory(capacity, FEATURES, dtype=dtype)
    return UnboundedCache(store, CLASSES, neighbours=neighbours, bandwidth=bandwidth)


def neural_loop(h, targets, capacity, theta):
    """Equation 1 of Rae et al. 2018, one position at a time."""
    h, targets, scores = h.numpy(), targets.numpy(), []
    for t in range(len(h)):
        first = 0 if capacity is None else max(0, t - capacity)
        weights = [math.exp(theta * float(h[t] @ h[i])) for i in range(first, t)]
        right = sum(weight for weight, i in zip(weights, range(first, t), strict=True) if targets[i] == targets[t])
        scores.append(1 / CLASSES if not weights else right / sum(weights))
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(scores)))


def unbounded_loop(h, targets, neighbours, bandwidth, capacity):
    h, targets, scores = h.numpy(), targets.numpy(), []
    for t in range(len(h)):
        past = range(max(0, t - capacity), t)
        distances = {i: math.sqrt(((h[t] - h[i]) ** 2).sum()) for i in past}
        near = sorted(past, key=lambda i: distances[i])[:neighbours]
        if not near:
            scores.append(1 / CLASSES)
            continue
        width = bandwidth or distances[near[-1]]
        kernel = {i: math.exp(-((distances[i] / width) ** 2) / 2) for i in near}
        scores.append(sum(kernel[i] for i in near if targets[i] == targets[t]) / sum(kernel.values()))
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(scores)))


@pytest.mark.parametrize("capacity", [1, 2, 9, 40, 300, None])
@pytest.mark.parametrize("theta", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("pairs", [1, 400, 2**22])
def test_the_neural_cache_is_the_loop_over_time(monkeypatch, capacity, theta, pairs):
    monkeypatch.setattr(caches, "_PAIRS", pairs)
    h, targets = stream(120)
    cache = NeuralCache(capacity, CLASSES, theta)
    torch.testing.assert_close(cache.log_prob(h, targets), neural_loop(h, targets, capacity, theta))
    kept = 120 if capacity is None else min(120, capacity)
    assert len(cache) == kept
    assert torch.equal(cache.activations, h[-kept:])
    assert torch.equal(cache.labels, targets[-kept:])


@pytest.mark.parametrize("neighbours", [1, 4, 1024])
@pytest.mark.parametrize("bandwidth", [None, 0.7])
@pytest.mark.parametrize("capacity", [1, 30, 1000])
@pytest.mark.parametrize("most", [1, 7, 64])
def test_the_unbounded_cache_is_the_loop_over_time(monkeypatch, neighbours, bandwidth, capacity, most):
    monkeypatch.setattr(caches, "_MOST_UNBOUNDED", most)
    h, targets = stream()
    cache = unbounded(neighbours, bandwidth, capacity)
    expected = unbounded_loop(h, targets, neighbours, bandwidth, capacity)
    torch.testing.assert_close(cache.log_prob(h, targets), expected)
    assert len(cache.store) == min(LENGTH, capacity)
    assert torch.equal(cache.store.values, targets[-capacity:])


def test_the_unbounded_cache_is_the_growing_neural_one_of_activations_of_one_length():
    h, targets = stream()
    h = h / h.norm(dim=1, keepdim=True)
    growing = NeuralCache(None, CLASSES, theta=4.0).log_prob(h, targets)
    torch.testing.assert_close(unbounded(1024, bandwidth=0.5).log_prob(h, targets), growing)


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_a_fixed_bandwidth_over_training_positions_is_knn_lm(temperature):
    """Equation 2 of Khandelwal et al. 2020, over the positions of a training text and those of the text itself."""
    (keys, words), (h, targets) = stream(300, seed=1), stream(20)
    cache = unbounded(8, bandwidth=math.sqrt(temperature / 2))
    cache.store.write(keys, words)
    scores = []
    for query, target in zip(h.numpy(), targets.tolist(), strict=True):
        distances = ((keys.numpy() - query) ** 2).sum(1)
        near = np.argsort(distances, kind="stable")[:8]
        kernel = np.exp(-distances[near] / temperature)
        p = np.bincount(words.numpy()[near], kernel, minlength=CLASSES) / kernel.sum()
        with np.errstate(divide="ignore"):
            scores.append(np.log(p[target]))
        keys, words = torch.cat([keys, torch.tensor(query)[None]]), torch.cat([words, torch.tensor([target])])
    torch.testing.assert_close(cache.log_prob(h, targets), torch.tensor(np.array(scores)))


CACHES = {
    "3": lambda dtype=torch.float64: NeuralCache(3, CLASSES),
    "40": lambda dtype=torch.float64: NeuralCache(40, CLASSES),
    "all": lambda dtype=torch.float64: NeuralCache(None, CLASSES),
    "unbounded": lambda dtype=torch.float64: unbounded(dtype=dtype),
}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@every_cache
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [50, 1, 39], [0, 89, 0, 1], [50, 0, 1, 39], [LENGTH]])
def test_a_stream_in_pieces_is_the_whole(make, sizes):
    h, targets = stream()
    cache = make()
    parts = [cache.log_prob(*part) for part in zip(h.split(sizes), targets.split(sizes), strict=True)]
    torch.testing.assert_close(torch.cat(parts), make().log_prob(h, targets))


@every_cache
def test_a_position_never_sees_itself_or_what_comes_after(make):
    h, targets = stream()
    before = make().log_prob(h, targets)
    h[40:], targets[41:] = 100.0, 3
    after = make().log_prob(h, targets)
    assert torch.equal(before[:40], after[:40])


@every_cache
@pytest.mark.parametrize("first", [True, False])
def test_a_stream_goes_on_in_and_out_of_inference_mode(make, first):
    h, targets = stream(120)
    with torch.inference_mode(first):
        cache = make()
    parts = []
    for start, end, inference in ((0, 50, first), (50, 51, not first), (51, 100, first), (100, 120, not first)):
        with torch.inference_mode(inference):
            parts.append(cache.log_prob(h[start:end].clone(), targets[start:end].clone()))
    torch.testing.assert_close(torch.cat([part.clone() for part in parts]), make().log_prob(h, targets))


@every_cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(make, dtype):
    h, targets = stream(dtype=dtype)
    plain = make(dtype).log_prob(h, targets)
    with torch.autocast("cpu", torch.bfloat16):
        scores = make(dtype).log_prob(h, targets)
    assert torch.equal(scores, plain)
    assert scores.dtype == torch.float32


@every_cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_scored_in_single(make, dtype):
    h, targets = stream(dtype=dtype)
    scores = make(dtype).log_prob(h, targets)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), make().log_prob(h.double(), targets), rtol=1e-4, atol=1e-5)


@every_cache
def test_bad_input_is_refused_and_nothing_is_remembered(make):
    h, targets = stream()
    cache = make()
    before = cache.log_prob(h, targets)
    bad = h.clone()
    bad[70, 1] = math.nan
    for wrong, labels, match in (
        (h[:, :4], targets, r"activations \[T,5\] and targets \[T\], got h \[90, 4\] and targets \[90\]"),
        (h, targets[:-1], r"got h \[90, 5\] and targets \[89\]"),
        (h, targets.float(), "int64, got torch.float32"),
        (h, targets + 3, r"target \d+ at \d+ is not one of the 7 classes, 0 to 6"),
        (bad, targets, "finite"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.log_prob(wrong, labels)
    other = make()
    assert torch.equal(other.log_prob(h, targets), before)
    assert torch.equal(cache.log_prob(h, targets), other.log_prob(h, targets))


def test_probabilities_of_all_classes_have_the_sum_one():
    h, targets = stream(30)
    total = 0.0
    for label in range(CLASSES):
        cache = NeuralCache(10, CLASSES)
        cache.log_prob(h[:-1], targets[:-1])
        total += float(cache.log_prob(h[-1:], torch.tensor([label])).exp())
    assert total == pytest.approx(1)


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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ((0, 7, 0.3), r"capacity \(None for no limit\) must be an integer of at least 1, got 0"),
        ((True, 7, 0.3), "must be an integer of at least 1, got True"),
        ((10, 0, 0.3), "num_classes must be an integer of at least 1, got 0"),
        ((10, 7, math.inf), "theta must be finite, got inf"),
    ],
)
def test_a_neural_cache_refuses_numbers_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        NeuralCache(*options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_classes": 7, "neighbours": 0}, "neighbours must be an integer of at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be an integer of at least 1, got 0"),
        ({"num_classes": 7, "bandwidth": 0.0}, r"bandwidth \(None to .*\) must be positive and finite, got 0.0"),
    ],
)
def test_an_unbounded_cache_refuses_numbers_out_of_range(options: dict[str, Any], match):
    with pytest.raises(ValueError, match=match):
        UnboundedCache(EpisodicMemory(5, 2), **options)
    with pytest.raises(ValueError, match="values must be class indices, got EpisodicMemory"):
        UnboundedCache(EpisodicMemory(5, 2, value_shape=(3,), value_dtype=torch.float32), 7)


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
    [
        (0.3, 1e20, "scale activations down"),
        (1e-3, 4e18, "scale activations down"),  # `recall` may be asked for products without theta
        (-1e38, 3.0, "scale activations or theta down"),
    ],
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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": torch.float16}, "row 80 of h becomes infinite in the memory's torch.float16"),
        ({"value_dtype": torch.uint8}, "row 80 of values has 300, which does not fit into the memory's torch.uint8"),
        ({}, "row 80 of h is so long that squared distances would overflow torch.float32"),
    ],
)
def test_what_the_memory_cannot_hold_is_refused_before_anything_is_remembered(options, match):
    h, targets = stream()
    cache = UnboundedCache(EpisodicMemory(1000, FEATURES, **options), num_classes=1000)
    h[80], targets[80] = (1.0, 300) if "value_dtype" in options else (1e6 if options else 1e20, 3)
    with pytest.raises(ValueError, match=match):
        cache.log_prob(h, targets)
    assert len(cache.store) == 0


@pytest.mark.parametrize("value_dtype", [torch.uint8, torch.int32])
def test_labels_of_another_dtype(value_dtype):
    h, targets = stream()
    cache = UnboundedCache(EpisodicMemory(1000, FEATURES, dtype=torch.float64, value_dtype=value_dtype), CLASSES)
    torch.testing.assert_close(cache.log_prob(h, targets), unbounded(1024).log_prob(h, targets))


def test_of_what_is_remembered_unscored_the_last_positions_stay_too():
    h, targets = stream(60)
    cache = NeuralCache(10, CLASSES)
    for part in (slice(0, 25), slice(25, 28), slice(28, 50)):
        cache.remember(h[part], targets[part])
        assert len(cache) == 10
        assert torch.equal(cache.activations, h[part.stop - 10 : part.stop])
        assert torch.equal(cache.labels, targets[part.stop - 10 : part.stop])
        assert cache.nbytes == sum(each.nbytes for each in vars(cache).values() if isinstance(each, torch.Tensor))
    scored = NeuralCache(10, CLASSES)
    expected = scored.log_prob(h, targets)[50:]
    torch.testing.assert_close(cache.log_prob(h[50:], targets[50:]), expected)


def test_the_same_activation_again_and_again():
    scores = unbounded(3).log_prob(torch.ones(6, FEATURES), torch.tensor([2, 2, 5, 2, 5, 5])).exp()
    torch.testing.assert_close(scores, torch.tensor([1 / 7, 1, 0, 2 / 3, 1 / 3, 1 / 3]))


def test_through_faiss():
    pytest.importorskip("faiss")
    h, targets = stream(dtype=torch.float32)
    through = UnboundedCache(FaissIndex(EpisodicMemory(1000, FEATURES)), CLASSES, neighbours=8)
    torch.testing.assert_close(through.log_prob(h, targets), unbounded(dtype=torch.float32).log_prob(h, targets))
