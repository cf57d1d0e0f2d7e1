"""What every training loop shares: steps with clipping, the best epoch on validation, checkpoints and exact resume."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.errors import RunError, TrainingError
from fastweights.training.progress import Progress
from fastweights.training.run_folder import Record, RunFolder, differences
from fastweights.training.schedule import Schedule

_RESULT = {"kind", "epoch", "validation_loss", "validation_error", "test_loss", "test_error", "parameters", "seconds"}
_CHECK_STEPS = 20  # steps between looks at the loss: each look waits for a GPU


@dataclass
class Standing:
    """Where a run stands, beside the weights: all of it goes into the checkpoint."""

    step: int = 0  # steps of the optimizer, over all epochs
    seconds: float = 0.0  # of training, over all processes
    loss: float = 0.0  # summed over the epoch's steps so far
    best_epoch: int = 0
    best_error: float = math.inf
    best_loss: float = math.inf


class Run:
    """One model trained in one folder. A loop gives the loss of a step and the scores of a split, and what it carries
    from step to step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps_per_epoch: int,
        schedule: Schedule,
        folder: RunFolder,
        seed: int,
        title: str,
        progress: Progress,
    ) -> None:
        self.model, self.optimizer, self.steps_per_epoch = model, optimizer, steps_per_epoch
        self.schedule, self.folder = schedule, folder
        self.seed, self.title, self.progress = seed, title, progress
        self.device = next(model.parameters()).device
        self.standing = Standing()
        self.best: dict[str, Tensor] = {}
        self.saved_at = time.monotonic()

    def loss(self, epoch: int, index: int) -> Tensor:
        """The loss of step `index` of an epoch, both counted from 0."""
        raise NotImplementedError

    def scores(self, split: str) -> Record:
        """The model's scores on a split: `{split}_loss` (nats), `{split}_error` (per cent), and what else there is."""
        raise NotImplementedError

    def judged(self) -> nn.Module:
        """What is scored after an epoch, and kept if it is the best."""
        return self.model

    def carried(self) -> Any:
        """What the loop carries from step to step beside the weights, for the checkpoint."""
        return None

    def carry_on(self, carried: Any) -> None:
        """Take up what an earlier process carried."""

    def epoch_scores(self) -> Record:
        return self.scores("validation")

    def improves(self, scores: Record) -> bool:
        """Whether the weights of an epoch are the ones to keep: those of the least error, of equals the least loss."""
        best = self.standing.best_error, self.standing.best_loss
        return (scores["validation_error"], scores["validation_loss"]) < best

    def complete(self) -> bool:
        """Whether nothing is left to train for, before the last epoch."""
        return False

    def note(self, epoch: int, scores: Record) -> str:
        """What an epoch is worth saying, if anything."""
        return f"epoch {epoch}: validation error {scores['validation_error']:.2f} %"

    def final_scores(self) -> Record:
        """The scores of the weights that were kept, for the result."""
        return self.scores("test")

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
        return begun or (epoch < self.schedule.epochs and waited < self.schedule.patience and not self.complete())

    def _train_epoch(self) -> None:
        standing = self.standing
        epoch, first = divmod(standing.step, self.steps_per_epoch)
        self.model.train()
        total = torch.tensor(standing.loss, dtype=torch.float64, device=self.device)
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        began = time.monotonic() - standing.seconds
        for index in range(first, self.steps_per_epoch):
            loss = self.loss(epoch, index)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip_norm)
            finite &= torch.isfinite(loss) & torch.isfinite(norm)
            self.optimizer.param_groups[0]["lr"] = self._learning_rate()
            self.optimizer.step()
            total += loss.detach()
            standing.step += 1
            done = index + 1
            due = time.monotonic() - self.saved_at >= self.schedule.checkpoint_seconds
            if due or done % _CHECK_STEPS == 0:
                # A step on a loss that is not finite has spoilt the weights: no checkpoint may hold them.
                self._require(bool(finite), epoch)
                standing.loss, standing.seconds = total.item(), time.monotonic() - began
                self.progress.update(standing.step, standing.loss / done)
                if due and done < self.steps_per_epoch:
                    self._save()
        self._require(bool(finite), epoch)
        standing.loss, standing.seconds = total.item(), time.monotonic() - began

    def _learning_rate(self) -> float:
        return self.schedule.learning_rate_at(self.standing.step / (self.schedule.epochs * self.steps_per_epoch))

    def _end_epoch(self) -> None:
        standing = self.standing
        epoch = standing.step // self.steps_per_epoch
        began = time.monotonic()
        scores = self.epoch_scores()
        standing.seconds += time.monotonic() - began
        train_loss, standing.loss = standing.loss / self.steps_per_epoch, 0.0
        if self.improves(scores):
            standing.best_epoch = epoch
            standing.best_error, standing.best_loss = scores["validation_error"], scores["validation_loss"]
            self.best = {name: tensor.detach().clone() for name, tensor in self.judged().state_dict().items()}
        told = {"kind": "epoch", "epoch": epoch, "step": standing.step, "seconds": standing.seconds}
        self.folder.append(told | {"train_loss": train_loss} | scores)
        if note := self.note(epoch, scores):
            self.progress.note(note)
        self._save()

    def _finish(self) -> Record:
        self.model.load_state_dict(self.best)
        result = {
            "kind": "result",
            "epoch": self.standing.best_epoch,
            "steps": self.standing.step,
            "validation_loss": self.standing.best_loss,
            "validation_error": self.standing.best_error,
            **self.final_scores(),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad),
            "seconds": self.standing.seconds,
        }
        self.folder.append(result)
        self._save(result)
        self.progress.note(f"test error {result['test_error']:.2f} %")
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
            "carried": None if finished else self.carried(),
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
            # Torch says in the first line that something is wrong with the weights, and in the second what.
            reason = " ".join(line.strip() for line in (str(error) or repr(error)).splitlines()[:2])
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
            if not state["result"].keys() >= _RESULT:
                raise ValueError("its result is not one of ours")
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.standing = Standing(**state["standing"])
        self.best = state["best"]
        self.carry_on(state.get("carried"))
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
        clip = f" or clip_norm ({self.schedule.clip_norm})" if math.isfinite(self.schedule.clip_norm) else ""
        raise TrainingError(
            f"{self.title}: the loss or its gradient became NaN or infinite in epoch {epoch + 1}, by step "
            f"{self.standing.step}; the checkpoint in {self.folder.path} is from before. Lower the learning rate "
            f"({self.schedule.learning_rate}){clip}, and start over with --fresh"
        )


def check_finite(name: str, split: Mapping[str, Tensor]) -> None:
    """Refuse a split that is empty or holds NaN or infinity.

    Raises:
        TrainingError: it does.
    """
    for part, tensor in split.items():
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
