"""A softmax layer learns all classes from a stream, beside a memory of what it is shown: which method answers soonest.

Everything that is drawn is a function of the seed, and the layer learns in seconds; so a run that was killed goes
through the stream again, and only what it had measured is not measured again.
"""

import math
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.memory import EpisodicMemory, MbPA, attend
from fastweights.reproduce._incremental_data import Features, within_class
from fastweights.runs import RunFolder
from fastweights.training import Progress, epoch_order

ModelName = Literal["mbpa", "non-parametric", "mixture", "parametric"]
_OF_METHODS: dict[ModelName, tuple[str, ...]] = {
    "mbpa": ("learning_rate", "capacity", "neighbours", "steps", "local_rate", "optimizer"),
    "non-parametric": ("capacity", "neighbours"),
    "mixture": ("learning_rate", "capacity", "neighbours", "mixing"),
    "parametric": ("learning_rate",),
}
_POINTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    model: ModelName
    learning_rate: float  # of the softmax layer
    capacity: int
    neighbours: int
    mixing: float  # the parametric model's share of the mixture
    steps: int
    local_rate: float
    optimizer: str

    def settings(self) -> dict[str, Any]:
        """What decides its numbers: no method has all of it."""
        return {name: getattr(self, name) for name in _OF_METHODS[self.model]}


def points(epochs: float) -> list[float]:
    """When the methods are compared, in passes over the stream.

    Examples:
        >>> from fastweights.reproduce._incremental_stream import points
        >>> points(0.3)
        [0.0, 0.02, 0.05, 0.1, 0.2, 0.3]
    """
    return sorted({*(point for point in _POINTS if point < epochs), epochs})


def stream_order(labels: Tensor, old: int, scarce: float) -> Tensor:
    """Which examples are shown: all, but of every other new class only the first share of them."""
    rare = (labels >= old) & ((labels - old) % 2 == 1)
    return torch.where(~rare | (within_class(labels) < (labels.bincount()[labels] * scarce).ceil()))[0]


class Stream:
    """A method on a split of the classes, from the first batch on."""

    def __init__(self, features: Features, method: Method, *, seed: int, scarce: float, batch_size: int) -> None:
        self.method, self.seed, self.batch_size = method, seed, batch_size
        self.old, self.classes = features.old, features.head.out_features
        self.parts = features.parts
        inputs, labels = features.parts["train"]
        shown = stream_order(labels.cpu(), features.old, scarce).to(labels.device)
        self.inputs, self.labels = inputs[shown], labels[shown]
        self.steps = math.ceil(len(shown) / batch_size)  # of a pass
        self.head = nn.Linear(features.head.in_features, self.classes).to(inputs.device)
        self.head.load_state_dict(features.head.state_dict())
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=method.learning_rate)
        self.store = EpisodicMemory(method.capacity, inputs.shape[1], device=inputs.device)
        self.adapted = MbPA(
            nn.Identity(),
            self.head,
            self.store,
            neighbours=method.neighbours,
            steps=method.steps,
            lr=method.local_rate,
            optimizer=method.optimizer,
        )
        self.step = 0

    def learn(self, until: int) -> None:
        """Go on with the stream to a step: the layer learns from each batch, and the memory keeps it."""
        for step in range(self.step, until):
            epoch, index = divmod(step, self.steps)
            if index == 0 or step == self.step:
                self.order = epoch_order(len(self.labels), self.seed, epoch).to(self.labels.device)
            batch = self.order[index * self.batch_size : (index + 1) * self.batch_size]
            loss = F.cross_entropy(self.head(self.inputs[batch]), self.labels[batch])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if self.method.model != "parametric":
                self.store.write(self.inputs[batch], self.labels[batch])
        self.step = until

    @torch.no_grad()
    def log_probs(self, inputs: Tensor) -> Tensor:
        """What the method answers, [n,d] -> [n,V]; a memory that is still empty says nothing."""
        model, share = self.method.model, self.method.mixing
        if model == "mbpa":
            return self.adapted(inputs).log_softmax(1)
        own: Tensor = self.head(inputs).log_softmax(1)
        if model == "parametric" or not len(self.store):
            return own if model != "non-parametric" else torch.zeros_like(own) - math.log(self.classes)
        remembered = attend(self.store.search(inputs, self.method.neighbours), self.classes).to(own.dtype)
        mixed = remembered if model == "non-parametric" else share * own.exp() + (1 - share) * remembered
        return mixed.clamp(min=1e-12).log()  # a class that no neighbour has is as good as ruled out

    def scores(self, part: str) -> dict[str, float]:
        """Accuracies in per cent of the novel, the pre-trained and all classes, and the loss in nats."""
        inputs, labels = self.parts[part]
        answers = torch.cat([self.log_probs(block) for block in torch.split(inputs, 1000)])
        right = (answers.argmax(1) == labels).double()
        new = labels >= self.old
        rare = new & ((labels - self.old) % 2 == 1)
        return {
            "novel_accuracy": 100 * float(right[new].mean()),
            "pretrained_accuracy": 100 * float(right[~new].mean()),
            "scarce_accuracy": 100 * float(right[rare].mean()),
            "accuracy": 100 * float(right.mean()),
            "loss": float(F.nll_loss(answers, labels)),
        }


def finished(folder: RunFolder) -> bool:
    """Whether a run has its result."""
    state = folder.load()
    return state is not None and state.get("result") is not None


def follow(stream: Stream, epochs: float, folder: RunFolder, title: str, progress: Progress) -> list[dict[str, float]]:
    """Go through the stream, and give the scores at each of the `points`; resume where a killed process was."""
    when = points(epochs)
    state = folder.load()
    if state is None:
        folder.note_environment()
        state = {"curve": [], "result": None}
        folder.save(state)  # from now on metrics without a checkpoint are a loss
    else:
        folder.rewind(state)
    curve: list[dict[str, float]] = state["curve"]
    progress.start(title, len(when), len(curve))
    seconds = curve[-1]["seconds"] if curve else 0.0
    for index, point in enumerate(when):
        began = time.monotonic()
        stream.learn(round(point * stream.steps))
        if index < len(curve):
            continue
        scores = stream.scores("test")
        seconds += time.monotonic() - began
        curve.append({"epoch": index, "passes": point, "step": stream.step, "seconds": seconds, **scores})
        folder.append({"kind": "epoch", **curve[-1]})
        folder.save({"curve": curve, "result": None})
        progress.update(index + 1, scores["loss"])
    return curve


def finish(stream: Stream, curve: list[dict[str, float]], folder: RunFolder, progress: Progress) -> None:
    """Write the result of a stream that was followed to its end, with the scores that `follow` gave."""
    validation = stream.scores("validation")
    result = {
        "kind": "result",
        "epoch": curve[-1]["epoch"],
        "steps": stream.step,
        "validation_loss": validation["loss"],
        "validation_error": 100 - validation["accuracy"],
        "test_loss": curve[-1]["loss"],
        "test_error": 100 - curve[-1]["accuracy"],
        "parameters": sum(parameter.numel() for parameter in stream.head.parameters()),
        "seconds": curve[-1]["seconds"],
    }
    folder.append(result)
    folder.save({"curve": curve, "result": result})
    progress.note(f"test error {result['test_error']:.2f} %")
