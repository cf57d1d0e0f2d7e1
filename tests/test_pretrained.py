"""Saved models: what comes back from a folder, and what is refused before anything is changed."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastweights import few_shot, nn
from fastweights.errors import WeightsError
from fastweights.hub import write_card
from fastweights.pretrained import Pretrained
from tests.laws import KERNELS, LAYERS, leaves


def _encoder(**options):
    return few_shot.ConvEncoder(1, 8, size=12, blocks=2, **options)


WORDS: dict[str, Any] = {"vocabulary_size": 20, "embedding_size": 4, "hidden_size": 6}
MODELS: dict[str, Callable[[], Any]] = {
    "deep": lambda: nn.FastWeightsRNN(3, 4, num_layers=2, dropout=0.1, rate=0.2, nonlinearity="tanh"),
    "gradient rule": lambda: nn.FastWeightsLinear(3, 4, 2, rule="gradient"),
    "Hebbian softmax": lambda: nn.HebbianSoftmax(3, 5, bias=True, objective=nn.InnerObjective("svm", neighbours=3)),
    "bare programmer": lambda: nn.FastWeightProgrammer(8, 2, output_gate=False, convolution=0),
    "language model": lambda: nn.LSTMLanguageModel(**WORDS, num_layers=2),
    "rare words": lambda: nn.LSTMLanguageModel(**WORDS, hebbian={"gamma": 0.1}, dtype=torch.bfloat16),
    "untied": lambda: nn.LSTMLanguageModel(**WORDS, tied=False, layer_norm=True),
    "residual": lambda: few_shot.ResidualEncoder(1, size=12, widths=(4, 6), features=9),
    "sentences": lambda: few_shot.SentenceEncoder(20, embedding_size=3, hidden_size=4),
    "network": lambda: few_shot.FewShotNetwork(_encoder(mirrored=True), few_shot.FastWeightsHead(72, 4)),
    "MAML": lambda: few_shot.MAML(_encoder(), 3, test_steps=2),
    "fine-tuning": lambda: few_shot.FineTuning(_encoder(dropout=0.1), 7, 3, lr=0.5),
    "classifier": lambda: few_shot.FewShotClassifier(
        few_shot.FewShotNetwork(_encoder(), few_shot.MatchingHead(3, scale=2.0)), shots=2, licence="mine"
    ),
}


def weights_of(model):
    module = model if isinstance(model, torch.nn.Module) else model.network
    return module.state_dict(keep_vars=True)


def everything(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def saved(tmp_path):
    """A layer's folder."""
    nn.FastWeightsRNN(3, 4).save_pretrained(tmp_path / "layer")
    return tmp_path / "layer"


@pytest.fixture
def config(saved):
    """The values of its `config.json`, and a function that writes them."""

    def write(**changes):
        (saved / "config.json").write_text(json.dumps(values | changes))

    values = json.loads((saved / "config.json").read_text())
    return values, write


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_for_bit(name, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "new" / "model")
    before = torch.get_rng_state()
    loaded = type(model).from_pretrained(str(tmp_path / "new" / "model"))
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.settings == model.settings
    ours, theirs = weights_of(model), weights_of(loaded)
    assert list(ours) == list(theirs)
    for key, tensor in theirs.items():
        assert (tensor.dtype, tensor.stride(), tensor.requires_grad) == (
            ours[key].dtype, ours[key].stride(), ours[key].requires_grad
        )  # fmt: skip
        assert torch.equal(tensor, ours[key])
    files = everything(tmp_path / "new" / "model")
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    loaded.save_pretrained(tmp_path / "again")
    assert everything(tmp_path / "again") == files


WHOLE = [layer for layer in LAYERS if layer.ours and "cell" not in layer.name and (KERNELS or not layer.needs_kernel)]


@pytest.mark.parametrize("layer", WHOLE, ids=str)
def test_a_layer_answers_as_before(layer, tmp_path):
    built = layer.build().eval()
    built.save_pretrained(tmp_path)
    loaded = type(built).from_pretrained(tmp_path)
    assert not loaded.training
    x = torch.randn(4, 2, 3)
    with torch.no_grad():
        (y, end), (same, same_end) = built(x), loaded(x)
    for one, other in zip([y, *leaves(end)], [same, *leaves(same_end)], strict=True):
        assert torch.equal(one, other)


def test_what_is_known_of_its_training_comes_back_and_is_saved_again(tmp_path):
    layer = nn.IRNN(3, 4)
    layer.about = {"seed": 1, "commit": "abc"}
    layer.save_pretrained(tmp_path / "layer")
    loaded = nn.IRNN.from_pretrained(tmp_path / "layer")
    assert loaded.about == layer.about
    loaded.save_pretrained(tmp_path / "again")
    assert everything(tmp_path / "again") == everything(tmp_path / "layer")
    layer.about = {"data": everything}
    with pytest.raises(WeightsError, match=r"about\['data'\] of this IRNN is a function, which cannot be written"):
        layer.save_pretrained(tmp_path / "layer")


def test_a_name_of_the_repository_is_found_without_a_hub():
    model = nn.LSTMLanguageModel.from_pretrained("sprechmann2018-ptb")
    assert (model.vocabulary_size, model.embedding.weight.dtype) == (10_000, torch.float16)


def test_shared_weights_are_written_once_and_shared_again(tmp_path):
    MODELS["language model"]().save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "embedding.weight" in names
    assert "head.weight" not in names
    loaded = nn.LSTMLanguageModel.from_pretrained(tmp_path)
    assert loaded.head.weight is loaded.embedding.weight


def test_settings_are_those_of_now(tmp_path):
    model = nn.LSTMLanguageModel(**WORDS, tied=False, hebbian={"gamma": 0.1})
    model.output_dropout, model.head.gamma = 0.25, 0.5
    model.save_pretrained(tmp_path)
    loaded = nn.LSTMLanguageModel.from_pretrained(tmp_path)
    assert (loaded.output_dropout, loaded.head.gamma) == (0.25, 0.5)
    head = nn.HebbianSoftmax(3, 5)
    head.grow(2)
    head.save_pretrained(tmp_path / "grown")
    assert nn.HebbianSoftmax.from_pretrained(tmp_path / "grown").counts.tolist() == [0] * 7


class Tagger(Pretrained, torch.nn.Module):
    """A model of a user's own."""

    def __init__(self, layer, tags, *, width=None, scales=(1.0,)):
        super().__init__()
        self.layer, self.output = layer, torch.nn.Linear(4, len(tags))
        self.tags, self.scales = tags, scales


def test_a_model_of_ones_own_is_saved_with_its_parts(tmp_path):
    tagger = Tagger(nn.FastWeightsRNN(3, 4, decay=0.5), ["noun", "verb"], scales=[0.5, 2.0])
    tagger.save_pretrained(tmp_path)
    loaded = Tagger.from_pretrained(tmp_path)
    assert loaded.layer.constants.decay == 0.5
    assert (loaded.tags, loaded.scales) == (["noun", "verb"], [0.5, 2.0])
    assert torch.equal(loaded.output.weight, tagger.output.weight)
    assert "A model of a user's own." in (tmp_path / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(3, 4, 2, dropout=0.1, batch_first=True),
        torch.nn.LSTM(3, 5, proj_size=4),
        torch.nn.GRU(3, 2, bias=False, bidirectional=True, dtype=torch.bfloat16),
        torch.nn.RNN(3, 4, nonlinearity="relu"),
    ],
    ids=str,
)
def test_a_model_of_a_users_own_may_have_a_recurrent_layer_of_torchs_own(tmp_path, layer):
    Tagger(layer, ["noun"]).save_pretrained(tmp_path)
    loaded = Tagger.from_pretrained(tmp_path).layer
    assert str(loaded) == str(layer)
    for name, weight in layer.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight)
    x = torch.randn(5, 2, 3, dtype=next(layer.parameters()).dtype)
    torch.testing.assert_close(loaded(x)[0], layer.eval()(x)[0], rtol=0, atol=0)

    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"num_layers": 10**12}, "tensors, and its settings ask for num_layers="),
        ({"hidden_size": 9}, "must be"),
        ({"code": "import os"}, "settings build no Tagger.*unexpected keyword argument 'code'"),
    ):
        described = {**config["settings"]["layer"], "settings": config["settings"]["layer"]["settings"] | change}
        path.write_text(json.dumps({**config, "settings": {**config["settings"], "layer": described}}))
        with pytest.raises(WeightsError, match=message):
            Tagger.from_pretrained(tmp_path)
    for kind in ("torch.nn.Linear", ["torch.nn.LSTM"]):
        settings = {**config["settings"], "layer": {**config["settings"]["layer"], "class": kind}}
        path.write_text(json.dumps({**config, "settings": settings}))
        with pytest.raises(WeightsError, match="settings build no Tagger"):
            Tagger.from_pretrained(tmp_path)


class Scaled(Pretrained, torch.nn.Module):
    """A model that keeps something else under the names of its arguments."""

    def __init__(self, features, scale=2.0, hidden=3, dropout=0):
        super().__init__()
        self.scale, self.hidden, self.dropout = 1 / scale, 2 * hidden, dropout
        self.output = torch.nn.Linear(features, self.hidden)

    def forward(self, x):
        return self.output(x) * self.scale


def test_what_a_constructor_makes_of_an_argument_is_not_taken_for_it(tmp_path):
    model, x = Scaled(4, scale=4.0).eval(), torch.randn(2, 4)
    model.dropout = 0.5
    assert model.settings == {"features": 4, "scale": 4.0, "hidden": 3, "dropout": 0.5}
    model.save_pretrained(tmp_path)
    loaded = Scaled.from_pretrained(tmp_path)
    assert torch.equal(loaded(x), model(x))
    assert loaded.dropout == 0.5


class Ramped(Pretrained, torch.nn.Module):
    """A model with a table that is not saved, which may need the value of a tensor."""

    def __init__(self, features, steps, *, kind="buffer"):
        super().__init__()
        self.layer = nn.FastWeightsRNN(features, 6)
        ramp = torch.linspace(1, 2, steps)[:, None, None]
        if kind == "buffer":
            self.register_buffer("ramp", ramp, persistent=False)
        else:
            self.ramp = ramp * (ramp.max().item() if kind == "value" else 1)

    def forward(self, x):
        return self.layer(x * self.ramp[: len(x)])[0]


@pytest.mark.parametrize("kind", ["buffer", "attribute", "value"])
def test_tensors_that_the_file_does_not_have_are_as_the_constructor_makes_them(tmp_path, kind):
    model, x = Ramped(4, 9, kind=kind).eval(), torch.randn(5, 2, 4)
    state = torch.random.get_rng_state()
    model.save_pretrained(tmp_path)
    loaded = Ramped.from_pretrained(tmp_path)
    assert torch.equal(loaded(x), model(x))
    assert not loaded.layer.training
    assert torch.equal(torch.random.get_rng_state(), state)


class Centred(Pretrained, torch.nn.Module):
    """A model that keeps a copy of a list of tensors."""

    def __init__(self, centres):
        super().__init__()
        self.centres = list(centres)


def test_a_list_of_tensors_can_be_an_argument_but_is_no_setting(tmp_path):
    model = Centred([torch.ones(2), torch.zeros(2)])
    with pytest.raises(WeightsError, match=r"centres\[0\] of this Centred is a Tensor"):
        model.save_pretrained(tmp_path)
    assert not everything(tmp_path)


def test_what_cannot_be_built_again_is_refused_before_anything_is_written(saved, tmp_path):
    before = everything(saved)
    broken = nn.FastWeightsRNN(3, 4)
    broken.extra = torch.nn.Linear(2, 2)
    untied = MODELS["language model"]()
    untied.head.weight = torch.nn.Parameter(untied.head.weight.detach().clone())
    refused = {
        r"layer of this Tagger is a Linear, which cannot be written as JSON": Tagger(torch.nn.Linear(3, 4), ["a"]),
        r"scales\[0\] of this Tagger is a Tensor": Tagger(nn.IRNN(3, 4), ["a"], scales=[torch.ones(1)]),
        r"extra.weight is \[2, 2\], and the settings of this FastWeightsRNN build None": broken,
        "head.weight and embedding.weight are one weight by the settings of this LSTMLanguageModel": untied,
    }
    for message, model in refused.items():
        with pytest.raises(WeightsError, match=message):
            model.save_pretrained(saved)
    assert everything(saved) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WeightsError, match="cannot write"):
        nn.IRNN(3, 4).save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_leaves_what_was_there(saved, monkeypatch):
    before = everything(saved)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(WeightsError, match=r"cannot write .*: No space left on device; what was there before is whole"):
        nn.FastWeightsRNN(3, 4).save_pretrained(saved)
    assert everything(saved) == before


def test_folders_that_hold_no_such_model(saved, tmp_path, config):
    values, write = config
    tmp_path.joinpath("empty").mkdir()
    with pytest.raises(WeightsError, match=r"holds no model, it has no config.json: save_pretrained\(\) a IRNN"):
        nn.IRNN.from_pretrained(tmp_path / "empty")
    with pytest.raises(WeightsError, match="holds a FastWeightsRNN, not a IRNN"):
        nn.IRNN.from_pretrained(saved)
    write(**{"class": "os.system"})
    with pytest.raises(WeightsError, match=r"holds a os\.system, not a FastWeightsRNN"):
        nn.FastWeightsRNN.from_pretrained(saved)
    for settings, message in (
        ({"input_size": 3}, "missing a required argument: 'hidden_size'"),
        (values["settings"] | {"code": "import os"}, "has no argument 'code'"),
        (values["settings"] | {"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        (
            values["settings"] | {"hidden_size": 5},
            r"bias must be \[5\], got \[4\]",
        ),
        (values["settings"] | {"num_layers": 10**12}, "it has 6 tensors, and its settings ask for num_layers="),
        (values["settings"] | {"num_layers": 2}, "the tensor bias_l1 is missing"),
    ):
        write(settings=settings)
        with pytest.raises(WeightsError, match=message):
            nn.FastWeightsRNN.from_pretrained(saved)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (None, "'NoneType' object has no attribute"),
        ({"class": "os.system", "settings": {"command": "echo"}}, "there is no class 'os.system'"),
        ({"class": "Encoder", "settings": {}}, "there is no class 'Encoder'"),
    ],
)
def test_a_part_that_is_none_is_refused_in_one_line(tmp_path, encoder, message):
    MODELS["MAML"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["settings"]["encoder"] = encoder
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=f"its settings build no MAML: {message}") as refused:
        few_shot.MAML.from_pretrained(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is damaged: it is not JSON"),
        ("[]", "was not written by save_pretrained"),
        ('{"class": "FastWeightsRNN", "settings": {}}', "was not written by save_pretrained"),
        (
            '{"class": "FastWeightsRNN", "settings": {}, "weights": {"sha256": "0"}, "about": "me"}',
            "config.json is damaged: about must be an object, got 'me'",
        ),
    ],
)
def test_a_damaged_config(saved, text, message):
    (saved / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        nn.FastWeightsRNN.from_pretrained(saved)


def test_damaged_weights(saved, tmp_path):
    path = saved / "model.safetensors"
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for content in (b"", good[:-1], bytes(flipped)):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"model.safetensors is damaged, or does not belong to the config.json"):
            nn.FastWeightsRNN.from_pretrained(saved)
    path.unlink()
    with pytest.raises(WeightsError, match=r"cannot read .*model.safetensors: No such file"):
        nn.FastWeightsRNN.from_pretrained(saved)


@pytest.mark.parametrize("content", [b"", b"no weights", bytes(1000)])
def test_weights_that_were_written_damaged(saved, config, content):
    """Their digest is in the config: what it does not tell is found as they are read."""
    values, write = config
    (saved / "model.safetensors").write_bytes(content)
    write(weights=values["weights"] | {"sha256": hashlib.sha256(content).hexdigest()})
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read \(.*good copy") as refused:
        nn.FastWeightsRNN.from_pretrained(saved)
    assert "\n" not in str(refused.value)


def test_weights_of_another_kind(saved, config):
    values, write = config
    path = saved / "model.safetensors"
    tensors = load_file(path)
    for changed, message in (
        (tensors | {"more": torch.zeros(1)}, "the tensor more is of another model"),
        (tensors | {"bias": torch.zeros(4, dtype=torch.int64)}, "bias must be like torch.float32, got torch.int64"),
    ):
        save_file(changed, path)
        write(weights=values["weights"] | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
        with pytest.raises(WeightsError, match=message):
            nn.FastWeightsRNN.from_pretrained(saved)


def test_numbers_that_are_not_finite_are_kept(tmp_path):
    layer = nn.IRNN(3, 4)
    with torch.no_grad():
        weight = layer.get_parameter("weight_ih_l0")
        weight[0], weight[1] = math.inf, math.nan
    layer.save_pretrained(tmp_path)
    loaded = nn.IRNN.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_parameter("weight_ih_l0").view(torch.int32), weight.view(torch.int32))


def test_a_plain_card_has_the_licence_of_a_classifier(tmp_path):
    MODELS["classifier"]().save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "\nlicense: mine\n" in card
    assert card.endswith("Licence: mine.\n")


@pytest.mark.parametrize(("licence", "known"), [("apache-2.0", "apache-2.0"), ("for research only, unsold", "other")])
def test_a_licence_in_words_is_another_one_in_the_head_of_a_card(licence, known):
    head, _, card = write_card("A model", "It.", "code", licence=licence).removeprefix("---\n").partition("---\n")
    assert head.splitlines() == ["library_name: fastweights", f"license: {known}", "tags:", "- fast-weights"]
    assert card.endswith(f"Licence: {licence}.\n")


def test_a_card_says_how_to_load_it_and_a_written_one_stays(saved):
    card = saved / "README.md"
    assert "from fastweights.nn import FastWeightsRNN" in card.read_text()
    assert '"decay": 0.95' in card.read_text()
    nn.FastWeightsRNN(3, 4, decay=0.5).save_pretrained(saved)  # the plain one follows
    assert '"decay": 0.5' in card.read_text()
    card.write_text("# Mine\n")
    nn.FastWeightsRNN(3, 4).save_pretrained(saved)
    assert card.read_text() == "# Mine\n"
    nn.FastWeightsRNN(3, 4).save_pretrained(saved, card="# Another\n")
    assert card.read_text() == "# Another\n"


@dataclasses.dataclass(frozen=True)
class Part:
    sizes: tuple[int, ...]
    name: str = "part"


@dataclasses.dataclass
class Sizes:
    hidden: int
    part: Part
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made = 2 * self.hidden


class OfSizes(Pretrained, torch.nn.Module):
    def __init__(self, sizes: Sizes, other: Part | None = None) -> None:
        super().__init__()
        self.sizes, self.other = sizes, other
        self.layer = torch.nn.Linear(sizes.hidden, sizes.part.sizes[0])


class OfAnything(Pretrained, torch.nn.Module):
    def __init__(self, sizes) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(sizes.hidden, 1)


def test_settings_in_a_dataclass_come_back_as_one(tmp_path):
    for other in (None, Part((1,), "another")):
        model = OfSizes(Sizes(3, Part((4, 5))), other)
        model.save_pretrained(tmp_path)
        again = OfSizes.from_pretrained(tmp_path)
        assert again.sizes == Sizes(3, Part((4, 5)))
        assert (again.sizes.made, again.other) == (6, other)
        assert torch.equal(again.layer.weight, model.layer.weight)


def test_a_dataclass_that_no_annotation_names_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        WeightsError, match=r"sizes of this OfAnything is a Sizes, .*: write `sizes: Sizes` in the constr"
    ):
        OfAnything(Sizes(3, Part((4, 5)))).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
