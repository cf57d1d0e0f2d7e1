"""The layer: algorithm 1 row by row, the optimizers that it is attached to, new classes at run time."""

import copy
import math
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as F

from fastweights import nn
from fastweights.ops.hebbian import COUNTINGS

from .problems import CLASSES, FEATURES, head_and_optimizer, problem, step


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
        elif counting == "running_mean":
            rate = max(n / (counts[i] + n), gamma)
        else:
            rate = gamma
        if counts[i] >= limit:
            rate = 0.0
        theta[i] = rate * mean + (1 - rate) * theta[i]
        counts[i] += n


@pytest.mark.parametrize("counting", COUNTINGS)
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


def train_without_loss(head, optimizer, h, target):
    optimizer.zero_grad()
    F.cross_entropy(head(h), target).backward()
    optimizer.step()


def train_unattached(head, optimizer, h, target):
    step(head, optimizer, (h, target))


def train_by_hand(head, optimizer, h, target):
    step(head, optimizer, (h, target))
    head.memorize()


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("train", [train_without_loss, train_unattached])
def test_a_head_that_remembers_nothing_says_so_once(train, attach):
    head, optimizer = head_and_optimizer()
    if attach:
        head.attach(optimizer)
    silent = attach and train is train_unattached  # which is how it should be
    ((h, target),) = problem(batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(250):
            train(head, optimizer, h, target)
    assert len(caught) == (0 if silent else 1)
    assert all("has remembered nothing in 100 passes" in str(warning.message) for warning in caught)


def test_a_head_that_remembers_or_need_not_is_silent():
    ((h, target),) = problem(batches=1)
    head, optimizer = head_and_optimizer()
    plain, its_optimizer = head_and_optimizer(limit=0)
    for _ in range(120):
        train_by_hand(head, optimizer, h, target)
        train_unattached(plain, its_optimizer, h, target)
        with torch.no_grad():
            head_and_optimizer()[0](h)
    untrained = head_and_optimizer()[0].requires_grad_(False)
    for _ in range(120):
        untrained(h)


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


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {"initial_accumulator_value": 0.1}, "Adam": {"amsgrad": True},
    "AdamW": {}, "Adamax": {}, "ASGD": {}, "Muon": {}, "NAdam": {}, "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {"lr": 0.02}, "SGD": {"momentum": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_smooths_and_grows(name):
    """New rows are to the optimizer as if they had been there without a gradient."""
    torch.manual_seed(0)
    head = nn.HebbianSoftmax(FEATURES, CLASSES)
    optimizer = getattr(torch.optim, name)(head.parameters(), **OPTIMIZERS[name])
    head.attach(optimizer)
    batches = [(h.float(), target) for h, target in problem(batches=4)]
    for batch in batches[:2]:
        step(head, optimizer, batch)
    weight, kept = head.weight, head.weight.detach().clone()
    head.grow(3)
    assert head.weight is weight
    assert head.weight.shape == (CLASSES + 3, FEATURES)
    assert torch.equal(head.weight[:CLASSES], kept)
    assert head.counts[CLASSES:].tolist() == [0, 0, 0]
    twin = torch.nn.Parameter(torch.zeros_like(weight))
    other = getattr(torch.optim, name)([twin], **OPTIMIZERS[name])
    for _ in range(2):
        twin.grad = torch.zeros_like(twin)
        other.step()
    for key, value in optimizer.state[weight].items():
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[0] != 1:
            torch.testing.assert_close(value[CLASSES:], other.state[twin][key][CLASSES:], rtol=0, atol=1e-6)
    h, target = batches[2]
    target[0] = CLASSES + 2
    step(head, optimizer, (h, target))
    torch.testing.assert_close(head.weight[CLASSES + 2].detach(), h[0])
    assert torch.isfinite(head.weight).all()


def test_new_rows_start_as_those_of_a_head_of_all_classes():
    head = nn.HebbianSoftmax(16, 200)
    head.grow(100)
    bound, new = math.sqrt(6 / (16 + 300)), head.weight[200:].detach()  # Glorot & Bengio 2010, equation 16
    assert 0.98 * bound < new.max() <= bound
    assert -bound <= new.min() < -0.98 * bound
    assert abs(new.mean()) < 4 * bound / math.sqrt(3 * new.numel())


def test_growing_during_accumulation_keeps_the_gradient():
    head, optimizer = head_and_optimizer(bias=True)
    head.attach(optimizer)
    h, target = problem()[0]
    head.loss(h, target).backward()
    gradient = head.weight.grad.clone()
    head.grow(2)
    assert torch.equal(head.weight.grad[:CLASSES], gradient)
    assert not head.weight.grad[CLASSES:].any()
    optimizer.step()
    assert int(head.counts.sum()) == 16
    assert head.bias.shape == (CLASSES + 2,)
    assert head(h).shape == (16, CLASSES + 2)


def test_a_bias_that_the_optimizer_does_not_hold_grows_too():
    head = nn.HebbianSoftmax(FEATURES, CLASSES, bias=True)
    head.attach(torch.optim.Adam([head.weight]))
    head.grow(2)
    assert head.bias is not None
    assert len(head.bias) == len(head.weight) == CLASSES + 2


def test_what_cannot_grow_is_left_as_it_was():
    head = nn.HebbianSoftmax(FEATURES, CLASSES)
    optimizer = torch.optim.LBFGS(head.parameters(), lr=0.1, max_iter=3)
    head.attach(optimizer)
    h, target = problem()[0]

    def closure():
        optimizer.zero_grad()
        loss = head.loss(h.float(), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert int(head.counts.sum()) == 16  # once, however often the closure was asked
    with pytest.raises(ValueError, match=r"LBFGS keeps .* cannot grow"):
        head.grow(1)
    assert head.num_classes == CLASSES
    assert head.weight.shape == (CLASSES, FEATURES)
    refused: list[Any] = [0, -1, 1.5, True]
    for wrong in refused:
        with pytest.raises(ValueError, match=f"got {wrong}"):
            head.grow(wrong)


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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gamma": 1.1}, "gamma must lie between 0 and 1, got 1.1"),
        ({"gamma": math.nan}, "gamma must lie between 0 and 1, got nan"),
        ({"limit": -1}, "limit must not be negative, got -1"),
        ({"dropout": 1.0}, "dropout must be a probability less than 1, got 1.0"),
        ({"objective": "l3"}, "objective must be one of l2, inner_product, svm, sparse_softmax, got 'l3'"),
        ({"counting": "mean"}, "counting must be one of literal, running_mean, constant, got 'mean'"),
    ],
)
def test_refuses_settings_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        nn.HebbianSoftmax(**{"in_features": FEATURES, "num_classes": CLASSES} | options)


def test_what_another_loss_is_computed_from_is_remembered_like_its_own():
    heads = [nn.HebbianSoftmax(4, 6, gamma=0.25, limit=10) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    h, target = torch.randn(3, 5, 4), torch.randint(6, (3, 5))
    for head, own in zip(heads, (True, False), strict=True):
        head.attach(optimizer := torch.optim.SGD(head.parameters(), lr=0.1))
        if own:
            loss = head.loss(h, target)
        else:
            loss = F.cross_entropy(head(h).flatten(0, 1), target.flatten())
            head.remember(h, target, loss)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(heads[0].weight, heads[1].weight)
    assert torch.equal(heads[0].counts, heads[1].counts)
    assert heads[1].counts.sum() == 15


def test_a_loss_that_is_not_remembered_leaves_the_head_as_it_is():
    head = nn.HebbianSoftmax(4, 6)
    h, target = torch.randn(3, 4), torch.tensor([0, -100, 2])
    head.eval().remember(h, target, head.loss(h, target))
    head.train().memorize()
    assert head.counts.sum() == 0
    with pytest.raises(ValueError, match=r"target 6 at \(2,\) is not one of the 6 classes"):
        head.remember(h, torch.tensor([0, 1, 6]), h.sum())
    head.remember(h, target, (head(h).sum(1) * 1.0).mean())
    head.memorize()
    assert head.counts.tolist() == [1, 0, 1, 0, 0, 0]
