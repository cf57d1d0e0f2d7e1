"""The memory as a user meets it: writing, removing, moving, and what is refused."""

import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from fastweights import memory


def rows(*numbers):
    return torch.tensor([[float(number), 0.0] for number in numbers])


def store_of(*numbers, capacity=4, **options):
    store = memory.EpisodicMemory(capacity, 2, **options)
    if numbers:
        store.write(rows(*numbers), torch.tensor(numbers))
    return store


def test_the_oldest_are_overwritten_first():
    store = store_of(0, 1, 2)
    store.write(rows(3, 4, 5), torch.tensor([3, 4, 5]))
    assert len(store) == 4
    assert store.values.tolist() == [2, 3, 4, 5]
    assert store.keys.tolist() == rows(2, 3, 4, 5).tolist()
    assert store.numbers.tolist() == [2, 3, 4, 5]


def test_of_more_than_the_capacity_the_last_stay():
    store = store_of(9, capacity=3)
    store.write(rows(*range(8)), torch.arange(8))
    assert store.values.tolist() == [5, 6, 7]
    store.write(rows(8), torch.tensor([8]))
    assert store.values.tolist() == [6, 7, 8]


def test_values_of_any_shape_and_dtype():
    store = memory.EpisodicMemory(3, 2, value_shape=(2, 3), value_dtype=torch.float32)
    values = torch.randn(2, 2, 3)
    store.write(rows(0, 1), values)
    assert torch.equal(store.search(rows(1), 2).values, values[[1, 0]][None])
    assert store.rename_class(values[1], values[0] + 1) == 1
    assert store.rename_class(values[1], values[0]) == 0
    assert torch.equal(store.values, torch.stack([values[0], values[0] + 1]))
    assert store.remove_class(values[0]) == 1
    assert torch.equal(store.values, values[:1] + 1)


def test_its_bytes_are_those_of_keys_and_values_and_of_the_room_for_more():
    store = memory.EpisodicMemory(5, 3, value_shape=(2,), value_dtype=torch.float64)
    store.write(torch.ones(9, 3), torch.ones(9, 2))
    least = 5 * (3 * 4 + 2 * 8)  # bytes that the entries take
    assert store.nbytes >= least
    assert store.nbytes % (3 * 4 + 2 * 8) == 0


def test_arrays_and_integers_of_other_widths_are_taken():
    store = store_of()
    store.write(np.ones((2, 2), np.float32), np.array([1, 2], np.int32))
    store.write([[0.0, 1.0]], [3])
    store.remove(np.array([0]))
    assert store.values.tolist() == [2, 3]


def test_removal_closes_the_gap():
    store = store_of(0, 1, 2, 3, 4, 5)  # wrapped
    store.remove([1, 1, 3])
    assert store.values.tolist() == [2, 4]
    store.write(rows(6, 7), torch.tensor([6, 7]))
    assert store.values.tolist() == [2, 4, 6, 7]
    store.remove([])
    assert store.remove_class(100) == 0
    assert store.remove_class(6) == 1
    store.clear()
    assert len(store) == 0
    assert store.keys.shape == (0, 2)


@pytest.mark.parametrize(
    ("indices", "said"),
    [([4], "no entry 4: the memory holds 3"), ([-1], "no entry -1"), ([0.0], "integers"), ([True], "integers")],
)
def test_an_index_that_there_is_not_is_refused(indices, said):
    store = store_of(0, 1, 2)
    with pytest.raises(ValueError, match=said):
        store.remove(torch.tensor([0, *indices]) if indices == [4] else torch.tensor(indices))
    assert len(store) == 3


NAN = rows(0, float("nan"))


@pytest.mark.parametrize(
    ("keys", "values", "said"),
    [
        (NAN, torch.arange(2), "row 1 of keys has a NaN; nothing was changed"),
        (rows(0, 1, float("inf")), torch.arange(3), "row 2 of keys is infinite"),
        (rows(1e30), torch.arange(1), "row 0 of keys is so long"),
        (torch.zeros(2, 3), torch.arange(2), r"keys must be \[n,2\], the memory's key_size; got \[2, 3\]"),
        (torch.zeros(2), torch.arange(2), r"keys must be \[n,2\]"),
        (torch.zeros(2, 2, dtype=torch.long), torch.arange(2), "keys must be floating point, got torch.int64"),
        (rows(0, 1), torch.arange(3), r"values must be \[2\], one for each of 2 keys; got \[3\]"),
        (rows(0, 1), torch.zeros(2), "values are torch.float32, the memory holds torch.int64"),
    ],
)
def test_what_cannot_be_written_is_refused_whole(keys, values, said):
    store = store_of(7)
    with pytest.raises(ValueError, match=said):
        store.write(keys, values)
    assert store.values.tolist() == [7]


def test_what_does_not_fit_the_dtypes_is_refused():
    with pytest.raises(ValueError, match=r"row 0 of keys becomes infinite in the memory's torch.float16"):
        store_of(dtype=torch.float16).write(rows(1e6), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"row 1 of values has 300, which does not fit into the memory's torch.uint8"):
        store_of(value_dtype=torch.uint8).write(rows(0, 1, 2), torch.tensor([255, 300, -1]))
    with pytest.raises(ValueError, match="a tag is a string"):
        store_of().write(rows(0), torch.tensor([0]), tag=3)
    with pytest.raises(ValueError, match="is not empty, got ''"):
        store_of().write(rows(0), torch.tensor([0]), tag="")


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), torch.float32, "row 1 of values has nan, which is not finite; nothing was changed"),
        (float("-inf"), torch.float64, "row 1 of values has -inf, which is not finite"),
        (float("inf"), torch.float8_e5m2, "row 1 of values has inf, which is not finite"),
        (1e300, torch.float32, r"row 1 of values has 1e\+300, which becomes infinite in the memory's torch.float32"),
        (1e5, torch.float16, "row 1 of values has 100000.0, which becomes infinite in the memory's torch.float16"),
        (100000, torch.float16, "row 1 of values has 100000, which becomes infinite in the memory's torch.float16"),
    ],
)
def test_values_that_are_not_finite_are_refused(value, dtype, said):
    store = memory.EpisodicMemory(3, 2, value_shape=(2,), value_dtype=dtype)
    given = torch.tensor([[0, 0], [0, value]], dtype=torch.int64 if isinstance(value, int) else torch.float64)
    with pytest.raises(ValueError, match=said):
        store.write(rows(0, 1), given)
    assert len(store) == 0
    store.write(rows(0), given[:1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity": 0, "key_size": 2}, "capacity must be an integer of at least 1, got 0"),
        ({"capacity": 2, "key_size": 2.0}, "key_size must be an integer"),
        ({"capacity": 2, "key_size": 2, "value_shape": (0,)}, "each of value_shape"),
        ({"capacity": 2, "key_size": 2, "dtype": torch.int64}, "dtype must be one of"),
    ],
)
def test_a_memory_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        memory.EpisodicMemory(**options)


def test_a_move_keeps_what_can_be_undone():
    store = store_of(0, 1, 2, 3)
    store.write(rows(4, 5), torch.tensor([4, 5]), tag="t")
    assert store.to(dtype=torch.float64) is store
    assert store.dtype == torch.float64
    assert store.search(rows(4), 1).values.tolist() == [[4]]
    store.undo("t")
    assert store.values.tolist() == [0, 1, 2, 3]
    assert store.keys.dtype == torch.float64


def test_what_an_undo_brings_back_after_a_move_is_found_exactly():
    """Keys that were rounded are not compared by the lengths that they had before."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (100 + 10 * torch.randn(count, 4, generator=generator) for count in (1500, 20))
    store = memory.EpisodicMemory(1000, 4)
    store.write(keys[:1000], torch.arange(1000))
    store.write(keys[1000:], torch.arange(500), tag="t")
    store.to(dtype=torch.bfloat16)
    store.undo("t")
    assert torch.equal(store.keys, keys[:1000].bfloat16())
    distances = (queries.bfloat16().double()[:, None] - store.keys.double()).square().sum(2)
    assert store.search(queries, 3).distances.tolist() == distances.sort(1)[0][:, :3].tolist()


def test_a_move_of_what_an_undo_would_bring_back_overflows_too():
    store = store_of(1000000, 1, 2, 3)
    store.write(rows(4), torch.tensor([4]), tag="t")
    with pytest.raises(ValueError, match=r"a key that an undo would bring back becomes infinite in torch.float16"):
        store.to(dtype=torch.float16)
    assert store.dtype == torch.float32
    store.write(rows(5, 6, 7, 8), torch.tensor([5, 6, 7, 8]))  # now nothing can bring it back
    assert store.to(dtype=torch.float16).dtype == torch.float16


def test_a_move_that_would_overflow_changes_nothing():
    store = store_of(0, 1000000)
    with pytest.raises(ValueError, match=r"key 1 becomes infinite in torch.float16"):
        store.to(dtype=torch.float16)
    assert store.dtype == torch.float32
    assert len(store) == 2


def test_a_memory_says_what_it_is():
    assert repr(store_of(0, 1)) == (
        "EpisodicMemory(2 of 4 entries, key_size=2, torch.float32, values torch.int64, cpu)"
    )


def test_a_memory_made_under_inference_mode_goes_on_outside():
    with torch.inference_mode():
        store = store_of(0, 1, 2, 3)
        store.write(rows(4), torch.tensor([4]), tag="t")
        store.remove([0])
    store.write(rows(5, 6), torch.tensor([5, 6]))
    assert store.search(rows(6), 1).values.tolist() == [[6]]
    store.undo("t")
    assert store.values.tolist() == [2, 3, 5, 6]


def test_torch_and_numpy_are_enough():
    words = """
import sys, torch
from fastweights import memory
store = memory.EpisodicMemory(3, 2)
store.write(torch.zeros(2, 2), torch.arange(2), tag="t")
store.search(torch.zeros(1, 2), 1)
store.undo("t")
print(sorted({"safetensors", "faiss", "matplotlib", "tyro", "PIL", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_faiss_an_index_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"run `pip install '\.\[faiss\]'` in the checkout"):
        memory.FaissIndex(store_of(1))


@pytest.mark.gpu
def test_on_a_gpu_the_result_is_the_same():
    torch.manual_seed(0)
    keys, queries = torch.randn(5000, 16), torch.randn(40, 16)
    store = memory.EpisodicMemory(5000, 16)
    store.write(keys, torch.arange(5000))
    on_cpu = store.search(queries, 20)
    on_gpu = store.to("cuda").search(queries, 20)
    assert torch.equal(on_cpu.indices, on_gpu.indices.cpu())
    torch.testing.assert_close(on_cpu.weights, on_gpu.weights.cpu())


def test_what_is_read_is_a_copy():
    for store in (store_of(0, 1, 2), store_of(0, 1, 2, 3, 4, 5), store_of()):
        before = store.keys.tolist(), store.values.tolist(), store.numbers.tolist()
        store.keys.zero_()
        store.values.fill_(9)
        store.numbers.fill_(9)
        assert (store.keys.tolist(), store.values.tolist(), store.numbers.tolist()) == before


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_is_a_memory_of_its_own(make_copy):
    store = store_of(0, 1, 2)
    other = make_copy(store)
    other.write(rows(3, 4), torch.tensor([3, 4]), tag="t")
    assert (store.values.tolist(), other.values.tolist()) == ([0, 1, 2], [1, 2, 3, 4])
    with store.lock, other.lock:
        other.undo("t")
    assert other.values.tolist() == [0, 1, 2]


def test_nobody_changes_or_searches_a_memory_whose_lock_is_held():
    store = store_of(0, 1, 2)
    seen = []
    threads = [
        threading.Thread(target=lambda: store.write(rows(3), torch.tensor([3]))),
        threading.Thread(target=lambda: seen.append(store.search(rows(1), 4).values.shape[1])),
    ]
    with store.lock:
        for thread in threads:
            thread.start()
        store.remove([0])  # the lock is re-entrant
        assert store.values.tolist() == [1, 2]
        assert not seen
    for thread in threads:
        thread.join()
    assert store.values.tolist() == [1, 2, 3]
    assert seen in ([2], [3])


@pytest.mark.parametrize("capacity", [10**12, 10**17, 10**30])
def test_a_memory_that_is_too_large_says_how_many_bytes_it_needs(capacity):
    with pytest.raises(MemoryError, match=f"{capacity:,} entries needs {capacity * 10_028:,} bytes, 10,028 for each"):
        memory.EpisodicMemory(capacity, 2500, value_shape=(2,), value_dtype=torch.int32)
