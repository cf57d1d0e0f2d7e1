"""The inner objectives of Hebbian Softmax: closed forms, and ascent against gradients of the paper's equations."""

import math

import numpy
import pytest
import torch

from fastweights.nn import HebbianSoftmax, InnerObjective

FEATURES, CLASSES = 5, 12


def problem(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(CLASSES, FEATURES, dtype=torch.float64, generator=generator)
    return (
        scale * torch.randn(4, FEATURES, dtype=torch.float64, generator=generator),
        weights,
        torch.tensor([1, 3, 4, 9]),
    )


@pytest.mark.parametrize("scale", [0.5, 20.0])
def test_closed_forms(scale):
    h, weights, classes = problem(scale)
    norms = h.norm(dim=1, keepdim=True)
    torch.testing.assert_close(InnerObjective("l2").maximum(h, weights, classes), h * (10 / norms).clamp_max(1))
    torch.testing.assert_close(InnerObjective("inner_product").maximum(h, weights, classes), 10 * h / norms)
    zero = InnerObjective("inner_product").maximum(torch.zeros_like(h), weights, classes)
    assert not zero.any()  # every w is as good: none is drawn anywhere


@pytest.mark.parametrize("name", ["l2", "inner_product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_overflows_is_the_largest_and_no_number_stays_none(name, dtype):
    objective, largest = InnerObjective(name), torch.finfo(dtype).max
    h = torch.zeros(5, FEATURES, dtype=dtype)
    h[0], h[1, 2], h[2, 1], h[3, 3] = largest, -largest, math.nan, math.inf
    found = objective.maximum(h, h, torch.arange(5))
    torch.testing.assert_close(found[0], torch.full((FEATURES,), 10 / math.sqrt(FEATURES), dtype=dtype))
    assert found[1].tolist() == [0, 0, -10, 0, 0]
    assert found[2:4].isnan().any(1).all()  # such a class is left alone
    assert not found[4].any()


def test_a_norm_within_a_largest_whose_square_overflows_stays():
    h = torch.full((2, FEATURES), 1e25)
    assert torch.equal(InnerObjective("l2", largest_norm=1e30).maximum(h, h, torch.arange(2)), h)


def ascent(objective, h, weights, own):
    """The loop of section 3.3 for one class, its gradient by autograd of the paper's equation."""
    others = [j for j in range(CLASSES) if j != own]
    others.sort(key=lambda j: float((weights[j] - h).norm()))
    near = weights[others[: objective.neighbours]]

    def bounded(w):
        return w * min(1.0, objective.largest_norm / float(w.norm()))

    w = bounded(h.clone())
    for _ in range(objective.steps):
        w.requires_grad_()
        if objective.name == "svm":
            g = w @ h
            for theta in near:
                if float(w.detach() @ theta) > objective.threshold:
                    g = g - objective.penalty * (w @ theta)
        else:
            g = (torch.exp(w @ h) / sum(torch.exp(w @ theta) for theta in near)).log()
        (gradient,) = torch.autograd.grad(g, w)
        w = bounded(w.detach() + objective.step_size * gradient)
    return w


@pytest.mark.parametrize("name", ["svm", "sparse_softmax"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"neighbours": 3, "steps": 7, "step_size": 0.3},
        {"penalty": 0.5, "threshold": 0.4, "largest_norm": 2.0},
        {"neighbours": CLASSES + 1},  # all other classes, and not the class itself
    ],
)
def test_ascent_is_that_of_the_equation(name, options):
    objective = InnerObjective(name, **options)
    h, weights, classes = problem()
    found = objective.maximum(h, weights, classes)
    expected = torch.stack([ascent(objective, each, weights, int(own)) for each, own in zip(h, classes, strict=True)])
    torch.testing.assert_close(found, expected)
    assert (found.norm(dim=1) <= objective.largest_norm * (1 + 1e-12)).all()


def test_neighbours_are_found_in_pieces_too(monkeypatch):
    h, weights, classes = problem()
    whole = InnerObjective("svm", neighbours=3).maximum(h, weights, classes)
    monkeypatch.setattr("fastweights.nn.hebbian_softmax.objectives.MOST_DISTANCES", CLASSES)  # one class at a time
    torch.testing.assert_close(InnerObjective("svm", neighbours=3).maximum(h, weights, classes), whole)


@pytest.mark.parametrize("name", ["l2", "inner_product", "svm", "sparse_softmax"])
def test_a_new_class_starts_at_the_maximum(name):
    torch.manual_seed(0)
    head = HebbianSoftmax(FEATURES, CLASSES, objective=name, dtype=torch.float64)
    before = head.weight.detach().clone()
    h, _weights, classes = problem()
    head.loss(h, classes)
    head.memorize()
    expected = before.clone()
    expected[classes] = InnerObjective(name).maximum(h, before, classes)
    torch.testing.assert_close(head.weight.detach(), expected)


def test_one_class_has_no_neighbours():
    head = HebbianSoftmax(FEATURES, 1, objective="svm")
    head.loss(torch.ones(2, FEATURES), torch.tensor([0, 0]))
    head.memorize()
    assert torch.isfinite(head.weight).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "L2"}, "objective must be one of .*, got 'L2'"),
        ({"neighbours": 0}, "neighbours must be an integer of at least 1, got 0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"step_size": math.inf}, "step_size must be positive and finite, got inf"),
        ({"largest_norm": 0}, "largest_norm must be positive and finite, got 0"),
        ({"penalty": -1}, "penalty must be finite and not negative, got -1"),
        ({"threshold": numpy.nan}, "threshold must be finite, got nan"),
    ],
)
def test_refuses_numbers_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        InnerObjective(**{"name": "svm"} | options)
