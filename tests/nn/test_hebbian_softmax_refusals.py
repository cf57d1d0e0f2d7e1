"""Hebbian Softmax: what is refused, and leaves the weights as they were."""

import copy
import math

import pytest
import torch

from fastweights import nn

from .hebbian import CLASSES, FEATURES, head_and_optimizer, problem, step


def test_a_weight_that_was_replaced_is_noticed():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    head.load_state_dict(copy.deepcopy(head.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match="SGD that this head is attached to no longer holds its weight"):
        optimizer.step()


def test_attach_refuses_and_can_be_ended():
    head, optimizer = head_and_optimizer()
    handle = head.attach(optimizer)
    with pytest.raises(RuntimeError, match="attached to an optimizer already \\(SGD\\)"):
        head.attach(torch.optim.Adam(head.parameters()))
    handle.remove()
    step(head, optimizer, problem()[0])
    assert int(head.counts.sum()) == 0
    head.attach(optimizer)
    del optimizer
    head.attach(torch.optim.Adam(head.parameters()))  # the first is gone
    other = nn.HebbianSoftmax(FEATURES, CLASSES)
    with pytest.raises(ValueError, match=r"Adam does not hold this head's weight \[9, 6\]"):
        other.attach(torch.optim.Adam(torch.nn.Linear(2, 2).parameters()))
    with pytest.raises(TypeError, match="got Linear"):
        other.attach(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def refuse(head, h, target, match):
    with pytest.raises(ValueError, match=match):
        head.loss(h, target)


def test_bad_input_is_refused_and_the_weights_stay():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    before = head.weight.detach().clone()
    h, target = problem()[0]
    for label in (-1, CLASSES, 10**12):
        wrong = target.clone()
        wrong[3] = label
        refuse(head, h, wrong, rf"target {label} at \(3,\) is not one of the 9 classes, 0 to 8")
    refuse(head, h[:, :-1], target, r"activations \[...,6\] .* got h \[16, 5\] and target \[16\]")
    refuse(head, h, target[:-1], r"got h \[16, 6\] and target \[15\]")
    refuse(head, h, target.float(), "int64, got torch.float32")
    for value in (math.nan, math.inf, -math.inf):
        wrong = h.clone()
        wrong[5, 2] = value
        refuse(head, wrong, target, rf"NaN or infinity, in 1 of 16 rows, first for a target of class {int(target[5])}")
    optimizer.step()
    head.memorize()
    assert torch.equal(head.weight, before)
    assert int(head.counts.sum()) == 0


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("weights", [None, 0.0, 1.0, -1.0])
def test_no_infinity_hides_from_the_loss(monkeypatch, weights, large):
    """Where every class answers to it alike or not at all, is not weighed, or dropout takes it."""
    if large:
        monkeypatch.setattr("fastweights.nn.hebbian_softmax.loss.LARGEST_LOGITS", 1)
    head = nn.HebbianSoftmax(FEATURES, CLASSES, dropout=0.9, bias=True)
    if weights is not None:
        torch.nn.init.constant_(head.weight, weights)
    h, target = torch.randn(2, 4, FEATURES), torch.randint(0, CLASSES, (2, 4))
    for value in (math.nan, math.inf, -math.inf):
        wrong = h.clone()
        wrong[1, 2, 3] = value
        for told in ({}, {"reduction": "none"}, {"weight": torch.zeros(CLASSES)}, {"label_smoothing": 0.1}):
            with pytest.raises(ValueError, match="NaN or infinity, in 1 of 8 rows"):
                head.loss(wrong, target, **told)
        ignored = target.clone()
        ignored[1, 2] = -100
        head.loss(wrong, ignored)
    head.memorize()
    assert head.weight.isfinite().all()


def test_activations_changed_in_place_are_refused():
    head, _ = head_and_optimizer()
    h, target = problem()[0]
    h = h.clone()
    before = head.weight.detach().clone()
    head.loss(h, target)
    h.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(16, 6\) were changed in place"):
        head.memorize()
    assert torch.equal(head.weight, before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"in_features": 0}, "in_features must be an integer of at least 1, got 0"),
        ({"num_classes": 2.5}, "num_classes must be an integer of at least 1, got 2.5"),
        ({"gamma": 1.1}, "gamma must lie between 0 and 1, got 1.1"),
        ({"gamma": math.nan}, "gamma must lie between 0 and 1, got nan"),
        ({"limit": -1}, "limit must not be negative, got -1"),
        ({"dropout": 1.0}, "dropout must be a probability less than 1, got 1.0"),
        ({"objective": "l3"}, "objective must be one of l2, inner_product, svm, sparse_softmax, got 'l3'"),
        ({"counting": "mean"}, "counting must be one of literal, running_mean, got 'mean'"),
    ],
)
def test_refuses_settings_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        nn.HebbianSoftmax(**{"in_features": FEATURES, "num_classes": CLASSES} | options)
