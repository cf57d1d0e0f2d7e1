"""The training loop: steps with clipping, the best epoch on validation, checkpoints and exact resume."""

import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn

from fastweights import processes
from fastweights.checks import check_choice, check_integers, check_positive, check_sizes, to_plain
from fastweights.errors import FolderError, TrainingError, one_line
from fastweights.runs import Progress, Record, RunFolder, describe_changes

_RESULT = {"kind", "epoch", "validation_loss", "test_loss", "parameters", "seconds"}
_CHECK_STEPS = 20  # steps between looks at the loss: each look waits for a GPU
ANNEALING = ("none", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The length and speed of training."""

    epochs: int
    batch_size: int = 128
    learning_rate: float = 1e-3
    annealing: str = "none"  # or "cosine": the learning rate falls to zero by the last of the `epochs`
    clip_norm: float = 5.0
    patience: int = 5  # epochs without a better validation score before training stops
    checkpoint_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_sizes(epochs=self.epochs, batch_size=self.batch_size, patience=self.patience)
        check_positive(learning_rate=self.learning_rate)
        check_choice(ANNEALING, annealing=self.annealing)
        if not (isinstance(self.clip_norm, int | float) and self.clip_norm > 0):
            raise ValueError(f"clip_norm must be positive (inf: no clipping), got {self.clip_norm!r}")
        if not (isinstance(self.checkpoint_seconds, int | float) and self.checkpoint_seconds >= 0):
            raise ValueError(f"checkpoint_seconds must not be negative, got {self.checkpoint_seconds!r}")

    def learning_rate_at(self, progress: float) -> float:
        """Return the learning rate when this share of all the steps is done, 0 to 1.

        Examples:
            >>> from fastweights.training import Schedule
            >>> schedule = Schedule(epochs=10, learning_rate=0.1, annealing="cosine")
            >>> [round(schedule.learning_rate_at(progress), 3) for progress in (0.0, 0.5, 1.0)]
            [0.1, 0.05, 0.0]
        """
        if self.annealing == "none":
            return self.learning_rate
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Learner(Protocol):
    """A model with its optimizer, the loss of each step and the scores after each epoch: what `train_epochs` drives.

    Where several processes share the training, all of them make these calls.
    """

    model: nn.Module  # trained, and left with the weights that were kept
    scored: nn.Module  # its weights are scored and kept: `model`, or a running mean of it
    optimizer: torch.optim.Optimizer  # over the model's parameters, in one group
    carried: Any  # state carried from step to step besides model and optimizer, plain values and tensors; set on resume

    @property
    def complete(self) -> bool:
        """True where nothing is left to train for, before the last epoch."""

    def loss(self, epoch: int, index: int) -> Tensor:
        """Return the loss of step `index` of an epoch, both counted from 0.

        Of several processes each returns its share, and the shares add up to the loss: see `processes.own_share`.
        """

    def score(self, step: int) -> tuple[Record, str]:
        """Score `scored` after an epoch, when `step` steps are done.

        The record has `validation_loss` (nats, or a return, negated), `validation_error` (per cent) where errors decide
        which weights are kept, and what else goes into metrics.jsonl; the text is a line for the user, or empty.
        """

    def test(self, step: int) -> Record:
        """Score `model` with the weights that were kept, after `step` steps: `test_loss`, `test_error` and others."""


@dataclass
class Standing:
    """The state of a run beside the weights; all of it goes into the checkpoint."""

    step: int = 0  # steps of the optimizer, over all epochs
    seconds: float = 0.0  # seconds of training, over all processes
    loss: float = 0.0  # summed over the epoch's steps so far
    best_epoch: int = 0
    best_error: float = math.inf
    best_loss: float = math.inf


def train_epochs(
    learner: Learner,
    schedule: Schedule,
    folder: RunFolder,
    *,
    steps_per_epoch: int,
    seed: int,
    identity: Record | None = None,
    keep_newest: bool = False,
    shared: bool = False,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train a learner, keep its best weights on validation, and test those; resume where a killed process was.

    The weights kept are those of the epoch with the least validation error, of equals the least loss; of a learner
    without errors, the least loss. A run that was killed at any moment goes on with the bits of an unbroken one, if all
    that `loss` draws is a function of the seed and the step, or comes from torch's generator. Of several processes each
    seeds that generator before every step by the seed, the step and its rank, and draws other numbers.

    Args:
        learner: the model, its losses and its scores.
        schedule: epochs, learning rate, clipping, patience, seconds between checkpoints.
        folder: an open `RunFolder`; a finished run is not trained again.
        steps_per_epoch: the steps between two scores.
        seed: of torch's generator while the run lasts; the caller's goes on as if nothing had happened here.
        identity: what else decides the numbers, beside the seed and the schedule; another one is refused on resume.
            Its "data" are the hash of the data (`hash_tensors`); a run that noted none takes any.
        keep_newest: keep the newest weights in place of the best.
        shared: the learner knows of the processes that torchrun started: `loss` is each one's share, `carried` and the
            scores are the same in all. Gradients are added up, and all have the main one's buffers. Otherwise several
            are refused.
        title: the name of the run for the user.
        progress: how far the run is; None tells nobody.

    Returns:
        The last record of `metrics.jsonl`.

    Raises:
        TrainingError: the loss or its gradient is not finite.
        RunError: the folder cannot be used, or there are several processes, of which the learner does not know.
        TypeError: it is no `RunFolder`.
        ValueError: the seed is not an integer of at least 0, or the folder is not open.
    """
    if not isinstance(folder, RunFolder):
        raise TypeError(f"folder must be an open RunFolder, got {folder!r}: with RunFolder(path, settings) as folder")
    check_integers(0, seed=seed)
    if not shared:
        processes.refuse_several(title)
    model, optimizer, progress = learner.model, learner.optimizer, progress or Progress()
    device = next(model.parameters()).device
    trained = {name: value for name, value in vars(schedule).items() if name != "checkpoint_seconds"}
    trained |= {"seed": seed, "steps_per_epoch": steps_per_epoch, "keep_newest": keep_newest, **(identity or {})}
    trained = {name: to_plain(value) for name, value in trained.items()}  # the run's folder has it as JSON
    standing, best = Standing(), dict[str, Tensor]()
    steps = schedule.epochs * steps_per_epoch
    # The caller's random numbers go on as if nothing had happened here.
    with torch.random.fork_rng():
        torch.manual_seed(int(seed))  # it may be of NumPy, which torch refuses
        for module in (model, learner.scored):
            processes.share_tensors([*module.parameters(), *module.buffers()])
        first = _checkpoint(learner, trained, standing, best)
        state = folder.begin(first)
        if state is not first:
            standing, best = _resume(state, learner, trained, folder)
            if state["result"] is not None:
                return dict(state["result"])
            folder.note_environment()
        saved = time.monotonic()
        progress.start(title, steps, standing.step)

        while True:
            epoch, begun = divmod(standing.step, steps_per_epoch)
            ends = epoch >= schedule.epochs or epoch - standing.best_epoch >= schedule.patience or learner.complete
            if begun == 0 and ends:  # an epoch that was begun is ended
                break
            model.train()
            total = torch.tensor(standing.loss, dtype=torch.float64, device=device)
            finite = torch.ones((), dtype=torch.bool, device=device)
            began = time.monotonic() - standing.seconds
            numbers = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
            learning_rates = [schedule.learning_rate_at(step / steps) for step in numbers]
            for index in range(begun, steps_per_epoch):
                _draw_own(seed, standing.step)
                loss = learner.loss(epoch, index)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                loss = processes.add_gradients(loss, model.parameters())
                processes.share_tensors(model.buffers())  # such as statistics, which each has of its part
                norm = nn.utils.clip_grad_norm_(model.parameters(), schedule.clip_norm)
                finite &= torch.isfinite(loss) & torch.isfinite(norm)
                optimizer.param_groups[0]["lr"] = learning_rates[index]
                optimizer.step()
                total += loss.detach()
                standing.step += 1
                done = index + 1
                due = processes.share(time.monotonic() - saved >= schedule.checkpoint_seconds)
                if due or done % _CHECK_STEPS == 0 or done == steps_per_epoch:
                    # A step on a loss that is not finite has spoilt the weights: no checkpoint may hold them.
                    if not finite:
                        raise _not_finite(title, epoch, standing.step, schedule, folder)
                    standing.loss, standing.seconds = total.item(), time.monotonic() - began
                    progress.update(standing.step, standing.loss / done)
                    if due and done < steps_per_epoch:
                        folder.save(_checkpoint(learner, trained, standing, best))
                        saved = time.monotonic()

            began = time.monotonic()
            scores, note = learner.score(standing.step)
            standing.seconds += time.monotonic() - began
            train_loss, standing.loss = standing.loss / steps_per_epoch, 0.0
            error_and_loss = scores.get("validation_error", -math.inf), scores["validation_loss"]
            if keep_newest or error_and_loss < (standing.best_error, standing.best_loss):
                standing.best_epoch = epoch + 1
                standing.best_error, standing.best_loss = error_and_loss
                best = {name: tensor.detach().clone() for name, tensor in learner.scored.state_dict().items()}
            record = {"kind": "epoch", "epoch": epoch + 1, "step": standing.step, "seconds": standing.seconds}
            if note:
                progress.note(note)
            folder.save(_checkpoint(learner, trained, standing, best), record | {"train_loss": train_loss} | scores)
            saved = time.monotonic()

        model.load_state_dict(best)
        _draw_own(seed, standing.step)
        result = {
            "kind": "result",
            "epoch": standing.best_epoch,
            "steps": standing.step,
            "validation_loss": standing.best_loss,
            **({} if standing.best_error == -math.inf else {"validation_error": standing.best_error}),
            **learner.test(standing.step),
            "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "seconds": standing.seconds,
        }
        if "test_error" in result:
            progress.note(f"test error {result['test_error']:.2f} %")
        elif "test_return" in result:
            progress.note(f"test return {result['test_return']:.3f}")
        else:
            progress.note(f"test loss {result['test_loss']:.4f} nats")
        folder.save(_checkpoint(learner, trained, standing, best, result), result)
        return processes.share(result)


def count_steps(examples: int, batch_size: int) -> int:
    """Return the batches of an epoch, the last of which may be smaller.

    Raises:
        RunError: one has fewer examples than there are processes.
    """
    last = examples % batch_size or batch_size
    processes.check_enough(batch_size=batch_size, **{"the last batch of an epoch": last})
    return math.ceil(examples / batch_size)


def _draw_own(seed: int, step: int) -> None:
    """Have each of several processes draw numbers of its own: a run that is resumed draws them again."""
    if processes.count() > 1:
        mixed = numpy.random.SeedSequence([seed, step, processes.rank()]).generate_state(1)[0]
        torch.manual_seed(int(mixed))


def hash_tensors(splits: Mapping[str, Iterable[Tensor]]) -> str:
    """Return a fingerprint of the data that a run is trained, chosen and tested on: other data, another fingerprint."""
    digest = hashlib.sha256()
    for name in sorted(splits):
        for tensor in splits[name]:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _checkpoint(
    learner: Learner, trained: Record, standing: Standing, best: dict[str, Tensor], result: Record | None = None
) -> Record:
    finished = result is not None  # such a run is never trained again: its best weights are all that is left to want
    return {
        "training": trained,
        "standing": vars(standing).copy(),
        "best": best,
        "result": result,
        "model": {} if finished else learner.model.state_dict(),
        "optimizer": {} if finished else learner.optimizer.state_dict(),
        "carried": None if finished else learner.carried,
        "random": torch.get_rng_state(),
        "cuda_random": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _resume(state: Record, learner: Learner, trained: Record, folder: RunFolder) -> tuple[Standing, dict[str, Tensor]]:
    """Put a checkpoint into the learner; return its standing and its best weights."""
    try:
        standing, best = Standing(**state["standing"]), state["best"]
        # Runs of earlier versions did not note these: there is nothing to compare them with.
        unnoted = {name: trained[name] for name in ("steps_per_epoch", "keep_newest", "data") if name in trained}
        changes = describe_changes(unnoted | state["training"], trained)
        if not changes and state["result"] is not None:
            learner.model.load_state_dict(best)
            if not state["result"].keys() >= _RESULT:
                raise ValueError("its result is of another kind")
        elif not changes:
            learner.model.load_state_dict(state["model"])
            learner.optimizer.load_state_dict(state["optimizer"])
            learner.carried = state.get("carried")
            torch.set_rng_state(state["random"])
            if state["cuda_random"] and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["cuda_random"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:  # all that a file can lack
        # Torch says in the first line that something is wrong with the weights, and in the second what.
        raise FolderError(
            f"the checkpoint in {folder.path} does not fit this model ({one_line(error, lines=2)}): put the right one "
            "back, or remove the folder to start over"
        ) from error
    if changes:
        raise FolderError(
            f"{folder.path} holds a run trained with other settings: {changes}. Choose another folder, or remove this "
            "one to start over"
        )
    folder.rewind(state)
    return standing, best


def _not_finite(title: str, epoch: int, step: int, schedule: Schedule, folder: RunFolder) -> TrainingError:
    clip = f" or clip_norm ({schedule.clip_norm})" if math.isfinite(schedule.clip_norm) else ""
    return TrainingError(
        f"{title}: the loss or its gradient became NaN or infinite in epoch {epoch + 1}, by step {step}; the "
        f"checkpoint in {folder.path} is from before. Lower the learning rate ({schedule.learning_rate}){clip}, and "
        "remove the folder to start over"
    )
