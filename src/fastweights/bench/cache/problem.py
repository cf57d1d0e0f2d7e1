"""The stream of one case, and the rivals that score it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.bench.cache.cases import LOOP, OURS, POSITIONS, Case
from fastweights.bench.streams import activations, words
from fastweights.memory import NeuralCache, mix

THETA, SHARE = 0.3, 0.1  # of likeness, and of the cache in the mixture


class Problem:
    """A model's activations and logits, with a full window before the positions that are scored."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.classes * case.hidden_size)
        length = case.window + POSITIONS[OURS]
        self.h = activations(length, case.hidden_size, generator)
        self.targets = words(length, case.classes, generator)
        self.logits = torch.randn(POSITIONS[OURS], case.classes, generator=generator)  # of the positions to score

    def ours(self) -> "Ours":
        return Ours(self)

    def loop(self) -> "Loop":
        return Loop(self)


class Ours:
    """`NeuralCache` and `mix`, on a cache that is full."""

    def __init__(self, problem: Problem) -> None:
        self.problem, window = problem, problem.case.window
        self.cache = NeuralCache(window, problem.case.classes, THETA)
        self.cache.log_prob(problem.h[:window], problem.targets[:window])

    def __call__(self, count: int = POSITIONS[OURS]) -> Tensor:
        """-log p of the next positions, [count]; the stream begins again after them."""
        first = self.problem.case.window
        h, targets = (each[first : first + count] for each in (self.problem.h, self.problem.targets))
        model = self.problem.logits[:count].log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
        return -mix([model, self.cache.log_prob(h, targets)], [1 - SHARE, SHARE])


class Loop:
    """Position after position: every class's probability as one-hot rows of the window times their attention.

    The rows of the window and of the positions to score stand ready, as they do in the published loop for the positions
    of one segment.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        count = problem.case.window + POSITIONS[LOOP]
        self.rows = F.one_hot(problem.targets[:count], problem.case.classes).float()

    def __call__(self, count: int = POSITIONS[LOOP]) -> Tensor:
        """-log p of the next positions, [count]."""
        problem, window = self.problem, self.problem.case.window
        model = problem.logits[:count].softmax(1)
        losses = []
        for index in range(count):
            past = slice(index, index + window)
            attention = torch.softmax(THETA * torch.mv(problem.h[past], problem.h[index + window]), 0)
            cached = (attention.unsqueeze(1).expand_as(self.rows[past]) * self.rows[past]).sum(0)
            mixed = SHARE * cached + (1 - SHARE) * model[index]
            losses.append(-mixed[problem.targets[index + window]].log())
        return torch.stack(losses)
