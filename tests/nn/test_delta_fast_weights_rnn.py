"""DeltaFastWeightsRNN: its parameters in the equations of its docstring, its start, and what it refuses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations, prune

from fastweights import nn


@pytest.mark.parametrize("gated", [False, True])
def test_it_is_its_equations_in_a_loop(gated: bool) -> None:
    features, size, heads, width, convolution = 5, 6, 2, 3, 3
    torch.manual_seed(0)
    layer = nn.DeltaFastWeightsRNN(
        features, size, heads, convolution=convolution, output_gate=gated, dtype=torch.float64
    )
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.5)
    x = torch.randn(7, features, dtype=torch.float64)
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    products = x.numpy() @ p["weight_ih"].T + p["bias"]
    driven = np.concatenate((np.zeros((convolution - 1, products.shape[1])), products))
    h, memory = np.zeros(size), np.zeros((heads, width, width))
    outputs, state = layer(x)
    for step, y in enumerate(outputs):
        row = p["convolution_bias"] + (p["convolution_weight"].T * driven[step : step + convolution]).sum(0)
        row += p["weight_hh"] @ h
        read = []
        for head in range(heads):
            q, k, v = (row[part * size + head * width :][:width] for part in range(1, 4))
            q, k, v = (values / (1 + np.exp(-values)) for values in (q, k, v))
            q, k = q / np.linalg.norm(q), k / np.linalg.norm(k)
            decay, rate = (1 / (1 + np.exp(-row[4 * size + part * heads + head])) for part in range(2))
            memory[head] *= decay
            memory[head] += rate * np.outer(k, v - k @ memory[head])
            read.append(q @ memory[head])
        sums = row[:size] + np.concatenate(read)
        normal = (sums - sums.mean()) / np.sqrt(sums.var() + 1e-5)
        h = (normal * p["norm.weight"] + p["norm.bias"]).clip(0)
        given = h
        if gated:
            gate = p["gate.weight"] @ x[step].numpy() + p["gate.bias"]
            given = h * gate / (1 + np.exp(-gate))
        assert np.allclose(y.detach().numpy(), given, rtol=0, atol=1e-12)
    assert np.allclose(state.hidden.detach().numpy(), h, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [4, 40, 400])
def test_at_the_start_most_of_the_memory_is_kept_at_every_width(size: int) -> None:
    layer = nn.DeltaFastWeightsRNN(size, size, 2)
    _, state = layer(torch.randn(50, 3, size))
    _, after = layer(torch.zeros(1, 3, size), state)
    kept = (after.memory.norm() / state.memory.norm()).item()
    assert 0.8 < kept < 1.2
    assert 0.1 < state.hidden.square().mean() < 2


@pytest.mark.parametrize("convolution", [0, 4])
@pytest.mark.parametrize(("size", "heads"), [(32, 1), (50, 1), (64, 2), (128, 4), (400, 1), (400, 4)])
def test_at_the_start_the_memory_is_heard_in_heads_of_32_units_and_more(
    size: int, heads: int, convolution: int
) -> None:
    torch.manual_seed(0)
    layer = nn.DeltaFastWeightsRNN(size, size, heads, convolution=convolution)
    _, state = layer(torch.randn(50, 8, size))
    now = torch.randn(1, 8, size)
    whole, _ = layer(now, state)
    deaf, _ = layer(now, state._replace(memory=torch.zeros_like(state.memory)))
    assert (whole - deaf).norm() > 0.03 * whole.norm()  # a hundredth with 400 units where values start as small as keys


@pytest.mark.parametrize(
    ("size", "heads", "reach"),
    [
        (2, 1, 0.25),
        (16, 1, 0.25),
        (24, 1, 1.265625),
        (32, 1, 4),
        (300, 1, 4),
        (64, 4, 0.25),
        (64, 2, 4),
        (400, 50, 0.25),
    ],
)
def test_values_start_as_small_as_keys_in_narrow_heads(size: int, heads: int, reach: float) -> None:
    torch.manual_seed(0)
    layer = nn.DeltaFastWeightsRNN(100, size, heads)
    values, keys = layer.weight_ih[3 * size : 4 * size], layer.weight_ih[2 * size : 3 * size]
    assert 0.9 * reach < 10 * values.abs().max() < 1.0001 * reach
    assert 0.9 * 0.25 < 10 * keys.abs().max() < 1.0001 * 0.25


def test_heads_that_do_not_divide_the_units_are_refused() -> None:
    # Keys of one unit are 1 or -1, and would learn nothing in silence.
    with pytest.raises(ValueError, match="num_heads must leave two units or more to a head, got 6 heads of 6 units"):
        nn.DeltaFastWeightsRNN(4, 6, num_heads=6)
    with pytest.raises(ValueError, match="num_heads must divide hidden_size, got 4 heads of 6 units"):
        nn.DeltaFastWeightsRNN(3, 6, 4)
    with pytest.raises(ValueError, match="convolution must be an integer of at least 0, got -1"):
        nn.DeltaFastWeightsRNN(3, 6, convolution=-1)


def _prune(layer: nn.DeltaFastWeightsRNN) -> None:
    prune.l1_unstructured(layer, "convolution_weight", 5)
    dict(layer.named_parameters())["convolution_weight_orig"].data.mul_(3)


def _parametrize(layer: nn.DeltaFastWeightsRNN) -> None:
    parametrizations.weight_norm(layer, "convolution_weight")


def _drop_biases(layer: nn.DeltaFastWeightsRNN) -> None:
    layer.bias = layer.convolution_bias = None  # type: ignore[assignment]


def _drop_convolution(layer: nn.DeltaFastWeightsRNN) -> None:
    layer.convolution_weight = None


@pytest.mark.parametrize("change", [_prune, _parametrize, _drop_biases, _drop_convolution])
def test_a_streamed_step_is_that_of_a_layer_that_was_changed(change: Callable[[nn.DeltaFastWeightsRNN], None]) -> None:
    torch.manual_seed(0)
    layer = nn.DeltaFastWeightsRNN(5, 6, 2)
    change(layer)
    x = torch.randn(1, 3, 5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0][0], layer(torch.cat((x, x)))[0][0])
