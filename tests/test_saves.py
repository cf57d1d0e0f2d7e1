"""Saves over an earlier save that are killed at every step: the old or the new is there, whole, and nothing is left."""

import os
import stat
import time

import pytest
import torch

from fastweights import memory, nn
from fastweights.errors import FastWeightsError
from fastweights.files import remove_parts, write_files
from tests.memory.language_models import CLASSES, make_model

STEPS = "replace", "fsync", "unlink", "rmdir", "rename", "mkdir"  # of the disk, in `os`


class Layer:
    """A layer."""

    def make(self, number):
        torch.manual_seed(number)
        return nn.FastWeightsRNN(3, 4 + number)

    def read(self, folder):
        layer = nn.FastWeightsRNN.from_pretrained(folder)
        return layer.hidden_size, [weight.tolist() for weight in layer.parameters()]


class Store:
    """A memory."""

    def make(self, number):
        torch.manual_seed(number)
        store = memory.EpisodicMemory(10, 2)
        store.write(torch.randn(3 + number, 2), torch.arange(3 + number), tag="t")
        return store

    def read(self, folder):
        store = memory.EpisodicMemory.from_pretrained(folder)
        return store.keys.tolist(), store.values.tolist(), store.tags


class Classifier:
    """A classifier: what it has forgotten and what it has learnt are in two files."""

    body = torch.nn.Identity()

    def make(self, number):
        torch.manual_seed(number)
        centers = 5 * torch.eye(5)
        classifier = memory.AdaptiveClassifier(self.body, classes=["a", "b", "c"])
        classifier.fit(centers[:3].repeat(20, 1) + torch.randn(60, 5), ["a", "b", "c"] * 20)
        classifier.add_examples(centers[3 + number] + torch.randn(5, 5), f"new {number}")
        if number:
            classifier.forget("a")
        return classifier

    def read(self, folder):
        classifier = memory.AdaptiveClassifier.from_pretrained(folder, self.body)
        return classifier.classes, classifier.predict(torch.eye(5)).probabilities.tolist()


class LanguageMemory:
    """The memory of a language model: its settings and its positions are in two files."""

    def make(self, number):
        torch.manual_seed(number)
        weights = [0.9, 0.1] if number else [0.5, 0.5]
        lm = memory.AdaptiveLanguageModel(make_model(), cache=memory.NeuralCache(99, CLASSES), weights=weights)
        lm.write(torch.randint(CLASSES, (1, 12 + number)))
        return lm

    def read(self, folder):
        lm = memory.AdaptiveLanguageModel.from_pretrained(make_model(), folder)
        assert lm.weights is not None
        return lm.weights.tolist(), lm.store.keys.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", [False, True], ids=["over an earlier save", "the first save"])
@pytest.mark.parametrize("kind", [Layer(), Store(), Classifier(), LanguageMemory()], ids=lambda kind: kind.__doc__)
def test_a_save_that_is_killed_at_any_step(kind, first, tmp_path):
    torch.set_num_threads(1)  # a forked process must not need the threads of its parent
    old, new = kind.make(0), kind.make(1)
    for number, saved in enumerate((old, new)):
        saved.save_pretrained(tmp_path / str(number))
    whole = [kind.read(tmp_path / str(number)) for number in (0, 1)]
    assert whole[0] != whole[1]
    files = {path.name for path in (tmp_path / "0").iterdir()}
    found = set()
    for step in range(100):
        folder = tmp_path / f"killed at {step}"
        if not first:
            old.save_pretrained(folder)
        finished = die_at(step, STEPS, lambda folder=folder: new.save_pretrained(folder))
        try:
            content = kind.read(folder)
        except FastWeightsError:
            assert first, "neither the old nor the new is there"
            content = None
        assert content in ([None, whole[1]] if first else whole)
        found.add(content == whole[1])
        old.save_pretrained(folder)
        assert kind.read(folder) == whole[0]
        assert {path.name for path in folder.iterdir()} == files
        if finished:
            break
    assert finished
    assert found == {False, True}


def die_at(step, names, change):
    """Make a change in a child that dies before a step of the disk; return whether it did not come to that step."""
    child = os.fork()
    if not child:
        try:
            done = 0

            def dying(call):
                def counted(*arguments, **options):
                    nonlocal done
                    if done == step:
                        os._exit(9)
                    done += 1
                    return call(*arguments, **options)

                return counted

            for name in names:
                setattr(os, name, dying(getattr(os, name)))
            change()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_classifier_that_is_killed_never_holds_more_than_its_capacity(tmp_path):
    torch.set_num_threads(1)
    body, found = torch.nn.Identity(), []
    classifier = memory.AdaptiveClassifier(body, classes=["a", "b"], capacity=12)
    classifier.fit(5 * torch.eye(4)[:2].repeat(20, 1) + torch.randn(40, 4), ["a", "b"] * 20)
    classifier.add_examples(5 * torch.eye(4)[2] + torch.randn(12, 4), "c")
    for step in range(20):
        classifier.save(tmp_path / str(step))

        def add(folder):
            with memory.AdaptiveClassifier.open(folder, body) as writer:
                writer.add_examples(5 * torch.eye(4)[3] + torch.randn(3, 4), "d")

        finished = die_at(step, ("pwrite", "fsync"), lambda folder=tmp_path / str(step): add(folder))
        loaded = memory.AdaptiveClassifier.load(tmp_path / str(step), body)
        found.append((len(loaded), loaded.classes))
        if finished:
            break
    assert set(found) == {(12, ("a", "b", "c")), (12, ("a", "b", "c", "d"))}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [Layer(), Store(), Classifier(), LanguageMemory()], ids=lambda kind: kind.__doc__)
def test_private_files_stay_private(kind, tmp_path):
    kind.make(0).save_pretrained(tmp_path)
    files = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    for path in files:
        path.chmod(0o600)
    kind.make(1).save_pretrained(tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_folded_memory_stays_private(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.memory.store._writer.SMALLEST_LOG", 100)
    with memory.EpisodicMemory.open(tmp_path, 100, 2) as store:
        store.write(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
        files = [tmp_path / "memory.safetensors", tmp_path / "memory.log"]
        for path in files:
            path.chmod(0o640)
        before = files[0].stat().st_ino
        store.write(torch.zeros(50, 2), torch.zeros(50, dtype=torch.long))
        assert files[0].stat().st_ino != before
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_a_file_that_is_new_has_the_permissions_of_any_file(tmp_path):
    write_files({tmp_path / "one": b""})
    (tmp_path / "two").touch()
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "two").stat().st_mode


def test_what_another_process_writes_just_now_is_not_swept_away(tmp_path):
    """A file, and a folder: its own time is that of its last new file, which a writer may long go on writing."""

    def age(path, seconds):
        os.utime(path, (time.time() - seconds, time.time() - seconds))

    def make(name, of_folder, of_files):
        folder = tmp_path / name
        folder.mkdir()
        for file, seconds in of_files.items():
            (folder / file).touch()
            age(folder / file, seconds)
        age(folder, of_folder)

    make(".corpus.1.part", 100, {"a": 100, "b": 5})  # is written
    make(".corpus.2.part", 5, {"a": 100})
    make(".corpus.3.part", 100, {"a": 90, "b": 100})
    make("corpus", 100, {"a": 100})  # no part
    for name, seconds in ((".x.4.part", 5), (".x.5.part", 100), ("x", 100)):
        (tmp_path / name).touch()
        age(tmp_path / name, seconds)
    remove_parts(tmp_path, seconds=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".corpus.1.part",
        ".corpus.2.part",
        ".x.4.part",
        "corpus",
        "x",
    ]
    remove_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "x"]
