"""Hebbian Softmax: algorithm 1 row by row, and its loss."""

import copy

import numpy
import pytest
import torch
from torch.nn import functional as F

from fastweights import nn

from .hebbian import CLASSES, FEATURES, head_and_optimizer, problem, step


def algorithm_1(theta, counts, h, labels, gamma, limit, counting):
    """The loop of the paper over all classes, after the optimizer's step; `theta` and `counts` are changed."""
    for i in range(len(theta)):
        n = int((labels == i).sum())
        if n == 0:
            continue
        mean = h[labels == i].mean(0)
        mean = mean * min(1, 10 / numpy.linalg.norm(mean))
        if counting == "literal":
            rate = max(1.0 if counts[i] == 0 else 1 / counts[i], gamma)
        else:
            rate = max(n / (counts[i] + n), gamma)
        if counts[i] >= limit:
            rate = 0.0
        theta[i] = rate * mean + (1 - rate) * theta[i]
        counts[i] += n


@pytest.mark.parametrize("counting", ["literal", "running_mean"])
@pytest.mark.parametrize(("gamma", "limit", "scale"), [(0.25, 500, 1.0), (0.0, 20, 1.0), (0.1, 7, 8.0), (1.0, 1, 1.0)])
def test_is_algorithm_1(counting, gamma, limit, scale):
    """Classes absent, repeated and past the limit; means beyond the norm of 10."""
    head, optimizer = head_and_optimizer(gamma=gamma, limit=limit, counting=counting)
    head.attach(optimizer)
    theta, velocity = head.weight.detach().numpy().copy(), 0.0
    counts = numpy.zeros(CLASSES, dtype=int)
    for h, target in problem(scale=scale):
        step(head, optimizer, (h, target))
        # The gradient of cross entropy by hand, then the paper's loop.
        logits = h.numpy() @ theta.T
        p = numpy.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[numpy.arange(len(p)), target.numpy()] -= 1
        velocity = 0.5 * velocity + p.T @ h.numpy() / len(p)
        theta = theta - 0.3 * velocity
        algorithm_1(theta, counts, h.numpy(), target.numpy(), gamma, limit, counting)
        numpy.testing.assert_allclose(head.weight.detach().numpy(), theta, rtol=1e-11, atol=1e-12)
        assert head.counts.tolist() == counts.tolist()
    assert counts.min() == 0
    assert limit > 100 or (counts >= limit).any()


def test_running_mean_holds_the_mean_of_all_activations():
    head, _ = head_and_optimizer(gamma=0.0, counting="running_mean")
    with torch.no_grad():
        head.weight.zero_()
    seen = problem(batches=5)
    for h, target in seen:
        head.loss(h, target)
        head.memorize()
    h, target = (torch.cat(parts) for parts in zip(*seen, strict=True))
    for i in range(CLASSES - 1):
        torch.testing.assert_close(head.weight[i].detach(), h[target == i].mean(0), rtol=1e-12, atol=1e-12)


def test_without_smoothing_it_is_the_plain_softmax():
    head, optimizer = head_and_optimizer(limit=0, bias=True)
    head.attach(optimizer)
    plain = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if name != "counts"})
    other = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.5)
    for h, target in problem():
        step(head, optimizer, (h, target))
        other.zero_grad()
        F.cross_entropy(plain(h), target).backward()
        other.step()
        assert torch.equal(head.weight, plain.weight)
        assert torch.equal(head.bias, plain.bias)
    assert int(head.counts.sum()) == 12 * 16


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


def test_ignored_targets_are_neither_smoothed_nor_counted():
    heads = [head_and_optimizer() for _ in range(2)]
    h, target = problem()[0]
    masked = target.clone()
    masked[target == 2] = -1
    for (head, optimizer), batch in zip(
        heads, [(h, masked, -1), (h[target != 2], target[target != 2], -100)], strict=True
    ):
        head.attach(optimizer)
        head.loss(batch[0], batch[1], ignore_index=batch[2]).backward()
        optimizer.step()
    torch.testing.assert_close(heads[0][0].weight, heads[1][0].weight)
    assert heads[0][0].counts[2] == 0
    assert torch.equal(heads[0][0].counts, heads[1][0].counts)


def test_class_weights_do_not_change_what_is_remembered():
    head, _ = head_and_optimizer()
    h, target = problem()[0]
    other = copy.deepcopy(head)
    head.loss(h, target, weight=torch.rand(CLASSES, dtype=torch.float64))
    other.loss(h, target)
    head.memorize()
    other.memorize()
    assert torch.equal(head.weight, other.weight)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e308)])
def test_activations_too_large_to_add_up_do_not_reach_the_weights(dtype, size):
    head = nn.HebbianSoftmax(FEATURES, CLASSES, dtype=dtype)
    before = head.weight.detach().clone()
    head.loss(torch.full((2, FEATURES), size, dtype=dtype), torch.tensor([0, 0]))
    head.memorize()
    assert torch.equal(head.weight, before)


def test_dropout_is_on_the_logits_and_not_on_what_is_remembered():
    head, _ = head_and_optimizer(dropout=0.9, gamma=1.0)
    h, target = problem()[0]
    torch.manual_seed(0)
    loss = head.loss(h, target)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(F.dropout(h, 0.9), head.weight), target))
    head.memorize()
    torch.testing.assert_close(head.weight[0].detach(), h[target == 0].mean(0))
    head.eval()
    torch.testing.assert_close(head(h), F.linear(h, head.weight))


def test_tied_weights_are_smoothed_in_both_places():
    embedding, head = torch.nn.Embedding(CLASSES, FEATURES), nn.HebbianSoftmax(FEATURES, CLASSES)
    head.weight = embedding.weight
    optimizer = torch.optim.Adam(embedding.parameters(), lr=1e-3)
    head.attach(optimizer)
    head.loss(embedding(torch.tensor([1, 2])), torch.tensor([3, 4])).backward()
    h = embedding.weight[1].detach().clone()
    optimizer.step()
    torch.testing.assert_close(embedding.weight[3].detach(), h)


def test_autocast_and_half_precision():
    for weights, activations in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        head = nn.HebbianSoftmax(FEATURES, CLASSES, dtype=weights)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head.attach(optimizer)
        h, target = problem()[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = head.loss(h.to(activations), target)
        loss.backward()
        optimizer.step()
        seen = int(target[0])
        mean = h.to(activations).double()[target == seen].mean(0)
        torch.testing.assert_close(head.weight[seen].detach().double(), mean, rtol=1e-2, atol=1e-2)
