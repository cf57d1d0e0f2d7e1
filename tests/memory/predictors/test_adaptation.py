"""Local adaptation: the closed form and the general path against torch's own optimizers, a query at a time."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights.memory import Neighbours
from fastweights.memory.predictors import _adaptation
from fastweights.memory.predictors._adaptation import (
    Affine,
    Descent,
    FirstLayer,
    adapt_affine,
    adapt_first_layer,
    adapt_general,
    adapt_once,
    pulls,
    split_classes,
)

QUERIES, NEIGHBOURS, FEATURES, OUTPUTS = 4, 6, 5, 7
OPTIMIZERS = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}


def neighbours(keys, values, weights, indices=None):
    indices = torch.empty(weights.shape, dtype=torch.long) if indices is None else indices
    return Neighbours(indices, torch.empty_like(weights), weights, keys, values)


def problem(dtype, *, regression=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(QUERIES, FEATURES, dtype=torch.float64, generator=generator)
    keys = torch.randn(QUERIES, NEIGHBOURS, FEATURES, dtype=torch.float64, generator=generator)
    values = torch.randint(0, OUTPUTS, (QUERIES, NEIGHBOURS), generator=generator)
    values[:, 1] = values[:, 0]  # a label twice
    weights = torch.rand(QUERIES, NEIGHBOURS, dtype=torch.float64, generator=generator)
    weights /= weights.sum(1, keepdim=True)
    if regression:
        values = torch.randn(QUERIES, NEIGHBOURS, OUTPUTS, dtype=torch.float64, generator=generator).to(dtype)
    return queries.to(dtype), neighbours(keys.to(dtype), values, weights.to(dtype))


def loop(output, queries, near, descent):
    """Algorithm 1 of Sprechmann et al. 2018: a copy of the network for each query, torch's optimizer."""
    outputs = []
    for q, h, v, w in zip(queries, near.keys, near.values, near.weights, strict=True):
        network = copy.deepcopy(output)
        start = [parameter.detach().clone() for parameter in output.parameters()]
        stepper = OPTIMIZERS[descent.optimizer](network.parameters(), lr=descent.lr)
        for _ in range(descent.steps):
            stepper.zero_grad()
            predicted = network(h)
            if v.is_floating_point():
                losses = (predicted - v).square().mean(1)
            else:
                losses = F.cross_entropy(predicted, v, reduction="none")
            far = sum((now - then).square().sum() for now, then in zip(network.parameters(), start, strict=True))
            ((w * losses).sum() + 0.5 * descent.penalty * far).backward()
            stepper.step()
        with torch.no_grad():
            outputs.append(network(q[None])[0])
    return torch.stack(outputs)


def distance(outputs, expected):
    return float((outputs - expected).norm() / expected.norm())


@torch.no_grad()
def closed_form(output, *arguments):
    return adapt_affine(Affine(output.weight, output.bias), *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("regression", [True, False])
@pytest.mark.parametrize("numbers", [1, 2 * NEIGHBOURS * OUTPUTS, 2**22])
def test_the_closed_form_is_autograd(monkeypatch, dtype, steps, penalty, bias, regression, numbers):
    monkeypatch.setattr(_adaptation, "NUMBERS", numbers)
    torch.manual_seed(0)
    output = nn.Linear(FEATURES, OUTPUTS, bias=bias, dtype=dtype)
    descent = Descent(steps, 0.15, penalty, "sgd")
    queries, near = problem(torch.float64, regression=regression)
    expected = loop(copy.deepcopy(output).double(), queries, near, descent)
    outputs = closed_form(output, *problem(dtype, regression=regression), descent)
    # In single precision the output itself is rounded: the loop runs on what it was rounded to.
    assert distance(outputs.double(), expected) < (1e-10 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 3, OUTPUTS, 32, 64])
@torch.no_grad()
def test_one_step_from_stored_predictions(bias, width):
    torch.manual_seed(0)
    output = nn.Linear(FEATURES, OUTPUTS, bias=bias, dtype=torch.float64)
    queries, near = problem(torch.float64)
    memory, labels = torch.randn(20, FEATURES, dtype=torch.float64), torch.randint(0, OUTPUTS, (20,))
    indices = torch.stack([torch.randperm(20)[:NEIGHBOURS] for _ in range(QUERIES)])
    near = neighbours(memory[indices], labels[indices], near.weights, indices)
    stored = split_classes(output(memory).softmax(1), width).contiguous()
    outputs = output(queries)
    adapt_once(outputs, stored, near.values, indices, pulls(queries, near, output.bias, lr=0.3))
    with torch.enable_grad():
        expected = loop(output, queries, near, Descent(1, 0.3, 0.5, "sgd"))
    assert distance(outputs, expected) < 1e-12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3, 12])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("regression", [True, False])
def test_the_general_path_is_torchs_optimizer(optimizer, steps, penalty, regression):
    torch.manual_seed(1)
    output = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, OUTPUTS)).double().eval()
    arguments = *problem(torch.float64, regression=regression), Descent(steps, 0.05, penalty, optimizer)
    before = copy.deepcopy(output.state_dict())
    outputs = adapt_general(output, *arguments)
    assert distance(outputs, loop(output, *arguments)) < 1e-9
    assert all(torch.equal(value, before[name]) for name, value in output.state_dict().items())


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_both_paths_agree(steps):
    torch.manual_seed(0)
    output = nn.Linear(FEATURES, OUTPUTS, dtype=torch.float64)
    arguments = *problem(torch.float64), Descent(steps, 0.15, 0.5, "sgd")
    torch.testing.assert_close(
        closed_form(output, *arguments), adapt_general(output, *arguments), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("regression", [True, False])
def test_a_first_layer_without_a_copy_is_the_general_path(steps, penalty, bias, regression):
    torch.manual_seed(1)
    first = nn.Linear(FEATURES, 8, bias=bias)
    output = nn.Sequential(first, nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, OUTPUTS)).double().eval()
    arguments = *problem(torch.float64, regression=regression), Descent(steps, 0.15, penalty, "sgd")
    outputs = adapt_first_layer(FirstLayer(first, output[1:]), *arguments)
    torch.testing.assert_close(outputs, adapt_general(output, *arguments), rtol=1e-10, atol=1e-10)
    assert distance(outputs, loop(output, *arguments)) < 1e-9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_that_share_a_gradient_or_have_none(optimizer):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = (nn.Parameter(torch.ones(FEATURES).double() * n) for n in (1, 2, 3))

        def forward(self, x):
            return x + self.first + self.second

    queries, near = problem(torch.float64, regression=True)
    near = near._replace(values=near.values[..., :FEATURES])
    descent = Descent(3, 0.05, 0.0, optimizer)
    assert distance(adapt_general(Twice(), queries, near, descent), loop(Twice(), queries, near, descent)) < 1e-9
