"""The supervised loop: batches, Adam, gradient clipping, early stop on validation, exact resume."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.errors import RunError, TrainingError
from fastweights.training.evaluation import Split, evaluate
from fastweights.training.progress import Progress
from fastweights.training.run_folder import Record, RunFolder, differences
from fastweights.training.schedule import Schedule, epoch_order

_RESULT = {"kind", "epoch", "validation_loss", "validation_error", "test_loss", "test_error", "parameters", "seconds"}
_CHECK_STEPS = 20  # steps between looks at the loss: each look waits for a GPU


@dataclass
class _Standing:
    """Where a run stands, beside the weights: all of it goes into the checkpoint."""

    step: int = 0  # steps of the optimizer, over all epochs
    seconds: float = 0.0  # of training, over all processes
    loss: float = 0.0  # summed over the epoch's steps so far
    best_epoch: int = 0
    best_error: float = math.inf
    best_loss: float = math.inf


def train(
    model: nn.Module,
    splits: dict[str, Split],
    schedule: Schedule,
    folder: RunFolder,
    *,
    seed: int,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train a classifier, keep its best epoch on validation, and test that; resume where a killed process was.

    The order of the examples is a function of the seed and the epoch alone, and everything else that decides the
    numbers is in the checkpoint: a resumed run gives the same bits as an unbroken one on the same number of threads.

    Args:
        model: inputs [B,...] -> logits [B,C]; on the device where it is to be trained, left there with the weights of
            its best epoch.
        splits: "train", "validation" and "test": inputs [N,...] and class indices [N].
        schedule: epochs, batch size, learning rate, clipping, patience.
        folder: an open `RunFolder`; a finished run is not trained again.
        seed: of the order of the examples and of dropout. The weights of `model` are the caller's.

    Returns:
        The last record of `metrics.jsonl`: epoch, validation and test error (per cent) and loss (nats), parameters,
        seconds.

    Raises:
        TrainingError: data or loss are not finite.
        RunError: the folder cannot be used.

    Examples:
        >>> import tempfile, pathlib, torch
        >>> from fastweights.training import RunFolder, Schedule, train
        >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
        >>> splits = {name: (x, (x[:, 0] > 0).long()) for name in ("train", "validation", "test")}
        >>> with RunFolder(pathlib.Path(tempfile.mkdtemp()) / "run", {}) as folder:
        ...     result = train(torch.nn.Linear(4, 2), splits, Schedule(epochs=30, learning_rate=0.1), folder, seed=1)
        >>> result["test_error"] < 5
        True
    """
    for name in ("train", "validation", "test"):
        _check_finite(name, splits[name])
    # The caller's random numbers go on as if nothing had happened here.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _Run(model, splits, schedule, folder, seed, title, progress or Progress()).run()


class _Run:
    def __init__(
        self,
        model: nn.Module,
        splits: dict[str, Split],
        schedule: Schedule,
        folder: RunFolder,
        seed: int,
        title: str,
        progress: Progress,
    ) -> None:
        self.model, self.splits, self.schedule, self.folder = model, splits, schedule, folder
        self.seed, self.title, self.progress = seed, title, progress
        self.optimizer = torch.optim.Adam(model.parameters(), lr=schedule.learning_rate, fused=True)
        self.standing = _Standing()
        self.best: dict[str, Tensor] = {}
        self.steps_per_epoch = math.ceil(len(splits["train"][1]) / schedule.batch_size)
        self.saved_at = time.monotonic()

    def run(self) -> Record:
        state = self.folder.load()
        if state is not None:
            self._resume(state)
            if state["result"] is not None:
                return dict(state["result"])
        self.folder.note_environment()
        if state is None:
            self._save()  # from now on metrics without a checkpoint are a loss, not a beginning
        self.progress.start(self.title, self.schedule.epochs * self.steps_per_epoch, self.standing.step)
        while self._goes_on():
            self._train_epoch()
            self._end_epoch()
        return self._finish()

    def _goes_on(self) -> bool:
        epoch = self.standing.step // self.steps_per_epoch
        waited = epoch - self.standing.best_epoch
        begun = self.standing.step % self.steps_per_epoch != 0  # an epoch that was begun is ended
        return begun or (epoch < self.schedule.epochs and waited < self.schedule.patience)

    def _train_epoch(self) -> None:
        inputs, targets = self.splits["train"]
        standing = self.standing
        epoch = standing.step // self.steps_per_epoch
        order = epoch_order(len(targets), self.seed, epoch).to(targets.device)
        batches = torch.split(order, self.schedule.batch_size)
        self.model.train()
        total = torch.tensor(standing.loss, dtype=torch.float64, device=targets.device)
        finite = torch.ones((), dtype=torch.bool, device=targets.device)
        began = time.monotonic() - standing.seconds
        steps = self.schedule.epochs * self.steps_per_epoch
        for batch in batches[standing.step % self.steps_per_epoch :]:
            loss = F.cross_entropy(self.model(inputs[batch]), targets[batch])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip_norm)
            finite &= torch.isfinite(loss) & torch.isfinite(norm)
            self.optimizer.param_groups[0]["lr"] = self.schedule.learning_rate_at(standing.step / steps)
            self.optimizer.step()
            total += loss.detach()
            standing.step += 1
            done = standing.step % self.steps_per_epoch
            due = time.monotonic() - self.saved_at >= self.schedule.checkpoint_seconds
            if due or done % _CHECK_STEPS == 0:
                # A step on a loss that is not finite has spoilt the weights: no checkpoint may hold them.
                self._require(bool(finite), epoch)
                standing.loss, standing.seconds = total.item(), time.monotonic() - began
                self.progress.update(standing.step, standing.loss / (done or self.steps_per_epoch))
                if due and done:
                    self._save()
        self._require(bool(finite), epoch)
        standing.loss, standing.seconds = total.item(), time.monotonic() - began

    def _end_epoch(self) -> None:
        standing = self.standing
        epoch = standing.step // self.steps_per_epoch
        began = time.monotonic()
        validation_loss, validation_error = evaluate(self.model, self.splits["validation"])
        test_loss, test_error = evaluate(self.model, self.splits["test"])  # for the curve: nothing is chosen by it
        standing.seconds += time.monotonic() - began
        train_loss, standing.loss = standing.loss / self.steps_per_epoch, 0.0
        if (validation_error, validation_loss) < (standing.best_error, standing.best_loss):
            standing.best_epoch, standing.best_error, standing.best_loss = epoch, validation_error, validation_loss
            self.best = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        self.folder.append(
            {
                "kind": "epoch",
                "epoch": epoch,
                "step": standing.step,
                "seconds": standing.seconds,
                "train_loss": train_loss,
                "validation_loss": validation_loss,
                "validation_error": validation_error,
                "test_loss": test_loss,
                "test_error": test_error,
            }
        )
        self.progress.note(f"epoch {epoch}: validation error {validation_error:.2f} %")
        self._save()

    def _finish(self) -> Record:
        self.model.load_state_dict(self.best)
        test_loss, test_error = evaluate(self.model, self.splits["test"])
        result = {
            "kind": "result",
            "epoch": self.standing.best_epoch,
            "validation_loss": self.standing.best_loss,
            "validation_error": self.standing.best_error,
            "test_loss": test_loss,
            "test_error": test_error,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "seconds": self.standing.seconds,
        }
        self.folder.append(result)
        self._save(result)
        self.progress.note(f"test error {test_error:.2f} %")
        return result

    def _save(self, result: Record | None = None) -> None:
        finished = result is not None
        state: dict[str, Any] = {
            "training": self._training(),
            "standing": vars(self.standing).copy(),
            "best": self.best,
            "result": result,
            # A finished run is never trained again: its best weights are all that is left to want.
            "model": {} if finished else self.model.state_dict(),
            "optimizer": {} if finished else self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        self.folder.save(state)
        self.saved_at = time.monotonic()

    def _resume(self, state: Record) -> None:
        try:
            changed = differences(state["training"], self._training())
            if not changed:
                self._restore(state)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:  # all that a file can lack
            reason = (str(error) or repr(error)).splitlines()[0]
            raise RunError(
                f"the checkpoint in {self.folder.path} does not fit this model ({reason}): put the right one back, or "
                "start over with --fresh"
            ) from error
        if changed:
            raise RunError(
                f"{self.folder.path} holds a run that was trained otherwise: {changed}. Choose another folder or "
                "remove this one"
            )
        self.folder.rewind(state)

    def _restore(self, state: Record) -> None:
        if state["result"] is not None:
            self.model.load_state_dict(state["best"])
            if state["result"].keys() != _RESULT:
                raise ValueError("its result is not one of ours")
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.standing = _Standing(**state["standing"])
        self.best = state["best"]
        torch.set_rng_state(state["random"])
        if state["cuda_random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_random"])

    def _training(self) -> Record:
        """What decides the numbers beside the model and the data."""
        schedule = {name: value for name, value in vars(self.schedule).items() if name != "checkpoint_seconds"}
        return {"seed": self.seed, **schedule}

    def _require(self, finite: bool, epoch: int) -> None:
        if finite:
            return
        raise TrainingError(
            f"{self.title}: the loss or its gradient became NaN or infinite in epoch {epoch + 1}, by step "
            f"{self.standing.step}; the checkpoint in {self.folder.path} is from before. Lower the learning rate "
            f"({self.schedule.learning_rate}) or clip_norm ({self.schedule.clip_norm}), and start over with --fresh"
        )


def _check_finite(name: str, split: Split) -> None:
    for part, tensor in zip(("inputs", "targets"), split, strict=True):
        if len(tensor) == 0:
            raise TrainingError(f"the {name} split is empty: its {part} have shape {tuple(tensor.shape)}")
        if tensor.is_floating_point():
            bad = (~torch.isfinite(tensor)).nonzero()
            if len(bad):
                index = tuple(bad[0].tolist())
                raise TrainingError(
                    f"the {name} {part} hold {tensor[index].item()} at {index}, and {len(bad)} such values in all: "
                    "mend or drop these examples"
                )
