"""What permuted MNIST is made of: the tasks of a seed, the network that learns them in turn, and its adaptation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import TrainingError
from fastweights.memory import EpisodicMemory, MbPA, Neighbours
from fastweights.runs import RunFolder
from fastweights.tasks import mnist
from fastweights.training import ElasticWeightConsolidation, Progress, epoch_order

VALIDATION = 10_000  # of the training images, the last ones: settings are chosen by them, and nothing is learnt of them

ModelName = Literal["mlp", "ewc", "mbpa", "random", "mbpa+ewc"]
Split = tuple[Tensor, Tensor]  # images [N,784], 0 to 1, and digits [N]
Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Permuted MNIST: tasks learnt one after another, each of them with pixels in an order of its own."""

    models: tuple[ModelName, ...] = ("mlp", "ewc", "mbpa", "random", "mbpa+ewc")
    """The rows of the table; the network that MbPA adapts is trained in any case, and has its own."""
    seeds: tuple[int, ...] = (1,)
    """One training run for each: of the weights, the permutations, the examples and their order."""
    tasks: int = 5
    """How many are learnt, one after another."""
    examples: int = 10_000
    """Of each task, drawn from MNIST's first 50,000 training images."""
    hidden_size: int = 400
    """Units between the two layers of the network."""
    epochs: int = 5
    """Passes over the examples of a task."""
    batch_size: int = 100
    """Examples in a step."""
    learning_rate: float = 1e-3
    """Of Adam, which goes on from task to task."""
    strength: float = 3.0
    """EWC: what the penalty is multiplied by."""
    fisher_examples: int = 1000
    """EWC: of a task, by which the Fisher information is estimated."""

    memories: tuple[int, ...] = (100, 500, 1000)
    """MbPA: examples of each task that are remembered; a row for each."""
    neighbours: int = 10
    """MbPA: memories that a query retrieves."""
    steps: int = 10
    """MbPA: of gradient descent on them."""
    rate: float = 0.1
    """MbPA: the learning rate of those steps."""
    random_neighbours: int = 50
    """Memories at random: how many a query is given."""
    random_steps: int = 20
    """Memories at random: steps on them, at the same rate."""
    queries: int = 200
    """Images of each task that every model is tested on, the same for all."""
    tested: tuple[int, ...] = (1, 2, 5, 10, 15)
    """MbPA: numbers of tasks after which it is tested, beside the last."""

    split: Literal["test", "validation"] = "test"
    """What is tested on; validation, MNIST's last 10,000 training images, to choose settings by."""
    data_dir: Path | None = None
    """The folder that has the folder of MNIST; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""


class Tasks:
    """The tasks of a seed: each has a permutation of the pixels and examples of its own."""

    def __init__(self, data: mnist.MNIST, settings: Settings, seed: int) -> None:
        images, labels = data.train_images.flatten(1), data.train_labels
        self.learnt = images[:-VALIDATION], labels[:-VALIDATION]
        self.validation = images[-VALIDATION:], labels[-VALIDATION:]
        self.test = data.test_images.flatten(1), data.test_labels
        self.settings, self.seed = settings, seed

    def training(self, task: int, count: int | None = None) -> Split:
        """The examples of a task, or so many: their order is one of chance."""
        return self._permuted(self.learnt, task, self.settings.examples if count is None else count)

    def held_out(self, task: int) -> Split:
        """What a task is tested on, other images for each task."""
        held_out = self.test if self.settings.split == "test" else self.validation
        return self._permuted(held_out, task, self.settings.queries)

    def _permuted(self, split: Split, task: int, count: int) -> Split:
        images, labels = split
        chosen = epoch_order(len(labels), self.seed, task)[:count]
        pixels = images[chosen][:, mnist.permutation(self.seed, task)]
        return pixels.float().div(255).to(self.settings.device), labels[chosen].to(self.settings.device)


def network(settings: Settings) -> nn.Sequential:
    """The multilayer perceptron of two layers."""
    layers = nn.Linear(mnist.PIXELS, settings.hidden_size), nn.ReLU(), nn.Linear(settings.hidden_size, mnist.CLASSES)
    return nn.Sequential(*layers).to(settings.device)


class AtRandom(EpisodicMemory):
    """A memory that hands out any entries, all alike, in place of the nearest: the paper's naive approach."""

    def __init__(self, capacity: int, key_size: int, *, seed: int, device: Any = None) -> None:
        super().__init__(capacity, key_size, device=device)
        self.generator = torch.Generator().manual_seed(seed)

    def search(self, queries: Tensor, neighbours: int, *, epsilon: float = 1e-3) -> Neighbours:
        count = min(neighbours, len(self))
        chances = torch.rand(len(queries), len(self), generator=self.generator)
        indices = chances.topk(count, dim=1).indices.to(self.device)
        keys = self.keys[indices]
        distances = (keys - queries.unsqueeze(1)).square().sum(2)
        return Neighbours(indices, distances, torch.full_like(distances, 1 / count), keys, self.values[indices])


class InTurn:
    """One row of the table, of one seed: after some numbers of tasks a record of its scores, and a checkpoint."""

    def __init__(self, tasks: Tasks, folder: RunFolder, title: str, progress: Progress, counts: Sequence[int]) -> None:
        self.tasks, self.settings, self.folder = tasks, tasks.settings, folder
        self.title, self.progress, self.counts = title, progress, list(counts)
        self.network = network(self.settings)
        self.done, self.seconds, self.answering, self.answers = 0, 0.0, 0.0, 0  # the last two: seconds, and how many

    def after(self, count: int) -> Record:
        """Go on until so many tasks are known."""
        raise NotImplementedError

    def answer(self, images: Tensor) -> Tensor:
        """Logits [N,10] for images [N,784]."""
        raise NotImplementedError

    def carried(self) -> Any:
        """What goes into the checkpoint."""
        return None

    def carry_on(self, carried: Any) -> None:
        """Take it up."""

    def run(self) -> None:
        """Score after every number of tasks; what a killed process has scored is not scored again."""
        state = self.folder.load()
        if state is not None:
            self.done, self.seconds, self.answering, self.answers = state["standing"]
            self.carry_on(state["carried"])
            if state["finished"]:
                return
            self.folder.rewind(state)
        self.folder.note_environment()
        if state is None:
            self._save(False)
        self.progress.start(self.title, len(self.counts), self.done)
        record: Record = {}
        while self.done < len(self.counts):
            record = self._score(self.counts[self.done])
        self._finish(record)

    def _score(self, count: int) -> Record:
        began = time.monotonic()
        told = self.after(count)
        scores = self._accuracies(count)
        self.seconds += time.monotonic() - began
        accuracy = sum(scores) / count
        record = {"kind": "epoch", "epoch": count, "tasks": count, "seconds": self.seconds} | told
        record |= {f"{self.settings.split}_accuracy": accuracy, "accuracies": scores}
        self.folder.append(record)
        self.done += 1
        if self.done < len(self.counts):  # of the last one the result comes first
            self._save(False)
        self.progress.update(self.done, told.get("train_loss", 0.0))
        self.progress.note(f"{count} tasks: accuracy {accuracy:.4f}")
        return record

    def _accuracies(self, count: int) -> list[float]:
        """The accuracy on each task that is known."""
        found = []
        for task in range(count):
            images, labels = self.tasks.held_out(task)
            began = time.perf_counter()
            right = self.answer(images).argmax(1) == labels
            found.append(right.float().mean().item())
            self.answering, self.answers = self.answering + time.perf_counter() - began, self.answers + len(labels)
        return found

    def _finish(self, record: Record) -> None:
        split = self.settings.split
        result = {"kind": "result", "epoch": record["epoch"], "tasks": record["tasks"], "seconds": self.seconds}
        result |= {f"{split}_accuracy": record[f"{split}_accuracy"], "accuracies": record["accuracies"]}
        result[f"{split}_error"] = 100 * (1 - record[f"{split}_accuracy"])
        result["milliseconds_a_query"] = 1000 * self.answering / self.answers
        result["parameters"] = sum(weight.numel() for weight in self.network.parameters())
        self.folder.append(result)
        self._save(True)

    def _save(self, finished: bool) -> None:
        standing = [self.done, self.seconds, self.answering, self.answers]
        self.folder.save({"standing": standing, "carried": self.carried(), "finished": finished})


class Training(InTurn):
    """A network that learns the tasks one after another, with elastic weight consolidation or without.

    `after_tasks` has its weights after each task, which stay in the checkpoint: adaptation at test time starts there.
    """

    def __init__(self, *arguments: Any, consolidate: bool) -> None:
        super().__init__(*arguments)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.settings.learning_rate, fused=True)
        self.consolidation = ElasticWeightConsolidation(self.network) if consolidate else None
        self.after_tasks: list[dict[str, Tensor]] = []

    def after(self, count: int) -> Record:
        task = count - 1
        images, labels = self.tasks.training(task)
        steps, total = 0, torch.zeros((), dtype=torch.float64)
        for epoch in range(self.settings.epochs):
            order = epoch_order(len(labels), self.tasks.seed, task * self.settings.epochs + epoch)
            for batch in torch.split(order.to(labels.device), self.settings.batch_size):
                loss = F.cross_entropy(self.network(images[batch]), labels[batch])
                total += loss.detach().cpu()
                if self.consolidation is not None and self.consolidation.tasks:
                    loss = loss + self.settings.strength * self.consolidation.penalty()
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                steps += 1
        if not bool(torch.isfinite(loss)):
            raise TrainingError(
                f"{self.title}: the loss became NaN or infinite in task {count}; the checkpoint in {self.folder.path} "
                f"is from before. Lower the learning rate ({self.settings.learning_rate}) or the strength "
                f"({self.settings.strength}), and start over with --fresh"
            )
        if self.consolidation is not None:
            drawn = torch.Generator(labels.device).manual_seed(2**16 * self.tasks.seed + task)
            self.consolidation.consolidate(images[: self.settings.fisher_examples], generator=drawn)
        self.after_tasks.append({name: value.detach().clone() for name, value in self.network.state_dict().items()})
        return {"step": steps * count, "train_loss": total.item() / steps}

    def answer(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.network(images)
        return logits

    def carried(self) -> Any:
        own = self.consolidation.state_dict() if self.consolidation is not None else None
        return {"after_tasks": self.after_tasks, "optimizer": self.optimizer.state_dict(), "consolidation": own}

    def carry_on(self, carried: Any) -> None:
        self.after_tasks = carried["after_tasks"]
        if self.after_tasks:
            self.network.load_state_dict(self.after_tasks[-1])
        self.optimizer.load_state_dict(carried["optimizer"])
        if self.consolidation is not None:
            self.consolidation.load_state_dict(carried["consolidation"])


class Adapting(InTurn):
    """A network that was trained already, with a memory of some examples of each task."""

    def __init__(self, *arguments: Any, trained: Training, memories: int, at_random: bool) -> None:
        super().__init__(*arguments)
        self.trained, self.memories, self.at_random = trained, memories, at_random

    def after(self, count: int) -> Record:
        self.network.load_state_dict(self.trained.after_tasks[count - 1])
        settings, size = self.settings, self.memories * count
        neighbours, steps = settings.neighbours, settings.steps
        store = EpisodicMemory(size, mnist.PIXELS, device=settings.device)
        if self.at_random:
            neighbours, steps = settings.random_neighbours, settings.random_steps
            store = AtRandom(size, mnist.PIXELS, seed=2**16 * self.tasks.seed + count, device=settings.device)
        self.model = MbPA(nn.Identity(), self.network, store, neighbours=neighbours, steps=steps, lr=settings.rate)
        for task in range(count):
            self.model.write(*self.tasks.training(task, self.memories))
        return {}

    def answer(self, images: Tensor) -> Tensor:
        return self.model(images)
