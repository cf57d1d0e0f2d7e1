"""A curriculum of classes: a few at first, more whenever the held-out drawings of those shown are told apart."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

from fastweights import processes
from fastweights.checks import check_sizes
from fastweights.runs import Progress, Record, RunFolder
from fastweights.training.loop import Schedule, hash_tensors, train_epochs
from fastweights.training.supervised import check_examples, score_splits

_EVALUATED = 32  # examples at a time: with more of them the activations of a convolution leave the processor's cache


@dataclass(frozen=True)
class CurriculumSchedule(Schedule):
    """The length and speed of training on a curriculum: at most `epochs` times `test_every` steps."""

    test_every: int = 20  # steps between two tests of the level
    first_classes: int = 30  # shown at the beginning
    added_classes: int = 5  # classes added by each completed level
    last_classes: int = 200  # the run ends with the first level of this many
    threshold: float = 0.6  # a level is completed by more than this accuracy, 0 to 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(test_every=self.test_every, first_classes=self.first_classes, added_classes=self.added_classes)
        if self.last_classes <= self.first_classes:
            raise ValueError(
                f"last_classes must be more than first_classes, {self.first_classes}, got {self.last_classes}"
            )
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be an accuracy, 0 or more and less than 1, got {self.threshold}")


def train_curriculum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Tensor,
    held_out: Tensor,
    schedule: CurriculumSchedule,
    folder: RunFolder,
    *,
    seed: int,
    augment: Callable[..., Tensor] | None = None,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train on some classes, and on more each time those shown are told apart; resume where a killed process was.

    A step's batch is drawn uniformly over the classes shown. Every `test_every` steps the model answers for the
    held-out examples of the classes shown, out of all classes; above the threshold the level is complete and the next
    classes are shown (the image curriculum of Rae et al. 2018, section 4.1). What is drawn is a function of the seed,
    the step and the level alone: a resumed run gives the same bits as an unbroken one on the same number of threads.

    Under `torchrun` each process takes its part of every batch and draws its own dropout. Without it, and without batch
    normalisation, the numbers are those of one process but for rounding. Another number of processes may resume a run.

    Args:
        model: a module with `model(inputs)`, logits [B,V], and `model.loss(inputs, targets)`, a mean over the inputs;
            left as it ends.
        optimizer: over the model's parameters.
        train: [V,n,...], float or uint8 (0 to 255, which becomes 0 to 1): n examples of each class, in the order in
            which classes are shown.
        held_out: [V,m,...], like train.
        schedule: levels, how long and how fast.
        folder: an open `RunFolder`; a finished run is not trained again, and one on other data is refused.
        seed: the seed of the examples drawn and of dropout. The weights of `model` are the caller's.
        augment: changes the inputs in training; it is called with them and `generator=`.

    Returns:
        The last record of `metrics.jsonl`: `levels`, pairs of the classes of a completed level and the step at which it
        was; `classes`, how many were shown in the end; error (per cent) and loss (nats) of the held-out examples of
        those, which stand for validation and test; parameters, seconds.

    Raises:
        TrainingError: data or loss are not finite.
        RunError: the folder cannot be used, or a batch has fewer examples than there are processes.
        ValueError: there are fewer classes than the schedule shows.

    Examples:
        >>> import pathlib, tempfile, torch
        >>> from fastweights.training import CurriculumSchedule, RunFolder, train_curriculum
        >>> class Softmax(torch.nn.Linear):
        ...     def loss(self, inputs, targets):
        ...         return torch.nn.functional.cross_entropy(self(inputs), targets)
        >>> examples = torch.eye(6)[:, None].expand(6, 4, 6)  # six classes, four examples each, all alike
        >>> levels = {"first_classes": 2, "added_classes": 2, "last_classes": 6}
        >>> schedule = CurriculumSchedule(epochs=50, learning_rate=0.5, **levels)
        >>> model = Softmax(6, 6)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> with RunFolder(pathlib.Path(tempfile.mkdtemp()) / "run", {}) as folder:
        ...     result = train_curriculum(model, optimizer, examples, examples, schedule, folder, seed=1)
        >>> result["levels"], result["classes"]
        ([[2, 20], [4, 40]], 6)
    """
    for name, examples in (("train", train), ("held-out", held_out)):
        if len(examples) < schedule.last_classes:
            raise ValueError(
                f"the {name} examples must have the schedule's {schedule.last_classes} classes, got {len(examples)}"
            )
        check_examples(name, examples=examples)
    processes.check_enough(batch_size=schedule.batch_size)
    learner = _Curriculum(model, optimizer, train, held_out, schedule, seed, augment)
    return train_epochs(
        learner,
        schedule,
        folder,
        steps_per_epoch=schedule.test_every,
        seed=seed,
        identity={"data": hash_tensors({"train": [train], "held-out": [held_out]})},
        keep_newest=True,  # later weights know more classes
        shared=True,
        title=title,
        progress=progress,
    )


class _Curriculum:
    """A classifier and the levels of its curriculum: batches of the classes shown, a test of them after every epoch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: Tensor,
        held_out: Tensor,
        schedule: CurriculumSchedule,
        seed: int,
        augment: Callable[..., Tensor] | None,
    ) -> None:
        self.model = self.scored = model
        self.optimizer, self.schedule, self.seed = optimizer, schedule, seed
        self.train, self.held_out, self.augment = train, held_out, augment
        self.carried: list[list[int]] = []  # classes and step of the levels completed

    @property
    def complete(self) -> bool:
        return self.shown >= self.schedule.last_classes

    @property
    def shown(self) -> int:
        """The number of classes of the level that is under way."""
        return self.schedule.first_classes + self.schedule.added_classes * len(self.carried)

    def loss(self, epoch: int, index: int) -> Tensor:
        step = epoch * self.schedule.test_every + index
        # The generator is the processor's: the same examples on every device.
        generator = torch.Generator().manual_seed(int(numpy.random.default_rng([self.seed, step]).integers(2**63)))
        size = self.schedule.batch_size
        targets = torch.randint(self.shown, (size,), generator=generator)
        which = torch.randint(self.train.shape[1], (size,), generator=generator)
        inputs = _as_float(self.train[targets.to(self.train.device), which.to(self.train.device)])
        if self.augment is not None:
            inputs = self.augment(inputs, generator=generator)
        rows, weight = processes.own_share(size)
        loss: Tensor = self.model.loss(inputs[rows], targets[rows].to(inputs.device))  # type: ignore[operator]
        return weight * loss

    def score(self, step: int) -> tuple[Record, str]:
        scores = self._scores("validation")
        if not scores["validation_error"] < 100 * (1 - self.schedule.threshold):
            return scores, ""
        before = self.carried[-1][1] if self.carried else 0
        note = f"step {step}: {self.shown} classes told apart, {scores['validation_error']:.2f} % error"
        scores |= {"level": self.shown, "level_steps": step - before}
        self.carried.append([self.shown, step])
        return scores, note

    def test(self, step: int) -> Record:
        return self._scores("test") | {"levels": self.carried}

    @processes.in_main
    def _scores(self, split: str) -> Record:
        shown = min(self.shown, self.schedule.last_classes)
        inputs = self.held_out[:shown]
        targets = torch.arange(shown, device=inputs.device).repeat_interleave(inputs.shape[1])
        examples = {split: (_as_float(inputs.flatten(0, 1)), targets)}
        return score_splits(self.model, examples, batch_size=_EVALUATED) | {"classes": shown}


def _as_float(examples: Tensor) -> Tensor:
    return examples.float() / 255 if examples.dtype == torch.uint8 else examples
