"""Permuted MNIST, figure 3 of Sprechmann et al. 2018: forgetting, EWC, and adaptation to memories at test time.

Section 4.1 of "Memory-based parameter adaptation".
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_not_negative
from fastweights.errors import TrainingError
from fastweights.memory import EpisodicMemory, MbPA, Neighbours
from fastweights.processes import refuse_several
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, resume, run_of, settings_of
from fastweights.reproduce._members import Members
from fastweights.runs import Curve, Progress, Record, RunFolder, Score
from fastweights.tasks import mnist
from fastweights.training import ElasticWeightConsolidation, epoch_order

EXPERIMENT = "sprechmann2018/permuted-mnist"
QUICK_MINUTES = 1  # docs/results/sprechmann2018-permuted-mnist: a quarter of its tasks, of one seed
DATA = "mnist"

ModelName = Literal["mlp", "ewc", "mbpa", "random", "mbpa+ewc"]
TITLES: dict[ModelName, str] = {
    "mlp": "MLP",
    "ewc": "EWC",
    "mbpa": "MbPA",
    "random": "MbPA, memories at random",
    "mbpa+ewc": "MbPA + EWC",
}
_CONSOLIDATING = ("ewc", "mbpa+ewc")
_ADAPTING = ("mbpa", "random", "mbpa+ewc")

VALIDATION = 10_000  # last training images, which nothing is learnt from: settings are chosen by them

Examples = tuple[Tensor, Tensor]  # images [N,784], 0 to 1, and digits [N]


@dataclass(frozen=True)
class Settings:
    """Permuted MNIST: tasks learnt one after another, each of them with pixels in an order of its own."""

    models: tuple[ModelName, ...] = ("mlp", "ewc", "mbpa", "random", "mbpa+ewc")
    """Models to train and test, each a row of the table; the network that MbPA adapts is trained in any case."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights, the permutations, the examples and their order: one training run for each."""
    tasks: int = 5
    """Number of tasks, which are learnt one after another."""
    examples: int = 10_000
    """Training examples of each task, drawn from MNIST's first 50,000 training images."""
    hidden_size: int = 400
    """Units between the two layers of the network."""
    epochs: int = 5
    """Passes over the examples of a task."""
    batch_size: int = 100
    """Examples in a step."""
    learning_rate: float = 1e-3
    """Learning rate of Adam, whose state is kept from task to task."""
    strength: float = only(_CONSOLIDATING, 3.0, "Factor of the penalty in the loss.")
    fisher_examples: int = only(_CONSOLIDATING, 1000, "Examples of each task that estimate the Fisher information.")

    memories: tuple[int, ...] = only(
        _ADAPTING, (100, 500, 1000), "Examples of each task that are remembered; a row for each number."
    )
    neighbours: int = only(("mbpa", "mbpa+ewc"), 10, "Memories that a query retrieves.")
    steps: int = only(("mbpa", "mbpa+ewc"), 10, "Gradient steps on the memories that are retrieved.")
    rate: float = only(_ADAPTING, 0.1, "Learning rate of those steps.")
    random_neighbours: int = only("random", 50, "Memories drawn at random for each query.")
    random_steps: int = only("random", 20, "Gradient steps on the memories that are drawn.")
    queries: int = 200
    """Images of each task that every model is tested on, the same for all."""
    tested: tuple[int, ...] = only(
        _ADAPTING, (1, 2, 5, 10, 15), "Numbers of tasks after which the model is tested, besides the last."
    )

    split: Literal["test", "validation"] = "test"
    """Images to test on; choose settings on validation, MNIST's last 10,000 training images."""
    data_dir: Path | None = None
    """Folder that has the folder of MNIST; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""


PRESETS = {"quick": Settings(), "paper": Settings(seeds=(1, 2, 3), tasks=20, strength=1.0, queries=250)}


class AdaptedRow(NamedTuple):
    """A row of the table: a network as it was trained, or adapted to so many memories of each task."""

    model: ModelName
    memories: int | None

    @property
    def title(self) -> str:
        return TITLES[self.model] if self.memories is None else f"{TITLES[self.model]}, {self.memories:,} a task"

    @property
    def consolidates(self) -> bool:
        return self.model in _CONSOLIDATING


class PermutedTasks:
    """The tasks of a seed: each has a permutation of the pixels and examples of its own."""

    def __init__(self, data: mnist.MNIST, settings: Settings, seed: int) -> None:
        images, labels = data.train_images.flatten(1), data.train_labels
        self.learnt = images[:-VALIDATION], labels[:-VALIDATION]
        self.validation = images[-VALIDATION:], labels[-VALIDATION:]
        self.test = data.test_images.flatten(1), data.test_labels
        self.settings, self.seed = settings, seed

    def training(self, task: int, count: int | None = None) -> Examples:
        """Return the examples of a task, or the first so many: their order is random."""
        return self._permute(self.learnt, task, self.settings.examples if count is None else count)

    def held_out(self, task: int) -> Examples:
        """Return the images that a task is tested on, others for each task."""
        held_out = self.test if self.settings.split == "test" else self.validation
        return self._permute(held_out, task, self.settings.queries)

    def _permute(self, examples: Examples, task: int, count: int) -> Examples:
        images, labels = examples
        chosen = epoch_order(len(labels), self.seed, task)[:count]
        pixels = images[chosen][:, mnist.permutation(self.seed, task)]
        return pixels.float().div(255).to(self.settings.device), labels[chosen].to(self.settings.device)


def make_network(settings: Settings) -> nn.Sequential:
    """Return the multilayer perceptron of two layers."""
    layers = nn.Linear(mnist.PIXELS, settings.hidden_size), nn.ReLU(), nn.Linear(settings.hidden_size, mnist.CLASSES)
    return nn.Sequential(*layers).to(settings.device)


class RandomMemory(EpisodicMemory):
    """A memory that returns random entries, equally weighted, in place of the nearest: the paper's naive approach."""

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


class TaskLearner(Protocol):
    """A row's model, which learns one task after another."""

    network: nn.Sequential

    def learn(self, count: int) -> Record:
        """Go on until so many tasks are known, and return numbers for the record."""

    def answer(self, images: Tensor) -> Tensor:
        """Return logits [N,10] for images [N,784]."""

    def state_dict(self) -> Any:
        """Return the checkpoint's content."""

    def load_state_dict(self, state: Any) -> None:
        """Take up a checkpoint's content."""


class NetworkLearner:
    """A network that learns the tasks one after another, with elastic weight consolidation or without.

    `after_tasks` has its weights after each task, which stay in the checkpoint: adaptation at test time starts there.
    """

    def __init__(self, tasks: PermutedTasks, folder: Path, title: str, *, consolidate: bool) -> None:
        self.tasks, self.settings, self.folder, self.title = tasks, tasks.settings, folder, title
        self.network = make_network(self.settings)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.settings.learning_rate, fused=True)
        self.consolidation = ElasticWeightConsolidation(self.network) if consolidate else None
        self.after_tasks: list[dict[str, Tensor]] = []

    def learn(self, count: int) -> Record:
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
                f"{self.title}: the loss became NaN or infinite in task {count}; the checkpoint in {self.folder} is "
                f"from before. Lower the learning rate ({self.settings.learning_rate}) or the strength "
                f"({self.settings.strength}), and start over with --fresh"
            )
        if self.consolidation is not None:
            generator = torch.Generator(labels.device).manual_seed(2**16 * self.tasks.seed + task)
            self.consolidation.consolidate(images[: self.settings.fisher_examples], generator=generator)
        self.after_tasks.append({name: value.detach().clone() for name, value in self.network.state_dict().items()})
        return {"step": steps * count, "train_loss": total.item() / steps}

    @torch.no_grad()
    def answer(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def state_dict(self) -> Any:
        consolidation = self.consolidation.state_dict() if self.consolidation is not None else None
        optimizer = self.optimizer.state_dict()
        return {"after_tasks": self.after_tasks, "optimizer": optimizer, "consolidation": consolidation}

    def load_state_dict(self, state: Any) -> None:
        self.after_tasks = state["after_tasks"]
        if self.after_tasks:
            self.network.load_state_dict(self.after_tasks[-1])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.consolidation is not None:
            self.consolidation.load_state_dict(state["consolidation"])


class AdaptedLearner:
    """A trained network, with a memory of some examples of each task."""

    def __init__(self, tasks: PermutedTasks, trained: NetworkLearner, *, memories: int, at_random: bool) -> None:
        self.tasks, self.trained, self.memories, self.at_random = tasks, trained, memories, at_random
        self.network = make_network(tasks.settings)

    def learn(self, count: int) -> Record:
        self.network.load_state_dict(self.trained.after_tasks[count - 1])
        settings, size = self.tasks.settings, self.memories * count
        neighbours, steps = settings.neighbours, settings.steps
        store = EpisodicMemory(size, mnist.PIXELS, device=settings.device)
        if self.at_random:
            neighbours, steps = settings.random_neighbours, settings.random_steps
            store = RandomMemory(size, mnist.PIXELS, seed=2**16 * self.tasks.seed + count, device=settings.device)
        self.model = MbPA(nn.Identity(), self.network, store, neighbours=neighbours, steps=steps, lr=settings.rate)
        for task in range(count):
            self.model.write(*self.tasks.training(task, self.memories))
        return {}

    def answer(self, images: Tensor) -> Tensor:
        return self.model(images)

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Train the networks of every seed, adapt them to memories.

    Raises:
        DataError: MNIST is missing or damaged.
    """
    refuse_several(EXPERIMENT)
    data = mnist.load(settings.data_dir)
    members = {}
    for seed in settings.seeds:
        for row in rows(settings):
            name = row.model if row.memories is None else f"{row.model}-{row.memories}"
            own = {"model": row.title, "hidden_size": settings.hidden_size, "seed": seed}
            own |= settings_of(settings, row.model, without=("memories",))
            members[row, seed] = RunFolder(Path(folder, f"{name}-seed{seed}"), own)
    trained: dict[bool, NetworkLearner] = {}  # the networks of the current seed, with and without consolidation

    def train_member(row: AdaptedRow, seed: int, member: RunFolder, progress: Progress) -> None:
        tasks, title = PermutedTasks(data, settings, seed), f"{row.title}, seed {seed}"
        if row.memories is None:
            network = NetworkLearner(tasks, member.path, title, consolidate=row.consolidates)
            measure(network, tasks, range(1, settings.tasks + 1), member, title, progress)
            trained[row.consolidates] = network
        else:
            start, at_random = trained[row.consolidates], row.model == "random"
            adapted = AdaptedLearner(tasks, start, memories=row.memories, at_random=at_random)
            counts = [*sorted({count for count in settings.tested if count < settings.tasks}), settings.tasks]
            measure(adapted, tasks, counts, member, title, progress)

    return Members(members, train_member, lambda: table(settings))


@one_line_errors()
def check(settings: Settings) -> None:
    """Refuse settings that cannot run with a RunError, before anything is trained or written."""
    task = ("tasks", "examples", "hidden_size", "epochs", "batch_size", "fisher_examples", "queries", "tested")
    memory = ("memories", "neighbours", "steps", "random_neighbours", "random_steps")
    check_settings(settings, sizes=(*task, *memory), lists=("models", "seeds", "memories", "tested"))
    for name, most in (("examples", 50_000), ("queries", 10_000)):
        if getattr(settings, name) > most:
            raise ValueError(f"{name} must be at most {most:,}, got {getattr(settings, name)}")
    if max(settings.memories) > settings.examples:
        raise ValueError(f"memories must be at most the {settings.examples} examples, got {settings.memories}")
    check_not_negative(learning_rate=settings.learning_rate, strength=settings.strength, rate=settings.rate)
    make_network(settings)


def rows(settings: Settings) -> list[AdaptedRow]:
    """Return the table's rows, those of the networks first: the others start from what they have learnt."""
    asked = dict.fromkeys(settings.models)
    found = []
    if {"mlp", "mbpa", "random"} & asked.keys():
        found.append(AdaptedRow("mlp", None))
    if {"ewc", "mbpa+ewc"} & asked.keys():
        found.append(AdaptedRow("ewc", None))
    for model in asked:
        if model == "random":
            found.append(
                AdaptedRow(model, max(settings.memories))
            )  # the number of memories makes no difference to random ones
        elif model not in ("mlp", "ewc"):
            found += [AdaptedRow(model, memories) for memories in settings.memories]
    return found


def measure(
    learner: TaskLearner,
    tasks: PermutedTasks,
    counts: Sequence[int],
    folder: RunFolder,
    title: str,
    progress: Progress,
) -> None:
    """Test a learner after each number of tasks; what a killed process has measured is not measured again."""
    split = tasks.settings.split
    begin = {"standing": [0, 0.0, 0.0, 0], "carried": learner.state_dict(), "finished": False}
    state = resume(folder, begin)
    learner.load_state_dict(state["carried"])
    if state["finished"]:
        return
    done, seconds, answering, answers = state["standing"]  # the last two: seconds of all answers, and their number
    progress.start(title, len(counts), done)
    for place, count in enumerate(counts[done:], start=done + 1):
        began = time.monotonic()
        record: Record = {"kind": "epoch", "epoch": count, "tasks": count, "seconds": 0.0} | learner.learn(count)
        accuracies = []
        for task in range(count):
            images, labels = tasks.held_out(task)
            asked = time.perf_counter()
            accuracies.append((learner.answer(images).argmax(1) == labels).float().mean().item())
            answering, answers = answering + time.perf_counter() - asked, answers + len(labels)
        seconds += time.monotonic() - began
        scores: Record = {f"{split}_accuracy": sum(accuracies) / count, "accuracies": accuracies}
        folder.append(record | {"seconds": seconds} | scores)
        if place == len(counts):  # the result comes before its checkpoint
            result = {"kind": "result", "epoch": count, "tasks": count, "seconds": seconds} | scores
            result[f"{split}_error"] = 100 * (1 - scores[f"{split}_accuracy"])
            result["milliseconds_a_query"] = 1000 * answering / answers
            result["parameters"] = sum(weight.numel() for weight in learner.network.parameters())
            folder.append(result)
        standing = [place, seconds, answering, answers]
        folder.save({"standing": standing, "carried": learner.state_dict(), "finished": place == len(counts)})
        progress.update(place, record.get("train_loss", 0.0))
        progress.note(f"{count} tasks: accuracy {scores[f'{split}_accuracy']:.4f}")


def table(settings: Settings) -> dict[str, Any]:
    """Return the table's rows, scores and curve."""
    accuracy = f"{settings.split} accuracy"
    return {
        "requested": [(row.title, settings.hidden_size) for row in rows(settings)],
        "scores": [Score(accuracy, {}, None), Score("milliseconds a query", {}, None)],
        "curves": [Curve(accuracy.replace(" ", "_"), accuracy, against="tasks", spread=True)],
    }
