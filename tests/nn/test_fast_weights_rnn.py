import copy
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from fastweights import nn
from fastweights.errors import KernelError

MAKERS = [nn.FastWeightsRNN, nn.FastWeightsRNNCell]
LAYER = nn.FastWeightsRNN(3, 4)


def test_parameters_have_the_names_and_shapes_of_the_interface():
    layer = nn.FastWeightsRNN(4, 6, num_layers=3)
    expected: dict[str, tuple[int, ...]] = {}
    for suffix, inputs in (("", 4), ("_l1", 6), ("_l2", 6)):
        expected |= {f"weight_ih{suffix}": (6, inputs), f"weight_hh{suffix}": (6, 6), f"bias{suffix}": (6,)}
        expected |= {f"log_rate{suffix}": (), f"norm{suffix}.weight": (6,), f"norm{suffix}.bias": (6,)}
    assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == expected
    assert layer.state_dict().keys() == expected.keys()
    assert {name for name, _ in nn.FastWeightsRNN(4, 6, rate=0.5, layer_norm=False).named_parameters()} == {
        "weight_ih",
        "weight_hh",
        "bias",
    }


@pytest.mark.parametrize("maker", MAKERS)
def test_initial_values(maker):
    torch.manual_seed(0)
    layer = maker(30, 400, identity_scale=0.3)
    assert torch.equal(layer.weight_hh, 0.3 * torch.eye(400))
    assert torch.equal(layer.bias, torch.zeros(400))
    assert torch.equal(layer.norm.weight, torch.ones(400))
    assert torch.equal(layer.norm.bias, torch.zeros(400))
    assert torch.equal(layer.log_rate, torch.zeros(()))
    bound = 1 / math.sqrt(400)  # the number of outgoing weights of an input
    assert layer.weight_ih.abs().max() <= bound
    assert layer.weight_ih.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    before = layer.weight_ih.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight_ih, before)
    assert torch.equal(maker(3, 4).weight_hh, 0.25 * torch.eye(4))
    assert torch.equal(maker(3, 400).weight_hh, 0.05 * torch.eye(400))


def test_defaults_are_the_papers_but_for_the_rate():
    constants = nn.FastWeightsRNN(3, 4, rate=0.5).constants
    assert (constants.decay, constants.rate, constants.inner_steps) == (0.95, 0.5, 1)
    assert (constants.nonlinearity, constants.normalize_initial, constants.eps) == ("relu", False, 1e-5)


def test_the_layer_and_its_cell_exchange_weights():
    layer, cell = nn.FastWeightsRNN(3, 5, dtype=torch.float64), nn.FastWeightsRNNCell(3, 5, dtype=torch.float64)
    cell.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    expected, end = layer(x)
    state = None
    for step, y in zip(x, expected, strict=True):
        h, state = cell(step, state)
        torch.testing.assert_close(h, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, end, rtol=1e-12, atol=1e-12)


def test_dropout_acts_between_layers_in_training_alone():
    layer = nn.FastWeightsRNN(3, 8, num_layers=2, dropout=0.5)
    x = torch.randn(5, 2, 3)
    torch.manual_seed(0)
    first, second = layer(x)[0], layer(x)[0]
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_states_have_a_layer_axis_only_with_several_layers():
    for layers, axis in ((1, ()), (2, (2,))):
        layer = nn.FastWeightsRNN(3, 4, num_layers=layers)
        _, state = layer(torch.zeros(5, 6, 3))
        assert state.hidden.shape == (*axis, 6, 4)
        assert state.memory.shape == (*axis, 6, 4, 4)
        _, state = layer(torch.zeros(5, 3))
        assert state.hidden.shape == (*axis, 4)
        assert state.memory.shape == (*axis, 4, 4)


def test_the_memory_is_formed_when_it_is_asked_for():
    layer, x = nn.FastWeightsRNN(3, 5, num_layers=2), torch.randn(6, 2, 3)
    y, state = layer(x)
    untouched = layer(x)[1]
    y.detach().mul_(2)  # in place: what the upper layer's memory would be formed from
    with pytest.raises(RuntimeError, match="changed in place since: ask for it before, or change a copy"):
        _ = state.memory
    y, state = layer(x)
    hidden, memory = state
    y.detach().mul_(2)  # now it may be
    assert state.memory is memory is state[1]
    torch.testing.assert_close(memory, untouched.memory)
    assert torch.equal(hidden, state.hidden)
    with torch.no_grad():  # the graph is that of the call, not of the question
        later = layer(x)[1]
    assert not later.memory.requires_grad
    y, state = layer(x)
    with torch.no_grad():
        assert state.memory.requires_grad
    assert not layer(x)[1].detach().memory.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it, and hides the warning from users
@pytest.mark.parametrize("layers", [1, 2])
def test_compiled_the_memory_is_formed_when_it_is_asked_for(layers):
    torch.compiler.reset()
    layer, x = nn.FastWeightsRNN(3, 5, num_layers=layers), torch.randn(12, 2, 3)
    expected, end = layer(x)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    y, state = compiled(x[:3])
    outputs = [y]
    for piece in x[3:].split(3):
        y, state = compiled(piece, state)
        outputs.append(y)
        assert repr(state).endswith("memory=formed when it is read)")
    assert counter.frame_count == 2  # with a state and without: not once a piece
    torch.testing.assert_close(torch.cat(outputs), expected)
    outputs[-1].detach().mul_(2)  # in place: the memory is formed from a copy
    torch.testing.assert_close(state.memory, end.memory)
    assert state.memory.requires_grad


def test_a_state_that_is_shown_does_not_form_its_memory():
    state = nn.FastWeightsRNN(3, 5)(torch.randn(6, 2, 3))[1]
    assert repr(state) == "FastWeightsState(hidden=float32 [2, 5], memory=formed when it is read)"
    _ = state.memory
    assert repr(state) == "FastWeightsState(hidden=float32 [2, 5], memory=float32 [2, 5, 5])"


def test_a_state_is_a_named_pair_that_can_be_kept():
    state = nn.FastWeightsRNN(3, 5)(torch.randn(6, 2, 3))[1].detach()
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), nn.FastWeightsState(*state)):
        assert type(copied) is nn.FastWeightsState
        assert torch.equal(copied.hidden, state.hidden)
        assert torch.equal(copied.memory, state.memory)
    assert len(state) == 2
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is nn.FastWeightsState


def test_in_inference_mode_the_memory_does_not_follow_changes():
    layer, x = nn.FastWeightsRNN(3, 5), torch.randn(6, 2, 3)
    expected = layer(x, layer(x)[1])[1].memory
    with torch.inference_mode():
        y, state = layer(x)
        y.zero_()
        y, state = layer(x, state)
        y.zero_()
        torch.testing.assert_close(state.memory, expected.detach())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [1, 6])  # of the second piece
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_a_stream_leaves_inference_mode_where_it_likes(layers, steps, context):
    layer, x, lengths = nn.FastWeightsRNN(3, 5, layers), torch.randn(6, 2, 3), torch.tensor([6, 4])
    expected, end = layer(x[:steps], layer(x, lengths=lengths)[1])
    with torch.inference_mode():
        _, state = layer(x, lengths=lengths.clone())
    with context():
        y, after = layer(x[:steps], state)
    torch.testing.assert_close((y, *after), (expected, *end))
    if context is torch.enable_grad:
        (y.sum() + after.memory.sum()).backward()
        assert layer.weight_hh.grad is not None


def test_the_memory_is_that_of_the_mode_in_which_the_state_was_made():
    layer, x = nn.FastWeightsRNN(3, 5), torch.randn(6, 2, 3)
    _, state = layer(x)
    with torch.inference_mode():
        _ = state.memory  # the first look must not decide whether there are gradients
    state.memory.sum().backward()
    assert layer.weight_hh.grad is not None
    with torch.inference_mode():
        _, state = layer(x)
    assert state.memory.is_inference()


def test_the_forms_agree_and_others_are_refused():
    x = torch.randn(9, 3, 4, dtype=torch.float64)
    layers = [nn.FastWeightsRNN(4, 5, form=form, dtype=torch.float64) for form in ("auto", "attention", "matrix")]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    for y, state in (layer(x) for layer in layers):
        torch.testing.assert_close(y, layers[0](x)[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state.memory, layers[0](x)[1].memory, rtol=1e-10, atol=1e-12)
    assert "form='matrix'" in repr(layers[2])
    with pytest.raises(ValueError, match="form must be one of auto, attention, matrix, got 'dense'"):
        nn.FastWeightsRNN(4, 5, form="dense")


def test_no_warning_on_the_common_path():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = nn.FastWeightsRNN(3, 4, num_layers=2)
        y, _ = layer(torch.randn(5, 2, 3), lengths=torch.tensor([5, 2], dtype=torch.int32))
        y.sum().backward()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    steps=st.integers(2, 9),
    batch=st.integers(1, 35),
    size=st.integers(2, 12),
    cut=st.integers(1, 8),
    layers=st.integers(1, 2),
    inner_steps=st.integers(1, 3),
)
def test_a_stream_cut_anywhere_equals_the_whole(steps, batch, size, cut, layers, inner_steps):
    cut = min(cut, steps - 1)
    torch.manual_seed(steps * batch)
    layer = nn.FastWeightsRNN(2, size, layers, inner_steps=inner_steps, dtype=torch.float64)
    x = torch.randn(steps, batch, 2, dtype=torch.float64)
    with torch.no_grad():
        whole, end = layer(x)
        first, middle = layer(x[:cut])
        second, state = layer(x[cut:], middle)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, end, rtol=1e-9, atol=1e-9)


def test_parameters_are_as_many_as_the_paper_counts():
    # Schlag & Schmidhuber 2017 count 100,140 for this cell at H = 300, with 15 symbols in and out.
    embedding, readout = 15 * 15, 300 * 15 + 15
    assert embedding + sum(p.numel() for p in nn.FastWeightsRNN(15, 300, rate=0.5).parameters()) + readout == 100_140


def test_two_layers_are_one_on_top_of_another():
    torch.manual_seed(0)
    both = nn.FastWeightsRNN(3, 4, num_layers=2, dtype=torch.float64)
    lower = nn.FastWeightsRNN(3, 4, dtype=torch.float64)
    upper = nn.FastWeightsRNN(4, 4, dtype=torch.float64)
    lower.load_state_dict({name: both.state_dict()[name] for name in lower.state_dict()})
    names = {name: name.replace("norm", "norm_l1") if "norm" in name else name + "_l1" for name in upper.state_dict()}
    upper.load_state_dict({name: both.state_dict()[stacked] for name, stacked in names.items()})
    x, lengths = torch.randn(5, 2, 3, dtype=torch.float64), torch.tensor([5, 2])
    _, start = both(x)
    y, end = both(x, start, lengths=lengths)
    below, first = lower(x, nn.FastWeightsState(start.hidden[0], start.memory[0]), lengths=lengths)
    expected, second = upper(below, nn.FastWeightsState(start.hidden[1], start.memory[1]), lengths=lengths)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for stacked, *single in zip(end, first, second, strict=True):
        torch.testing.assert_close(stacked, torch.stack(single), rtol=1e-12, atol=1e-12)


def test_neither_the_input_nor_the_state_is_written_to():
    x = torch.randn(5, 2, 3)
    _, state = LAYER(x)
    given = [tensor.detach().clone() for tensor in (x, *state)]
    y, _ = LAYER(x, state)
    y.sum().backward()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((x, *state), given, strict=True))


def test_the_repr_shows_what_differs_from_the_defaults():
    assert nn.FastWeightsRNN(3, 4, rate=0.5).extra_repr() == "3, 4, decay=0.95, rate=0.5"
    cell = nn.FastWeightsRNNCell(
        3, 4, inner_steps=2, nonlinearity="tanh", layer_norm=False, normalize_initial=True, impl="reference"
    )
    assert cell.extra_repr() == (
        "3, 4, decay=0.95, rate=None, inner_steps=2, nonlinearity='tanh', layer_norm=False, normalize_initial=True, "
        "impl='reference'"
    )
    assert nn.FastWeightsRNN(3, 4, hold_input=False).extra_repr() == "3, 4, decay=0.95, rate=None, hold_input=False"
    assert nn.GatedFastWeightsRNN(3, 4, layer_norm="none").extra_repr() == "3, 4, layer_norm='none'"
    layer = nn.FastWeightsRNN(3, 4, 2, dropout=0.1, batch_first=True)
    assert layer.extra_repr() == "3, 4, decay=0.95, rate=None, num_layers=2, dropout=0.1, batch_first=True"


@pytest.mark.parametrize("lengths", [None, torch.zeros(0, dtype=torch.long)])
def test_an_empty_batch_gives_an_empty_answer_and_no_gradient(lengths):
    layer = nn.FastWeightsRNN(3, 4)
    y, state = layer(torch.zeros(5, 0, 3), lengths=lengths)
    assert y.shape == (5, 0, 4)
    assert state.memory.shape == (0, 4, 4)
    (y.sum() + state.memory.sum()).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_shapes_can_be_had_without_numbers():
    y, state = nn.FastWeightsRNN(3, 4, device="meta")(torch.empty(5, 2, 3, device="meta"))
    assert y.shape == (5, 2, 4)
    assert state.memory.shape == (2, 4, 4)
    assert y.device.type == state.memory.device.type == "meta"


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": -0.1}, r"decay must lie between 0 and 1, got -0\.1"),
        ({"decay": 1.1}, r"decay must lie between 0 and 1, got 1\.1"),
        ({"decay": math.nan}, "decay must lie between 0 and 1, got nan"),
        ({"rate": -0.5}, r"rate must be finite and not negative, got -0\.5"),
        ({"rate": math.inf}, "rate must be finite and not negative, got inf"),
        ({"inner_steps": 0}, "inner_steps must be a whole number from 1 to 10,000, got 0"),
        ({"inner_steps": 1.5}, r"inner_steps must be a whole number from 1 to 10,000, got 1\.5"),
        ({"inner_steps": 2**32 + 1}, "inner_steps must be a whole number .*, got 4294967297"),
        ({"nonlinearity": "sigmoid"}, "nonlinearity must be one of relu, tanh, got 'sigmoid'"),
        ({"identity_scale": math.nan}, "identity_scale must be finite, got nan"),
        ({"impl": "gpu"}, "impl must be one of auto, reference, cpu, triton, got 'gpu'"),
    ],
)
def test_what_no_layer_can_have_is_refused(maker, options, message):
    with pytest.raises(ValueError, match=message):
        maker(**{"input_size": 3, "hidden_size": 4, **options})


def test_dropout_is_a_probability_and_a_single_layer_warns_as_torch_does():
    with pytest.raises(ValueError, match=r"dropout must lie between 0 and 1, got 1\.5"):
        nn.FastWeightsRNN(3, 4, dropout=1.5)
    with pytest.warns(UserWarning, match=r"dropout=0\.5 acts between layers and does nothing with num_layers=1"):
        nn.FastWeightsRNN(3, 4, dropout=0.5)


STATE = nn.FastWeightsState(torch.zeros(2, 4), torch.zeros(2, 4, 4))


def test_a_state_of_one_layer_does_not_fit_two():
    with pytest.raises(ValueError, match=r"state\.hidden must have shape \(2, 2, 4\) for this x, got \(2, 4\)"):
        nn.FastWeightsRNN(3, 4, num_layers=2)(torch.zeros(5, 2, 3), STATE)


@pytest.mark.parametrize(
    ("x", "state", "message"),
    [
        (torch.zeros(2, 9), None, r"x must be \[B,D\] or \[D\] with D = 3, got shape \(2, 9\)"),
        (torch.zeros(5, 2, 3), None, r"got shape \(5, 2, 3\)"),
        (torch.zeros(3, 3), STATE, r"state\.hidden must have shape \(3, 4\)"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(x, state, message):
    with pytest.raises(ValueError, match=message):
        nn.FastWeightsRNNCell(3, 4)(x, state)


def test_asking_for_a_kernel_that_is_not_there_says_why(monkeypatch):
    monkeypatch.setattr("fastweights.ops._native.MISSING", "it was not built")
    with pytest.raises(KernelError, match="impl='cpu' was asked for, but it was not built"):
        nn.FastWeightsRNN(3, 4, impl="cpu")(torch.zeros(5, 2, 3))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match="impl='triton' was asked for"):
        nn.FastWeightsRNN(3, 4, impl="triton")(torch.zeros(5, 2, 3))


def test_any_integers_are_lengths():
    x = torch.randn(5, 2, 3)
    expected, end = LAYER(x, lengths=torch.tensor([5, 2]))
    for dtype in (torch.int32, torch.uint8):
        y, after = LAYER(x, lengths=torch.tensor([5, 2], dtype=dtype))
        assert torch.equal(y, expected)
        assert torch.equal(after.memory, end.memory)
    alone, _ = LAYER(x[:, 1], lengths=torch.tensor(2))
    torch.testing.assert_close(alone, LAYER(x[:, 1:], lengths=torch.tensor([2]))[0][:, 0], rtol=0, atol=0)


def test_a_layer_of_another_rate_is_told_and_an_old_pickle_keeps_its_own():
    with pytest.raises(RuntimeError, match=r"log_rate is of a layer that learns its rate, and this one has rate=0.5"):
        nn.FastWeightsRNN(4, 6, rate=0.5).load_state_dict(nn.FastWeightsRNN(4, 6).state_dict())
    layer = nn.FastWeightsRNN(4, 6, rate=0.5)
    state = layer.__getstate__() if hasattr(layer, "__getstate__") else layer.__dict__
    old = nn.FastWeightsRNN.__new__(nn.FastWeightsRNN)
    old.__setstate__({name: value for name, value in state.items() if name != "rate"})
    assert old.rates() == [0.5]
    x = torch.randn(3, 2, 4)
    assert torch.equal(old(x)[0], layer(x)[0])
