"""The language model against torch's LSTM, against loops over the equations, and its dropout."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastweights.nn import HebbianSoftmax, LSTMLanguageModel, LSTMLanguageModelState

V, E, H, T, B = 11, 4, 6, 9, 3
DROPOUTS: dict[str, Any] = {
    "embedding_dropout": 0.3,
    "input_dropout": 0.3,
    "layer_dropout": 0.3,
    "state_dropout": 0.3,
    "output_dropout": 0.3,
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(layers=1, **options):
    return LSTMLanguageModel(V, E, H, layers, dtype=torch.float64, **options)


def draw(steps=T, batch=B):
    return torch.randint(V, (steps, batch))


def draw_state(layers):
    return LSTMLanguageModelState(*(torch.randn(layers, B, H, dtype=torch.float64) for _ in range(2)))


class Torch(torch.nn.Module):
    """The same model of torch's own layers, with the same weights."""

    def __init__(self, model):
        super().__init__()
        self.model, layers = model, len(model.layers)
        self.lstm = torch.nn.LSTM(E, H, layers, dtype=torch.float64)
        with torch.no_grad():
            for number, layer in enumerate(model.layers):
                getattr(self.lstm, f"weight_ih_l{number}").copy_(layer.weight_ih)
                getattr(self.lstm, f"weight_hh_l{number}").copy_(layer.weight_hh)
                getattr(self.lstm, f"bias_ih_l{number}").copy_(layer.bias)
                getattr(self.lstm, f"bias_hh_l{number}").zero_()

    def forward(self, tokens, state):
        model = self.model
        y, state = self.lstm(model.embedding.weight[tokens], tuple(state))
        return F.linear(model.projection(y), model.head.weight, model.head.bias), state


@pytest.mark.parametrize("layers", [1, 2])
def test_outputs_and_gradients_are_those_of_torchs_lstm(layers):
    model = make(layers)
    peer, state, tokens = Torch(model), draw_state(layers), draw()
    leaves = [tensor.requires_grad_() for tensor in state]
    logits, end = model(tokens, state)
    expected, (hidden, cell) = peer(tokens, state)
    for ours, theirs in ((logits, expected), (end.hidden, hidden), (end.cell, cell)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = [torch.randn_like(tensor) for tensor in (logits, hidden, cell)]
    shared = [*leaves, model.embedding.weight, model.projection.weight]

    def slopes(outputs, own):
        total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
        return torch.autograd.grad(total, [*shared, *own])

    ours = slopes((logits, *end), [part for layer in model.layers for part in layer.parameters()])
    names = ("weight_ih", "weight_hh", "bias_ih")
    own = [getattr(peer.lstm, f"{name}_l{number}") for number in range(layers) for name in names]
    for first, second in zip(ours, slopes((expected, hidden, cell), own), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-11)


@pytest.mark.parametrize("norm", [False, True])
def test_gradients_under_every_dropout_against_differences(norm):
    model = LSTMLanguageModel(5, 2, 3, 2, layer_norm=norm, dtype=torch.float64, **DROPOUTS)
    tokens = torch.randint(5, (4, 2))
    state = LSTMLanguageModelState(*(torch.randn(2, 2, 3, dtype=torch.float64) for _ in range(2)))
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(hidden, cell, *values):
        torch.manual_seed(5)  # the same masks each time
        arguments = (tokens[:-1], LSTMLanguageModelState(hidden, cell))
        logits, end = torch.func.functional_call(model, dict(zip(names, values, strict=True)), arguments)
        return F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten()), end.cell

    inputs = [tensor.detach().requires_grad_() for tensor in (*state, *parameters)]
    assert torch.autograd.gradcheck(loss, inputs)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("norm", [False, True])
def test_a_step_reads_the_state_through_one_mask_all_along(norm):
    model, tokens = make(state_dropout=0.5, layer_norm=norm), draw()
    if norm:
        for part in model.layers[0].norms:
            torch.nn.init.normal_(part.weight)
            torch.nn.init.normal_(part.bias)
    torch.manual_seed(7)
    mask = torch.empty(B, H, dtype=torch.float64).bernoulli_(0.5).mul_(2).numpy()
    torch.manual_seed(7)
    h, _ = model.encode(tokens)

    layer = model.layers[0]
    value = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}

    def normalise(z, number):
        if not norm:
            return z
        centred = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5)
        return centred * value[f"norms.{number}.weight"] + value[f"norms.{number}.bias"]

    hidden, cell = np.zeros((B, H)), np.zeros((B, H))
    for step, now in enumerate(model.embedding.weight.detach().numpy()[tokens.numpy()]):
        drive = normalise(now @ value["weight_ih"].T, 0) + value["bias"]
        i, f, g, o = np.split(drive + normalise((hidden * mask) @ value["weight_hh"].T, 1), 4, axis=1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(normalise(cell, 2))
        expected = hidden @ model.projection.weight.detach().numpy().T
        np.testing.assert_allclose(h[step].detach().numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("sizes", "parameters"), [((10_000, 268, 1194), 9_997_280), ((33_278, 241, 1853), 24_027_989)])
def test_the_papers_models_have_the_papers_parameters(sizes, parameters):
    model = LSTMLanguageModel(*sizes, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("norm", [False, True])
def test_a_text_in_pieces_gives_what_it_gives_whole(norm):
    model, tokens = make(2, layer_norm=norm), draw()
    whole, end = model(tokens)
    first, state = model(tokens[:4])
    second, last = model(tokens[4:], state)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(tuple(last), tuple(end), rtol=0, atol=1e-12)


LENGTHS = torch.tensor([9, 0, 5])
STARTS = torch.zeros(T, B, dtype=torch.bool)
STARTS[0, 0] = STARTS[4, 0] = STARTS[2, 2] = STARTS[6, 2] = True  # the last is past the length of its text


def run_apart(model, tokens, state):
    """Every text by itself, from one start to the next: the logits, zero past a length, and the state of each."""
    logits, ends = torch.zeros(T, B, V, dtype=torch.float64), []
    for index, length in enumerate(LENGTHS.tolist()):
        now: Any
        now, begin = LSTMLanguageModelState(*(part[:, index : index + 1] for part in state)), 0
        for mark in [*(t for t in range(length) if STARTS[t, index]), length]:
            if mark > begin:
                y, now = model(tokens[begin:mark, index : index + 1], now)
                logits[begin:mark, index] = y[:, 0]
            if mark < length:
                now, begin = None, mark
        ends.append(now)
    return logits, LSTMLanguageModelState(*(torch.cat(parts, 1) for parts in zip(*ends, strict=True)))


@pytest.mark.parametrize("norm", [False, True])
def test_texts_that_end_early_or_start_anew_are_as_texts_of_their_own(norm):
    model, tokens = make(2, layer_norm=norm), draw()
    state = draw_state(2)
    leaves = [*(part.requires_grad_() for part in state), *model.parameters()]
    padded = torch.where(torch.arange(T).unsqueeze(1) < LENGTHS, tokens, -100)  # whatever stands there
    logits, end = model(padded, state, lengths=LENGTHS, starts=STARTS)
    expected, last = run_apart(model, tokens, state)
    torch.testing.assert_close((logits, *end), (expected, *last), rtol=0, atol=1e-12)
    gradients = []
    for results in ((logits, *end), (expected, *last)):
        weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).double() for part in results]
        gradients.append(torch.autograd.grad(results, leaves, weights))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    h, _ = model.encode(padded, state, lengths=LENGTHS, starts=STARTS)
    for index, length in enumerate(LENGTHS.tolist()):
        assert (h[length:, index] == 0).all()


@pytest.mark.parametrize("hebbian", [None, {"gamma": 0.1, "limit": 10}])
def test_the_loss_is_the_mean_over_the_tokens_within_the_lengths(hebbian):
    model, tokens = make(hebbian=hebbian), draw(T + 1)
    valid = torch.arange(T).unsqueeze(1) < LENGTHS
    targets = torch.where(valid, tokens[1:], V)  # which would be refused
    loss, state = model.loss(tokens[:-1], targets, lengths=LENGTHS, starts=STARTS)
    logits, end = model(tokens[:-1], lengths=LENGTHS, starts=STARTS)
    torch.testing.assert_close(loss, F.cross_entropy(logits[valid], targets[valid]), rtol=0, atol=1e-12)
    torch.testing.assert_close(tuple(state), tuple(end), rtol=0, atol=1e-12)
    marked = torch.where(valid, targets, -100)
    torch.testing.assert_close(model.loss(tokens[:-1], marked, starts=STARTS)[0], loss, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"target \[10, 3\]"):
        model.loss(tokens[:-1], tokens, lengths=LENGTHS)


def test_the_dropout_of_the_state_is_that_of_every_layer():
    model = make(2, state_dropout=0.5)
    assert model.state_dropout == model.settings["state_dropout"] == 0.5
    model.state_dropout = 0.25
    assert [layer.state_dropout for layer in model.layers] == [0.25, 0.25]
    assert "state_dropout=0.25" in model.extra_repr()


def test_a_model_opens_that_was_pickled_when_its_layers_stood_in_its_file():
    model = make(2, state_dropout=0.5, layer_norm=True)
    before = copy.deepcopy(model)
    before.__dict__["state_dropout"] = 0.5
    for layer in before.layers:
        for name in ("input_size", "layer_norm", "state_dropout", "batch_first"):
            del layer.__dict__[name]
    now, then = b"fastweights.nn._lstm\nLSTM\n", b"fastweights.nn.lstm_language_model\n_LSTM\n"
    written = pickle.dumps(before, protocol=2)
    assert now in written
    opened = pickle.loads(written.replace(now, then))
    assert repr(opened) == repr(model)
    assert opened.settings == model.settings
    tokens = draw()
    results = []
    for one in (opened, model):
        torch.manual_seed(3)
        results.append(one(tokens)[0])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_gradients_of_gradients_against_differences():
    model = LSTMLanguageModel(4, 2, 2, dtype=torch.float64)
    tokens, names = torch.randint(4, (3, 2)), ["layers.0.weight_ih", "layers.0.weight_hh", "layers.0.bias"]

    def run(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (tokens,))[0]

    assert torch.autograd.gradgradcheck(run, [model.get_parameter(name) for name in names])


def inputs_of(model, tokens, layer=0):
    """The inputs of a layer in training, as multiples of what they are without dropout."""
    seen = []
    handle = model.layers[layer].register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    model.eval()
    model.encode(tokens)
    model.train()
    model.encode(tokens)
    handle.remove()
    return seen[1] / seen[0]


def test_what_a_unit_forgets_begins_at_a_bias_of_one():
    for layer in make(2).layers:
        into, forgets, new, out = layer.bias.chunk(4)  # in the order of torch.nn.LSTM
        assert forgets.tolist() == [1] * H
        assert not torch.cat([into, new, out]).any()


def test_masks_of_inputs_are_fixed_over_time_and_differ_between_sequences():
    factors = inputs_of(make(input_dropout=0.5), draw(batch=40))
    assert torch.allclose(factors, factors[:1].expand_as(factors))
    kept = factors[0]
    assert set(kept.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(kept[0], kept[1])


def test_masks_between_layers_are_fixed_over_time():
    model = make(2, layer_dropout=0.5)
    factors = inputs_of(model, draw(batch=40), layer=1)
    assert torch.allclose(factors, factors[:1].expand_as(factors))
    assert set(factors.round(decimals=9).unique().tolist()) == {0.0, 2.0}


def test_a_token_is_dropped_wherever_it_stands():
    tokens = draw(batch=40)
    factors = inputs_of(make(embedding_dropout=0.5), tokens)
    of_token = [factors[tokens == token].round(decimals=9).unique().tolist() for token in range(V)]
    assert sorted(map(tuple, of_token))[0] == (0.0,)
    assert set(map(tuple, of_token)) == {(0.0,), (2.0,)}


def test_the_softmax_drops_for_each_token_and_evaluation_drops_nothing():
    model, tokens = make(output_dropout=0.5), draw()
    model.head.weight.data[:E] = torch.eye(E)  # the first logits are what reaches the softmax
    h, _ = model.eval().encode(tokens)
    logits, _ = model.train()(tokens)
    kept = logits[..., :E] / h
    assert set(kept.round(decimals=9).unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(kept[0], kept[1])
    quiet = make(**DROPOUTS).eval()
    torch.testing.assert_close(quiet(tokens)[0], quiet(tokens)[0], rtol=0, atol=0)


@pytest.mark.parametrize("hebbian", [None, {"gamma": 0.1, "limit": 10}])
def test_the_loss_is_the_mean_cross_entropy_and_its_state_is_cut(hebbian):
    model, tokens = make(hebbian=hebbian), draw(T + 1)
    loss, state = model.loss(tokens[:-1], tokens[1:])
    logits, _ = model(tokens[:-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert not state.hidden.requires_grad
    assert model(tokens[:-1])[1].hidden.requires_grad


def test_a_hebbian_softmax_remembers_what_comes_before_its_dropout_in_the_tied_embedding():
    model = make(output_dropout=0.5, hebbian={"gamma": 1.0, "limit": 10})
    assert isinstance(model.head, HebbianSoftmax)
    assert model.head.dropout == 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.head.attach(optimizer)
    tokens = torch.tensor([[1, 2], [3, 4]])
    h, _ = model.encode(tokens[:1])
    loss, _ = model.loss(tokens[:1], tokens[1:])
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(model.embedding.weight[[3, 4]], h[0], rtol=0, atol=1e-12)
    assert model.head.counts.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("hebbian", [None, {"gamma": 0.1}])
def test_it_starts_as_it_says(hebbian):
    model = LSTMLanguageModel(500, 16, 25, hebbian=hebbian)
    assert model.projection is not None
    for weight, bound in (
        (model.embedding.weight, 0.1),
        (model.layers[0].get_parameter("weight_hh"), 1 / 5),  # as torch.nn.LSTM and torch.nn.Linear
        (model.projection.weight, 1 / 5),
    ):
        assert 0.95 * bound < weight.max() <= bound
        assert -bound <= weight.min() < -0.95 * bound
        assert abs(weight.mean()) < 4 * bound / (3 * weight.numel()) ** 0.5
    assert model.head.bias is not None
    assert not model.head.bias.any()


def test_arguments_of_the_hebbian_softmax_are_those_that_are_given():
    given = make(output_dropout=0.5, hebbian={"gamma": 0.1, "dropout": 0.2, "bias": False}).head
    assert isinstance(given, HebbianSoftmax)
    assert (given.gamma, given.dropout, given.bias) == (0.1, 0.2, None)
    others = make(output_dropout=0.5, hebbian={}).head
    assert isinstance(others, HebbianSoftmax)
    assert others.dropout == 0.5
    assert others.bias is not None


def test_weights_are_tied_unless_they_are_not_wanted_so():
    tied, untied = make(), make(tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    copied = copy.deepcopy(make())
    assert copied.head.weight is copied.embedding.weight
    wide = LSTMLanguageModel(V, 6, 6)
    assert wide.projection is None
    assert wide(draw())[0].shape == (T, B, V)


def test_dropout_between_layers_keeps_the_mean_in_full_where_products_are_in_half_precision():
    model, seen = LSTMLanguageModel(V, E, H, 2, layer_dropout=0.3), []
    model.layers[0].register_forward_hook(lambda layer, given, found: seen.append(found[0]))
    model.layers[1].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        model(draw())
    out, read = seen
    assert out.dtype == torch.bfloat16
    kept = read != 0
    assert 0 < kept.double().mean() < 1
    torch.testing.assert_close(read[kept], out[kept].float() / 0.7)  # 1 / 0.7 in bfloat16 is a thousandth off


def test_half_precision_of_products_keeps_the_state_in_full():
    torch.manual_seed(0)
    model = LSTMLanguageModel(V, E, H)
    tokens = draw(T + 1)
    with torch.autocast("cpu", torch.bfloat16):
        loss, state = model.loss(tokens[:-1], tokens[1:])
    loss.backward()
    assert state.hidden.dtype == torch.float32
    exact, _ = model.loss(tokens[:-1], tokens[1:])
    assert abs(loss.item() - exact.item()) < 0.02
    rounded = [parameter.grad for parameter in model.parameters()]
    for ours, true in zip(rounded, torch.autograd.grad(exact, list(model.parameters())), strict=True):
        assert ours is not None
        assert (ours - true).norm() < 0.03 * true.norm()  # bfloat16 keeps 8 bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"state_dropout": 1.0}, "state_dropout must be a probability less than 1, got 1.0"),
        ({"hebbian": {"gamma": 2}}, "gamma must lie between 0 and 1, got 2"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LSTMLanguageModel(**({"vocabulary_size": V, "embedding_size": E, "hidden_size": H} | options))


def test_tokens_and_states_that_do_not_fit_are_refused():
    model = make()
    with pytest.raises(ValueError, match=r"tokens must be \[T,B\] int64 with at least one step, got \[3\]"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got \[2, 3\] torch.int32"):
        model(draw(2).int())
    with pytest.raises(ValueError, match=r"0 to 10, got 0 to 11: is the text encoded with another vocabulary\?"):
        model(torch.tensor([[0], [V]]))
    with pytest.raises(ValueError, match=r"state.hidden must have shape \(1, 3, 6\) for this x, got \(2, 3, 6\)"):
        model(draw(), draw_state(2))
    with pytest.raises(TypeError, match=r"^state must be a LSTMLanguageModelState for this x, .* got a tuple of 1$"):
        model(draw(), (torch.zeros(1, B, H),))
    with pytest.raises(ValueError, match="lengths must lie between 0 and the 9 steps of x, got 1 to 10"):
        model(draw(), lengths=torch.tensor([1, 10, 9]))
    with pytest.raises(TypeError, match=r"starts must be torch.bool, got torch.int64: starts.bool\(\)"):
        model(draw(), starts=draw())
    with pytest.raises(ValueError, match=r"starts must be \[T,B\] of the steps of x, \(9, 3\), got shape \(3, 9\)"):
        model(draw(), starts=STARTS.t())
    with pytest.raises(ValueError, match="is not one of the 11 classes"):
        model.loss(draw(), draw() + V)
