"""`fastweights bench hebbian-softmax`: a training step of Hebbian Softmax beside that of a plain softmax."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.bench.parity import allowed_error, distance, parity_error
from fastweights.bench.problems import Calls, draw_words
from fastweights.bench.published import Columns, Row, last_measured, left_out, number, place, show, show_ratio, table
from fastweights.bench.run import Line, explain_lack_of_memory
from fastweights.nn import HebbianSoftmax
from fastweights.nn.hebbian_softmax import loss as softmax_loss

OURS, PLAIN, PAST_LIMIT = "fastweights", "torch.nn.Linear", "fastweights past the limit"
RIVALS = (OURS, PLAIN, PAST_LIMIT)
BATCHES = 8  # batches prepared, and taken in turn
NEVER = 2**62  # a limit that no class reaches
LEARNING_RATE = 0.1
# Of an activation, as in the hidden state of a trained LSTM. Large ones make logits so far apart that probabilities
# are denormal numbers: a product of them takes many times as long, whoever computes it.
SCALE = 0.1
PARITY_LIMIT = 3  # the limit of the head in the parity check
_ROWS = 128  # rows computed in float64 at once

BASE = ("plain", PLAIN)
COLUMNS = ["batch", "classes", "hidden_size", "rival"]
UNIT = "milliseconds of a training step"
MEMORY_COLUMNS = [*COLUMNS, "present"]
MEMORY_RIVALS = (OURS, PLAIN)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class SoftmaxCase:
    """One size of the head."""

    classes: int  # V
    hidden_size: int = 256  # d
    batch: int = 1024

    def __str__(self) -> str:
        return f"V={self.classes}, d={self.hidden_size}"

    @property
    def present(self) -> int:
        """The number of classes in the first batch."""
        return len(set(draw_labels(self)[0].tolist()))

    def added_bytes(self, present: int) -> int:
        """Return the most that the head may hold beside a plain one's step, with so many classes in the batch.

        A counter for each class, the batch's activations until the step, and sums for the classes present.
        """
        return 8 * self.classes + 4 * (self.batch + present) * self.hidden_size


@dataclass(frozen=True)
class SoftmaxSelection:
    """The cases that a run times; the default is a part of the whole grid that takes minutes."""

    threads: tuple[int, ...] = (1, 2)
    classes: tuple[int, ...] = (1000, 33_278)
    hidden_sizes: tuple[int, ...] = (256,)
    rounds: int = 30
    memory: bool = False
    batch: int = 1024
    budget: float = 60.0  # seconds that the rounds of one case may take, of all rivals together

    def cases(self) -> list[SoftmaxCase]:
        sizes = itertools.product(self.classes, self.hidden_sizes)
        return [SoftmaxCase(classes, hidden_size, self.batch) for classes, hidden_size in sizes]

    memory_cases = cases


QUICK = SoftmaxSelection()
# The words of WikiText-2 and of WikiText-103.
FULL = SoftmaxSelection(classes=(1000, 33_278, 267_735), hidden_sizes=(256, 1024), memory=True)


def count_kept_bytes(case: SoftmaxCase, rival: str) -> int:
    """Return what all rivals of a case hold together, the same whichever is asked for.

    The weights of each, the gradient of one in the making and made, and a plain loss's logits: as they are, as log
    probabilities and as their gradient.
    """
    weights = (len(RIVALS) + 2) * case.classes * case.hidden_size
    return 4 * (weights + 3 * case.batch * case.classes)


def draw_labels(case: SoftmaxCase) -> Tensor:
    """Return the labels of all batches, [BATCHES,batch]: the class of rank r in proportion to 1 / r."""
    generator = torch.Generator().manual_seed(case.classes)
    return draw_words(BATCHES * case.batch, case.classes, generator).view(BATCHES, case.batch)


class SoftmaxProblem:
    """Activations, labels whose frequencies are Zipf's, and the weights that every rival begins with."""

    def __init__(self, case: SoftmaxCase) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.classes * case.hidden_size)
        shape = BATCHES, case.batch, case.hidden_size
        self.activations = SCALE * torch.randn(shape, generator=generator)
        self.labels = draw_labels(case)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.weight = HebbianSoftmax(case.hidden_size, case.classes).weight.detach()

    def head(self, limit: int = NEVER) -> HebbianSoftmax:
        """Return a head of ours with weights of its own; where a limit is given, every class has been seen once."""
        head = HebbianSoftmax(self.case.hidden_size, self.case.classes, limit=limit, device="meta")
        head.weight = nn.Parameter(self.weight.clone())
        head.counts = torch.full((self.case.classes,), int(limit != NEVER))
        return head


class TrainingStep:
    """Steps of one rival, batch after batch: the loss, the gradients of activations and weights, and plain SGD."""

    def __init__(self, problem: SoftmaxProblem, rival: str) -> None:
        case = problem.case
        self.module: HebbianSoftmax | nn.Linear
        if rival == PLAIN:
            self.module = nn.Linear(case.hidden_size, case.classes, bias=False, device="meta")
            self.module.weight = nn.Parameter(problem.weight.clone())
        else:
            self.module = problem.head(limit=1 if rival == PAST_LIMIT else NEVER)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        if isinstance(self.module, HebbianSoftmax):
            self.module.attach(self.optimizer)
        self.batches = itertools.cycle(zip(problem.activations, problem.labels, strict=True))

    def __call__(self) -> None:
        h, target = next(self.batches)
        h = h.detach().requires_grad_()
        if isinstance(self.module, HebbianSoftmax):
            loss = self.module.loss(h, target)
        else:
            loss = F.cross_entropy(self.module(h), target)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()  # here rather than before the loss: who waits for its turn holds no gradient


def rivals(case: SoftmaxCase, selection: SoftmaxSelection) -> tuple[Calls, dict[str, str]]:
    """Return a training step of every rival, or why there is none."""
    if reason := explain_lack_of_memory(count_kept_bytes(case, OURS)):
        return {}, dict.fromkeys(RIVALS, reason)
    problem = SoftmaxProblem(case)
    return {rival: TrainingStep(problem, rival) for rival in RIVALS}, {}


def prepare_pass(case: SoftmaxCase, rival: str) -> TrainingStep:
    """Return a training step, after tiny ones have warmed the libraries."""
    step = TrainingStep(SoftmaxProblem(case), rival)
    for bound in (0, softmax_loss.LARGEST_LOGITS):  # a loss of many logits loads more of torch
        softmax_loss.LARGEST_LOGITS = bound
        TrainingStep(SoftmaxProblem(replace(case, classes=2, batch=2)), rival)()
    return step


def require_parity(case: SoftmaxCase) -> None:
    """Raise FastWeightsError where loss and gradients are not a plain softmax's, or the smoothing not algorithm 1.

    The error against float64 is at most 1e-5, or three times that of the plain loss in float32; smoothed weights are
    compared with a loop over the classes, some of which are new and some past the limit. A case that does not fit into
    this machine is not timed either.
    """
    if not explain_lack_of_memory(count_kept_bytes(case, OURS)):
        problem = SoftmaxProblem(case)
        _require_gradients(problem)
        _require_smoothing(problem)


def _require_gradients(problem: SoftmaxProblem) -> None:
    h, target = problem.activations[0], problem.labels[0]
    exact = _compute_exactly(problem.weight.double(), h.double(), target)
    head = problem.head()
    errors = _measure_errors(_differentiate(head, head.loss, h, target), exact)
    eager = dict.fromkeys(errors, 0.0)
    if any(not error <= allowed_error(0) for error in errors.values()):
        plain = _differentiate(head, lambda h, target: F.cross_entropy(head(h), target), h, target)
        eager = _measure_errors(plain, exact)
    for name, error in errors.items():
        if not error <= allowed_error(eager[name]):  # a NaN is red
            raise parity_error(
                f"{name} at {problem.case} differs from that of float64 by {error:.1e}, the plain loss's in float32 by "
                f"{eager[name]:.1e}"
            )


def _differentiate(
    head: HebbianSoftmax, loss: Callable[[Tensor, Tensor], Tensor], h: Tensor, target: Tensor
) -> Tensors:
    h = h.clone().requires_grad_()
    value = loss(h, target)
    h_grad, weight_grad = torch.autograd.grad(value, [h, head.weight])
    return _name(value.detach(), h_grad, weight_grad)


def _name(loss: Tensor, h_grad: Tensor, weight_grad: Tensor) -> Tensors:
    return {"the loss": loss, "the gradient of h": h_grad, "the gradient of the weight": weight_grad}


def _compute_exactly(weight: Tensor, h: Tensor, target: Tensor) -> Tensors:
    """Compute the loss and its gradients by hand, a few activations at once: all logits in float64 may not fit."""
    loss, h_grad, weight_grad = torch.zeros((), dtype=h.dtype), torch.empty_like(h), torch.zeros_like(weight)
    for rows in torch.split(torch.arange(len(h)), _ROWS):
        logits = h[rows] @ weight.T
        right = torch.arange(len(rows)), target[rows]
        total = logits.logsumexp(1, keepdim=True)
        loss += (total.squeeze(1) - logits[right]).sum() / len(h)
        pull = logits.sub_(total).exp_()
        pull[right] -= 1
        pull /= len(h)
        h_grad[rows] = pull @ weight
        weight_grad.addmm_(pull.T, h[rows])
    return _name(loss, h_grad, weight_grad)


def _measure_errors(tensors: Tensors, exact: Tensors) -> dict[str, float]:
    return {name: distance(tensors[name], true) for name, true in exact.items()}


def _require_smoothing(problem: SoftmaxProblem) -> None:
    head = problem.head(PARITY_LIMIT)
    head.counts.copy_(torch.arange(len(head.counts)) % (PARITY_LIMIT + 2))
    h, target = problem.activations[0], problem.labels[0]
    weight, counts = problem.weight.clone(), head.counts.clone()
    expected = _smooth_in_a_loop(weight, counts, h, target, head.gamma, PARITY_LIMIT)
    head.loss(h, target)
    head.memorize()
    rows = torch.tensor(list(expected))
    error = distance(head.weight.detach()[rows], torch.stack(list(expected.values())))
    weight[rows] = head.weight.detach()[rows]
    if not error <= allowed_error(0):
        raise parity_error(f"the smoothed weights at {problem.case} differ from algorithm 1 by {error:.1e}")
    if not torch.equal(weight, head.weight) or not torch.equal(counts, head.counts):
        raise parity_error(
            f"weights at {problem.case} of classes outside the batch changed, or a class was counted wrongly"
        )


def _smooth_in_a_loop(
    weight: Tensor, counts: Tensor, h: Tensor, target: Tensor, gamma: float, limit: int
) -> dict[int, Tensor]:
    """Return the smoothed weights of the batch's classes, one after another in float64, and bring `counts` up to date.

    Means stay within a norm of 10, as in the head.
    """
    smoothed = {}
    for index in sorted(set(target.tolist())):
        activations = h[target == index].double()
        seen = int(counts[index])
        mean = activations.sum(0) / len(activations)
        mean *= min(1.0, 10 / math.sqrt(float(mean.square().sum())))
        rate = 0.0 if seen >= limit else max(1.0 if seen == 0 else 1 / seen, gamma)
        smoothed[index] = rate * mean + (1 - rate) * weight[index].double()
        counts[index] += len(activations)
    return smoothed


def lines(case: SoftmaxCase) -> list[Line]:
    """Return the line that is printed for a case."""
    sizes = ("threads", 7, "threads"), ("V", 7, "classes"), ("d", 5, "hidden_size")
    times = ("ours", 9, show(OURS)), ("past limit", 10, show(PAST_LIMIT)), ("plain", 9, show(PLAIN))
    ratios = ("ours/plain", 10, show_ratio(OURS, PLAIN, 3)), ("past/plain", 10, show_ratio(PAST_LIMIT, PLAIN, 3))
    return [[*sizes, *times, *ratios]]


TIMES: Columns = (
    ("threads", "threads"),
    ("V", "classes"),
    ("d", "hidden_size"),
    ("fastweights", show(OURS)),
    ("`torch.nn.Linear`", show(PLAIN)),
    ("ours / plain", show_ratio(OURS, PLAIN)),
    ("past the limit", show(PAST_LIMIT)),
    ("past the limit / plain", show_ratio(PAST_LIMIT, PLAIN)),
)


def _show_added(row: Mapping[str, Any], values: Mapping[str, float], *, and_plain: bool = False) -> str:
    case = SoftmaxCase(int(row["classes"]), int(row["hidden_size"]), int(row["batch"]))
    added = case.added_bytes(int(row["present"])) / 2**20
    if and_plain:
        return number(values[PLAIN] + added if PLAIN in values else None, digits=1)
    return number(added, digits=1)


PEAKS: Columns = (
    ("V", "classes"),
    ("d", "hidden_size"),
    ("fastweights", show(OURS, digits=1)),
    ("`torch.nn.Linear`", show(PLAIN, digits=1)),
    ("counters, activations, sums", _show_added),
    ("both of these", functools.partial(_show_added, and_plain=True)),
)


def times_table(rows: list[Row]) -> str:
    """Return a table of a training step beside that of a plain softmax."""
    return _write(rows, "Milliseconds of a training step, the median", TIMES, "milliseconds")


def peaks_table(rows: list[Row]) -> str:
    """Return a table of the newest peaks of memory, and what the head may add to that of a plain softmax."""
    return _write(rows, "Peak memory of a training step in MiB", PEAKS, "mebibytes")


def _write(rows: list[Row], what: str, columns: Columns, value: str) -> str:
    rows = last_measured(rows)
    title = f"{what}, {rows[-1]['batch']} activations in float32; {place(rows[-1])}.\n"
    return f"{title}\n{table(rows, columns, value)}{left_out(rows, {'V': 'classes', 'd': 'hidden_size'})}"
