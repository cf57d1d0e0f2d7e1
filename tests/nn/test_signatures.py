"""The arguments of the layers and their defaults, and sizes that no layer can have."""

import inspect

import numpy
import pytest

from fastweights import nn
from fastweights.nn._lstm import LSTM
from fastweights.nn._recurrent import RecurrentCell, RecurrentLayer
from fastweights.pretrained import Pretrained

SIGNATURES = {
    nn.FastWeightsRNN: "(input_size, hidden_size, num_layers=1, *, decay=0.95, rate=None, inner_steps=1, "
    "nonlinearity='relu', layer_norm=True, normalize_initial=False, hold_input=True, identity_scale=None, "
    "dropout=0.0, batch_first=False, impl='auto', form='auto', device=None, dtype=None)",
    nn.FastWeightsRNNCell: "(input_size, hidden_size, *, decay=0.95, rate=None, inner_steps=1, nonlinearity='relu', "
    "layer_norm=True, normalize_initial=False, hold_input=True, identity_scale=None, impl='auto', device=None, "
    "dtype=None)",
    nn.GatedFastWeightsRNN: "(input_size, hidden_size, *, slow_hidden_size=None, slow_inner_size=100, "
    "layer_norm='after', batch_first=False, impl='auto', device=None, dtype=None)",
    nn.GatedFastWeightsRNNCell: "(input_size, hidden_size, *, slow_hidden_size=None, slow_inner_size=100, "
    "layer_norm='after', impl='auto', device=None, dtype=None)",
    nn.DeltaFastWeightsRNN: "(input_size, hidden_size, num_heads=1, *, convolution=4, output_gate=False, "
    "batch_first=False, impl='auto', device=None, dtype=None)",
    nn.AssociativeLSTM: "(input_size, hidden_size, *, copies=4, heads=3, batch_first=False, device=None, dtype=None)",
    nn.HyperLSTM: "(input_size, hidden_size, *, hyper_hidden_size=128, hyper_embedding_size=4, layer_norm=True, "
    "batch_first=False, device=None, dtype=None)",
    LSTM: "(input_size, hidden_size, *, layer_norm=False, state_dropout=0.0, batch_first=False, device=None, "
    "dtype=None)",
    nn.LSTMLanguageModel: "(vocabulary_size, embedding_size, hidden_size, num_layers=1, *, tied=True, "
    "embedding_dropout=0.0, input_dropout=0.0, layer_dropout=0.0, state_dropout=0.0, output_dropout=0.0, "
    "layer_norm=False, hebbian=None, device=None, dtype=None)",
    nn.IRNN: "(input_size, hidden_size, num_layers=1, *, identity_scale=0.5, dropout=0.0, batch_first=False, "
    "device=None, dtype=None)",
    nn.FastWeightProgrammer: "(embed_dim, num_heads, *, rule='gated_delta', key_size=None, value_size=None, "
    "feature_map='silu', convolution=4, output_gate=True, negative_eigenvalues=False, batch_first=False, impl='auto', "
    "device=None, dtype=None)",
    nn.HebbianSoftmax: "(in_features, num_classes, *, gamma=0.25, limit=500, bias=False, dropout=0.0, "
    "objective='l2', counting='literal', device=None, dtype=None)",
    nn.FastWeightsLinear: "(in_features, out_features, num_classes, *, rule='hebbian', negative_slope=0.2, "
    "label_noise=0.0, slow=True, one_hot=False, stop_gradient=False, second_order=False, device=None, dtype=None)",
    nn.InnerObjective: "(name, neighbours=10, steps=20, step_size=0.1, penalty=1.0, threshold=0.0, largest_norm=10.0)",
}
SIZES = {
    nn.FastWeightsRNN: ["input_size", "hidden_size", "num_layers"],
    nn.FastWeightsRNNCell: ["input_size", "hidden_size"],
    nn.GatedFastWeightsRNN: ["input_size", "hidden_size", "slow_hidden_size", "slow_inner_size"],
    nn.GatedFastWeightsRNNCell: ["input_size", "hidden_size", "slow_hidden_size", "slow_inner_size"],
    nn.DeltaFastWeightsRNN: ["input_size", "hidden_size", "num_heads"],
    nn.AssociativeLSTM: ["input_size", "hidden_size", "copies", "heads"],
    nn.HyperLSTM: ["input_size", "hidden_size", "hyper_hidden_size", "hyper_embedding_size"],
    LSTM: ["input_size", "hidden_size"],
    nn.LSTMLanguageModel: ["vocabulary_size", "embedding_size", "hidden_size", "num_layers"],
    nn.IRNN: ["input_size", "hidden_size", "num_layers"],
    nn.FastWeightProgrammer: ["embed_dim", "num_heads", "key_size", "value_size"],
    nn.HebbianSoftmax: ["in_features", "num_classes"],
    nn.FastWeightsLinear: ["in_features", "out_features", "num_classes"],
}


def without_types(function) -> str:
    signature = inspect.signature(function)
    names = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=names, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("layer", SIGNATURES, ids=lambda layer: layer.__name__)
def test_arguments_and_defaults_are_the_documented_ones(layer):
    assert without_types(layer) == SIGNATURES[layer]


@pytest.mark.parametrize("layer", SIZES, ids=lambda layer: layer.__name__)
def test_the_repr_begins_with_the_sizes_in_the_order_in_which_they_are_given(layer):
    wanted = [one for one in inspect.signature(layer).parameters.values() if one.default is one.empty]
    text = repr(layer(*(4, 2, 6)[: len(wanted)])).replace("(\n  ", "(")  # what has layers inside has a line for each
    assert text.startswith(f"{layer.__name__}(4, 2")


@pytest.mark.parametrize(
    "layer",
    [
        nn.FastWeightsRNN,
        nn.DeltaFastWeightsRNN,
        nn.GatedFastWeightsRNN,
        nn.AssociativeLSTM,
        nn.HyperLSTM,
        LSTM,
        nn.FastWeightProgrammer,
    ],
)
def test_all_layers_are_called_alike(layer):
    more = ", strengths=None, clears=None" if layer is nn.FastWeightsRNN else ""  # a control of what is written
    assert without_types(layer.forward) == f"(self, x, state=None, *, lengths=None, starts=None{more})"


def test_a_language_model_is_called_as_the_layers_are():
    for function in (nn.LSTMLanguageModel.forward, nn.LSTMLanguageModel.encode):
        assert without_types(function) == "(self, tokens, state=None, *, lengths=None, starts=None)"


@pytest.mark.parametrize(("layer", "name"), [(layer, name) for layer, names in SIZES.items() for name in names])
@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_what_is_no_size_is_refused_in_the_same_words(layer, name, size):
    arguments = {required: 4 for required in SIZES[layer]} | {name: size}
    with pytest.raises(ValueError, match=rf"^{name} must be an integer of at least 1, got {size}$"):
        layer(**arguments)


NORMED = {
    nn.FastWeightsRNN: True,
    nn.FastWeightsRNNCell: True,
    nn.GatedFastWeightsRNN: "before",
    nn.GatedFastWeightsRNNCell: "after",
    nn.HyperLSTM: True,
    LSTM: True,
    nn.LSTMLanguageModel: True,
    nn.DeltaFastWeightsRNN: None,  # always normed
}


@pytest.mark.parametrize(
    ("layer", "name"), [*((layer, "hidden_size") for layer in NORMED), (nn.HyperLSTM, "hyper_hidden_size")]
)
def test_one_unit_with_layer_normalization_is_refused(layer, name):
    """Its norm is 0 at all times: such a layer would answer the same to every input, in silence."""
    arguments = {required: 4 for required in SIZES[layer]} | {name: 1}
    given = {"num_heads": 1} if NORMED[layer] is None else {"layer_norm": NORMED[layer]}
    with pytest.raises(ValueError, match=rf"^{name} must be at least 2 with layer normalization, got 1: one unit less"):
        layer(**arguments | given)
    assert layer(**arguments | {name: 2} | given)
    if "layer_norm" in given:
        assert layer(**arguments, layer_norm="none" if isinstance(given["layer_norm"], str) else False)


def test_the_layers_with_layer_normalization_are_known():
    normed = {layer for layer in SIZES if "layer_norm" in inspect.signature(layer).parameters}
    assert normed == NORMED.keys() - {nn.DeltaFastWeightsRNN}


INSTEAD = {
    "num_layers": "make several, and give the outputs of one to the next as its x",
    "dropout": "put a torch.nn.Dropout between two layers",
    "bidirectional": "make a second one, run it over the reversed sequence",
    "proj_size": "put a torch.nn.Linear behind it",
    "bias": "leave it out",
    "batch_first": "a cell takes one step",
}
ABSENT = [
    (kind, name)
    for kind in SIGNATURES
    if issubclass(kind, nn.IRNN | RecurrentLayer | RecurrentCell)
    for name in INSTEAD
    if name not in inspect.signature(kind).parameters
]


@pytest.mark.parametrize(("kind", "name"), ABSENT)
def test_an_argument_of_torchs_layers_that_is_absent_is_told_with_what_to_do(kind, name):
    with pytest.raises(TypeError) as raised:
        kind(4, 6, **{name: 2})
    assert str(raised.value).startswith(f"{kind.__name__} has no argument {name!r}: {INSTEAD[name]}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", [kind for kind in SIGNATURES if issubclass(kind, Pretrained)])
def test_an_argument_that_no_layer_has_is_told_in_the_words_of_the_class(kind):
    names = list(inspect.signature(kind).parameters)
    with pytest.raises(TypeError) as raised:
        kind(**dict.fromkeys(names[:2], 4), hiden_size=4)
    assert str(raised.value).startswith(f"{kind.__name__} has no argument 'hiden_size': ")
    assert str(raised.value).endswith(f"it has {', '.join(names)}")
    assert ("did you mean hidden_size? " in str(raised.value)) == ("hidden_size" in names)


@pytest.mark.parametrize(
    ("kind", "positional", "named", "message"),
    [
        (
            nn.FastWeightsRNN,
            (4, 6, 1, True, True),
            {},
            "FastWeightsRNN takes input_size, hidden_size, num_layers by position, and got 5 arguments so: give the "
            "others by name: decay, rate, ",
        ),
        (
            nn.FastWeightsRNNCell,
            (4, 6, 1),
            {},
            "FastWeightsRNNCell takes input_size, hidden_size by position, and got 3 ",
        ),
        (nn.GatedFastWeightsRNNCell, (4,), {}, "GatedFastWeightsRNNCell: missing a required argument: 'hidden_size'"),
        # It is not told to read backwards.
        (
            nn.LSTMLanguageModel,
            (5, 4, 6),
            {"bidirectional": True},
            "LSTMLanguageModel has no argument 'bidirectional': it has vocabulary_size, ",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_the_words_of_the_class(kind, positional, named, message):
    with pytest.raises(TypeError) as raised:
        kind(*positional, **named)
    assert str(raised.value).startswith(message)


def test_a_warning_of_a_constructor_leads_to_the_line_that_calls_it():
    with pytest.warns(UserWarning, match="dropout=0.5 acts between layers") as warned:
        nn.FastWeightsRNN(4, 6, dropout=0.5)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(("kind", "sizes"), SIZES.items())
def test_sizes_may_be_numpys_and_are_kept_as_pythons(kind, sizes, tmp_path):
    layer = kind(**{size: numpy.int64(2 if size == "num_heads" else 4) for size in sizes})
    assert all(type(getattr(layer, size)) is int for size in sizes if hasattr(layer, size))
    layer.save_pretrained(tmp_path)
    assert kind.from_pretrained(tmp_path).settings == layer.settings
    with pytest.raises(ValueError, match=r"must be an integer of at least 1, got np.float64\(4.0\)"):
        kind(**dict.fromkeys(sizes, numpy.float64(4)))
