"""A recurrence without bounds says once that its state is no longer finite, and what to do."""

import warnings
from typing import Any

import pytest
import torch

from fastweights import nn

GROWING: dict[str, Any] = {"layer_norm": False, "rate": 0.5}
TOLD = r"^the state of this \w+ grew until it was not finite: give .*\. This warning comes once$"


def read(layer, x, **steps):
    return layer(x, **steps)[0]


def step(cell, x):
    state = None
    for now in x:
        y, state = cell(now, state)
    return y


@pytest.mark.parametrize(
    ("make", "run", "steps", "advice"),
    [
        (lambda: nn.FastWeightsRNN(4, 64, **GROWING), read, 20, "layer_norm=True, or a smaller rate or decay"),
        (lambda: nn.FastWeightsRNN(4, 64, num_layers=2, **GROWING), read, 20, "layer_norm=True"),
        (lambda: torch.nn.ModuleList([nn.FastWeightsRNN(4, 64, **GROWING)])[0], read, 20, "layer_norm=True"),
        (lambda: nn.FastWeightsRNNCell(4, 64, **GROWING), step, 20, "layer_norm=True"),
        (lambda: nn.IRNN(4, 64, identity_scale=1.5), read, 400, "a smaller identity_scale"),
    ],
)
def test_a_state_that_overflows_is_told_once_at_the_line_that_calls(make, run, steps, advice):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(steps, 2, 4)
    with pytest.warns(UserWarning, match=TOLD) as told:
        assert not read_finite(run(layer, x))
    assert advice in str(told[0].message)
    assert (len(told), told[0].filename) == (1, __file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(layer, x)


def read_finite(y):
    return bool(y.isfinite().all())


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.FastWeightsRNN(4, 64, rate=0.5), torch.randn(20, 2, 4)),
        (nn.FastWeightsRNN(4, 64, nonlinearity="tanh", **GROWING), torch.randn(20, 2, 4)),
        (nn.FastWeightsRNN(4, 8, layer_norm=False), torch.full((3, 2, 4), float("nan"))),  # x is to blame
        (nn.IRNN(4, 8), torch.full((3, 2, 4), float("inf"))),
        (nn.FastWeightsRNN(1, 50, layer_norm=False, rate=0.0), torch.full((1, 1, 1), 1e38)),  # the sum alone overflows
    ],
)
def test_what_does_not_overflow_is_not_told_so(layer, x):
    if x.shape[2] == 1:
        torch.nn.init.ones_(layer.get_parameter("weight_ih"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(layer, x)


def test_an_overflow_late_in_training_is_told_too():
    layer, x = nn.FastWeightsRNN(4, 64, layer_norm=False, rate=0.5, decay=0.0), torch.randn(20, 2, 4)
    for _ in range(70):
        read(layer, 1e-3 * x)
    torch.nn.init.constant_(layer.get_parameter("weight_hh"), 1e9)
    with pytest.warns(UserWarning, match=TOLD):
        [read(layer, x) for _ in range(7)]


def test_weights_that_are_not_finite_are_not_told_as_an_overflow():
    layer = nn.FastWeightsRNN(4, 8, layer_norm=False)
    torch.nn.init.constant_(layer.get_parameter("weight_ih"), float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(layer, torch.randn(3, 2, 4))


def test_padding_is_not_looked_at():
    x, lengths = torch.randn(500, 2, 4), torch.tensor([400, 400])
    x[400:] = float("nan")
    with pytest.warns(UserWarning, match=TOLD):
        read(nn.IRNN(4, 64, identity_scale=1.5), x, lengths=lengths)


def test_nothing_is_looked_at_under_a_transform_or_on_the_way_to_a_graph():
    layer, x = nn.FastWeightsRNN(4, 64, **GROWING), torch.randn(20, 2, 4)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.func.vmap(lambda x: layer(x)[0], in_dims=1)(x)
        nn.FastWeightsRNN(4, 64, device="meta", **GROWING)(x.to("meta"))
        for strict in (False, True):
            torch.export.export(layer, (x,), strict=strict)
            torch.export.export(nn.IRNN(4, 64, identity_scale=1e9), (x,), strict=strict)
    assert not any("not finite" in str(each.message) for each in told)
