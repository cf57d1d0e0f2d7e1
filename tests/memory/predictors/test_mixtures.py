"""Mixtures against their law, and fitted weights against the bound that concavity gives."""

import math

import numpy
import pytest
import torch

from fastweights.memory import fit_weights, mix


def predictors(count=3, positions=500):
    generator = torch.Generator().manual_seed(0)
    return list(torch.rand(count, positions, dtype=torch.float64, generator=generator).log())


def test_a_mixture_is_the_weighted_sum():
    probabilities = [log.exp() for log in predictors()]
    weights = [0.5, 0.2, 0.3]
    expected = sum(weight * p for weight, p in zip(weights, probabilities, strict=True))
    torch.testing.assert_close(mix(predictors(), weights).exp(), expected)
    whole = [log.view(50, 10) for log in predictors()]
    torch.testing.assert_close(mix(whole, torch.tensor(weights)).exp(), expected.view(50, 10))
    torch.testing.assert_close(mix(predictors(), [0, 1, 0]), predictors()[1])
    nothing = torch.tensor([-math.inf])
    assert float(mix([nothing, nothing], [0.5, 0.5])) == -math.inf


def test_fitted_weights_are_the_best_on_a_grid():
    logs = predictors()
    logs[1] = logs[1] - 3  # hardly worth anything
    weights = fit_weights(logs)
    assert float(weights.sum()) == pytest.approx(1)
    best = float(mix(logs, weights).mean())
    for first in numpy.linspace(0, 1, 51):
        for second in numpy.linspace(0, 1 - first, 21):
            shares = [first, second, max(0.0, 1 - first - second)]
            assert float(mix(logs, shares).mean()) <= best + 2e-7


def test_a_predictor_that_is_always_better_gets_everything():
    good = predictors()[0]
    assert fit_weights([good, good - 1.0, good - 2.0])[0] > 0.999
    ruled_out = good.clone()
    ruled_out[7] = -math.inf  # which a mixture can bear
    assert math.isfinite(float(mix([ruled_out, good - 1], fit_weights([ruled_out, good - 1])).mean()))


def test_mixtures_refuse_what_is_none():
    logs = predictors()
    with pytest.raises(ValueError, match="at least one predictor, got none"):
        mix([], [])
    with pytest.raises(ValueError, match=r"weight for each of the 3 predictors, got \[2\]"):
        mix(logs, [0.5, 0.5])
    for weights in ([0.5, 0.6, 0.1], [1.5, -0.5, 0.0], [math.nan, 0.5, 0.5]):
        with pytest.raises(ValueError, match="must not be negative and must have the sum 1"):
            mix(logs, weights)
    with pytest.raises(ValueError, match=r"one shape, got \[\[500\], \[499\]\]"):
        mix([logs[0], logs[1][:-1]], [0.5, 0.5])
    broken = [log.clone() for log in logs]
    for log in broken:
        log[4] = -math.inf
    with pytest.raises(ValueError, match="no predictor gives position 4 a finite log probability"):
        fit_weights(broken)
    for bad in (math.inf, math.nan):
        broken = [log.clone() for log in logs]
        broken[2][4] = bad
        with pytest.raises(ValueError, match=f"predictor 2 gives position 4 the log probability {bad}"):
            fit_weights(broken)
    with pytest.raises(ValueError, match="must be tensors, got list of predictor 1"):
        mix([logs[0], [0.1]], [0.5, 0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="must be tensors, got list of predictor 0"):
        fit_weights([[0.1]])  # type: ignore[list-item]


def gap(logs, weights):
    """How far the mean log likelihood may be below its maximum, by concavity."""
    likely = torch.stack(logs).double().exp()
    return float((likely / (weights @ likely)).mean(1).max()) - 1


def assert_best(logs, most=1e-6):
    weights = fit_weights(logs)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((weights >= 0).all())
    assert gap(logs, weights) <= most
    return weights


@pytest.mark.parametrize(("noise", "most"), [(1e-2, 1e-4), (1e-3, 3e-5), (1e-5, 1e-6), (1e-8, 1e-6), (0.0, 1e-6)])
@pytest.mark.parametrize("seed", range(3))
def test_predictors_that_are_nearly_or_quite_alike(noise, most, seed):
    """Expectation maximisation crawls where hardly anything is to be gained."""
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.rand(2, 3000, dtype=torch.float64, generator=generator).log()
    alike = one + noise * torch.randn(3000, dtype=torch.float64, generator=generator)
    assert_best([one, alike, other], most)


def test_a_long_stream():
    generator = torch.Generator().manual_seed(1)
    one, other = torch.rand(2, 100_000, dtype=torch.float64, generator=generator).log()
    assert_best([one, one + 1e-3 * torch.randn(100_000, dtype=torch.float64, generator=generator), other])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_fitted_weights_are_no_worse_than_those_of_long_expectation_maximisation(count, spread):
    generator = torch.Generator().manual_seed(count)
    logs = list(spread * torch.randn(count, 400, dtype=torch.float64, generator=generator))
    likely = torch.stack(logs).exp()
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for _ in range(3000):
        weights = weights * (likely / (weights @ likely)).mean(1)
    fitted = assert_best(logs, 1e-4 if spread == 0.01 else 1e-6)
    assert float((fitted @ likely).log().mean()) >= float((weights @ likely).log().mean()) - 1e-9


def test_a_dominated_predictor_gets_nothing_and_one_that_alone_bears_a_position_its_share():
    first, second, third = predictors()
    assert float(assert_best([first, torch.maximum(first, second) - 0.5, second, third - 9])[3]) < 1e-12
    lone = torch.full((500,), -math.inf, dtype=torch.float64)
    lone[7], first[7] = -2.0, -math.inf
    assert float(assert_best([first, lone])[1]) == pytest.approx(1 / 500, rel=1e-3)


def test_gradients_are_not_followed_by_the_fit():
    assert not fit_weights([log.requires_grad_() for log in predictors()]).requires_grad
