"""Hebbian Softmax where it gets large: vocabularies whose logits are never held, several processes, a compiler."""

import multiprocessing

import pytest
import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fastweights import nn
from fastweights.nn.hebbian_softmax import loss as softmax_loss

FEATURES, CLASSES, BATCH, STEPS = 8, 40, 12, 5


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


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler itself, which hides it but from pytest
def test_a_compiled_body_and_head():
    model, plain = Model(), Model()
    torch.testing.assert_close(train(model, torch.compile(model, backend="aot_eager")), train(plain, plain))
    assert int(model.head.counts.sum()) == STEPS * BATCH
    logits = torch.compile(model.head, backend="aot_eager", fullgraph=True)
    h = torch.randn(3, FEATURES)
    torch.testing.assert_close(logits(h), model.head(h))
