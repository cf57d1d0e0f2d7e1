"""The HyperLSTM against a loop over the paper's equations, its start, and its number of parameters."""

import numpy as np
import pytest
import torch

from fastweights.nn import HyperLSTM, HyperLSTMState

GATES = "ifog"


def randomized(layer: HyperLSTM) -> HyperLSTM:
    """Weights without the symmetries of the start."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


def random_state(batch: int, large: int, small: int) -> HyperLSTMState:
    return HyperLSTMState(*(torch.randn(batch, units, dtype=torch.float64) for units in (large, large, small, small)))


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def loop(layer, x, state):
    """One sequence x [T,D] from equations 10 to 13, one gate at a time."""
    value = {name: parameter.detach().numpy() for name, parameter in layer.named_parameters()}
    blocks = {name: np.split(value[name], 4) for name in ("weight_ih", "weight_hh", "bias")}
    blocks |= {name: np.split(value[name], 4) for name in ("hyper_weight_ih", "hyper_weight_hh", "hyper_bias")}
    embedding_weights = [np.split(matrix, 4) for matrix in value["embedding_weight"]]
    embedding_biases = [np.split(vector, 4) for vector in value["embedding_bias"]]

    def normalize(z, name, block):
        if not layer.layer_norm:
            return z
        gain, bias = (value[f"{name}_{kind}"][block] for kind in ("weight", "bias"))
        return gain * (z - z.mean()) / np.sqrt(z.var() + 1e-3) + bias

    def update(gates, cell, name):
        i, f, o, g = (gates[gate] for gate in GATES)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(normalize(cell, name, 4)), cell

    h, c, small_h, small_c = (leaf.numpy() for leaf in state)
    outputs = []
    for now in x:
        gates = {}
        for k, gate in enumerate(GATES):
            both = np.concatenate([h, now])
            z = blocks["hyper_weight_ih"][k] @ both + blocks["hyper_weight_hh"][k] @ small_h + blocks["hyper_bias"][k]
            gates[gate] = normalize(z, "hyper_norm", k)
        small_h, small_c = update(gates, small_c, "hyper_norm")
        for k, gate in enumerate(GATES):
            z_h = embedding_weights[0][k] @ small_h + embedding_biases[0][k]
            z_x = embedding_weights[1][k] @ small_h + embedding_biases[1][k]
            z_b = embedding_weights[2][k] @ small_h
            d_h, d_x, d_b = (value["scale_weight"][j, k].T @ z for j, z in enumerate((z_h, z_x, z_b)))
            y = d_h * (blocks["weight_hh"][k] @ h) + d_x * (blocks["weight_ih"][k] @ now) + d_b + blocks["bias"][k]
            gates[gate] = normalize(y, "norm", k)
        h, c = update(gates, c, "norm")
        outputs.append(h)
    return np.stack(outputs), h, c, small_h, small_c


@pytest.mark.parametrize(
    ("hidden", "small", "embedding", "layer_norm"),
    [
        (1, 1, 1, False),  # with layer normalization one unit is refused
        (2, 2, 1, True),
        *((*sizes, layer_norm) for sizes in [(6, 3, 2), (20, 7, 4), (5, 9, 16)] for layer_norm in (True, False)),
    ],
)
def test_it_is_the_papers_equations(hidden, small, embedding, layer_norm):
    torch.manual_seed(0)
    sizes = {"hyper_hidden_size": small, "hyper_embedding_size": embedding}
    layer = randomized(HyperLSTM(3, hidden, **sizes, layer_norm=layer_norm, dtype=torch.float64))
    x, start = torch.randn(5, 2, 3, dtype=torch.float64), random_state(2, hidden, small)
    y, state = layer(x, start)
    for index in range(2):
        own = HyperLSTMState(*(leaf[index] for leaf in start))
        outputs, *end = loop(layer, x[:, index].numpy(), own)
        torch.testing.assert_close(y[:, index], torch.from_numpy(outputs), rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(state, end, strict=True):
            torch.testing.assert_close(mine[index], torch.from_numpy(theirs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer_norm", [True, False])
def test_second_derivatives(layer_norm):
    torch.manual_seed(1)
    layer = HyperLSTM(2, 3, hyper_hidden_size=2, hyper_embedding_size=1, layer_norm=layer_norm, dtype=torch.float64)
    randomized(layer)
    x = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,))


@pytest.mark.parametrize("layer_norm", [True, False])
def test_it_starts_as_in_the_paper(layer_norm):
    torch.manual_seed(0)
    layer = HyperLSTM(7, 12, hyper_hidden_size=40, hyper_embedding_size=8, layer_norm=layer_norm)
    for weight in (layer.weight_ih, layer.weight_hh, layer.hyper_weight_ih, layer.hyper_weight_hh):
        for gate in weight.detach().chunk(4):
            thin = gate if gate.shape[0] <= gate.shape[1] else gate.t()
            torch.testing.assert_close(thin @ thin.t(), torch.eye(len(thin)), rtol=0, atol=1e-5)
    assert layer.embedding_weight[:2].count_nonzero() == 0
    assert layer.embedding_weight[2].std().item() == pytest.approx(0.01, rel=0.1)
    assert (layer.embedding_bias == 1).all()
    torch.testing.assert_close(layer.scale_weight[:2], torch.full((2, 4, 8, 12), 0.1 / 8))
    assert layer.scale_weight[2].count_nonzero() == 0
    forget = torch.zeros(4)
    forget[GATES.index("f")] = 1
    biases = [layer.bias.view(4, -1), layer.hyper_bias.view(4, -1)]
    if layer_norm:
        assert all((bias == 0).all() for bias in biases)
        assert (layer.norm_weight == 1).all()
        assert (layer.hyper_norm_weight == 1).all()
        norms = (layer.norm_bias, layer.hyper_norm_bias)
        assert all((norm[4] == 0).all() for norm in norms)
        biases = [norm[:4] for norm in norms]
    for bias in biases:
        assert torch.equal(bias, forget.unsqueeze(1).expand_as(bias))


def test_at_the_start_every_row_is_scaled_by_a_tenth():
    """One step of an ordinary LSTM with a tenth of the weights, whatever the small one does."""
    torch.manual_seed(0)
    layer = HyperLSTM(3, 6, hyper_hidden_size=5, hyper_embedding_size=7, layer_norm=False, dtype=torch.float64)
    x, start = torch.randn(1, 2, 3, dtype=torch.float64), random_state(2, 6, 5)
    _, state = layer(x, start)
    rows = 0.1 * (x[0] @ layer.weight_ih.t() + start.hidden @ layer.weight_hh.t()) + layer.bias
    i, f, o, g = rows.chunk(4, 1)
    cell = f.sigmoid() * start.cell + i.sigmoid() * g.tanh()
    torch.testing.assert_close(state.cell, cell, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.hidden, o.sigmoid() * cell.tanh(), rtol=1e-12, atol=1e-12)


def test_the_papers_start_tells_the_components_of_a_scaling_embedding_not_apart():
    torch.manual_seed(0)
    layer = HyperLSTM(3, 6, hyper_hidden_size=5, hyper_embedding_size=4, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        layer(x)[0].square().sum().backward()
        optimizer.step()
    scales = layer.scale_weight.detach()
    distance = (scales - scales[:, :, :1]).abs().amax((1, 2, 3))
    assert distance[:2].max() < 1e-9 < 1e-3 < distance[2]
    assert scales[0].std() > 1e-3  # and yet the rows have learned


@pytest.mark.parametrize(
    ("sizes", "layer_norm"),
    [((3, 6, 4, 2), True), ((15, 20, 7, 5), False), ((1, 1, 1, 1), False), ((1, 2, 2, 1), True)],
)
def test_the_number_of_parameters(sizes, layer_norm):
    d, h, n, e = sizes
    layer = HyperLSTM(d, h, hyper_hidden_size=n, hyper_embedding_size=e, layer_norm=layer_norm)
    expected = 4 * h * (h + d + 1) + 4 * n * (n + h + d + 1) + 4 * e * (3 * n + 2) + 12 * h * e
    expected += 10 * (h + n) if layer_norm else 0
    assert sum(parameter.numel() for parameter in layer.parameters()) == expected


@pytest.mark.parametrize(
    ("characters", "hidden", "small", "embedding", "layer_norm", "millions"),
    [
        (50, 1000, 128, 4, True, 4.92),
        (50, 1000, 128, 4, False, 4.91),
        (205, 1800, 256, 64, False, 18.71),
        (205, 2048, 512, 64, True, 26.54),
    ],
)
def test_the_numbers_of_parameters_that_the_paper_gives(characters, hidden, small, embedding, layer_norm, millions):
    """Tables 3 and 4: Penn Treebank and enwik8, one-hot characters in and a softmax out."""
    options = {"hyper_hidden_size": small, "hyper_embedding_size": embedding, "layer_norm": layer_norm}
    layer = HyperLSTM(characters, hidden, **options, device="meta")
    count = sum(parameter.numel() for parameter in layer.parameters()) + characters * (hidden + 1)
    assert round(count / 1e6, 2) == millions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_is_made_in_any_dtype(dtype):
    layer = HyperLSTM(3, 6, hyper_hidden_size=4, dtype=dtype)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    gate = layer.weight_hh[:6].detach().double()
    torch.testing.assert_close(gate @ gate.t(), torch.eye(6, dtype=torch.float64), rtol=0, atol=0.02)


def test_a_seed_gives_the_same_start():
    layers = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(HyperLSTM(3, 4))
    for mine, theirs in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_layer_made_on_no_device_is_filled_later():
    layer = HyperLSTM(3, 4, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(2, 1, 3))[0].isfinite().all()


def test_autocast_reaches_the_products_over_time_alone():
    torch.manual_seed(0)
    layer, x = randomized(HyperLSTM(3, 4, hyper_hidden_size=5)), torch.randn(6, 2, 3)
    state = layer(x)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, end = layer(x, state)
    assert y.dtype == torch.bfloat16
    assert {leaf.dtype for leaf in end} == {torch.float32}
    assert not torch.equal(end.hidden.bfloat16().float(), end.hidden)


def test_the_repr_names_what_was_chosen():
    text = repr(HyperLSTM(3, 4, hyper_hidden_size=6, hyper_embedding_size=2, layer_norm=False, batch_first=True))
    expected = "HyperLSTM(3, 4, hyper_hidden_size=6, hyper_embedding_size=2, layer_norm=False, batch_first=True)"
    assert text == expected
    assert repr(HyperLSTM(3, 4)) == "HyperLSTM(3, 4, hyper_hidden_size=128, hyper_embedding_size=4)"
