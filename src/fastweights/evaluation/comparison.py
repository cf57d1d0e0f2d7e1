"""The comparison of a classifier before and after it learnt new classes: accuracy, calibration and time."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_sizes
from fastweights.nn.modes import evaluating

Classifier = Callable[[Tensor], Tensor]  # inputs [B,...] -> logits [B,V]
_BINS = 15
_ALONE = 50  # queries that are timed one at a time


class Scores(NamedTuple):
    """The scores of a classifier's answers to some examples."""

    examples: int
    accuracy: float  # per cent
    cross_entropy: float  # nats
    calibration_error: float  # per cent


class Measured(NamedTuple):
    """A classifier's scores on the old classes, the new ones and all, and the median milliseconds for one query."""

    old: Scores
    new: Scores
    all: Scores
    milliseconds: float  # in batches
    milliseconds_alone: float  # milliseconds for an input, given one at a time


class Comparison(NamedTuple):
    """Two classifiers on the same examples; `print` shows them as a table."""

    before: Measured
    after: Measured
    batch_size: int

    def __str__(self) -> str:
        parts = {"old classes": "old", "new classes": "new", "all": "all"}
        rows = [
            (
                title,
                name,
                f"{getattr(self.before, part).examples}",
                *(f"{getattr(one, part)[at]:.2f}" for one in self[:2]),
            )
            for at, title in enumerate(("accuracy, %", "cross entropy, nats", "calibration error, %"), 1)
            for name, part in parts.items()
        ]
        for at, name in ((3, f"{self.batch_size} at once"), (4, "one at a time")):
            rows.append(("milliseconds a query", name, "", *(f"{one[at]:.3f}" for one in self[:2])))
        rows = [("", "", "examples", "before", "after"), *rows]
        titles = ["", *(row[0] for row in rows)]  # named once, not on every line
        return "\n".join(
            f"{'' if row[0] == above else row[0]:<22}{row[1]:<14}{row[2]:>8}{row[3]:>10}{row[4]:>10}"
            for row, above in zip(rows, titles, strict=False)
        )


def compare(
    before: Classifier,
    after: Classifier,
    split: tuple[Tensor, Tensor],
    new_classes: Sequence[int],
    *,
    batch_size: int = 100,
) -> Comparison:
    """Measure two classifiers on labelled examples: accuracy, cross entropy, calibration error and time for a query.

    A module is read in evaluation mode, any other function as it is. `before` may know fewer classes than `after`: the
    others then have a probability of 0. The two take turns at the batches, of which the median counts, and then at up
    to 50 queries one at a time; a time ends when the answer is on the processor.

    The calibration error is that of 15 bins, which few answers cannot fill evenly: of a classifier that is as often
    right as it says it is some 24 % with 30 examples, 6 % with 300, 2 % with 3,000. Compare those of as many examples.

    Args:
        before: inputs [B,...] -> logits [B,V].
        after: inputs [B,...] -> logits [B,V'], with a logit for every target.
        split: inputs [N,...] and class indices [N].
        new_classes: which of the classes are new; the others are old.
        batch_size: inputs at a time.

    Raises:
        ValueError: not a target for each input, no example of an old or of a new class, a target that `after` has no
            logit for, logits that are not [B,V] or give no probabilities (NaN), or a `batch_size` of no inputs.

    Examples:
        >>> import torch
        >>> from fastweights.evaluation import compare
        >>> split = torch.eye(3), torch.tensor([0, 1, 2])
        >>> before, after = (lambda x: 9 * x[:, :2]), (lambda x: 9 * x)        # the first knows two classes only
        >>> comparison = compare(before, after, split, new_classes=[2])
        >>> comparison.before.new.accuracy, comparison.after.new.accuracy
        (0.0, 100.0)
        >>> print(comparison)                                                       # doctest: +ELLIPSIS
                                            examples    before     after
        accuracy, %           old classes          2    100.00    100.00
                              new classes          1      0.00    100.00
                              all                  3     66.67    100.00
        ...
    """
    inputs, targets = split
    if targets.dim() != 1 or len(inputs) != len(targets) or targets.is_floating_point():
        raise ValueError(
            f"targets must be a class index for each of {len(inputs)} inputs, got {list(targets.shape)} {targets.dtype}"
        )
    check_sizes(batch_size=batch_size)
    targets = targets.detach().cpu()
    new = torch.isin(targets, torch.as_tensor(new_classes, dtype=torch.long))
    if not new.any() or new.all():
        lacking = "old" if bool(new.any()) else "new"
        raise ValueError(f"there is no example of {lacking} classes; new_classes are {list(new_classes)}")
    models = {"before": before, "after": after}
    with ExitStack() as modes:
        for model in models.values():
            if isinstance(model, nn.Module):
                modes.enter_context(evaluating(model))
        logits, batched = _answers(models, inputs, min(batch_size, len(inputs)))
        _, alone = _answers(models, inputs[:_ALONE], 1)
    known = logits["after"].shape[1]
    if int(targets.min()) < 0 or int(targets.max()) >= known:
        raise ValueError(
            f"after has logits of the classes 0 to {known - 1}, and the targets are {int(targets.min())} to "
            f"{int(targets.max())}"
        )
    missing = max(0, known - logits["before"].shape[1])
    logits["before"] = F.pad(logits["before"], (0, missing), value=-torch.inf)

    def measure(name: str) -> Measured:
        old, others, both = (_scores(logits[name][part], targets[part]) for part in (~new, new, new | ~new))
        return Measured(old, others, both, batched[name], alone[name])

    return Comparison(measure("before"), measure("after"), min(batch_size, len(inputs)))


def calibration_error(logits: Tensor, targets: Tensor) -> float:
    """Return the expected calibration error of answers, in per cent (Guo et al. 2017).

    The error is the distance between the probability of the answers and how often they are right: over 15 bins of equal
    width, the mean of
    ``|accuracy - confidence|``, weighed by the examples in each.

    Shapes: logits [N,V], targets [N].

    Examples:
        >>> import torch
        >>> from fastweights.evaluation import calibration_error
        >>> sure = torch.tensor([[0.0, -99.0], [0.0, -99.0]])
        >>> calibration_error(sure, torch.tensor([0, 1]))                            # sure of both, and right once
        50.0
    """
    confidence, answers = logits.double().softmax(1).max(1)
    bins = (confidence * _BINS).ceil().long().clamp(1, _BINS) - 1
    gaps = torch.zeros(_BINS, dtype=torch.float64, device=logits.device)
    gaps.index_add_(0, bins, (answers == targets).double() - confidence)
    return 100 * float(gaps.abs().sum()) / len(targets)


def _scores(logits: Tensor, targets: Tensor) -> Scores:
    accuracy = 100 * float((logits.argmax(1) == targets).double().mean())
    return Scores(len(targets), accuracy, float(F.cross_entropy(logits, targets)), calibration_error(logits, targets))


@torch.no_grad()
def _answers(
    models: dict[str, Classifier], inputs: Tensor, batch_size: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the logits [N,V] of each model in float64, and the median milliseconds an input of its full batches."""
    batches = torch.split(inputs, batch_size)
    logits: dict[str, list[Tensor]] = {name: [] for name in models}
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        model(batches[0])  # the first call sets things up, and is not timed
    for batch in batches:
        for name, model in models.items():
            start = time.perf_counter()
            answers = model(batch).cpu()
            elapsed = 1000 * (time.perf_counter() - start) / len(batch)
            if answers.dim() != 2 or len(answers) != len(batch):
                raise ValueError(f"{name} must give logits [{len(batch)},V] of inputs, got {list(answers.shape)}")
            if answers.double().log_softmax(1).isnan().any():
                raise ValueError(f"{name} gives logits that are NaN or infinite")
            logits[name].append(answers.double())
            if len(batch) == batch_size:
                times[name].append(elapsed)
    medians = {name: statistics.median(milliseconds) for name, milliseconds in times.items()}
    return {name: torch.cat(parts) for name, parts in logits.items()}, medians
