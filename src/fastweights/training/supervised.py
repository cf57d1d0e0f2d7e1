"""The supervised loop: batches in a shuffled order, Adam, early stop on validation, exact resume."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate

from fastweights import processes
from fastweights.checks import check_sizes
from fastweights.errors import TrainingError
from fastweights.nn import HebbianSoftmax
from fastweights.nn.fast_weights_linear import to_single
from fastweights.nn.modes import evaluating
from fastweights.runs import Progress, Record, RunFolder
from fastweights.training.loop import Schedule, count_steps, hash_tensors, train_epochs

Split = tuple[Tensor, Tensor]  # inputs [N,...], targets [N]
Examples = tuple[Any, Any] | Dataset[Any] | DataLoader[Any]  # whatever `read_split` can make a split from


def train(
    model: nn.Module,
    splits: Mapping[str, Examples],
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

    Under `torchrun` each process takes its part of every batch and draws its own dropout. Without it, and without batch
    normalisation, the numbers are those of one process but for rounding. Another number of processes may resume a run.

    Args:
        model: inputs [B,...] -> logits [B,C]; on the device where it is to be trained, left there with the weights of
            its best epoch.
        splits: "train", "validation" and "test": inputs [N,...] and class indices [N], as tensors or NumPy arrays; or a
            `torch.utils.data.Dataset` of such pairs, or a `DataLoader` of one. These are read once, into tensors beside
            the model: the batch size is the schedule's, and the order `epoch_order`'s. Splits of other names are scored
            with the test, by the weights of the best epoch, such as the test's rare classes alone.
        schedule: epochs, batch size, learning rate, clipping, patience.
        folder: an open `RunFolder`; a finished run is not trained again, and one on other data is refused.
        seed: the seed of the order of the examples and of dropout. The weights of `model` are the caller's.
        loss: the loss to train on, a mean over inputs [B,...] and class indices [B]; None is the logits' cross entropy.
            The targets of "train" are for it alone, and may be others, such as soft labels [N,C].
        optimizer: an optimizer of the model's parameters in one group, whose learning rate the schedule sets; None is
            Adam.

    Returns:
        The last record of `metrics.jsonl`: epoch, validation and test error (per cent) and loss (nats), parameters,
        seconds, and error and loss of the splits of other names.

    Raises:
        TrainingError: data or loss are not finite.
        RunError: the folder cannot be used, or a batch has fewer examples than there are processes.
        TypeError: a split is nothing that can be read into two tensors, or targets are no class indices [N].
        ValueError: a split is missing or has not a target for each input; a DataLoader chooses examples; the model has
            nothing to train, or a `HebbianSoftmax` and no loss is given; or the optimizer has several groups.

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
    check_splits(splits)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    device = next(model.parameters()).device
    given = {name: read_split(name, examples, device) for name, examples in splits.items()}
    for name, (inputs, targets) in given.items():
        check_examples(name, inputs=inputs, targets=targets)
    tensors = {
        name: (inputs, targets if name == "train" and loss is not None else to_indices(name, targets))
        for name, (inputs, targets) in given.items()
    }
    heads = [module for module in model.modules() if isinstance(module, HebbianSoftmax)]
    if heads and loss is None:
        raise ValueError(
            f"the HebbianSoftmax in this {type(model).__name__} remembers what its own loss is computed from: give "
            "train a loss, such as loss=lambda inputs, targets: model.head.loss(model.body(inputs), targets)"
        )
    if optimizer is not None and len(optimizer.param_groups) != 1:
        raise ValueError(
            f"the schedule has one learning rate, and this optimizer has {len(optimizer.param_groups)} groups: "
            "give an optimizer with one group"
        )
    steps = count_steps(len(tensors["train"][1]), schedule.batch_size)
    learner = _Classifier(model, loss, optimizer, tensors, schedule, seed)
    handles = [head.attach(learner.optimizer) for head in heads]
    try:
        return train_epochs(
            learner,
            schedule,
            folder,
            steps_per_epoch=steps,
            seed=seed,
            identity={"data": hash_tensors(given)},
            shared=True,
            title=title,
            progress=progress,
        )
    finally:
        for handle in handles:
            handle.remove()


def evaluate(model: nn.Module, split: Examples, *, batch_size: int = 1000) -> tuple[float, float]:
    """Return the mean cross entropy (nats) and the error (per cent) of a classifier on a split.

    The model is read in evaluation mode, `batch_size` inputs at a time, and is left as it was.

    Args:
        model: inputs [B,...] -> logits [B,C].
        split: inputs [N,...] and class indices [N], or what else `train` takes as a split.
        batch_size: inputs at a time.

    Raises:
        TypeError: the split is none, or its targets are no class indices.
        ValueError: inputs and targets are not as many, a target is negative, or the batch size is out of range.
        TrainingError: the split is empty, or an input is NaN or infinite.

    Examples:
        >>> import torch
        >>> from fastweights.training import evaluate
        >>> loss, error = evaluate(torch.nn.Identity(), (torch.eye(4), torch.tensor([0, 1, 2, 0])))
        >>> error
        25.0
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    check_sizes(batch_size=batch_size)
    inputs, targets = read_split("given", split, device)
    check_examples("given", inputs=inputs)
    scores = score_splits(model, {"given": (inputs, to_indices("given", targets))}, batch_size=batch_size)
    return scores["given_loss"], scores["given_error"]


def score_splits(model: nn.Module, splits: Mapping[str, Split], *, batch_size: int = 1000) -> Record:
    """Return what `evaluate` measures on each split, by its name, as a run records it."""
    scores: Record = {}
    with evaluating(model), torch.no_grad():
        for name, (inputs, targets) in splits.items():
            loss = wrong = 0.0
            for x, y in zip(torch.split(inputs, batch_size), torch.split(targets, batch_size), strict=True):
                logits = model(x)
                loss += F.cross_entropy(to_single(logits), y, reduction="sum").item()  # float16 ends at 65504
                wrong += (logits.argmax(1) != y).sum().item()
            scores |= {f"{name}_loss": loss / len(targets), f"{name}_error": 100 * wrong / len(targets)}
    return scores


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the order of the examples in an epoch, [count] int64: a pure function of its arguments.

    Examples:
        >>> from fastweights.training import epoch_order
        >>> epoch_order(5, seed=1, epoch=0).sort().values.tolist()
        [0, 1, 2, 3, 4]
        >>> bool((epoch_order(100, seed=1, epoch=0) == epoch_order(100, seed=1, epoch=1)).all())
        False
    """
    return torch.from_numpy(numpy.random.default_rng([seed, epoch]).permutation(count))


def read_split(name: str, examples: Examples, device: torch.device | None) -> Split:
    """Return the inputs and the targets of a split as tensors on a device, whatever `train` was given as the split.

    Raises:
        TypeError: there are no such two tensors in it.
        ValueError: inputs and targets are not as many, or a DataLoader chooses the examples.
        TrainingError: a Dataset is empty.
    """
    parts = _collate(name, examples) if isinstance(examples, Dataset | DataLoader) else examples
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        raise TypeError(
            f"the {name} split must be a pair of inputs and targets, or a Dataset or DataLoader of such pairs, got "
            f"{type(parts).__name__}{f' of {len(parts)}' if isinstance(parts, tuple | list) else ''}"
        )
    tensors = []
    for part, values in zip(("inputs", "targets"), parts, strict=True):
        try:
            tensor = torch.as_tensor(values, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"the {name} {part} must be a tensor, or convertible by torch.as_tensor, got a "
                f"{type(values).__name__} ({error})"
            ) from error
        if tensor.dim() == 0:
            raise TypeError(f"the {name} {part} must be one for each example, got the single number {tensor.item()}")
        tensors.append(tensor)
    inputs, targets = tensors
    if len(inputs) != len(targets):
        raise ValueError(
            f"the {name} split has {len(inputs)} inputs and {len(targets)} targets: give a target for each input"
        )
    return inputs, targets


def to_indices(name: str, targets: Tensor) -> Tensor:
    """Return targets as class indices, [N] int64; what is of another kind would be compared as something else.

    Raises:
        TypeError: they are no indices.
        ValueError: one is negative; in the training split, whose loss may leave such out, that is allowed.
    """
    if targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        raise TypeError(
            f"the {name} targets must be class indices [N], got {targets.dtype} {list(targets.shape)}: of "
            "one-hot targets take argmax(1), of numbers long(), and for two classes give the model two logits"
        )
    targets = targets.long()
    if name != "train" and len(targets) and int(targets.min()) < 0:
        raise ValueError(f"the {name} targets must be class indices from 0 on, got {int(targets.min())}")
    return targets


def _collate(name: str, source: Dataset[Any] | DataLoader[Any]) -> Any:
    """Read all examples of a map-style dataset into one batch."""
    collate: Callable[[list[Any]], Any] = default_collate
    dataset: Any = source
    if isinstance(source, DataLoader):
        collate, dataset = source.collate_fn, source.dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"the {name} split is read in an order of its own ({type(dataset).__name__}), and training chooses the "
            "order: read its examples into two tensors first, such as torch.utils.data.default_collate(list(dataset))"
        )
    if isinstance(source, DataLoader) and not (
        type(source.sampler) in (SequentialSampler, RandomSampler) and type(source.batch_sampler) is BatchSampler
    ):
        raise ValueError(
            f"the DataLoader of the {name} split has a sampler of its own, and training chooses the order: give it the "
            "examples alone, such as torch.utils.data.Subset(dataset, indices)"
        )
    examples = [dataset[index] for index in range(len(dataset))]
    if not examples:
        raise TrainingError(f"the {name} split is empty: its {type(dataset).__name__} has no examples")
    try:
        return collate(examples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"the examples of the {name} split cannot be put side by side ({error}): give them one shape, or a "
            "DataLoader whose collate_fn does"
        ) from error


def check_splits(splits: Mapping[str, object]) -> None:
    """Refuse splits without train, validation or test.

    Raises:
        TypeError: they are not splits by name.
        ValueError: one of them is missing.
    """
    if not isinstance(splits, Mapping):
        raise TypeError(f"splits must be a dict of train, validation and test, got a {type(splits).__name__}")
    missing = [name for name in ("train", "validation", "test") if name not in splits]
    if missing:
        raise ValueError(
            f"splits lack {' and '.join(missing)}: give train, validation and test, got {', '.join(splits) or 'none'}"
        )


def check_examples(split: str, **parts: Tensor) -> None:
    """Refuse tensors of a split that are empty or hold NaN or infinity.

    Raises:
        TypeError: a part is no tensor.
        TrainingError: a part is empty or not finite.
    """
    for name, tensor in parts.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"the {split} {name} must be a tensor, got {type(tensor).__name__}: torch.as_tensor makes one"
            )
        if len(tensor) == 0:
            raise TrainingError(f"the {split} split is empty: its {name} have shape {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            continue
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            index = tuple(bad[0].tolist())
            raise TrainingError(
                f"the {split} {name} hold {tensor[index].item()} at {index}, and {len(bad)} such values in all: "
                "repair or drop these examples"
            )


class _Classifier:
    """A classifier and its splits: batches in a shuffled order, scores on validation and test after every epoch."""

    complete, carried = False, None

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        splits: dict[str, Split],
        schedule: Schedule,
        seed: int,
    ) -> None:
        self.model = self.scored = model
        self.optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=schedule.learning_rate, fused=True)
        self.loss_of = loss or (lambda inputs, targets: F.cross_entropy(model(inputs), targets))
        self.splits, self.batch_size, self.seed = splits, schedule.batch_size, seed
        self.ordered, self.order = -1, torch.empty(0, dtype=torch.int64)  # an epoch, and the order of its examples

    def loss(self, epoch: int, index: int) -> Tensor:
        inputs, targets = self.splits["train"]
        if epoch != self.ordered:
            self.ordered, self.order = epoch, epoch_order(len(targets), self.seed, epoch).to(targets.device)
        batch = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        rows, weight = processes.own_share(len(batch))
        return weight * self.loss_of(inputs[batch[rows]], targets[batch[rows]])

    @processes.in_main
    def score(self, step: int) -> tuple[Record, str]:
        # The test scores are for the curve: nothing is chosen by them.
        scores = score_splits(self.model, {name: self.splits[name] for name in ("validation", "test")})
        return scores, f"epoch {self.ordered + 1}: validation error {scores['validation_error']:.2f} %"

    @processes.in_main
    def test(self, step: int) -> Record:
        return score_splits(
            self.model, {name: self.splits[name] for name in self.splits if name not in ("train", "validation")}
        )
