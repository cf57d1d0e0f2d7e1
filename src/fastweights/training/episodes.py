"""The episodic loop: whole tasks, others in every step, the best on validation tested (Vinyals et al. 2016)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from fastweights import processes
from fastweights.checks import check_sizes, is_integer
from fastweights.errors import TrainingError
from fastweights.few_shot import MAML
from fastweights.nn.fast_weights_linear import to_single
from fastweights.nn.modes import evaluating
from fastweights.runs import Progress, Record, RunFolder
from fastweights.tasks.episodes import Episodes, EpisodeSampler
from fastweights.training.loop import Schedule, train_epochs
from fastweights.training.supervised import check_examples

_VALIDATION, _TEST = -1, -2  # in place of a step, where the tasks to validate and to test on are drawn
_NORMAL = 1.96  # standard errors either way that hold the mean in 95 of 100 cases
_SCORED = ("validation", "test")  # the samplers whose tasks are scored
_NO_END = 10**9  # the patience, in validations, of training that never stops early

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Takes the examples [E,...] of a step and a generator, and returns them changed."""

_Tensors = tuple[Tensor, ...] | list[Tensor]


class EpisodeScores(NamedTuple):
    """The scores of a network's answers to the queries of some tasks."""

    tasks: int
    accuracy: float  # per cent, the mean over the tasks
    interval: float  # half of the mean's 95 % confidence interval, per cent; NaN for one task
    cross_entropy: float  # nats


@dataclass(frozen=True)
class EpisodeSchedule:
    """The length and speed of training on tasks.

    Raises:
        ValueError: a number out of range, or numbers of tasks that do not go into one another.

    Examples:
        >>> from fastweights.training import EpisodeSchedule
        >>> EpisodeSchedule(tasks=64_000, tasks_per_step=64, validate_every=3200).of_epochs().epochs
        20
    """

    tasks: int  # training tasks in all
    tasks_per_step: int = 1
    pool: int | None = None  # classes that the tasks of a step share; None draws each task by itself
    validate_every: int = 400  # tasks between two validations
    validation_tasks: int = 400  # the same tasks every time, so that scores differ by the weights alone
    test_tasks: int = 1000
    learning_rate: float = 1e-3
    annealing: str = "none"
    averaging: float = 0.0  # decay of a running mean of the weights, which is then scored; 0: no mean
    weight_decay: float = 0.0  # the share of the weights lost in a step, as a multiple of the learning rate
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        counts = ("tasks", "tasks_per_step", "validate_every", "validation_tasks", "test_tasks")
        check_sizes(**{name: getattr(self, name) for name in counts})
        for name in ("validation_tasks", "test_tasks"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, for an interval; got {getattr(self, name)}")
        for name, part in (("validate_every", "tasks_per_step"), ("tasks", "validate_every")):
            if getattr(self, name) % getattr(self, part):
                raise ValueError(
                    f"{name} must be a multiple of {part}, got {getattr(self, name)} and {getattr(self, part)}: "
                    f"give another {part} too"
                )
        if self.pool is not None:
            check_sizes(pool=self.pool)
        self.of_epochs()
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must be at least 0 and less than 1, got {self.averaging}")
        if not 0 <= self.weight_decay * self.learning_rate < 1:
            raise ValueError(
                "weight_decay times the learning rate must be at least 0 and less than 1, got "
                f"{self.weight_decay} times {self.learning_rate}"
            )

    def of_epochs(self) -> Schedule:
        """Return the same as a schedule whose epochs end with a validation."""
        return Schedule(
            epochs=self.tasks // self.validate_every,
            batch_size=self.tasks_per_step,
            learning_rate=self.learning_rate,
            annealing=self.annealing,
            clip_norm=math.inf,
            patience=_NO_END,
            checkpoint_seconds=self.checkpoint_seconds,
        )


def train_episodes(
    network: nn.Module,
    samplers: dict[str, EpisodeSampler],
    schedule: EpisodeSchedule,
    folder: RunFolder,
    *,
    seed: int,
    augment: Augment | None = None,
    further: dict[str, Episodes] | None = None,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train a few-shot network on tasks, keep its best weights on validation, and test those; resume where killed.

    With `averaging`, the weights that are validated, kept and tested are a running mean (Polyak & Juditsky 1992), over
    about the last ninth of the steps and at most 1 / (1 - averaging) of them: the weights of a single step still swing.
    Weights decay as in Loshchilov & Hutter 2019.

    Every step draws its tasks anew, by the seed and the number of the step alone: a resumed run gives the same numbers
    as an unbroken one. Validation and test are of fixed tasks, drawn by the seed.

    Under `torchrun` each process takes its part of a step's tasks and draws its own noise and dropout. Without these
    and batch normalisation, the numbers are those of one process but for rounding. Another number of processes may
    resume a run. A network's own `loss` is computed whole by each.

    Args:
        network: `network(examples, description, labels, queries)` -> logits [tasks,m,C], as `FewShotNetwork`; it is
            trained on their cross entropy, or on `network.loss(episodes)` where it has a loss of its own.
        samplers: "train", "validation" and "test", of different classes; all may have fewer ways than the
            network has columns, and those to validate and to test on fewer than those to train on.
        schedule: the number of tasks, in all and in a step, and the learning rate.
        folder: an open `RunFolder`; a finished run is not trained again. It is refused where the schedule, the kinds of
            tasks or the numbers of their classes and examples were others; that the examples are the same is yours.
        seed: the seed of the tasks and of noise, 0 to 2^63 - 1. The weights of `network` are the caller's.
        augment: changes the examples [E,...] of a step in training; it is called with them and a generator.
        further: other tasks that the best weights are tested on, by name.

    Returns:
        The last record of `metrics.jsonl`: `test_accuracy` and `test_interval`, the 95 % confidence interval over the
        tasks (per cent), `test_error` (per cent) and `test_loss` (nats), the same by the name of such tasks, as
        `5-way_1-shot_test_accuracy`, and by those of `further`; `tasks` that were trained on, the best weights'
        `validation_loss`, `parameters`, `seconds`.

    Raises:
        ValueError: one of the samplers is missing, or tasks have more classes than the network has columns, or than
            those that a head with weights, or MAML, is trained on, or `further` has a name of the loop's own, or the
            seed is out of range.
        TrainingError: an example or the loss is not finite, or an answer in validation or test is NaN.
        RunError: the folder cannot be used, or holds a run of other tasks or another schedule; or a step has fewer
            tasks than there are processes.

    Examples:
        >>> import tempfile, pathlib, torch
        >>> from fastweights import few_shot
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> from fastweights.training import EpisodeSchedule, RunFolder, train_episodes
        >>> labels = torch.arange(20).repeat_interleave(10)
        >>> examples = torch.eye(20)[labels] + 0.1 * torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
        >>> sampler = EpisodeSampler(examples, labels, ways=5, shots=1, queries=2)
        >>> network = few_shot.FewShotNetwork(torch.nn.Linear(20, 16), few_shot.PrototypeHead(num_classes=5))
        >>> schedule = EpisodeSchedule(tasks=80, tasks_per_step=4, validate_every=40, learning_rate=0.01)
        >>> with RunFolder(pathlib.Path(tempfile.mkdtemp()) / "run", {}) as folder:
        ...     result = train_episodes(
        ...         network, dict.fromkeys(("train", "validation", "test"), sampler), schedule, folder, seed=1
        ...     )
        >>> result["test_accuracy"] > 99
        True
    """
    check_seed(seed)
    further = further or {}
    _check_tasks(samplers, further, network)
    if processes.count() > 1 and not hasattr(network, "loss"):
        processes.check_enough(tasks_per_step=schedule.tasks_per_step)
    learner = _Episodic(network, samplers, schedule, seed, augment, further)
    identity = {name: value for name, value in vars(schedule).items() if name != "checkpoint_seconds"}
    return train_epochs(
        learner,
        schedule.of_epochs(),
        folder,
        steps_per_epoch=learner.steps_per_epoch,
        seed=seed,
        identity=identity | {name: str(sampler) for name, sampler in samplers.items()},
        shared=True,
        title=title,
        progress=progress,
    )


class _Episodic:
    """A few-shot network and its tasks: fresh ones in every step, the same ones in every validation."""

    complete = False

    def __init__(
        self,
        network: nn.Module,
        samplers: dict[str, EpisodeSampler],
        schedule: EpisodeSchedule,
        seed: int,
        augment: Augment | None,
        further: dict[str, Episodes],
    ) -> None:
        self.model = self.scored = network
        self.samplers, self.schedule, self.seed = samplers, schedule, seed
        self.augment, self.further = augment, further
        self.steps_per_epoch = schedule.validate_every // schedule.tasks_per_step
        self.step = 0  # the current step
        self.device = next(network.parameters()).device
        self.validation = samplers["validation"].draw(schedule.validation_tasks, task_generator(seed, _VALIDATION))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True
        )
        self.averaged = None
        if schedule.averaging:
            # Buffers too: the weights that are scored need their own statistics.
            averaged = self.averaged = AveragedModel(network, multi_avg_fn=self._average, use_buffers=True)
            self.scored = averaged.module
            self.optimizer.register_step_post_hook(lambda *_: averaged.update_parameters(network))

    def loss(self, epoch: int, index: int) -> Tensor:
        self.step = epoch * self.steps_per_epoch + index
        generator = task_generator(self.seed, self.step)
        episodes = self.samplers["train"].draw(self.schedule.tasks_per_step, generator, pool=self.schedule.pool)
        episodes = episodes.to(self.device)
        if self.augment is not None:
            episodes = episodes._replace(examples=self.augment(episodes.examples, generator))
        if (loss_of := getattr(self.model, "loss", None)) is not None:
            # Which may be a mean over anything: each process computes all of it.
            loss: Tensor = loss_of(episodes)
            return loss / processes.count()
        rows, weight = processes.own_share(self.schedule.tasks_per_step)
        own = _own_tasks(episodes, rows)
        # As they are scored: a column without a class would learn to be never answered.
        logits = answers(self.model, own)[..., : own.classes.shape[1]]
        return weight * F.cross_entropy(logits.flatten(0, 1), own.targets.flatten())

    @torch.no_grad()
    def _average(self, averaged: _Tensors, current: _Tensors, _: Tensor | int) -> None:
        kept = min(self.schedule.averaging, (1 + self.step) / (10 + self.step))
        for mean, tensor in zip(averaged, current, strict=True):
            if mean.is_floating_point():
                mean.lerp_(tensor, 1 - kept)
            else:
                mean.copy_(tensor)

    @processes.in_main
    def score(self, step: int) -> tuple[Record, str]:
        tasks = step * self.schedule.tasks_per_step
        scores = {"tasks": tasks} | self._scores("validation", self.scored, self.validation)
        return scores, f"{tasks:,} tasks: validation accuracy {scores['validation_accuracy']:.2f} %"

    @processes.in_main
    def test(self, step: int) -> Record:
        episodes = held_out_episodes(self.samplers["test"], self.schedule.test_tasks, self.seed)
        scores = {"tasks": step * self.schedule.tasks_per_step} | self._scores("test", self.model, episodes)
        for name, episodes in self.further.items():
            scores |= _record(name, evaluate_episodes(self.model, episodes.to(self.device)))
        return scores

    def _scores(self, split: str, network: nn.Module, episodes: Episodes) -> Record:
        """Score the tasks of a split, by its name and again by the kind of tasks."""
        scores = evaluate_episodes(network, episodes.to(self.device))
        ways = episodes.classes.shape[1]
        return _record(split, scores) | _record(kind_of_tasks(ways, episodes.labels.shape[1] // ways, split), scores)

    @property
    def carried(self) -> Record | None:
        """The running mean of the weights, None where there is none."""
        return None if self.averaged is None else self.averaged.state_dict()

    @carried.setter
    def carried(self, state: Record | None) -> None:
        if self.averaged is not None:
            self.averaged.load_state_dict(state or {})


def _own_tasks(episodes: Episodes, rows: slice) -> Episodes:
    """Return this process's tasks, with the examples that occur in them."""
    if processes.count() == 1:
        return episodes
    described = episodes.description.shape[1]
    used = torch.cat([episodes.description[rows], episodes.queries[rows]], dim=1)
    needed, index = torch.unique(used, return_inverse=True)
    labels, targets, classes = (part[rows] for part in (episodes.labels, episodes.targets, episodes.classes))
    return Episodes(episodes.examples[needed], index[:, :described], labels, index[:, described:], targets, classes)


def _check_tasks(samplers: dict[str, EpisodeSampler], further: Mapping[str, Episodes], network: nn.Module) -> None:
    """Refuse before training the tasks that a test would be refused for after it."""
    if missing := {"train", "validation", "test"} - {name for name, sampler in samplers.items() if sampler is not None}:
        raise ValueError(f"samplers must have train, validation and test; {', '.join(sorted(missing))} is missing")
    names = {
        kind for name in _SCORED for kind in (name, kind_of_tasks(samplers[name].ways, samplers[name].shots, name))
    }
    if taken := names & set(further):
        raise ValueError(f"further has {min(taken)!r}, a name that the loop uses itself: give those tasks another name")
    ways = {name: sampler.ways for name, sampler in samplers.items()}
    ways |= {f"further {name!r}": episodes.classes.shape[1] for name, episodes in further.items()}
    columns = getattr(network, "num_classes", None)
    # Heads that compare have columns of no weights; MAML's are the whole network's, a caller's own may be either.
    head = network if isinstance(network, MAML) else getattr(network, "head", None)
    learnt = any(True for _ in getattr(head, "parameters", tuple)())
    for name, classes in ways.items():
        if columns is not None and classes > columns:
            raise ValueError(
                f"the {name} tasks have {classes} classes, and the network has columns for {columns} at most"
            )
        if learnt and classes > ways["train"]:
            raise ValueError(
                f"the {name} tasks have {classes} classes, and those to train on {ways['train']}: the network would "
                "never have learnt its other columns; train on tasks of as many classes"
            )
    for name, sampler in samplers.items():
        if isinstance(sampler.examples, Tensor):  # else examples are made when they are read
            check_examples(name, examples=sampler.examples)


def _record(name: str, scores: EpisodeScores) -> Record:
    return {
        f"{name}_loss": scores.cross_entropy,
        f"{name}_error": 100 - scores.accuracy,
        f"{name}_accuracy": scores.accuracy,
        f"{name}_interval": scores.interval,
    }


def evaluate_episodes(network: nn.Module, episodes: Episodes) -> EpisodeScores:
    """Score a few-shot network's answers to the queries of some tasks, among as many classes as the tasks have.

    Raises:
        ValueError: the tasks have no queries.
        TrainingError: an answer is NaN.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> from fastweights.training import evaluate_episodes
        >>> labels = torch.arange(6).repeat_interleave(4)
        >>> tasks = EpisodeSampler(torch.eye(6)[labels], labels, ways=3, shots=1, queries=2).draw(
        ...     10, torch.Generator().manual_seed(0)
        ... )
        >>> evaluate_episodes(few_shot.FewShotNetwork(torch.nn.Identity(), few_shot.PrototypeHead(3)), tasks).accuracy
        100.0
    """
    if episodes.queries.numel() == 0:
        raise ValueError(f"there must be at least one query, got {list(episodes.queries.shape)}")
    with evaluating(network), torch.no_grad():
        # A network with more columns than the tasks have classes has a logit for each.
        logits = answers(network, episodes)[..., : episodes.classes.shape[1]]
        if logits.isnan().any():
            raise TrainingError("the network returned NaN: look for NaN or infinity in the examples")
        right = (logits.argmax(-1) == episodes.targets).double().mean(1)
        loss = F.cross_entropy(to_single(logits).flatten(0, 1), episodes.targets.flatten())
    spread = float(right.std()) if len(right) > 1 else math.nan
    return EpisodeScores(
        len(right), 100 * float(right.mean()), 100 * _NORMAL * spread / math.sqrt(len(right)), float(loss)
    )


def held_out_episodes(sampler: EpisodeSampler, tasks: int, seed: int) -> Episodes:
    """Return the tasks that `train_episodes` tests on with this seed.

    Raises:
        ValueError: `tasks` is less than 1, or the seed out of range.

    Examples:
        >>> import torch
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> from fastweights.training import held_out_episodes
        >>> labels = torch.arange(6).repeat_interleave(4)
        >>> sampler = EpisodeSampler(torch.eye(6)[labels], labels, ways=3, shots=1, queries=2)
        >>> held_out_episodes(sampler, 10, seed=1).queries.shape
        torch.Size([10, 6])
    """
    check_seed(seed)
    return sampler.draw(tasks, task_generator(seed, _TEST))


def check_seed(seed: int) -> None:
    """Refuse a seed that no generator takes.

    Raises:
        ValueError: it is not an integer of 0 to 2^63 - 1.
    """
    if not is_integer(seed) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer of 0 to 2^63 - 1, got {seed!r}")


def kind_of_tasks(ways: int, shots: int, split: str) -> str:
    """Return the name of the scores of such tasks in metrics.jsonl."""
    return f"{ways}-way_{shots}-shot_{split}"


def task_generator(seed: int, step: int) -> torch.Generator:
    # Torch's generator takes 32 bits of its seed: they are mixed from both numbers.
    mixed = numpy.random.SeedSequence([seed, step % 2**32]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


def answers(network: nn.Module, episodes: Episodes) -> Tensor:
    logits: Tensor = network(episodes.examples, episodes.description, episodes.labels, episodes.queries)
    return logits
