"""Local adaptation: the closed form and the general path against torch's own optimizers, a query at a time."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights.memory import _affine, _general, _low_rank

QUERIES, NEIGHBOURS, FEATURES, OUTPUTS = 4, 6, 5, 7
OPTIMIZERS = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}


def problem(dtype, *, regression=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(QUERIES, FEATURES, dtype=torch.float64, generator=generator)
    keys = torch.randn(QUERIES, NEIGHBOURS, FEATURES, dtype=torch.float64, generator=generator)
    values = torch.randint(0, OUTPUTS, (QUERIES, NEIGHBOURS), generator=generator)
    values[:, 1] = values[:, 0]  # a label twice
    weights = torch.rand(QUERIES, NEIGHBOURS, dtype=torch.float64, generator=generator)
    weights /= weights.sum(1, keepdim=True)
    if regression:
        targets = torch.randn(QUERIES, NEIGHBOURS, OUTPUTS, dtype=torch.float64, generator=generator).to(dtype)
        return queries.to(dtype), keys.to(dtype), targets, weights.to(dtype)
    return queries.to(dtype), keys.to(dtype), values, weights.to(dtype)


def loop(output, queries, keys, values, weights, *, steps, lr, penalty, optimizer="sgd"):
    """Algorithm 1 of Sprechmann et al. 2018: a copy of the network for each query, torch's optimizer."""
    outputs = []
    for q, h, v, w in zip(queries, keys, values, weights, strict=True):
        network = copy.deepcopy(output)
        start = [parameter.detach().clone() for parameter in output.parameters()]
        stepper = OPTIMIZERS[optimizer](network.parameters(), lr=lr)
        for _ in range(steps):
            stepper.zero_grad()
            predicted = network(h)
            if v.is_floating_point():
                losses = (predicted - v).square().mean(1)
            else:
                losses = F.cross_entropy(predicted, v, reduction="none")
            far = sum((now - then).square().sum() for now, then in zip(network.parameters(), start, strict=True))
            ((w * losses).sum() + 0.5 * penalty * far).backward()
            stepper.step()
        with torch.no_grad():
            outputs.append(network(q[None])[0])
    return torch.stack(outputs)


def closed_form(output, queries, *context, **told):
    with torch.no_grad():
        outputs = output(context[0])
        return _affine.adapted(
            queries, _affine.Context(*context), outputs.__getitem__, output.weight, output.bias, **told
        )


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("regression", [True, False])
@pytest.mark.parametrize("numbers", [1, 2 * NEIGHBOURS * OUTPUTS, 2**22])
def test_the_closed_form_is_autograd(monkeypatch, dtype, steps, penalty, bias, regression, numbers):
    monkeypatch.setattr(_affine, "NUMBERS", numbers)
    torch.manual_seed(0)
    output = nn.Linear(FEATURES, OUTPUTS, bias=bias, dtype=dtype)
    queries, *context = problem(dtype, regression=regression)
    told = {"steps": steps, "lr": 0.15, "penalty": penalty}
    expected = loop(copy.deepcopy(output).double(), *problem(torch.float64, regression=regression), **told)
    found = closed_form(output, queries, *context, **told)
    # In single precision the output itself is rounded: the loop runs on what it was rounded to.
    assert distance(found.double(), expected) < (1e-10 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 3, OUTPUTS, 64])
def test_one_step_from_stored_predictions(bias, width):
    torch.manual_seed(0)
    output = nn.Linear(FEATURES, OUTPUTS, bias=bias, dtype=torch.float64)
    queries, _, _, weights = problem(torch.float64)
    memory, labels = torch.randn(20, FEATURES, dtype=torch.float64), torch.randint(0, OUTPUTS, (20,))
    indices = torch.stack([torch.randperm(20)[:NEIGHBOURS] for _ in range(QUERIES)])
    keys, values = memory[indices], labels[indices]
    with torch.no_grad():
        padded = F.pad(output(memory).softmax(1), (0, -OUTPUTS % width))
        stored = padded.view(20, -1, width).transpose(0, 1).contiguous()
        pull = _affine.pulls(queries, _affine.Context(keys, values, weights), output.bias, lr=0.3)
        found = _affine.adapted_once(queries, values, indices, pull, stored, output.weight, output.bias)
    expected = loop(output, queries, keys, values, weights, steps=1, lr=0.3, penalty=0.5)
    assert distance(found, expected) < 1e-12


def network(dtype):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, OUTPUTS)).to(dtype).eval()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3, 12])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("regression", [True, False])
def test_the_general_path_is_torchs_optimizer(optimizer, steps, penalty, regression):
    output = network(torch.float64)
    arguments = problem(torch.float64, regression=regression)
    told = {"steps": steps, "lr": 0.05, "penalty": penalty, "optimizer": optimizer}
    before = copy.deepcopy(output.state_dict())
    found = _general.adapted(output, *arguments, **told)
    assert distance(found.detach(), loop(output, *arguments, **told)) < 1e-9
    assert all(torch.equal(value, before[name]) for name, value in output.state_dict().items())


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_both_paths_agree(steps):
    torch.manual_seed(0)
    output = nn.Linear(FEATURES, OUTPUTS, dtype=torch.float64)
    queries, *context = problem(torch.float64)
    told = {"steps": steps, "lr": 0.15, "penalty": 0.5}
    closed = closed_form(output, queries, *context, **told)
    general = _general.adapted(output, queries, *context, **told, optimizer="sgd")
    torch.testing.assert_close(closed, general.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_that_share_a_gradient_or_have_none(optimizer):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = (nn.Parameter(torch.ones(FEATURES).double() * n) for n in (1, 2, 3))

        def forward(self, x):
            return x + self.first + self.second

    arguments = problem(torch.float64, regression=True)
    arguments = (*arguments[:2], arguments[2][..., :FEATURES], arguments[3])
    told = {"steps": 3, "lr": 0.05, "penalty": 0.0, "optimizer": optimizer}
    found = _general.adapted(Twice(), *arguments, **told)
    assert distance(found.detach(), loop(Twice(), *arguments, **told)) < 1e-9


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("regression", [True, False])
def test_the_low_rank_form_is_the_general_path(steps, penalty, bias, regression):
    output = network(torch.float64)
    output[0] = nn.Linear(FEATURES, 8, bias=bias, dtype=torch.float64)
    arguments = problem(torch.float64, regression=regression)
    told = {"steps": steps, "lr": 0.15, "penalty": penalty}
    parts = _low_rank.parts_of(output)
    assert parts is not None
    before = copy.deepcopy(output.state_dict())
    found = _low_rank.adapted(*parts, *arguments, **told).detach()
    general = _general.adapted(output, *arguments, **told, optimizer="sgd").detach()
    torch.testing.assert_close(found, general, rtol=1e-10, atol=1e-10)
    assert distance(found, loop(output, *arguments, **told)) < 1e-9
    assert all(torch.equal(value, before[name]) for name, value in output.state_dict().items())


def test_the_low_rank_form_is_for_a_first_layer_of_its_own():
    shared = nn.Linear(FEATURES, FEATURES)
    hooked = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
    hooked[0].register_forward_hook(lambda *arguments: None)
    others = [
        nn.Linear(FEATURES, 8),
        nn.Sequential(nn.Linear(FEATURES, 8)),
        nn.Sequential(nn.Tanh(), nn.Linear(FEATURES, 8)),
        nn.Sequential(shared, nn.Tanh(), shared),
        hooked,
    ]
    assert not any(map(_low_rank.parts_of, others))
