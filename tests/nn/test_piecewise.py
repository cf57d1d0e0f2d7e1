"""A small network of one number, a line at a time: the same numbers and gradients as the network itself."""

import pytest
import torch
from torch import nn

from fastweights.nn.fast_weights_linear import map_numbers


def network(units=40, seed=0, dtype=torch.float64, spread=1.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = nn.Sequential(
            nn.Linear(1, units), nn.LeakyReLU(0.2), nn.Linear(units, units), nn.LeakyReLU(0.2), nn.Linear(units, 1)
        ).to(dtype)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=spread)
    return made


def itself(made, x):
    return made(x.unsqueeze(-1)).squeeze(-1)


def numbers(count=4000, spread=3.0, dtype=torch.float64):
    return spread * torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(values, made, x):
    asked = [x, *made.parameters()]
    return torch.autograd.grad(values.sin().sum(), asked)


@pytest.mark.parametrize("units", [1, 3, 40])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_and_all_gradients_are_those_of_the_network(units, seed):
    made, x = network(units, seed), numbers().requires_grad_()
    ours, theirs = map_numbers(made, x), itself(made, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for one, other in zip(gradients(ours, made, x), gradients(theirs, made, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_single_precision_is_about_as_near_to_the_truth_as_the_network(spread):
    exact, x = network(), numbers(spread=spread)
    single = network(dtype=torch.float32)
    truth = itself(exact, x)
    ours, theirs = (found.double() - truth for found in (map_numbers(single, x.float()), itself(single, x.float())))
    assert float(ours.detach().norm()) <= max(3 * float(theirs.detach().norm()), 1e-6 * float(truth.detach().norm()))


def test_as_it_starts_with_no_bias_all_pieces_meet_at_zero():
    made = network()
    for place in (0, 2, 4):
        nn.init.zeros_(made[place].bias)
    x = torch.cat([numbers(), torch.zeros(3, dtype=torch.float64)])
    torch.testing.assert_close(map_numbers(made, x), itself(made, x), rtol=1e-11, atol=1e-11)


def test_units_without_a_weight_and_numbers_at_a_kink():
    made = network(4)
    with torch.no_grad():
        made[0].weight[1] = 0
        made[2].weight[2] = 0
    kinks = (-made[0].bias / made[0].weight[:, 0])[[0, 2, 3]].detach()
    x = torch.cat([numbers(), kinks])
    torch.testing.assert_close(map_numbers(made, x), itself(made, x), rtol=1e-9, atol=1e-9)


def test_any_shape_and_nan_stays_nan():
    made = network(3)
    x = torch.tensor([[[0.5, torch.nan]], [[torch.inf, -2.0]]], dtype=torch.float64)
    found = map_numbers(made, x)
    assert found.shape == (2, 1, 2)
    assert found.isnan().tolist() == [[[False, True]], [[False, False]]]


def test_gradients_check():
    made = network(3)
    parameters = dict(made.named_parameters())
    x = numbers(7).requires_grad_()

    def call(x, *weights):
        named = dict(zip(parameters, weights, strict=True))
        return torch.func.functional_call(_Evaluated(made), {f"made.{name}": value for name, value in named.items()}, x)

    assert torch.autograd.gradcheck(call, (x, *parameters.values()))


class _Evaluated(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return map_numbers(self.made, x)
