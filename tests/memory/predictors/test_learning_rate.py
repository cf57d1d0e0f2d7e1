"""MbPA's learning rate: its own, which is right for features of any length, and numbers that must diverge."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastweights.memory import AdaptiveLanguageModel, EpisodicMemory, MbPA, Neighbours, StreamMbPA
from fastweights.memory.predictors._adaptation import Descent, FirstLayer, adapt_first_layer, adapt_general
from tests.memory.language_models import make_model
from tests.memory.predictors.test_adaptation import loop

CLASSES = 8


def remember(head, keys, values, **options):
    shape, dtype = tuple(values.shape[1:]), values.dtype
    store = EpisodicMemory(len(keys), keys.shape[1], value_shape=shape, value_dtype=dtype, dtype=keys.dtype)
    store.write(keys, values)
    return MbPA(nn.Identity(), head, store, **options)


def fitted(features, targets):
    """Return the affine map of features [n,d] that is closest to targets [n,V]."""
    head = nn.Linear(features.shape[1], targets.shape[1]).requires_grad_(False)
    rows = F.pad(features, (0, 1), value=1.0).double()
    ridge = 1e-6 * rows.square().sum() / len(rows) * torch.eye(rows.shape[1])
    found = torch.linalg.solve(rows.T @ rows + ridge, rows.T @ targets.double())
    head.weight.copy_(found[:-1].T)
    head.bias.copy_(found[-1])
    return head


def bump(features=80, points=60, outputs=1, scale=1.0):
    """Return a head that knows a sine, points of a sine with a bump, and questions about it."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(1, features), nn.Tanh()).requires_grad_(False)
    x, queries, points = 6 * torch.rand(400, 1) - 3, torch.linspace(-3, 3, 100)[:, None], 6 * torch.rand(points, 1) - 3
    head = fitted(scale * body(x), torch.sin(1.5 * x).expand(-1, outputs))
    now = [torch.sin(1.5 * x) + 1.5 * torch.exp(-(((x - 1) / 0.5) ** 2)) for x in (points, queries)]
    values, targets = (each.expand(-1, outputs).contiguous() for each in now)
    return head, scale * body(points), values + 0.05 * torch.randn(values.shape), scale * body(queries), targets


def renamed(features=80, points=160, scale=1.0):
    """Return a head that knows classes, examples of the classes under other names, and questions about them."""
    torch.manual_seed(0)
    means = torch.randn(CLASSES, features)
    labels = torch.arange(points) % CLASSES
    keys, queries = (scale * (means[labels] + 0.7 * torch.randn(points, features)) for _ in range(2))
    head = fitted(keys, 6.0 * F.one_hot(labels, CLASSES))
    names = (labels + 1) % CLASSES
    return head, keys, names, queries[:100], names[:100]


def score(answers, targets):
    """Return the error, less of which is better."""
    if targets.is_floating_point():
        return float(F.mse_loss(answers, targets))
    return float((answers.argmax(1) != targets).double().mean())


@pytest.mark.parametrize("problem", [bump, renamed])
@pytest.mark.parametrize(
    "size",
    [{"features": 8}, {"features": 80}, {"features": 800}, {"scale": 0.1}, {"scale": 10.0}, {"scale": 1000.0},
     {"points": 40}, {"points": 400}, {"points": 4000}],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"neighbours": 8, "steps": 20}])
def test_the_default_is_finite_and_better_than_the_network_at_every_size(problem, size, options):
    head, keys, values, queries, targets = problem(**size)
    alone, found = head(queries), remember(head, keys, values, **options)(queries)
    assert found.isfinite().all()
    assert score(found, targets) < score(alone, targets) / 3


@pytest.mark.parametrize("problem", [bump, renamed])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 1000.0])
def test_the_default_is_finite_with_any_penalty(problem, penalty):
    head, keys, values, queries, targets = problem()
    found = remember(head, keys, values, neighbours=8, steps=50, penalty=penalty)(queries)
    assert found.isfinite().all()
    assert score(found, targets) <= score(head(queries), targets)


@pytest.mark.parametrize("outputs", [1, 10, 100])
def test_the_default_counts_a_rate_for_each_output(outputs):
    head, keys, values, queries, targets = bump(outputs=outputs)
    assert score(remember(head, keys, values)(queries), targets) < score(head(queries), targets) / 10


@pytest.mark.parametrize("problem", [bump, renamed])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_the_default_is_the_number_that_the_documentation_says(problem, steps, penalty):
    head, keys, values, queries, _ = problem()
    options: dict[str, Any] = {"neighbours": 8, "steps": steps, "penalty": penalty}
    found = remember(head, keys, values, **options)(queries[:5])
    for query, answer in zip(queries[:5], found, strict=True):
        near = remember(head, keys, values).store.search(query[None], 8)
        unit = float((near.weights * (near.keys.square().sum(2) + 1)).sum())
        curvature = 2 / values.shape[1] if values.is_floating_point() else steps**0.5 / 64
        number = 1 / (curvature * unit + (penalty if steps > 1 else 0))
        expected = remember(head, keys, values, **options, lr=number)(query[None])[0]
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


def most_of(head, keys, values, queries, neighbours):
    """Return two over the largest curvature of each query, by an eigenvalue."""
    near = remember(head, keys, values).store.search(queries, neighbours)
    rows = F.pad(near.keys, (0, 1), value=1.0).double() * near.weights.sqrt().unsqueeze(2)
    return values.shape[1] / torch.linalg.matrix_norm(rows, 2).square()


@pytest.mark.parametrize("outputs", [1, 10])
@pytest.mark.parametrize("steps", [1, 20])
def test_a_number_with_which_steps_must_diverge_is_not_taken_and_said_once(outputs, steps):
    head, keys, values, queries, targets = bump(outputs=outputs)
    most = most_of(head, keys, values, queries, 8)
    options = {"neighbours": 8, "steps": steps}
    good = remember(head, keys, values, **options)(queries)
    model = remember(head, keys, values, **options, lr=1.01 * float(most.median()))
    with pytest.warns(UserWarning, match=f"lr={model.lr} is too large for") as caught:
        found = model(queries)
    words = r"for (\d+) of 100 queries.*the largest rate that is good for all of them is (\S+)\. This"
    said = re.search(words, str(caught[0].message))
    assert said is not None
    taken = model.lr >= most
    assert abs(int(said[1]) - int(taken.sum())) <= 2  # one that is all but equal
    assert float(said[2]) == pytest.approx(float(most.min()) / 2, rel=0.06)
    clear = (model.lr / most - 1).abs() > 0.01
    torch.testing.assert_close(found[clear & taken], good[clear & taken])
    assert score(found[taken], targets[taken]) < score(head(queries)[taken], targets[taken])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model(queries), found)  # not said again
        best = remember(head, keys, values, **options, lr=float(said[2]))  # and nothing of what was said to be good
        assert score(best(queries), targets) < score(head(queries), targets)


@pytest.mark.parametrize("below", [True, False])
def test_the_bound_is_where_steps_begin_to_grow(below):
    head, keys, values, queries, _ = bump()
    most = most_of(head, keys, values, queries[:1], 8)
    number = float(most) * (0.98 if below else 1.02)
    near = remember(head, keys, values).store.search(queries[:1], 8)
    few, many = (
        loop(head.requires_grad_(True), queries[:1], near, Descent(steps, number, 0.0, "sgd")) for steps in (50, 400)
    )
    head.requires_grad_(False)
    assert (float((many - few).abs()) < 1) == below


def test_what_a_regression_was_told_before_is_no_longer_infinite():
    """As a user met it: eight neighbours, 20 steps, and the number that was the default."""
    head, keys, values, queries, targets = bump(features=64)
    model = remember(head, keys, values, neighbours=8, steps=20, lr=0.15)
    with pytest.warns(UserWarning, match=r"lr=0.15 is too large for 100 of 100 queries"):
        assert score(model(queries), targets) < 0.02 < score(head(queries), targets)


def test_classes_take_any_number():
    head, keys, values, queries, _ = renamed()
    found = remember(head, keys, values, lr=1e4, steps=20, neighbours=8)(queries)  # the gradient is bounded
    assert found.isfinite().all()


def deep(width=32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(80, width), nn.Tanh(), nn.Linear(width, 1)).requires_grad_(False)


@pytest.mark.parametrize("options", [{"lr": 3.0}, {"lr": 3.0, "optimizer": "adam"}])
@pytest.mark.parametrize("neighbours", [8, 60])  # without a copy of the first layer, and with one
def test_another_network_answers_itself_where_steps_run_away(options, neighbours):
    _, keys, values, queries, _ = bump()
    head = deep()
    model = remember(head, keys, values, neighbours=neighbours, steps=20, **options)
    with pytest.warns(UserWarning, match=r"the steps of \d+ of 100 queries led further away.*lr=3.0 and steps=20"):
        found = model(queries)
    assert found.isfinite().all()
    own = (found == head(queries)).all(1)
    assert own.any()
    assert float(found.abs().max()) < 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model(queries), found)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("neighbours", [8, 60])
@pytest.mark.parametrize("steps", [1, 20])
def test_the_default_of_another_network_is_good_at_every_size(scale, neighbours, steps):
    _, keys, values, queries, targets = bump()
    head = deep()
    head[0].weight /= scale
    found = remember(head, scale * keys, values, neighbours=neighbours, steps=steps)(scale * queries[::2])
    assert score(found, targets[::2]) < score(head(scale * queries[::2]), targets[::2]) / 4


@pytest.mark.parametrize("squared", [True, False])
def test_the_default_of_another_network_is_the_same_without_a_copy_of_its_first_layer(squared):
    torch.manual_seed(0)
    first = nn.Linear(5, 8).double()
    output = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3)).double()
    keys, weights = torch.randn(4, 6, 5).double(), torch.full((4, 6), 1 / 6).double()
    values = torch.randn(4, 6, 3).double() if squared else torch.randint(0, 3, (4, 6))
    near = Neighbours(torch.zeros(4, 6).long(), torch.zeros(4, 6), weights, keys, values)
    arguments = torch.randn(4, 5).double(), near, Descent(5, None, 0.1, "sgd")
    answers = adapt_first_layer(FirstLayer(first, output[1:]), *arguments)
    torch.testing.assert_close(answers, adapt_general(output, *arguments), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("problem", [bump, renamed])
def test_of_one_neighbour_the_default_of_any_network_is_that_of_an_affine_map(problem):
    head, keys, values, queries, _ = problem()
    options = {"neighbours": 1, "steps": 3}
    found = remember(nn.Sequential(head, nn.Identity()), keys, values, **options)(queries[:9])
    torch.testing.assert_close(found, remember(head, keys, values, **options)(queries[:9]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_features_of_zeros_change_nothing_but_the_bias(squared, bias):
    head = nn.Linear(4, 3, bias=bias).requires_grad_(False)
    values = torch.randn(6, 3) if squared else torch.arange(6) % 3
    found = remember(head, torch.zeros(6, 4), values)(torch.zeros(2, 4))
    assert found.isfinite().all()
    assert torch.equal(found, head(torch.zeros(2, 4))) != bias


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "adam"}, "lr=None is for optimizer='sgd': a step of 'adam' is about lr long"),
        ({"optimizer": "rmsprop", "steps": 3}, "give lr, such as 0.01"),
        ({"lr": 0.5, "penalty": 4.0, "steps": 2}, r"lr=0.5 times penalty=4.0 must be less than 2.*less than 0.5, or"),
    ],
)
def test_refuses_rates_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        remember(nn.Linear(2, 3), torch.zeros(1, 2), torch.tensor([0]), **options)


@pytest.mark.parametrize("lr", [None, 0.1])
def test_an_output_without_parameters_stays_as_it_is(lr):
    queries = torch.randn(3, 2)
    found = remember(nn.Sequential(nn.Tanh()), torch.randn(5, 2), torch.randn(5, 2), lr=lr, steps=2)(queries)
    assert torch.equal(found, queries.tanh())


@pytest.mark.parametrize("lr", [None, 0.3])
def test_a_saved_stream_keeps_its_rate(tmp_path, lr):
    model = make_model()
    head = model.get_output_embeddings()
    lm = AdaptiveLanguageModel(model, mbpa=StreamMbPA(head, 50, neighbours=4, lr=lr), weights=[0.5, 0.5])
    text = torch.arange(3, 40)[None] % 11
    lm.write(text)
    lm.save_pretrained(tmp_path)
    again = AdaptiveLanguageModel.from_pretrained(model, tmp_path)
    assert again.settings == lm.settings == {"rate": lr}
    assert torch.equal(again.score(text, remember=False), lm.score(text, remember=False))
