"""The loss: torch's own where the logits are few, the same where they are never held at once; bad input is refused."""

import math

import pytest
import torch
from torch.nn import functional as F

from fastweights import nn
from fastweights.nn.hebbian_softmax import loss as softmax_loss

from .problems import CLASSES, FEATURES, head_and_optimizer, problem


def test_the_loss_is_that_of_torch():
    head, _ = head_and_optimizer(bias=True)
    head.bias.data.normal_()
    (h, target), weight = problem()[0], torch.rand(CLASSES, dtype=torch.float64)
    target[::3] = 4
    for told in ({}, {"weight": weight}, {"ignore_index": 4}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
        expected = F.cross_entropy(F.linear(h, head.weight, head.bias), target, **told)
        torch.testing.assert_close(head.loss(h, target, **told), expected)
    shaped = head.loss(h.view(4, 4, FEATURES), target.view(4, 4), reduction="none")
    torch.testing.assert_close(shaped, F.cross_entropy(head(h), target, reduction="none").view(4, 4))
    torch.testing.assert_close(head.loss(h[0], target[0]), F.cross_entropy(head(h[0]), target[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_vocabulary_has_the_same_loss_and_gradients(monkeypatch, dtype):
    torch.manual_seed(0)
    head = nn.HebbianSoftmax(FEATURES, CLASSES, bias=True, dtype=dtype)
    assert head.bias is not None
    head.bias.data.normal_()
    h = torch.randn(3, 4, FEATURES, dtype=dtype, requires_grad=True)
    target, weight = torch.randint(0, CLASSES, (3, 4)), torch.rand(CLASSES, dtype=dtype)
    target[0, 0] = -100
    inputs = [h, head.weight, head.bias]
    for told in ({}, {"weight": weight}, {"reduction": "sum"}):
        expected = F.cross_entropy(head(h).flatten(0, 1), target.flatten(), **told)
        with monkeypatch.context() as patched:
            patched.setattr(softmax_loss, "LARGEST_LOGITS", 1)
            patched.setattr(softmax_loss, "ROWS_AT_ONCE", 5)
            loss = head.loss(h, target, **told)
        torch.testing.assert_close(loss, expected)
        for ours, plain in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
            torch.testing.assert_close(ours, plain)


def test_a_large_vocabulary_takes_every_option(monkeypatch):
    """Those that torch's own large loss lacks go the plain way, without a warning."""
    monkeypatch.setattr(softmax_loss, "LARGEST_LOGITS", 1)
    head = nn.HebbianSoftmax(FEATURES, CLASSES)
    h, target = torch.randn(12, FEATURES), torch.randint(0, CLASSES, (12,))
    for told in (
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "weight": torch.rand(CLASSES)},
    ):
        torch.testing.assert_close(head.loss(h, target, **told), F.cross_entropy(head(h), target, **told))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(head.loss(h, target), F.cross_entropy(head(h), target), rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(head.loss(h, target), F.cross_entropy(head(h), target))


def test_a_large_vocabulary_under_torch_func(monkeypatch):
    monkeypatch.setattr(softmax_loss, "LARGEST_LOGITS", 1)
    head = nn.HebbianSoftmax(FEATURES, CLASSES)
    h, target = torch.randn(12, FEATURES), torch.randint(0, CLASSES, (12,))
    ours = torch.func.grad(lambda h: head.loss(h, target))(h)
    torch.testing.assert_close(ours, torch.func.grad(lambda h: F.cross_entropy(head(h), target))(h))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_large_vocabulary_under_autocast_is_not_rounded(monkeypatch, dtype, reduction):
    torch.manual_seed(0)
    head = nn.HebbianSoftmax(FEATURES, CLASSES, bias=True)
    h, target = torch.randn(12, FEATURES).to(dtype), torch.randint(0, CLASSES, (12,))
    with torch.autocast("cpu", dtype=dtype):
        plain = head.loss(h, target, reduction=reduction)
        monkeypatch.setattr(softmax_loss, "LARGEST_LOGITS", 1)
        large = head.loss(h, target, reduction=reduction)
    assert large.dtype == plain.dtype == torch.float32
    exact = F.cross_entropy(F.linear(h.float(), head.weight, head.bias), target, reduction=reduction)
    torch.testing.assert_close(large, exact)


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
        monkeypatch.setattr(softmax_loss, "LARGEST_LOGITS", 1)
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
