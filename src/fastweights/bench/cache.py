"""`fastweights bench cache`: the neural cache beside the loop over time that such caches are published with."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.bench.parity import parity_error
from fastweights.bench.problems import Calls, draw_words, make_activations
from fastweights.bench.published import Columns, Row, last_measured, place, show, show_ratio, table
from fastweights.bench.run import Line
from fastweights.memory import NeuralCache, mix

OURS, LOOP = "fastweights", "loop over time"
RIVALS = (OURS, LOOP)
POSITIONS = {OURS: 512, LOOP: 5}  # positions scored by a timed call
THETA, SHARE = 0.3, 0.1  # theta multiplies the likeness; the cache's share of the mixture
MOST_ERROR = 1e-6

BASE = ("loop", LOOP)
COLUMNS = ["window", "classes", "hidden_size", "rival", "positions"]
UNIT = "milliseconds a position"
PER = "positions"


@dataclass(frozen=True)
class CacheCase:
    """A stream, and how much of it the cache remembers."""

    window: int
    classes: int = 10_000  # V
    hidden_size: int = 400  # d

    def __str__(self) -> str:
        return f"window={self.window}, V={self.classes}, d={self.hidden_size}"

    def positions(self, rival: str) -> int:
        """Return how many positions a timed call scores."""
        return POSITIONS[rival]


@dataclass(frozen=True)
class CacheSelection:
    """The cases that a run of the command times."""

    threads: tuple[int, ...] = (1, 2)
    windows: tuple[int, ...] = (2000,)
    rounds: int = 15
    budget: float = 60.0  # seconds that the rounds of one case may take, of both rivals together

    def cases(self) -> list[CacheCase]:
        return [CacheCase(window) for window in self.windows]


QUICK = CacheSelection()
FULL = CacheSelection(windows=(500, 2000, 8000))


class CacheProblem:
    """A model's activations and logits, with a full window before the positions that are scored."""

    def __init__(self, case: CacheCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.classes * case.hidden_size)
        length = case.window + POSITIONS[OURS]
        self.h = make_activations(length, case.hidden_size, generator)
        self.targets = draw_words(length, case.classes, generator)
        self.logits = torch.randn(
            POSITIONS[OURS], case.classes, generator=generator
        )  # logits of the positions to score


class Ours:
    """`NeuralCache` and `mix`, on a cache that is full."""

    def __init__(self, problem: CacheProblem) -> None:
        self.problem, window = problem, problem.case.window
        self.cache = NeuralCache(window, problem.case.classes, THETA)
        self.cache.log_prob(problem.h[:window], problem.targets[:window])

    def __call__(self, count: int = POSITIONS[OURS]) -> Tensor:
        """Return -log p of the next positions, [count]; the stream begins again after them."""
        first = self.problem.case.window
        h, targets = (stream[first : first + count] for stream in (self.problem.h, self.problem.targets))
        model = self.problem.logits[:count].log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
        return -mix([model, self.cache.log_prob(h, targets)], [1 - SHARE, SHARE])


class Loop:
    """Position after position: every class's probability as one-hot rows of the window times their attention.

    The rows of the window and of the positions to score stand ready, as they do in the published loop for the positions
    of one segment.
    """

    def __init__(self, problem: CacheProblem) -> None:
        self.problem = problem
        count = problem.case.window + POSITIONS[LOOP]
        self.rows = F.one_hot(problem.targets[:count], problem.case.classes).float()

    def __call__(self, count: int = POSITIONS[LOOP]) -> Tensor:
        """Return -log p of the next positions, [count]."""
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


def require_parity(case: CacheCase) -> None:
    """Raise FastWeightsError where the loss is not that of the loop over time, to 1e-6 of it."""
    problem = CacheProblem(case)
    expected, loss = (float(losses(POSITIONS[LOOP]).double().sum()) for losses in (Loop(problem), Ours(problem)))
    error = abs(loss - expected) / abs(expected)
    if not error <= MOST_ERROR:  # a NaN is red
        raise parity_error(f"the loss at {case} differs from the loop's by {error:.1e}")


def rivals(case: CacheCase, selection: CacheSelection) -> tuple[Calls, dict[str, str]]:
    """Return the calls of both rivals."""
    problem = CacheProblem(case)
    return {OURS: Ours(problem), LOOP: Loop(problem)}, {}


def lines(case: CacheCase) -> list[Line]:
    """Return the line that is printed for a case."""
    ours = ("ours", 8, show(OURS, digits=4)), ("loop", 8, show(LOOP))
    return [[("threads", 7, "threads"), ("window", 7, "window"), *ours, ("loop/ours", 9, show_ratio(LOOP, OURS, 0))]]


TABLE: Columns = (
    ("threads", "threads"),
    ("window", "window"),
    ("V", "classes"),
    ("d", "hidden_size"),
    ("fastweights", show(OURS, digits=4)),
    ("loop over time", show(LOOP, digits=1)),
    ("times the positions of the loop", show_ratio(LOOP, OURS, 0)),
)


def times_table(rows: list[Row]) -> str:
    """Return a table of milliseconds a position, and how many times as fast as the loop ours is."""
    rows = last_measured(rows)
    return f"Milliseconds a position, the median, float32; {place(rows[-1])}.\n\n{table(rows, TABLE)}"
