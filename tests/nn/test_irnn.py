import math

import pytest
import torch

from fastweights import nn


@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_torchs_relu_network_with_identity_weights(layers):
    torch.manual_seed(0)
    layer = nn.IRNN(7, 300, layers, identity_scale=0.5)
    assert isinstance(layer, torch.nn.RNN)
    assert layer.nonlinearity == "relu"
    bound = 1 / math.sqrt(300)
    for index in range(layers):
        assert torch.equal(getattr(layer, f"weight_hh_l{index}"), 0.5 * torch.eye(300))
        assert torch.equal(getattr(layer, f"bias_ih_l{index}"), torch.zeros(300))
        assert torch.equal(getattr(layer, f"bias_hh_l{index}"), torch.zeros(300))
        weight = getattr(layer, f"weight_ih_l{index}")
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_its_steps_are_those_of_the_equation():
    layer = nn.IRNN(3, 4, identity_scale=1.0, dtype=torch.float64)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    y, last = layer(x)
    weight = dict(layer.named_parameters())["weight_ih_l0"]
    h = torch.zeros(2, 4, dtype=torch.float64)
    for t in range(5):
        h = torch.relu(x[t] @ weight.T + h)
        torch.testing.assert_close(y[t], h, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last[0], h, rtol=1e-12, atol=1e-12)


def test_a_scale_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="identity_scale must be finite, got nan"):
        nn.IRNN(3, 4, identity_scale=math.nan)


def test_the_repr_shows_the_scale():
    assert repr(nn.IRNN(3, 4)) == "IRNN(3, 4, identity_scale=0.5)"
