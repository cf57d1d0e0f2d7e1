"""The unbounded cache against a loop over time in NumPy, and against the growing cache where they are the same."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastweights.memory import EpisodicMemory, FaissIndex, NeuralCache, UnboundedCache, unbounded_cache

CLASSES, FEATURES, LENGTH = 7, 5, 90


def stream(seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(LENGTH, FEATURES, dtype=torch.float64, generator=generator)
    return h, torch.randint(0, CLASSES, (LENGTH,), generator=generator)


def cache(neighbours, bandwidth=None, capacity=1000, dtype=torch.float64):
    store = EpisodicMemory(capacity, FEATURES, dtype=dtype)
    return UnboundedCache(store, CLASSES, neighbours=neighbours, bandwidth=bandwidth)


def loop(h, targets, neighbours, bandwidth, capacity):
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


@pytest.mark.parametrize("neighbours", [1, 4, 1024])
@pytest.mark.parametrize("bandwidth", [None, 0.7])
@pytest.mark.parametrize("capacity", [1, 30, 1000])
@pytest.mark.parametrize("most", [1, 7, 64])
def test_is_the_loop_over_time(monkeypatch, neighbours, bandwidth, capacity, most):
    monkeypatch.setattr(unbounded_cache, "_MOST", most)
    h, targets = stream()
    found = cache(neighbours, bandwidth, capacity)
    torch.testing.assert_close(found.log_prob(h, targets), loop(h, targets, neighbours, bandwidth, capacity))
    assert len(found.store) == min(LENGTH, capacity)
    assert torch.equal(found.store.values, targets[-capacity:])


def test_is_the_growing_cache_of_activations_of_one_length():
    h, targets = stream()
    h = h / h.norm(dim=1, keepdim=True)
    growing = NeuralCache(None, CLASSES, theta=4.0).log_prob(h, targets)
    torch.testing.assert_close(cache(1024, bandwidth=0.5).log_prob(h, targets), growing)


def test_a_position_never_sees_itself_or_what_comes_after():
    h, targets = stream()
    before = cache(8).log_prob(h, targets)
    h[40:], targets[41:] = 100.0, 3
    after = cache(8).log_prob(h, targets)
    assert torch.equal(before[:40], after[:40])


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [50, 0, 1, 39]])
def test_a_stream_in_pieces_is_the_whole(sizes):
    h, targets = stream()
    pieces = cache(8)
    parts = [pieces.log_prob(*part) for part in zip(h.split(sizes), targets.split(sizes), strict=True)]
    torch.testing.assert_close(torch.cat(parts), cache(8).log_prob(h, targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_low_precision(dtype):
    h, targets = stream()
    h = h.to(dtype)
    scores = cache(8, dtype=dtype).log_prob(h, targets)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), loop(h.double(), targets, 8, None, 1000), rtol=1e-4, atol=1e-5)


def test_the_same_activation_again_and_again():
    found = cache(3)
    scores = found.log_prob(torch.ones(6, FEATURES), torch.tensor([2, 2, 5, 2, 5, 5])).exp()
    torch.testing.assert_close(scores, torch.tensor([1 / 7, 1, 0, 2 / 3, 1 / 3, 1 / 3]))


def test_through_faiss():
    pytest.importorskip("faiss")
    h, targets = stream()
    plain = cache(8, dtype=torch.float32)
    index = FaissIndex(EpisodicMemory(1000, FEATURES))
    through = UnboundedCache(index, CLASSES, neighbours=8)
    torch.testing.assert_close(through.log_prob(h.float(), targets), plain.log_prob(h.float(), targets))


def test_bad_input_is_refused_and_nothing_is_remembered():
    h, targets = stream()
    found = cache(8)
    bad = h.clone()
    bad[70, 1] = math.nan
    for wrong, labels, match in (
        (h[:, :4], targets, r"activations \[T,5\] and targets \[T\], got h \[90, 4\] and targets \[90\]"),
        (h, targets + 3, r"target \d+ at \d+ is not one of the 7 classes, 0 to 6"),
        (bad, targets, "finite"),
    ):
        with pytest.raises(ValueError, match=match):
            found.log_prob(wrong, labels)
    assert len(found.store) == 0
    refused: list[tuple[dict[str, Any], str]] = [
        ({"num_classes": 7, "neighbours": 0}, "neighbours must be an integer of at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be an integer of at least 1, got 0"),
        (
            {"num_classes": 7, "bandwidth": 0.0},
            "bandwidth must be a positive number, or None to .*, got 0.0",
        ),
    ]
    for told, match in refused:
        with pytest.raises(ValueError, match=match):
            UnboundedCache(found.store, **told)
    with pytest.raises(ValueError, match="values must be class indices, got EpisodicMemory"):
        UnboundedCache(EpisodicMemory(5, 2, value_shape=(3,), value_dtype=torch.float32), 7)


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
    found = UnboundedCache(EpisodicMemory(1000, FEATURES, **options), num_classes=1000)
    h[80], targets[80] = (1.0, 300) if "value_dtype" in options else (1e6 if options else 1e20, 3)
    with pytest.raises(ValueError, match=match):
        found.log_prob(h, targets)
    assert len(found.store) == 0


@pytest.mark.parametrize("value_dtype", [torch.uint8, torch.int32])
def test_labels_of_another_dtype(value_dtype):
    h, targets = stream()
    found = UnboundedCache(EpisodicMemory(1000, FEATURES, dtype=torch.float64, value_dtype=value_dtype), CLASSES)
    torch.testing.assert_close(found.log_prob(h, targets), cache(1024).log_prob(h, targets))


@pytest.mark.parametrize("first", [True, False])
def test_a_stream_goes_on_in_and_out_of_inference_mode(first):
    h, targets = stream()
    with torch.inference_mode(first):
        found = cache(8)
        before = found.log_prob(h[:50].clone(), targets[:50].clone())
    with torch.inference_mode(not first):
        after = found.log_prob(h[50:].clone(), targets[50:].clone())
    torch.testing.assert_close(torch.cat([before.clone(), after.clone()]), cache(8).log_prob(h, targets))


def test_autocast_changes_nothing():
    h, targets = stream()
    plain = cache(8, dtype=torch.float32).log_prob(h.float(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cache(8, dtype=torch.float32).log_prob(h.float(), targets), plain)
