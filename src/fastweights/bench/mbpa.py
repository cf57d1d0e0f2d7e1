"""`fastweights bench mbpa`: local adaptation beside autograd, a query at a time and through `torch.func.vmap`."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights.bench.parity import distance, parity_error
from fastweights.bench.problems import Calls, draw_words, make_activations
from fastweights.bench.published import Columns, Row, last_measured, place, show, show_ratio, table
from fastweights.bench.run import Line
from fastweights.memory import EpisodicMemory, MbPA

OURS, ANEW = "fastweights", "fastweights, nothing stored"
LOOP, VMAP = "autograd loop", "torch.func.vmap"
RIVALS = (OURS, ANEW, LOOP, VMAP)
OUTPUTS = ("linear", "mlp")
OPTIMIZERS = ("sgd", "rmsprop")
LEARNING_RATE = {"sgd": 0.15, "rmsprop": 0.01}
HIDDEN = 128  # units of the multilayer perceptron
MOST_ERROR = 1e-6

BASE = ("loop", LOOP)
COLUMNS = ["output", "optimizer", "steps", "classes", "key_size", "neighbours", "batch", "entries", "rival", "queries"]
UNIT = "milliseconds a query"
PER = "queries"

Answer = Callable[[Tensor], Tensor]  # queries [Q,d] -> [Q,V]


@dataclass(frozen=True)
class MbPACase:
    """A model with its memory."""

    steps: int  # T
    output: str = "linear"
    optimizer: str = "sgd"
    classes: int = 10_000  # V
    key_size: int = 400  # d
    neighbours: int = 256  # K
    entries: int = 5000  # N
    batch: int = 256  # queries at once

    def __str__(self) -> str:
        return f"{self.output} under {self.optimizer}, T={self.steps}, V={self.classes}, d={self.key_size}"

    @property
    def rivals(self) -> tuple[str, ...]:
        """The rivals to time: "nothing stored" only where the output is an affine map, whose outputs are stored."""
        closed = self.output == "linear" and self.optimizer == "sgd"
        return tuple(rival for rival in RIVALS if closed or rival != ANEW)

    def queries(self, rival: str) -> int:
        """Return how many queries a timed call answers: of the slow rivals fewer."""
        if self.classes * self.key_size > 2**20:
            most = {OURS: 256 if self.steps == 1 else 16, ANEW: 16, LOOP: 2, VMAP: 2}
        else:
            most = {LOOP: 16, VMAP: 64}
        return min(self.batch, most.get(rival, self.batch))


SMALL = {"classes": 100, "key_size": 64, "neighbours": 50}


@dataclass(frozen=True)
class MbPASelection:
    """The cases that a run times: the language model's softmax, and small networks that have no closed form."""

    threads: tuple[int, ...] = (1, 2)
    steps: tuple[int, ...] = (1, 5)
    rounds: int = 15
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together

    def cases(self) -> list[MbPACase]:
        cases = [MbPACase(steps, batch=batch) for steps in self.steps for batch in ((256, 1) if steps == 1 else (256,))]
        for output, optimizer in (("linear", "rmsprop"), ("mlp", "rmsprop"), ("mlp", "sgd")):
            cases += [MbPACase(steps, output, optimizer, **SMALL) for steps in self.steps]
        return cases


QUICK = MbPASelection()
FULL = MbPASelection(steps=(1, 5, 20))


class MbPAProblem:
    """Keys and queries as an LSTM's activations, labels as frequent as words."""

    def __init__(self, case: MbPACase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.classes * case.key_size)
        self.store = EpisodicMemory(case.entries, case.key_size)
        labels = draw_words(case.entries, case.classes, generator)
        self.store.write(make_activations(case.entries, case.key_size, generator), labels)
        self.queries = make_activations(case.batch, case.key_size, generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.output = _make_output(case)

    def answer(self, rival: str) -> Answer:
        """Return the call of a rival, which finds the neighbours itself."""
        if rival in (LOOP, VMAP):
            return self.answer_in_a_loop if rival == LOOP else self.answer_at_once
        return MbPA(
            nn.Identity(),
            self.output,
            self.store,
            neighbours=self.case.neighbours,
            steps=self.case.steps,
            lr=LEARNING_RATE[self.case.optimizer],
            optimizer=self.case.optimizer,
            max_prediction_bytes=2**29 if rival == OURS else 0,
        )

    def answer_in_a_loop(self, queries: Tensor) -> Tensor:
        """Adapt a copy of the network for each query, with torch's optimizer."""
        optimizers = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
        answers = []
        for query in queries:
            near = self.store.search(query[None], self.case.neighbours)
            network = copy.deepcopy(self.output)
            optimizer = optimizers[self.case.optimizer](network.parameters(), lr=LEARNING_RATE[self.case.optimizer])
            for _ in range(self.case.steps):
                optimizer.zero_grad()
                losses = F.cross_entropy(network(near.keys[0]), near.values[0], reduction="none")
                (near.weights[0] * losses).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                answers.append(network(query))
        return torch.stack(answers)

    def answer_at_once(self, queries: Tensor) -> Tensor:
        """Do the same for all queries at once, with gradients from `torch.func`."""
        near = self.store.search(queries, self.case.neighbours)
        before = {name: parameter.detach() for name, parameter in self.output.named_parameters()}
        rate, squares = LEARNING_RATE[self.case.optimizer], self.case.optimizer == "rmsprop"

        def loss(parameters: dict[str, Tensor], keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
            outputs = functional_call(self.output, parameters, (keys,))
            return (weights * F.cross_entropy(outputs, values, reduction="none")).sum()

        def one(query: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
            parameters, means = before, {name: torch.zeros_like(value) for name, value in before.items()}
            for _ in range(self.case.steps):
                steps = grad(loss)(parameters, keys, values, weights)
                if squares:
                    means = {name: 0.99 * means[name] + 0.01 * step.square() for name, step in steps.items()}
                    steps = {name: step / (means[name].sqrt() + 1e-8) for name, step in steps.items()}
                parameters = {name: parameters[name] - rate * step for name, step in steps.items()}
            answer: Tensor = functional_call(self.output, parameters, (query,))
            return answer

        answers: Tensor = vmap(one)(queries, near.keys, near.values, near.weights)
        return answers.detach()


def _make_output(case: MbPACase) -> nn.Module:
    """Return the output network that adapts."""
    if case.output == "linear":
        return nn.Linear(case.key_size, case.classes)
    return nn.Sequential(nn.Linear(case.key_size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, case.classes))


def require_parity(case: MbPACase) -> None:
    """Raise FastWeightsError where a rival's outputs are not the autograd loop's, to 1e-6 of their norm."""
    problem = MbPAProblem(case)
    queries = problem.queries[: case.queries(LOOP)]
    expected = problem.answer_in_a_loop(queries)
    for rival in case.rivals:
        error = distance(problem.answer(rival)(queries), expected)
        if not error <= MOST_ERROR:  # a NaN is red
            raise parity_error(f"{rival} at {case} differs from the autograd loop by {error:.1e}")


def rivals(case: MbPACase, selection: MbPASelection) -> tuple[Calls, dict[str, str]]:
    """Return a call of every rival, each with as many queries as it answers at once."""
    problem = MbPAProblem(case)
    queries = {rival: problem.queries[: case.queries(rival)] for rival in case.rivals}
    return {rival: functools.partial(problem.answer(rival), queries[rival]) for rival in case.rivals}, {}


def lines(case: MbPACase) -> list[Line]:
    """Return the line that is printed for a case."""
    model = ("threads", 7, "threads"), ("output", 7, "output"), ("optimizer", 9, "optimizer")
    sizes = ("T", 3, "steps"), ("V", 6, "classes"), ("at once", 7, "batch")
    headings = zip(("ours", "not stored", "loop", "vmap"), (8, 10, 8, 8), RIVALS, strict=True)
    shown = ((heading, width, show(rival, digits=3)) for heading, width, rival in headings)
    return [[*model, *sizes, *shown, ("loop/ours", 9, show_ratio(LOOP, OURS, 1))]]


TABLE: Columns = (
    ("threads", "threads"),
    ("output", "output"),
    ("optimizer", "optimizer"),
    ("T", "steps"),
    ("V", "classes"),
    ("d", "key_size"),
    ("K", "neighbours"),
    ("queries at once", "batch"),
    ("fastweights", show(OURS, digits=3)),
    ("nothing stored", show(ANEW, digits=3)),
    ("autograd loop", show(LOOP, digits=3)),
    ("`torch.func.vmap`", show(VMAP, digits=3)),
    ("times the queries of the loop", show_ratio(LOOP, OURS, 1)),
)


def times_table(rows: list[Row]) -> str:
    """Return a table of milliseconds a query, and how many times as fast as the loop ours is."""
    rows = last_measured(rows)
    shown = table(rows, TABLE, words=(*OUTPUTS, *OPTIMIZERS))
    return f"Milliseconds a query, the median, float32; {rows[-1]['entries']} entries; {place(rows[-1])}.\n\n{shown}"
