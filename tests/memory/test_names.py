"""Modules are found under the names that they had before they stood in folders."""

import importlib
import pickle

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
    before = pickle.dumps(memory.FitReport, protocol=0).replace(b"memory.classifier.fit_report", b"memory.fit_report")
    assert b"fastweights.memory.fit_report" in before
    assert pickle.loads(before) is memory.FitReport
