"""The model, the memory and the queries of one case, and the rivals that answer them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fastweights.bench.mbpa import cases
from fastweights.bench.mbpa.cases import Case
from fastweights.bench.streams import activations, words
from fastweights.memory import EpisodicMemory, MbPA

LEARNING_RATE = {"sgd": 0.15, "rmsprop": 0.01}
HIDDEN = 128  # units of the multilayer perceptron

Answer = Callable[[Tensor], Tensor]  # queries [Q,d] -> [Q,V]


class Problem:
    """Keys and queries as an LSTM's activations, labels as frequent as words."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.classes * case.key_size)
        self.store = EpisodicMemory(case.entries, case.key_size)
        labels = words(case.entries, case.classes, generator)
        self.store.write(activations(case.entries, case.key_size, generator), labels)
        self.queries = activations(case.batch, case.key_size, generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.output = network(case)

    def answer(self, rival: str) -> Answer:
        """A rival, which finds the neighbours itself."""
        if rival == cases.LOOP:
            return self.loop
        return self.mapped if rival == cases.VMAP else self.ours(stored=rival == cases.OURS)

    def ours(self, *, stored: bool) -> MbPA:
        return MbPA(
            nn.Identity(),
            self.output,
            self.store,
            neighbours=self.case.neighbours,
            steps=self.case.steps,
            lr=LEARNING_RATE[self.case.optimizer],
            optimizer=self.case.optimizer,
            max_prediction_bytes=2**29 if stored else 0,
        )

    def loop(self, queries: Tensor) -> Tensor:
        """A copy of the network for each query, and torch's optimizer."""
        optimizers = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}
        answers = []
        for query in queries:
            found = self.store.search(query[None], self.case.neighbours)
            adapted = copy.deepcopy(self.output)
            optimizer = optimizers[self.case.optimizer](adapted.parameters(), lr=LEARNING_RATE[self.case.optimizer])
            for _ in range(self.case.steps):
                optimizer.zero_grad()
                losses = F.cross_entropy(adapted(found.keys[0]), found.values[0], reduction="none")
                (found.weights[0] * losses).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with torch.no_grad():
                answers.append(adapted(query))
        return torch.stack(answers)

    def mapped(self, queries: Tensor) -> Tensor:
        """The same of all queries at once, with gradients from `torch.func`."""
        found = self.store.search(queries, self.case.neighbours)
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

        answers: Tensor = vmap(one)(queries, found.keys, found.values, found.weights)
        return answers.detach()


def network(case: Case) -> nn.Module:
    """The output network that adapts."""
    if case.output == "linear":
        return nn.Linear(case.key_size, case.classes)
    return nn.Sequential(nn.Linear(case.key_size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, case.classes))
