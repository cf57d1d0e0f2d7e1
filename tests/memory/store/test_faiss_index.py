"""FAISS finds what the exact search finds, or says how much of it."""

import importlib.util

import pytest
import torch

from fastweights import memory

if importlib.util.find_spec("faiss") is None:
    pytest.skip("FAISS is not installed: pip install '.[faiss]'", allow_module_level=True)
# FAISS's own Python wrapper, made by SWIG.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


@pytest.fixture
def store():
    torch.manual_seed(0)
    store = memory.EpisodicMemory(3000, 16)
    store.write(torch.randn(2500, 16), torch.arange(2500))
    return store


def assert_same(index, store, queries, neighbours):
    for one, other in zip(index.search(queries, neighbours), store.search(queries, neighbours), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("queries", "neighbours"), [(1, 1), (40, 10), (3, 4000)])
def test_flat_gives_the_same_results(store, dtype, queries, neighbours):
    store.to(dtype=dtype)
    assert_same(memory.FaissIndex(store), store, torch.randn(queries, 16), neighbours)


def test_flat_gives_the_same_results_where_distances_are_equal_or_all_rounding(store):
    store.write(torch.randint(0, 2, (900, 16)).float(), torch.arange(900))
    store.write(1000 + 0.01 * torch.randn(300, 16), torch.arange(300))
    index = memory.FaissIndex(store)
    assert_same(index, store, torch.randint(0, 2, (5, 16)).float(), 30)
    assert_same(index, store, torch.full((2, 16), 1000.0), 30)


@pytest.mark.parametrize("factory", ["Flat", "IVF8,Flat", "HNSW16", "PCAR16,IVF8,Flat", "IVF8,Flat,RFlat"])
def test_an_index_follows_its_memory(store, factory):
    index = memory.FaissIndex(store, factory, probes=8)  # of 8 cells: all
    queries = torch.randn(20, 16)
    assert index.recall(queries, 5) > 0.9
    store.write(torch.randn(1000, 16), torch.arange(1000), tag="t")
    store.remove(torch.arange(0, 3000, 7))
    store.remove_class(3)
    assert index.recall(queries, 5) > 0.9
    store.undo("t")
    found = index.search(queries, 5)
    assert bool((found.indices < len(store)).all())
    assert index.recall(queries, 5) > 0.9
    if factory in ("Flat", "IVF8,Flat"):
        assert_same(index, store, queries, 5)
    store.clear()
    with pytest.raises(ValueError, match="the memory is empty"):
        index.search(queries, 1)
    store.write(torch.ones(200, 16), torch.arange(200))
    assert index.search(torch.ones(1, 16), 3).distances.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("factory", ["IVF32,Flat", "PCA12,IVF32,Flat", "OPQ4_16,IVF32,Flat", "IVF32,Flat,RFlat"])
def test_recall_grows_with_the_cells_that_are_looked_through(store, factory):
    queries = torch.randn(50, 16)
    few, many = (memory.FaissIndex(store, factory, probes=probes) for probes in (1, 16))
    assert few.recall(queries, 10) < many.recall(queries, 10) <= 1


def test_an_index_follows_a_reader_into_another_memory(store, tmp_path):
    store.save(tmp_path)
    reader = memory.EpisodicMemory.load(tmp_path)
    index = memory.FaissIndex(reader)
    assert_same(index, store, torch.randn(5, 16), 3)
    other = memory.EpisodicMemory(3000, 16)
    other.write(torch.randn(2500, 16), torch.arange(2500))  # the same numbers of other entries
    other.save(tmp_path)
    assert reader.refresh()
    assert_same(index, other, torch.randn(5, 16), 3)


def test_a_query_whose_cells_hold_too_little_is_searched_for_exactly(store):
    index = memory.FaissIndex(store, "IVF64,Flat", probes=1)
    assert_same(index, store, torch.randn(3, 16), 1500)


def test_what_faiss_cannot_do_is_said(store):
    with pytest.raises(ValueError, match="FAISS cannot make 'Nonsense'"):
        memory.FaissIndex(store, "Nonsense")
    with pytest.raises(ValueError, match="probes must be an integer"):
        memory.FaissIndex(store, probes=0)
    index = memory.FaissIndex(store, "IVF256,Flat")
    store.remove(torch.arange(2400))
    with pytest.raises(ValueError, match="100 keys are too few to train 'IVF256,Flat'"):
        index.search(torch.zeros(1, 16), 1)
