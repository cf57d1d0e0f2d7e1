"""A saved classifier: what comes back from its folder, or from a single file, and what is refused unbuilt."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastweights
from fastweights import few_shot
from fastweights.errors import HubError, WeightsError
from fastweights.few_shot import FewShotClassifier
from tests.few_shot.conftest import network

SINGLE_FILE = Path(__file__).with_name("single_file.safetensors")  # written by FewShotClassifier.save of commit 7f9727b


@pytest.fixture
def folder(small, tmp_path):
    small.save(tmp_path / "mine")
    return tmp_path / "mine"


ENCODERS: dict[str, Callable[[], torch.nn.Module]] = {
    "convolutions": lambda: few_shot.ConvEncoder(
        1, 8, size=28, blocks=3, standardise=True, interpolated=True, mirrored=True
    ),
    "residual": lambda: few_shot.ResidualEncoder(1, size=28, widths=(8, 12), features=128),
}
HEADS: dict[str, Callable[[], torch.nn.Module]] = {
    "hebbian": lambda: few_shot.FastWeightsHead(128, 4, hidden_size=24),
    "fast alone": lambda: few_shot.FastWeightsHead(128, 4, hidden="fast", hidden_size=24),
    "softmax": lambda: few_shot.FastWeightsHead(128, 4, hidden="slow", softmax="both", hidden_size=24),
    "both": lambda: few_shot.FastWeightsHead(128, 4, hidden="both", softmax="fast", hidden_size=24),
    "gradient": lambda: few_shot.FastWeightsHead(128, 4, rule="gradient", softmax="both", hidden_size=24),
    "matching": lambda: few_shot.MatchingHead(4, scale=7.5),
    "prototypes": lambda: few_shot.PrototypeHead(4),
}


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("head", HEADS)
def test_what_is_loaded_answers_as_what_was_saved(tmp_path, images, encoder, head):
    torch.manual_seed(0)
    made = FewShotClassifier(
        few_shot.FewShotNetwork(ENCODERS[encoder](), HEADS[head]()),
        shots=2,
        ink=True,
        trained_on="ours",
        licence="none",
    )
    made.network.encoder(images)  # in training mode: the statistics of normalisation move
    made.save(tmp_path / "new" / "mine")
    loaded = FewShotClassifier.load(tmp_path / "new" / "mine")
    assert (loaded.shots, loaded.ink, loaded.trained_on, loaded.licence) == (2, True, "ours", "none")
    for classifier in (made, loaded):
        classifier.describe(images[:4], list("aabc"))
    assert torch.allclose(loaded.predict(images).probabilities, made.predict(images).probabilities, atol=1e-6)
    assert not any(tensor.is_meta for tensor in loaded.network.state_dict().values())


def test_a_single_file_answers_as_before_and_is_saved_as_a_folder(tmp_path):
    loaded = FewShotClassifier.load(SINGLE_FILE)
    assert (loaded.shots, loaded.ink, loaded.trained_on, loaded.licence) == (2, True, "noise", "none")
    weights, stored = loaded.network.state_dict(), load_file(SINGLE_FILE)
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stored.items())
    loaded.save(tmp_path / "new")
    images = 0.2 * torch.rand(5, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    answers = []
    for classifier in (loaded, FewShotClassifier.load(str(tmp_path / "new"))):
        classifier.describe(images[:3], ["a", "b", "c"])
        answers.append(classifier.predict(images).probabilities)
    assert torch.equal(*answers)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_single_files_that_are_damaged(tmp_path, keep):
    path = tmp_path / "mine.safetensors"
    path.write_bytes(SINGLE_FILE.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"mine.safetensors is damaged, or not a classifier: FewShotClassifier.save"):
        FewShotClassifier.load(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "or not a classifier"),
        ("{", "or not a classifier"),
        ("[]", "not a classifier that this version reads: save it again as a folder"),
        ('{"version": 1, "shots": 1}', "not a classifier that this version reads"),
        ('{"version": 2, "class": "PrototypeHead", "settings": {}}', "holds a PrototypeHead, not a FewShotClassifier"),
    ],
)
def test_single_files_that_are_no_classifiers(tmp_path, metadata, message):
    path = tmp_path / "mine.safetensors"
    save_file(load_file(SINGLE_FILE), path, None if metadata is None else {"few_shot_classifier": metadata})
    with pytest.raises(WeightsError, match=message):
        FewShotClassifier.load(path)


def test_a_file_in_the_place_of_the_folder_stays(small, tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    with pytest.raises(WeightsError, match=r"cannot write .*mine: File exists; what was there before is whole"):
        small.save(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_unknown_names(tmp_path):
    with pytest.raises(
        WeightsError, match=r"there is no classifier 'omniglott': give omniglot, a folder, or owner/name"
    ):
        FewShotClassifier.load("omniglott")
    with pytest.raises(HubError, match=r"there is no folder .*nowhere"):
        FewShotClassifier.load(tmp_path / "nowhere")


def test_a_name_of_the_package_gives_way_to_a_model_of_ones_own_and_not_to_other_folders(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "omniglot").mkdir()  # a data set, say
    assert FewShotClassifier.load("omniglot").num_classes == 30
    small.save("omniglot")
    assert FewShotClassifier.load("omniglot").num_classes == 5


def test_the_package_loads_it_lazily_under_its_name():
    assert fastweights.FewShotClassifier is FewShotClassifier
    assert "FewShotClassifier" in dir(fastweights)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("network", "encoder", None, "needs a FewShotNetwork whose encoder is one of ConvEncoder, ResidualEncoder"),
        ("encoder", "class", "os.system", "there is no class 'os.system'"),
        ("encoder", "class", ["ConvEncoder"], r"there is no class \['ConvEncoder'\]"),
        ("head", "class", "ConvEncoder", "ConvEncoder has no argument"),
        ("encoder", "filters", 10**12, "overflow|must be"),
        ("encoder", "filters", 0, "filters must be an integer of at least 1, got 0"),
        ("encoder", "filters", True, "filters must be an integer of at least 1, got True"),
        ("encoder", "blocks", 10**9, r"it has \d+ tensors, and its settings ask for blocks=1000000000"),
        ("encoder", "code", "import os", "has no argument 'code'"),
        ("head", "rule", "loud", "rule must be one of"),
        ("head", "hidden_size", 10**5, r"head\..*must be"),
        ("classifier", "class", "PrototypeHead", "holds a PrototypeHead, not a FewShotClassifier"),
        ("classifier", "shots", "1", "shots must be an integer of at least 1, got '1'"),
        ("classifier", "shots", 0, "shots must be an integer of at least 1, got 0"),
        ("classifier", "ink", 1, "ink a bool, .*; got shots=1, ink=1"),
        ("classifier", "code", "import os", "has no argument 'code'"),
    ],
)
def test_settings_that_are_refused(folder, part, key, value, message):
    config = json.loads((folder / "config.json").read_text())
    network = config["settings"]["network"]
    described = {"classifier": config, "network": network, **network["settings"]}[part]
    (described if key == "class" else described["settings"])[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message):
        FewShotClassifier.load(folder)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"shots": 200_000}, "shots must be 1 to 100,000, ink a bool, trained_on and licence words; got shots=200000"),
        ({"ink": "yes"}, "ink='yes'"),
        ({"trained_on": 5}, "trained_on=5"),
        ({"licence": None}, "licence=None"),
    ],
)
def test_what_a_folder_cannot_say_is_refused_before_it_is_written(about, message):
    with pytest.raises(ValueError, match=message):
        FewShotClassifier(network(), **{"shots": 1, **about})
