"""Hebbian Softmax: algorithm 1 row by row, what a step smooths and what it leaves, growth, and bad input."""

import copy
import math
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastweights import nn

FEATURES, CLASSES = 6, 9


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


def problem(batches=12, size=16, *, seed=0, scale=1.0):
    """Batches of activations and labels; the last class comes late, and one never."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for index in range(batches):
        classes = CLASSES - 1 if index > batches // 2 else CLASSES - 2
        h = scale * torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
        drawn.append((h, torch.randint(0, classes, (size,), generator=generator)))
    return drawn


def head_and_optimizer(**options):
    torch.manual_seed(1)
    head = nn.HebbianSoftmax(FEATURES, CLASSES, dtype=torch.float64, **options)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.3, momentum=0.5)
    return head, optimizer


def step(head, optimizer, *batches):
    optimizer.zero_grad()
    for h, target in batches:
        head.loss(h, target).backward()
    optimizer.step()


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


@pytest.mark.parametrize("limit", [500, 5])
def test_micro_batches_are_one_smoothing(limit):
    whole, parts = head_and_optimizer(limit=limit), head_and_optimizer(limit=limit)
    for head, optimizer in (whole, parts):
        head.attach(optimizer)
    for h, target in problem(batches=4):
        for (head, optimizer), cuts in ((whole, 1), (parts, 4)):
            optimizer.zero_grad()
            for part, labels in zip(h.chunk(cuts), target.chunk(cuts), strict=True):
                (head.loss(part, labels) / cuts).backward()
            optimizer.step()
    torch.testing.assert_close(whole[0].weight, parts[0].weight)
    assert torch.equal(whole[0].counts, parts[0].counts)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_late", [True, False])
def test_a_step_skipped_for_overflow_smooths_nothing(set_to_none, zero_late):
    """Neither when it is skipped, nor with the next step."""
    batches = problem(batches=3)
    (head, optimizer), (other, others) = head_and_optimizer(), head_and_optimizer()
    head.attach(optimizer)
    other.attach(others)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for index, (h, target) in enumerate(batches):
        before = head.weight.detach().clone()
        if not zero_late:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = head.loss(h, target) * (math.inf if index == 1 else 1)
        if zero_late:
            optimizer.zero_grad(set_to_none=set_to_none)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(1.0)
        if index == 1:
            assert torch.equal(head.weight, before)
            assert int(head.counts.sum()) == 16
        else:
            step(other, others, (h, target))
    assert torch.equal(head.weight, other.weight)
    assert torch.equal(head.counts, other.counts)


def test_an_optimizer_that_looks_for_overflow_itself():
    torch.manual_seed(0)
    head = nn.HebbianSoftmax(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, fused=True)
    head.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    before = head.weight.detach().clone()
    h, target = problem()[0]
    scaler.scale(head.loss(h.float(), target) * math.inf).backward()
    scaler.step(optimizer)
    assert torch.equal(head.weight, before)
    assert int(head.counts.sum()) == 0


def test_micro_batches_that_pull_at_nothing_count_too():
    """Probabilities that underflow, targets that are all ignored and batches of none leave no gradient."""
    head = nn.HebbianSoftmax(FEATURES, CLASSES, gamma=0.1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    head.attach(optimizer)
    with torch.no_grad():
        head.weight.copy_(torch.cat([100 * torch.eye(FEATURES), torch.zeros(3, FEATURES)]))
    for label in (0, 1, 2):
        h = 10 * torch.eye(FEATURES)[label : label + 1]
        head.loss(h, torch.tensor([label])).backward()
        assert head.weight.grad is not None
        assert not head.weight.grad.any()
        head.loss(h, torch.tensor([-100]), reduction="sum").backward()
        head.loss(h[:0], torch.tensor([], dtype=torch.int64), reduction="sum").backward()
    optimizer.step()
    assert head.counts.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipping_between_micro_batches_is_not_giving_them_up(set_to_none):
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    for index, (h, target) in enumerate(problem(batches=4)):
        if index == 2:
            optimizer.zero_grad(set_to_none=set_to_none)  # the first two are given up
        head.loss(h, target).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1e-3)
    optimizer.step()
    assert int(head.counts.sum()) == 32


def test_a_buffer_of_labels_may_be_filled_again_before_the_step():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    h, labels = problem()[0][0][:2], torch.tensor([0, 1])
    head.loss(h, labels).backward()
    labels.copy_(torch.tensor([2, 3]))
    head.loss(h, labels).backward()
    optimizer.step()
    assert head.counts.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0]


def test_a_frozen_weight_is_left_alone():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    head.weight.requires_grad_(False)
    before = head.weight.clone()
    h, target = problem()[0]
    head.loss(h.requires_grad_(), target).backward()
    optimizer.step()
    head.memorize()
    assert torch.equal(head.weight, before)
    assert int(head.counts.sum()) == 0


def test_gradients_that_are_not_for_the_weight_do_not_count():
    """As of an adversarial example, which is sought before the step with the gradient of the inputs."""
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    h, target = problem()[0]
    h.requires_grad_()
    torch.autograd.grad(head.loss(h, target), h)
    head.loss(h.detach() + 0.1, target).backward()
    optimizer.step()
    assert int(head.counts.sum()) == 16
    # Without another, a gradient that was asked for and put in place by hand does.
    (gradient,) = torch.autograd.grad(head.loss(h, target), head.weight)
    head.weight.grad = gradient
    optimizer.step()
    assert int(head.counts.sum()) == 32


def test_a_step_without_a_gradient_smooths_nothing():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    h, target = problem()[0]
    head.loss(h, target)  # never differentiated
    optimizer.step()
    head.loss(h, target).backward()
    optimizer.zero_grad()  # given up
    optimizer.step()
    assert int(head.counts.sum()) == 0


def test_a_weight_that_was_replaced_is_noticed():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    head.load_state_dict(copy.deepcopy(head.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match="SGD that this head is attached to no longer holds its weight"):
        optimizer.step()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e308)])
def test_activations_too_large_to_add_up_do_not_reach_the_weights(dtype, size):
    head = nn.HebbianSoftmax(FEATURES, CLASSES, dtype=dtype)
    before = head.weight.detach().clone()
    head.loss(torch.full((2, FEATURES), size, dtype=dtype), torch.tensor([0, 0]))
    head.memorize()
    assert torch.equal(head.weight, before)


def test_losses_that_never_went_backward_are_forgotten():
    """Such as the batch that a training loop leaves out because its loss is not finite."""
    (head, optimizer), (other, others) = head_and_optimizer(), head_and_optimizer()
    first, second = problem(batches=2)
    head.attach(optimizer)
    other.attach(others)
    head.loss(*first)
    step(head, optimizer, second)
    step(other, others, second)
    assert torch.equal(head.weight, other.weight)
    assert torch.equal(head.counts, other.counts)


def test_two_losses_of_one_backward_pass_both_count():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    first, second = problem(batches=2)
    (head.loss(*first) + head.loss(*second)).backward()
    optimizer.step()
    assert int(head.counts.sum()) == 32


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_remembers_once(reentrant):
    (head, optimizer), (other, others) = head_and_optimizer(dropout=0.3), head_and_optimizer(dropout=0.3)
    head.attach(optimizer)
    other.attach(others)
    for h, target in problem(batches=3):
        optimizer.zero_grad()
        torch.manual_seed(3)
        checkpoint(head.loss, h.requires_grad_(), target, use_reentrant=reentrant).backward()
        optimizer.step()
        torch.manual_seed(3)
        step(other, others, (h, target))
    torch.testing.assert_close(head.weight, other.weight)
    assert torch.equal(head.counts, other.counts)
    assert int(head.counts.sum()) == 48


def test_nothing_is_remembered_in_evaluation_or_without_gradients():
    head, _ = head_and_optimizer()
    before = head.weight.detach().clone()
    h, target = problem()[0]
    head.eval()
    head.loss(h, target)
    head.train()
    with torch.no_grad():
        head.loss(h, target)
    head(h)
    torch.func.grad(lambda h: head.loss(h, target))(h)
    head.memorize()
    assert torch.equal(head.weight, before)
    assert int(head.counts.sum()) == 0


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
    for value in optimizer.state[weight].values():
        assert not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] in (1, CLASSES + 3)
    h, target = batches[2]
    target[0] = CLASSES + 2
    step(head, optimizer, (h, target))
    torch.testing.assert_close(head.weight[CLASSES + 2].detach(), h[0])
    assert torch.isfinite(head.weight).all()


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


def test_a_state_dict_goes_round_and_a_copy_is_free():
    head, optimizer = head_and_optimizer()
    head.attach(optimizer)
    for batch in problem(batches=3):
        step(head, optimizer, batch)
    other = nn.HebbianSoftmax(FEATURES, CLASSES, dtype=torch.float64)
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.counts, head.counts)
    assert torch.equal(other.weight, head.weight)
    copied = copy.deepcopy(head)
    copied.attach(torch.optim.SGD(copied.parameters(), lr=0.1))  # the original stays attached to its own
    with pytest.raises(RuntimeError, match="attached"):
        head.attach(optimizer)


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


def test_a_wrapped_optimizer_is_found():
    class Wrapper(torch.optim.Optimizer):  # as accelerate's: an optimizer by name, whose own hooks never run
        def __init__(self, optimizer):
            self.optimizer = optimizer

    head, optimizer = head_and_optimizer()
    head.attach(Wrapper(optimizer))
    step(head, optimizer, problem()[0])
    assert int(head.counts.sum()) == 16


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
        monkeypatch.setattr("fastweights.nn._softmax_loss.LARGEST_LOGITS", 1)
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
        ({"gamma": 1.1}, "gamma must be between 0 and 1, got 1.1"),
        ({"gamma": math.nan}, "gamma must be between 0 and 1, got nan"),
        ({"limit": -1}, "limit must not be negative, got -1"),
        ({"dropout": 1.0}, "dropout must be a probability less than 1, got 1.0"),
        ({"objective": "l3"}, "objective must be one of l2, inner_product, svm, sparse_softmax, got 'l3'"),
        ({"counting": "mean"}, "counting must be one of literal, running_mean, got 'mean'"),
    ],
)
def test_refuses_settings_out_of_range(options, match):
    with pytest.raises(ValueError, match=match):
        nn.HebbianSoftmax(**{"in_features": FEATURES, "num_classes": CLASSES} | options)
