"""The rate that `FastWeightsRNN` learns by default: where it begins at every size, and what is saved of it."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fastweights import nn

MAKERS = [nn.FastWeightsRNN, nn.FastWeightsRNNCell]


@torch.no_grad()
def length_of_reading(units, steps, decay, rate=None):
    """How long A h_0 is beside z at the last of some steps of an untrained layer."""
    torch.manual_seed(0)
    layer: Any = nn.FastWeightsRNN(32, units, decay=decay, rate=rate)
    x = torch.randn(steps, 8, 32)
    _, (hidden, memory) = layer(x[:-1])
    z = F.linear(x[-1], layer.weight_ih, layer.bias) + F.linear(hidden, layer.weight_hh)
    memory = decay * memory + layer.rates()[0] * hidden.unsqueeze(2) * hidden.unsqueeze(1)
    reading = (memory @ z.relu().unsqueeze(2)).squeeze(2)
    return float((reading.norm(dim=1) / z.norm(dim=1)).mean())


@pytest.mark.parametrize("units", [16, 64, 256, 1024])
def test_what_is_read_begins_shorter_than_what_comes_in(units):
    cases = [(steps, decay) for steps in (24, 200) for decay in (0.5, 0.95, 0.99)]
    assert all(1 / 200 < length_of_reading(units, *case) < 1 / 5 for case in cases)
    assert all(length_of_reading(units, *case, rate=0.5) > 1 for case in cases)  # the paper's constant: up to 19,000


def share_right(units, *, most=300, **options):
    """The share of right answers to which of four symbols was read two steps before, after some updates by Adam."""
    torch.manual_seed(0)
    layer, output = nn.FastWeightsRNN(4, units, **options), torch.nn.Linear(units, 4)
    parameters = [*layer.parameters(), *output.parameters()]
    optimizer, right = torch.optim.Adam(parameters, lr=3e-3), []
    for _ in range(most):
        symbols = torch.randint(4, (10, 16))
        logits = output(layer(F.one_hot(symbols, 4).float())[0])[2:]
        right.append(float((logits.argmax(2) == symbols[:-2]).float().mean()))
        if sum(right[-10:]) > 9.5:
            break
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), symbols[:-2].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return sum(right[-10:]) / 10


@pytest.mark.parametrize("units", [8, 80, 800])
def test_the_default_learns_what_came_before_at_every_size(units):
    assert share_right(units, most=1000) > 0.85


def test_the_constant_of_the_paper_does_not():
    assert share_right(80, most=150, rate=0.5) < 0.6  # the default needs some forty updates


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("decay", "first"), [(0.0, 0.5), (0.9, 0.05), (0.95, 0.025), (1.0, 0.0005)])
def test_the_first_rate_is_that_of_the_sizes(maker, decay, first):
    layer = maker(3, 40, decay=decay)
    assert layer.rates() == [pytest.approx(first / 40)]
    with torch.no_grad():
        layer.log_rate.fill_(0.1)
    assert layer.rates() == [pytest.approx(first / 40 * math.e**2)]
    layer.reset_parameters()
    assert layer.rates() == [pytest.approx(first / 40)]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_number_is_no_parameter(maker):
    layer = maker(3, 4, rate=0.25)
    assert layer.rates() == [0.25]
    assert "log_rate" not in layer.state_dict()
    assert layer.log_rate is None


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("steps", [4, 30])  # one that is run as attention, one that forms the matrix
def test_a_learnt_rate_writes_as_the_same_number_does(impl, steps):
    learnt: Any = nn.FastWeightsRNN(3, 5, 2, impl=impl, dtype=torch.float64)
    with torch.no_grad():
        learnt.log_rate.fill_(0.2)
        learnt.log_rate_l1.fill_(0.2)
    given = nn.FastWeightsRNN(3, 5, 2, rate=learnt.rates()[0], impl=impl, dtype=torch.float64)
    given.load_state_dict({name: learnt.state_dict()[name] for name in given.state_dict()})
    x, lengths = torch.randn(steps, 2, 3, dtype=torch.float64), torch.tensor([steps, 2])
    starts, strengths = torch.rand(steps, 2) < 0.2, torch.rand(steps, 2, dtype=torch.float64)
    for options in ({}, {"lengths": lengths, "starts": starts}, {"strengths": strengths}):
        (y, end), (expected, after) = (layer(x, **options) for layer in (learnt, given))
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(end.memory, after.memory, rtol=1e-10, atol=1e-12)


def test_training_moves_the_rate_of_each_layer():
    layer = nn.FastWeightsRNN(3, 8, num_layers=2)
    before = layer.rates()
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    layer(torch.randn(7, 4, 3))[0].square().mean().backward()
    optimizer.step()
    for first, now in zip(before, layer.rates(), strict=True):
        assert abs(math.log(now / first)) == pytest.approx(0.02, rel=0.01)  # Adam's first step is its learning rate


def test_a_state_dict_of_a_fixed_rate_says_that_the_rate_is_missing():
    saved = nn.FastWeightsRNN(3, 4, rate=0.5).state_dict()
    with pytest.raises(RuntimeError, match=r"weight_hh comes without log_rate.* give that number .*rate=0\.5"):
        nn.FastWeightsRNN(3, 4).load_state_dict(saved)
    nn.FastWeightsRNN(3, 4, rate=0.5).load_state_dict(saved)
    body = torch.nn.ModuleDict({"core": nn.FastWeightsRNN(3, 4)})
    with pytest.raises(RuntimeError, match=r"core\.weight_hh comes without core\.log_rate"):
        body.load_state_dict({f"core.{name}": tensor for name, tensor in saved.items()})


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_saved_layer_keeps_its_rate(tmp_path, rate):
    layer: Any = nn.FastWeightsRNN(3, 4, num_layers=2, rate=rate)
    if rate is None:
        torch.nn.init.constant_(layer.log_rate_l1, 0.05)
    layer.save_pretrained(tmp_path)
    loaded = nn.FastWeightsRNN.from_pretrained(tmp_path)
    assert (loaded.rates(), loaded.settings["rate"]) == (layer.rates(), rate)
