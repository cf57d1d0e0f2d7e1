"""Modules are found under the names that they had before they stood in folders."""

import importlib
import pickle

import torch

from fastweights import memory


def test_old_names_of_modules_are_the_modules():
    for name, part in (
        ("episodic", "EpisodicMemory"),
        ("caches", "NeuralCache"),
        ("stream_mbpa", "StreamMbPA"),
        ("adaptive_classifier", "AdaptiveClassifier"),
        ("certificate", "certify"),
    ):
        module = importlib.import_module(f"fastweights.memory.{name}")
        assert module is getattr(memory, name)
        assert getattr(module, part) is getattr(memory, part)


def test_a_pickle_of_before_opens():
    store = memory.EpisodicMemory(capacity=4, key_size=2)
    store.write(torch.eye(2), torch.tensor([5, 6]))
    before = pickle.dumps(store, protocol=0)
    for now, name in ((b"memory.store.episodic", b"memory.episodic"), (b"memory.store.ring", b"memory._store")):
        assert now in before
        before = before.replace(now, name)
    assert b"memory.store." not in before
    assert pickle.loads(before).values.tolist() == [5, 6]
