"""The recorder: which batches a step smooths, and which it leaves; on several processes, and compiled."""

import copy
import math
import multiprocessing

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastweights import nn

from .problems import CLASSES, FEATURES, head_and_optimizer, problem, step


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
    optimizer.zero_grad(set_to_none=False)
    scaler.update(1.0)
    scaler.scale(head.weight.square().sum()).backward()  # no loss of the head's, so that nothing is to be smoothed
    scaler.step(optimizer)
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


def test_a_wrapped_optimizer_is_found():
    class Wrapper(torch.optim.Optimizer):  # as accelerate's: an optimizer by name, whose own hooks never run
        def __init__(self, optimizer):
            self.optimizer = optimizer

    head, optimizer = head_and_optimizer()
    head.attach(Wrapper(optimizer))
    step(head, optimizer, problem()[0])
    assert int(head.counts.sum()) == 16


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


BATCH, STEPS = 12, 5


class Model(torch.nn.Module):
    """A body and a head, whose loss is its forward pass: what a data-parallel wrapper has to see."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, FEATURES)
        self.head = nn.HebbianSoftmax(FEATURES, CLASSES, gamma=0.1, limit=6)

    def forward(self, x, target):
        return self.head.loss(self.body(x), target)


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 4, generator=generator), torch.randint(0, 7, (BATCH,), generator=generator)


def train(model, wrapped, share=slice(None)):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model.head.attach(optimizer)
    for x, target in batches():
        optimizer.zero_grad()
        wrapped(x[share], target[share]).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def worker(rank, address, results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = Model()
    state = train(model, DistributedDataParallel(model), slice(rank, None, 2))
    # Then a step for which one of the processes has nothing to remember.
    if rank == 0:
        model.head.loss(torch.ones(1, FEATURES), torch.tensor([CLASSES - 1]))
    model.head.memorize()
    state["late"] = model.head.weight[CLASSES - 1].detach().clone()
    results.put((rank, {name: value.numpy() for name, value in state.items()}))
    distributed.destroy_process_group()


def test_two_processes_give_what_one_gives(tmp_path):
    expected = train(alone := Model(), alone)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=worker, args=(rank, f"file://{tmp_path}/store", results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    for state in found.values():
        late = torch.from_numpy(state.pop("late"))
        torch.testing.assert_close(late, torch.ones(FEATURES))
        for name, value in expected.items():
            torch.testing.assert_close(torch.from_numpy(state[name]), value, rtol=1e-6, atol=1e-6)
    assert (found[0]["head.weight"] == found[1]["head.weight"]).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler itself, which hides it but from pytest
def test_a_compiled_body_and_head():
    model, plain = Model(), Model()
    torch.testing.assert_close(train(model, torch.compile(model, backend="aot_eager")), train(plain, plain))
    assert int(model.head.counts.sum()) == STEPS * BATCH
    logits = torch.compile(model.head, backend="aot_eager", fullgraph=True)
    h = torch.randn(3, FEATURES)
    torch.testing.assert_close(logits(h), model.head(h))
