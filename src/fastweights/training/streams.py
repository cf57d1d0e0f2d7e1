"""Truncated backpropagation through time: parallel streams, their states carried from segment to segment, detached."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import processes
from fastweights.checks import check_between, check_choice, check_sizes
from fastweights.nn.modes import evaluating
from fastweights.runs import Progress, Record, RunFolder
from fastweights.training.loop import Schedule, hash_tensors, train_epochs
from fastweights.training.supervised import check_examples, check_splits

_EVALUATED_STEPS = 128  # steps at a time: enough to keep the processor busy, few enough for the logits of large models
_BIN = 16  # distances in one line of the table by distance
_OPTIMIZERS: dict[str, Any] = {"nadam": torch.optim.NAdam, "adam": torch.optim.Adam}


class Streams(NamedTuple):
    """Streams side by side: the symbols that are read and the answers that are due, at each step of each stream."""

    inputs: Tensor  # [steps, B], indices
    targets: Tensor  # [steps, B], indices
    distances: Tensor  # [steps, B], how many steps ago the needed value was read; 0 where no answer is due


@dataclass(frozen=True)
class StreamSchedule(Schedule):
    """The length and speed of training on streams: `epochs` passes over them, `batch_size` streams side by side."""

    segment: int = 32  # steps that the gradient goes back over
    reset: float = 0.0  # the chance, at each segment, that a stream's state starts from zeros again
    optimizer: str = "nadam"  # or "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(segment=self.segment)
        check_between(0, 1, reset=self.reset)
        check_choice(_OPTIMIZERS, optimizer=self.optimizer)


@dataclass(frozen=True)
class StreamScores:
    """The scores of a model on streams; *partial* is over the answers alone, *total* over every step."""

    loss: float  # nats a step
    total_accuracy: float  # 0 to 1
    partial_accuracy: float
    total_bits: float  # a step
    partial_bits: float  # an answer
    by_distance: tuple[tuple[int, int, float, int], ...]  # from, to, partial accuracy, answers

    def record(self, split: str) -> Record:
        """Return the scores as keys of a run's records; the error is that of the answers, in per cent."""
        error = 100 * (1 - self.partial_accuracy)
        return {f"{split}_error": error} | {f"{split}_{name}": value for name, value in vars(self).items()}


def evaluate_streams(model: nn.Module, streams: tuple[Tensor, Tensor, Tensor]) -> StreamScores:
    """Score a model on parallel streams, read from their first step to the last, the states starting from zeros.

    The model is read in evaluation mode and is left as it was.

    Args:
        model: inputs [T,B] int64 and a state, None at first -> logits [T,B,C] and the next state.
        streams: inputs, targets and distances, each [steps,B], as `Streams`.

    Raises:
        ValueError: the streams are no such tensors, or no answer is due in them.

    Examples:
        >>> import torch
        >>> from fastweights.training import evaluate_streams
        >>> class Repeat(torch.nn.Module):  # always answers what it reads
        ...     def forward(self, inputs, state):
        ...         return 100 * torch.nn.functional.one_hot(inputs, 4).float(), ()
        >>> inputs, distances = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[0, 0], [1, 1]])
        >>> scores = evaluate_streams(Repeat(), (inputs, torch.tensor([[1, 2], [3, 1]]), distances))
        >>> scores.total_accuracy, scores.partial_accuracy
        (0.75, 0.5)
    """
    _check_streams(streams, "streams")
    _require_answers(streams, "streams")
    inputs, targets, distances = streams
    state = None
    losses, rights, asked = [], [], []
    with evaluating(model), torch.no_grad():
        for start in range(0, len(inputs), _EVALUATED_STEPS):
            part = slice(start, start + _EVALUATED_STEPS)
            logits, state = model(inputs[part].long(), state)
            target = targets[part].long()
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none"))
            rights.append((logits.argmax(2) == target).flatten())
            asked.append(distances[part].flatten())
    return _scores(torch.cat(losses).double(), torch.cat(rights).double(), torch.cat(asked).long())


def _scores(losses: Tensor, rights: Tensor, distances: Tensor) -> StreamScores:
    answers = distances > 0
    bins = (distances - 1) // _BIN
    by_distance = []
    for index in torch.unique(bins[answers]).tolist():
        inside = rights[answers & (bins == index)]
        by_distance.append((_BIN * index + 1, _BIN * (index + 1), inside.mean().item(), len(inside)))
    return StreamScores(
        loss=losses.mean().item(),
        total_accuracy=rights.mean().item(),
        partial_accuracy=rights[answers].mean().item(),
        total_bits=losses.mean().item() / math.log(2),
        partial_bits=losses[answers].mean().item() / math.log(2),
        by_distance=tuple(by_distance),
    )


def train_streams(
    model: nn.Module,
    splits: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    schedule: StreamSchedule,
    folder: RunFolder,
    *,
    seed: int,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train on parallel streams by truncated backpropagation through time; resume where a killed process was.

    The streams are read in order, a segment a step, and their states go on from one segment to the next, detached, and
    from the end of the streams to their beginning. Nadam (Dozat 2016) or Adam, the gradient's norm clipped; the loss is
    the mean over all steps of a segment. After every pass the model is scored on validation, and the best pass is
    tested. A resumed run gives the same bits as an unbroken one on the same number of threads.

    Under `torchrun` each process reads its part of the streams and draws its own dropout. Without it the numbers are
    those of one process but for rounding. Another number of processes may resume a run.

    Args:
        model: inputs [T,B] int64 and a state, None at first -> logits [T,B,C] and the next state, a tuple of tensors
            [B,...] that are zero at the start; left with the weights of its best pass.
        splits: "train", "validation" and "test": inputs, targets and distances, each [steps,B], as `Streams`. The
            streams of training number `schedule.batch_size`.
        schedule: passes, learning rate, clipping, the length of a segment, how often a stream restarts.
        folder: an open `RunFolder`; a finished run is not trained again, and one on other data is refused.
        seed: the seed of dropout and of the choice of streams that restart. The weights of `model` are the caller's.

    Returns:
        The last record of `metrics.jsonl`: the scores of `StreamScores` on test, validation loss and error (per cent of
        the answers), the best pass, parameters that are trained, seconds.

    Raises:
        TrainingError: data or loss are not finite.
        RunError: the folder cannot be used.
        ValueError: the streams are no such tensors, not `schedule.batch_size` of them, without an answer to score, or
            cannot be divided evenly between the processes.

    Examples:
        >>> import pathlib, tempfile, torch
        >>> from fastweights.training import RunFolder, StreamSchedule, train_streams
        >>> class Last(torch.nn.Module):  # answers with what it read one step before
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table = torch.nn.Embedding(4, 4)
        ...     def forward(self, inputs, state):
        ...         last = inputs[:1] * 0 if state is None else state[0].t()
        ...         return self.table(torch.cat((last, inputs[:-1]))), (inputs[-1:].t(),)
        >>> inputs = torch.randint(4, (200, 8), generator=torch.Generator().manual_seed(0))
        >>> streams = (inputs, torch.cat((inputs[:1] * 0, inputs[:-1])), torch.ones_like(inputs))
        >>> splits = dict.fromkeys(("train", "validation", "test"), streams)
        >>> schedule = StreamSchedule(epochs=20, batch_size=8, learning_rate=0.1)
        >>> with RunFolder(pathlib.Path(tempfile.mkdtemp()) / "run", {}) as folder:
        ...     result = train_streams(Last(), splits, schedule, folder, seed=1)
        >>> result["test_partial_accuracy"]
        1.0
    """
    if not isinstance(schedule, StreamSchedule):
        raise TypeError(f"schedule must be a StreamSchedule, got {schedule!r}")
    check_splits(splits)
    for name in ("train", "validation", "test"):
        _check_streams(splits[name], name)
        check_examples(name, inputs=splits[name][0])
        if name != "train":
            _require_answers(splits[name], name)
    streams = splits["train"][0].shape[1]
    if streams != schedule.batch_size:
        raise ValueError(f"the train split must be {schedule.batch_size} streams (batch_size), got {streams}")
    processes.check_divisible(batch_size=schedule.batch_size)
    steps = math.ceil(len(splits["train"][0]) / schedule.segment)
    learner = _StreamReader(model, splits, schedule, steps, seed)
    return train_epochs(
        learner,
        schedule,
        folder,
        steps_per_epoch=steps,
        seed=seed,
        identity={"data": hash_tensors(splits)},
        shared=True,
        title=title,
        progress=progress,
    )


class _StreamReader:
    """A recurrent model and its streams: a segment a step, the state carried to the next."""

    complete = False

    def __init__(
        self,
        model: nn.Module,
        splits: Mapping[str, tuple[Tensor, Tensor, Tensor]],
        schedule: StreamSchedule,
        steps_per_epoch: int,
        seed: int,
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.model = self.scored = model
        self.optimizer: torch.optim.Optimizer = _OPTIMIZERS[schedule.optimizer](trained, lr=schedule.learning_rate)
        self.splits, self.schedule, self.steps_per_epoch, self.seed = splits, schedule, steps_per_epoch, seed
        self.state: list[Tensor] | None = None  # state of this process's streams at the end of the last segment

    @property
    def carried(self) -> list[Tensor] | None:
        return None if self.state is None else [processes.gather(part, dim=0) for part in self.state]

    @carried.setter
    def carried(self, whole: list[Tensor] | None) -> None:
        self.state = None if whole is None else [processes.own_part(each, dim=0) for each in whole]

    def loss(self, epoch: int, index: int) -> Tensor:
        part = slice(index * self.schedule.segment, (index + 1) * self.schedule.segment)
        inputs, targets, _ = self.splits["train"]
        rows, weight = processes.own_share(self.schedule.batch_size)
        before = self._first_state(epoch * self.steps_per_epoch + index, rows)
        logits, state = self.model(inputs[part, rows].long(), before)
        self.state = [tensor.detach() for tensor in state]
        return weight * F.cross_entropy(logits.flatten(0, 1), targets[part, rows].long().flatten())

    def _first_state(self, step: int, rows: slice) -> tuple[Tensor, ...] | None:
        """Return the state that a segment of these streams begins with: zeros for those that restart."""
        if self.state is None:
            return None
        state = tuple(tensor.to(self.splits["train"][0].device) for tensor in self.state)
        if self.schedule.reset == 0:
            return state
        # A function of the seed and the step alone, so that a resumed run draws the same.
        chances = numpy.random.default_rng([self.seed, step]).random(self.schedule.batch_size)[rows]
        anew = torch.from_numpy(chances < self.schedule.reset).to(state[0].device)
        return tuple(tensor.masked_fill(anew.view(-1, *[1] * (tensor.dim() - 1)), 0) for tensor in state)

    @processes.in_main
    def score(self, step: int) -> tuple[Record, str]:
        scores = evaluate_streams(self.model, self.splits["validation"]).record("validation")
        return scores, f"epoch {step // self.steps_per_epoch}: validation error {scores['validation_error']:.2f} %"

    @processes.in_main
    def test(self, step: int) -> Record:
        return evaluate_streams(self.model, self.splits["test"]).record("test")


def _check_streams(streams: tuple[Tensor, Tensor, Tensor], name: str) -> None:
    shapes = [tuple(tensor.shape) for tensor in streams]
    if len(shapes) != 3 or len(shapes[0]) != 2 or len(set(shapes)) != 1:
        raise ValueError(f"{name}: inputs, targets and distances must each be [steps,B], got {shapes}")
    for part, tensor in zip(Streams._fields, streams, strict=True):
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"{name}: {part} must be integers, got {tensor.dtype}")
        if tensor.numel() > 0 and int(tensor.min()) < 0:
            raise ValueError(f"{name}: {part} must not be negative, got {int(tensor.min())}")


def _require_answers(streams: tuple[Tensor, Tensor, Tensor], name: str) -> None:
    if not bool((streams[2] > 0).any()):
        raise ValueError(f"{name}: no answer is due, distances are zero everywhere")
