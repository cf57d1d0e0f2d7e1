"""Hebbian Softmax: new classes at run time, with any optimizer."""

from typing import Any

import pytest
import torch

from fastweights import nn

from .hebbian import CLASSES, FEATURES, head_and_optimizer, problem, step

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
