"""The supervised loop: batches in a shuffled order, Adam, early stop on validation, exact resume."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn import HebbianSoftmax
from fastweights.training._run import Run, check_finite
from fastweights.training.evaluation import Split, evaluate
from fastweights.training.progress import Progress
from fastweights.training.run_folder import Record, RunFolder
from fastweights.training.schedule import Schedule, epoch_order


def train(
    model: nn.Module,
    splits: dict[str, Split],
    schedule: Schedule,
    folder: RunFolder,
    *,
    seed: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train a classifier, keep its best epoch on validation, and test that; resume where a killed process was.

    The order of the examples is a function of the seed and the epoch alone, and everything else that decides the
    numbers is in the checkpoint: a resumed run gives the same bits as an unbroken one on the same number of threads.

    A `HebbianSoftmax` in the model smooths after every step; its loss has to be given, because it remembers by that.

    Args:
        model: inputs [B,...] -> logits [B,C]; on the device where it is to be trained, left there with the weights of
            its best epoch.
        splits: "train", "validation" and "test": inputs [N,...] and class indices [N]. Splits of other names are
            scored with the test, by the weights of the best epoch, such as the test's rare classes alone.
        schedule: epochs, batch size, learning rate, clipping, patience.
        folder: an open `RunFolder`; a finished run is not trained again.
        seed: of the order of the examples and of dropout. The weights of `model` are the caller's.
        loss: of inputs [B,...] and class indices [B], in training; None is the cross entropy of the model's logits.
        optimizer: over the model's parameters, in one group, whose learning rate is the schedule's; None is Adam.

    Returns:
        The last record of `metrics.jsonl`: epoch, validation and test error (per cent) and loss (nats), parameters,
        seconds, and error and loss of the splits of other names.

    Raises:
        TrainingError: data or loss are not finite.
        RunError: the folder cannot be used.
        ValueError: the model has a `HebbianSoftmax`, and no loss is given; or the optimizer has several groups.

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
    for name in dict.fromkeys(("train", "validation", "test", *splits)):
        check_finite(name, dict(zip(("inputs", "targets"), splits[name], strict=True)))
    heads = [module for module in model.modules() if isinstance(module, HebbianSoftmax)]
    if heads and loss is None:
        raise ValueError(
            f"the HebbianSoftmax in this {type(model).__name__} remembers what its own loss is computed of: give train "
            "a loss, such as loss=lambda inputs, targets: model.head.loss(model.body(inputs), targets)"
        )
    if optimizer is not None and len(optimizer.param_groups) != 1:
        raise ValueError(
            f"the schedule has one learning rate, this optimizer {len(optimizer.param_groups)} groups of parameters: "
            "give one of a single group"
        )
    # The caller's random numbers go on as if nothing had happened here.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        run = _Supervised(model, loss, optimizer, splits, schedule, folder, seed, title, progress or Progress())
        handles = [head.attach(run.optimizer) for head in heads]
        try:
            return run.run()
        finally:
            for handle in handles:
                handle.remove()


class _Supervised(Run):
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        splits: dict[str, Split],
        schedule: Schedule,
        folder: RunFolder,
        seed: int,
        title: str,
        progress: Progress,
    ) -> None:
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=schedule.learning_rate, fused=True)
        steps = math.ceil(len(splits["train"][1]) / schedule.batch_size)
        super().__init__(model, optimizer, steps, schedule, folder, seed, title, progress)
        self.splits, self.own_loss = splits, loss
        self.ordered, self.order = -1, torch.empty(0, dtype=torch.int64)  # an epoch, and the order of its examples

    def loss(self, epoch: int, index: int) -> Tensor:
        inputs, targets = self.splits["train"]
        if epoch != self.ordered:
            self.ordered, self.order = epoch, epoch_order(len(targets), self.seed, epoch).to(targets.device)
        size = self.schedule.batch_size
        batch = self.order[index * size : (index + 1) * size]
        if self.own_loss is not None:
            return self.own_loss(inputs[batch], targets[batch])
        return F.cross_entropy(self.model(inputs[batch]), targets[batch])

    def scores(self, split: str) -> Record:
        loss, error = evaluate(self.model, self.splits[split])
        return {f"{split}_loss": loss, f"{split}_error": error}

    def epoch_scores(self) -> Record:
        # The test scores are for the curve: nothing is chosen by them.
        return self.scores("validation") | self.scores("test")

    def final_scores(self) -> Record:
        scores: Record = {}
        for split in self.splits:
            scores |= {} if split in ("train", "validation") else self.scores(split)
        return scores
