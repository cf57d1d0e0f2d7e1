"""The batches and the head of one case, the same for every rival, and the training step that is timed."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench.hebbian_softmax import cases
from fastweights.bench.hebbian_softmax.cases import Case
from fastweights.bench.streams import words
from fastweights.nn import HebbianSoftmax

BATCHES = 8  # that are prepared, and taken in turn
NEVER = 2**62  # a limit that no class reaches
LEARNING_RATE = 0.1
# Of an activation, as in the hidden state of a trained LSTM. Large ones make logits so far apart that probabilities
# are denormal numbers, of which a product takes many times as long, whoever computes it.
SCALE = 0.1


class Problem:
    """Activations, labels whose frequencies are Zipf's, and the weights that every rival begins with."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.classes * case.hidden_size)
        shape = BATCHES, case.batch, case.hidden_size
        self.activations = SCALE * torch.randn(shape, generator=generator)
        self.labels = labels(case)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.weight = HebbianSoftmax(case.hidden_size, case.classes).weight.detach()

    def head(self, limit: int = NEVER) -> HebbianSoftmax:
        """A head of ours with weights of its own; with limit 1, every class has been seen as often."""
        head = HebbianSoftmax(self.case.hidden_size, self.case.classes, limit=limit, device="meta")
        head.weight = nn.Parameter(self.weight.clone())
        head.counts = torch.full((self.case.classes,), int(limit != NEVER))
        return head


class TrainingStep:
    """Steps of one rival, batch after batch: the loss, the gradients of activations and weights, and plain SGD."""

    def __init__(self, problem: Problem, rival: str) -> None:
        case = problem.case
        self.module: HebbianSoftmax | nn.Linear
        if rival == cases.PLAIN:
            self.module = nn.Linear(case.hidden_size, case.classes, bias=False, device="meta")
            self.module.weight = nn.Parameter(problem.weight.clone())
        else:
            self.module = problem.head(limit=1 if rival == cases.PAST_LIMIT else NEVER)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        if isinstance(self.module, HebbianSoftmax):
            self.module.attach(self.optimizer)
        self.batches = itertools.cycle(zip(problem.activations, problem.labels, strict=True))

    def __call__(self) -> None:
        h, target = next(self.batches)
        h = h.detach().requires_grad_()
        if isinstance(self.module, HebbianSoftmax):
            loss = self.module.loss(h, target)
        else:
            loss = F.cross_entropy(self.module(h), target)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()  # here rather than before the loss: who waits for its turn holds no gradient


def labels(case: Case) -> Tensor:
    """Of all batches, [BATCHES,batch]: the class of rank r in proportion to 1 / r."""
    generator = torch.Generator().manual_seed(case.classes)
    return words(BATCHES * case.batch, case.classes, generator).view(BATCHES, case.batch)
