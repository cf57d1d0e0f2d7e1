"""A classifier's file: what comes back, and what is refused without being built."""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fastweights
from fastweights import few_shot
from fastweights.errors import WeightsError
from fastweights.few_shot import FewShotClassifier
from tests.few_shot.conftest import network


@pytest.fixture
def file(small, tmp_path):
    path = tmp_path / "mine.safetensors"
    small.save(path)
    return path


@pytest.fixture
def parts(file):
    """The tensors and the metadata of a good file."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, json.loads(  # noqa: SIM118
            opened.metadata()["few_shot_classifier"]
        )


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
    made.save(tmp_path / "new" / "mine.safetensors")
    loaded = FewShotClassifier.load(tmp_path / "new" / "mine.safetensors")
    assert (loaded.shots, loaded.ink, loaded.trained_on, loaded.licence) == (2, True, "ours", "none")
    for classifier in (made, loaded):
        classifier.describe(images[:4], list("aabc"))
    assert torch.allclose(loaded.predict(images).probabilities, made.predict(images).probabilities, atol=1e-6)
    assert not any(tensor.is_meta for tensor in loaded.network.state_dict().values())


def test_a_loaded_one_saves_the_same_bytes(file, tmp_path):
    FewShotClassifier.load(str(file)).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_a_failed_save_leaves_what_was_there(small, file, tmp_path, monkeypatch):
    before = file.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(WeightsError, match=r"cannot write .*mine.safetensors: No space left on device; what was there"):
        small.save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(WeightsError, match=r"a file that ends in .safetensors, got .*mine.pt"):
        small.save(tmp_path / "mine.pt")


def test_unknown_names(tmp_path):
    with pytest.raises(WeightsError, match=r"there is no classifier 'omniglott': give omniglot, or a file"):
        FewShotClassifier.load("omniglott")
    with pytest.raises(WeightsError, match=r"there is no file .*nowhere.safetensors"):
        FewShotClassifier.load(tmp_path / "nowhere.safetensors")


def test_the_package_loads_it_lazily_under_its_name():
    assert fastweights.FewShotClassifier is FewShotClassifier
    assert "FewShotClassifier" in dir(fastweights)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_damaged_files(file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"mine.safetensors cannot be read \(.*: put a good copy in its place"):
        FewShotClassifier.load(file)


def test_files_that_are_no_classifiers(file, parts, tmp_path):
    tensors, _ = parts
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"is not a classifier: it was not written by FewShotClassifier.save"):
        FewShotClassifier.load(file)
    torch.save({"weights": 1}, tmp_path / "pickled.safetensors")
    with pytest.raises(WeightsError, match="cannot be read"):
        FewShotClassifier.load(tmp_path / "pickled.safetensors")
    for text, message in (("{", "is not JSON"), ("[]", "of version 2"), ('{"version": 2}', "of version 2")):
        save_file(tensors, file, {"few_shot_classifier": text})
        with pytest.raises(WeightsError, match=message):
            FewShotClassifier.load(file)


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("network", "encoder", None, "needs a FewShotNetwork whose encoder is one of ConvEncoder, ResidualEncoder"),
        ("encoder", "class", "os.system", "there is no class 'os.system'"),
        ("encoder", "class", ["ConvEncoder"], r"there is no class \['ConvEncoder'\]"),
        ("head", "class", "ConvEncoder", "unexpected keyword argument"),
        ("encoder", "filters", 10**12, "overflow|must be"),
        ("encoder", "filters", 0, "filters must be an integer of at least 1, got 0"),
        ("encoder", "filters", True, "filters must be an integer of at least 1, got True"),
        ("encoder", "blocks", 10**9, r"it has \d+ tensors, and its settings ask for blocks=1000000000"),
        ("encoder", "code", "import os", "unexpected keyword argument 'code'"),
        ("head", "rule", "loud", "rule must be one of"),
        ("head", "hidden_size", 10**5, r"head\..*must be"),
        ("classifier", "class", "PrototypeHead", "holds a PrototypeHead, not a FewShotClassifier"),
        ("classifier", "shots", "1", "shots must be an integer of at least 1, got '1'"),
        ("classifier", "shots", 0, "shots must be an integer of at least 1, got 0"),
        ("classifier", "ink", 1, "ink=1 cannot be saved"),
        ("classifier", "code", "import os", "unexpected keyword argument 'code'"),
    ],
)
def test_metadata_that_is_refused(file, parts, part, key, value, message):
    tensors, metadata = parts
    network = metadata["settings"]["network"]
    described = {"classifier": metadata, "network": network, **network["settings"]}[part]
    (described if key == "class" else described["settings"])[key] = value
    save_file(tensors, file, {"few_shot_classifier": json.dumps(metadata)})
    with pytest.raises(WeightsError, match=message):
        FewShotClassifier.load(file)


def test_tensors_that_are_refused(file, parts):
    tensors, metadata = parts
    name = "head.hidden.weight"
    wrong = {
        "is missing": {key: value for key, value in tensors.items() if key != name},
        "the tensor extra is of another model": tensors | {"extra": torch.zeros(1)},
        r"head.hidden.weight must be \[32, 16\], got \[16, 32\]": tensors | {name: tensors[name].T.contiguous()},
        "head.hidden.weight must be finite numbers of torch.float32": tensors | {name: tensors[name].half()},
        "head.hidden.weight must be finite": tensors | {name: torch.full((32, 16), torch.nan)},
    }
    for message, changed in wrong.items():
        save_file(changed, file, {"few_shot_classifier": json.dumps(metadata)})
        with pytest.raises(WeightsError, match=message):
            FewShotClassifier.load(file)


def test_a_network_in_double_is_saved_in_single(tmp_path):
    FewShotClassifier(network().double(), shots=1).save(tmp_path / "mine.safetensors")
    weights = FewShotClassifier.load(tmp_path / "mine.safetensors").network.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {"shots": 200_000},
            "shots=200000 cannot be saved: shots must be 1 to 100,000, ink a bool, trained_on",
        ),
        ({"ink": "yes"}, "ink='yes' cannot be saved"),
        ({"trained_on": 5}, "trained_on=5 cannot be saved"),
        ({"licence": None}, "licence=None cannot be saved"),
    ],
)
def test_what_a_file_cannot_say_is_refused_before_it_is_written(about, message):
    with pytest.raises(ValueError, match=message):
        FewShotClassifier(network(), **{"shots": 1, **about})


def test_a_network_that_a_file_cannot_hold_is_refused_before_it_is_written(small, tmp_path):
    with torch.no_grad():
        small.network.head.hidden.weight[0, 0] = torch.nan
    with pytest.raises(WeightsError, match=r"head\.hidden\.weight has NaN or infinity: .* is not written"):
        small.save(tmp_path / "mine.safetensors")
    assert not (tmp_path / "mine.safetensors").exists()
