"""Exact search against a loop in Python, where rounding and ties would show."""

from typing import Any

import numpy as np
import pytest
import torch

from fastweights import memory
from fastweights.memory.store import search as _search
from fastweights.ops import products
from tests.memory.store.model import brute_force


def filled(keys, capacity=None, **options):
    store = memory.EpisodicMemory(capacity or len(keys), keys.shape[1], **options)
    store.write(keys, torch.arange(len(keys)))
    return store


def assert_exact(store, queries, neighbours, **options):
    found = store.search(queries, neighbours, **options)
    keys = store.keys.double().numpy()
    indices, distances = brute_force(keys, queries.to(store.dtype).double().numpy(), neighbours)
    assert found.indices.tolist() == indices.tolist()
    torch.testing.assert_close(found.distances.double(), torch.from_numpy(distances), rtol=1e-6, atol=0)
    assert torch.equal(found.keys, store.keys[found.indices])
    assert torch.equal(found.values, store.values[found.indices])
    return found


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a few hundred keys fill many."""
    monkeypatch.setattr(_search, "SCORES", 2**8)
    monkeypatch.setattr(_search, "PAIRS", 2**6)
    monkeypatch.setattr(_search, "QUERIES", 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("entries", "queries", "neighbours"), [(1, 1, 1), (40, 3, 50), (700, 9, 5), (700, 1, 64)])
def test_the_nearest_are_those_of_a_loop(dtype, entries, queries, neighbours, small_blocks):
    torch.manual_seed(0)
    store = filled(torch.randn(entries, 20), dtype=dtype)
    found = assert_exact(store, torch.randn(queries, 20), neighbours)
    count = min(entries, neighbours)
    assert found.indices.shape == found.distances.shape == found.weights.shape == (queries, count)
    assert found.keys.shape == (queries, count, 20)
    assert found.keys.dtype == dtype
    assert found.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_large_memory_is_searched_exactly():
    torch.manual_seed(0)
    store = filled(torch.randn(30_000, 16))
    queries = torch.randn(300, 16)
    found = store.search(queries, 10)
    true = torch.cdist(queries.double(), store.keys.double()).topk(10, largest=False)
    assert torch.equal(found.indices, true.indices)
    torch.testing.assert_close(found.distances.double(), true.values.square(), rtol=1e-5, atol=0)


def test_where_every_key_is_nearer_than_the_one_before(small_blocks):
    keys = torch.linspace(30, 1, 900)[:, None] * torch.ones(1, 4)
    assert_exact(filled(keys), torch.zeros(5, 4), 7)
    assert_exact(filled(keys.flip(0)), torch.zeros(5, 4), 7)


def test_equal_distances_are_in_the_order_of_writing(small_blocks):
    keys = torch.randint(0, 2, (600, 3), generator=torch.Generator().manual_seed(1)).float()
    assert_exact(filled(keys), torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.5, 0.5]]), 40)
    assert filled(torch.zeros(300, 3)).search(torch.zeros(1, 3), 5).indices.tolist() == [[0, 1, 2, 3, 4]]


def test_an_exact_match_far_from_the_origin_has_distance_zero(small_blocks):
    torch.manual_seed(0)
    keys = 1000 + 0.01 * torch.randn(500, 30)  # |k|^2 of 3e7 against distances of 0.01: scores are all rounding
    found = assert_exact(filled(keys), keys[[3, 400]], 6)
    assert found.distances[:, 0].tolist() == [0, 0]
    assert found.weights[:, 0].min() > 0.4


def test_the_nearest_is_found_where_the_errors_of_a_long_sum_add_up():
    """Each of 511 products is a little less than half of what the sum so far can tell, and all are lost."""
    eps = torch.finfo(torch.float32).eps
    query = torch.full((512,), (0.49 * eps) ** 0.5)
    query[0] = 1
    lost = 511 * 0.49 * eps
    others = torch.zeros(30, 512)  # in the direction of the first feature: their products are right
    others[:, 0] = 1 + torch.sqrt(torch.arange(30) * 6 * eps)
    nearest = query.clone()
    nearest[0] += (lost - 40 * eps) ** 0.5
    queries = query.repeat(8, 1)  # a single one is multiplied in another order, which loses less
    found = assert_exact(filled(torch.cat([others, nearest[None]])), queries, 2)
    assert found.indices.tolist() == [[30, 0]] * 8


def test_one_long_key_does_not_spoil_the_others(small_blocks):
    torch.manual_seed(0)
    keys = torch.randn(500, 8)
    keys[100] *= 1e15
    assert_exact(filled(keys), torch.randn(4, 8), 6)


def test_the_order_of_a_wrapped_and_torn_memory_is_that_of_writing(small_blocks):
    torch.manual_seed(0)
    store = memory.EpisodicMemory(500, 4)
    for first in range(0, 1200, 60):
        store.write(torch.randint(0, 3, (60, 4)).float(), torch.arange(first, first + 60))
    store.remove(torch.arange(0, 500, 3))
    store.write(torch.randint(0, 3, (50, 4)).float(), torch.arange(50))
    assert_exact(store, torch.rand(6, 4) * 3, 30)


def test_the_weights_are_the_kernel_of_the_paper():
    store = filled(torch.tensor([[0.0], [1.0], [3.0]]))
    found = store.search(torch.tensor([[0.0]]), 3)
    kernel = np.array([1 / (1e-3 + distance) for distance in (0.0, 1.0, 9.0)])
    np.testing.assert_allclose(found.weights[0].numpy(), kernel / kernel.sum(), rtol=1e-6)
    kernel = np.array([1 / (0.5 + distance) for distance in (0.0, 1.0, 9.0)])
    other = store.search(torch.tensor([[0.0]]), 3, epsilon=0.5)
    np.testing.assert_allclose(other.weights[0].numpy(), kernel / kernel.sum(), rtol=1e-6)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
def test_the_result_does_not_depend_on_the_precision_of_matrix_products(precision):
    torch.manual_seed(0)
    store, queries = filled(torch.randn(2000, 32) + 10), torch.randn(20, 32) + 10
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_exact(store, queries, 9)
    finally:
        products.fp32_precision = before


def test_no_block_is_larger_than_the_bound(monkeypatch):
    monkeypatch.setattr(_search, "SCORES", 2**12)
    seen = []
    product = products.multiply

    def counted(*given):
        scores = product(*given)
        seen.append(scores.numel())
        return scores

    monkeypatch.setattr(_search, "multiply", counted)
    store = filled(torch.randn(5000, 4))
    for queries in (1, 7, 100, 300):
        store.search(torch.randn(queries, 4), 3)
    assert seen
    assert max(seen) <= max(2**12, 256 * 32)


def test_no_gradient_flows_and_nothing_is_shared():
    keys, queries = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    store = filled(keys)
    found = store.search(queries, 2)
    assert not any(one.requires_grad for one in found)
    before = store.keys.clone()
    found.keys.zero_()
    with torch.no_grad():
        keys.zero_()
    assert torch.equal(store.keys, before)


@pytest.mark.parametrize(
    ("queries", "neighbours", "epsilon", "said"),
    [
        (torch.zeros(2, 4), 1, 1e-3, r"queries must be \[n,3\].*got \[2, 4\]"),
        (torch.zeros(3), 1, 1e-3, r"got \[3\]"),
        (torch.tensor([[0.0, 0, 0], [0, float("nan"), 0]]), 1, 1e-3, "row 1 of queries has a NaN"),
        (torch.zeros(1, 3), 0, 1e-3, "neighbours must be an integer of at least 1, got 0"),
        (torch.zeros(1, 3), 1.5, 1e-3, "neighbours must be an integer"),
        (torch.zeros(1, 3), 1, 0.0, "epsilon must be positive and finite"),
        (torch.zeros(1, 3), 1, float("nan"), "epsilon must be positive and finite"),
    ],
)
def test_what_cannot_be_searched_is_refused(queries, neighbours, epsilon, said):
    store = filled(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=said):
        store.search(queries, neighbours, epsilon=epsilon)


def test_an_empty_memory_and_no_queries():
    store = memory.EpisodicMemory(4, 3)
    with pytest.raises(ValueError, match="the memory is empty"):
        store.search(torch.zeros(1, 3), 1)
    store.write(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))
    assert store.search(torch.zeros(0, 3), 2).values.shape == (0, 1)
