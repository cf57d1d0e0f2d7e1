"""Training of language models by truncated backpropagation through time, on pieces of one long text side by side."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import processes
from fastweights.checks import check_integers, check_sizes
from fastweights.errors import TrainingError
from fastweights.evaluation.language_scores import evaluate_language_model
from fastweights.nn import HebbianSoftmax, LSTMLanguageModel, LSTMLanguageModelState
from fastweights.runs import Progress, Record, RunFolder
from fastweights.tasks.text import cut_streams
from fastweights.training.loop import Schedule, hash_tensors, train_epochs
from fastweights.training.supervised import check_splits


@dataclass(frozen=True)
class LanguageSchedule(Schedule):
    """The length and speed of training a language model: `epochs` passes over the text in `batch_size` pieces."""

    batch_size: int = 32
    segment: int = 35  # tokens that the gradient goes back over
    validation_streams: int = 10  # pieces of the validation text side by side, for speed; the test text is one
    carry_state: bool = True  # into the next segment; otherwise each begins with zeros
    sampled: int = 0  # words that the softmax is over, beside the next ones, in all passes but the last; 0 for all
    plain_epochs: int = 0  # of these `epochs` the last ones, in which a Hebbian softmax is smoothed no more
    bfloat16: bool = False  # for products alone; weights, states and sums keep their dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(segment=self.segment, validation_streams=self.validation_streams)
        check_integers(0, sampled=self.sampled, plain_epochs=self.plain_epochs)
        if self.plain_epochs >= self.epochs:
            raise ValueError(
                f"plain_epochs must be below epochs, or nothing is smoothed, got {self.plain_epochs} of {self.epochs}: "
                "give 0 to smooth in all"
            )


def to_perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats a token.

    Raises:
        TrainingError: it is larger than any number.

    Examples:
        >>> from fastweights.training.language import to_perplexity
        >>> round(to_perplexity(4.6), 1)
        99.5
    """
    try:
        return math.exp(loss)
    except OverflowError as error:
        raise TrainingError(
            f"the loss is {loss:,.0f} nats a token, and its perplexity too large for a number: lower the learning rate"
        ) from error


class SampledSoftmax:
    """The loss of a large softmax over a sample of its classes (Bengio & Senecal 2008; Jean et al. 2015, section 3).

    The sum over all classes is estimated from the right one and a sample, drawn by the 3/4 power of the counts, each
    weighed by how unlikely it was to be drawn: nearly what the whole softmax teaches, for a part of its time.

    Args:
        counts: how often each class occurs, [V].
        size: classes to draw for a batch.

    Examples:
        >>> import torch
        >>> from fastweights.training.language import SampledSoftmax
        >>> sampled, head = SampledSoftmax(torch.arange(1, 1001), size=100), torch.nn.Linear(8, 1000)
        >>> h, targets = torch.randn(32, 8), torch.randint(1000, (32,))
        >>> loss = sampled(h, head.weight, head.bias, targets)  # h [n,d], weight [V,d], bias [V], targets [n] -> number
    """

    def __init__(self, counts: Tensor, size: int) -> None:
        share = counts.double().clamp(min=1).pow(0.75)
        self.share, self.size = share / share.sum(), size
        # The expected number of a class in a sample, which has each at most once.
        self.log_expected = torch.log(-torch.expm1(size * torch.log1p(-self.share))).float()

    def __call__(self, h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the mean loss of activations [n,d] and targets [n], in nats."""
        self.share, self.log_expected = self.share.to(weight.device), self.log_expected.to(weight.device)
        drawn = torch.multinomial(self.share, self.size, replacement=True).unique()  # type: ignore[no-untyped-call]
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        right = (h * F.embedding(targets, weight)).sum(1) + bias[targets]
        others = F.linear(h, weight[drawn]).to(bias.dtype) + (bias - self.log_expected.to(bias))[drawn]
        others = others.masked_fill(drawn == targets.unsqueeze(1), -math.inf)  # the right one counts once
        return (torch.logaddexp(right, others.logsumexp(1)) - right).mean()


def train_language_model(
    model: LSTMLanguageModel,
    splits: Mapping[str, Tensor],
    schedule: LanguageSchedule,
    folder: RunFolder,
    *,
    seed: int,
    title: str = "training",
    progress: Progress | None = None,
) -> Record:
    """Train a language model on a text with Adam; resume where a killed process was.

    The text is cut into `schedule.batch_size` pieces, which are read side by side, a segment a step; states go on from
    one segment to the next, and from the end of a pass to the next one's beginning. After every pass the model is
    scored on validation, and the best pass is tested. A resumed run gives the same bits as an unbroken one on the same
    number of threads. A Hebbian softmax is attached to the optimizer; in the last `schedule.plain_epochs` passes, which
    training that ends early does not come to, its limit is 0.

    Under `torchrun` each of n processes reads `batch_size` / n of the pieces, and all take the same steps. Each draws
    dropout and the words of a sampled softmax by itself. Without these the numbers are those of one process but for
    rounding. Another number of processes may resume a run.

    Args:
        model: left with the weights of its best pass.
        splits: "train", "validation" and "test", token streams [N] of integers.
        schedule: passes, learning rate, clipping, the length of a segment.
        folder: an open `RunFolder`; a finished run is not trained again, and one on other data is refused.
        seed: the seed of dropout. The weights of `model` are the caller's.

    Returns:
        The last record of `metrics.jsonl`: validation and test loss (nats a token) and perplexity, the best pass,
        parameters, seconds.

    Raises:
        TrainingError: the loss is not finite.
        RunError: the folder cannot be used.
        ValueError: a text is too short to be cut into pieces, or has a token that is none of the model's vocabulary; or
            the pieces cannot be divided evenly between the processes.

    Examples:
        >>> import pathlib, tempfile, torch
        >>> from fastweights.nn import LSTMLanguageModel
        >>> from fastweights.training import LanguageSchedule, RunFolder, train_language_model
        >>> text = torch.arange(2000) % 5                       # a language of five words, always in one order
        >>> splits = {"train": text, "validation": text[:200], "test": text[:200]}
        >>> schedule = LanguageSchedule(epochs=8, batch_size=8, learning_rate=0.02)
        >>> with RunFolder(pathlib.Path(tempfile.mkdtemp()) / "run", {}) as folder:
        ...     result = train_language_model(LSTMLanguageModel(5, 8, 16), splits, schedule, folder, seed=1)
        >>> round(result["test_perplexity"], 1)
        1.0
    """
    if not isinstance(schedule, LanguageSchedule):
        raise TypeError(f"schedule must be a LanguageSchedule, got {schedule!r}")
    processes.check_divisible(batch_size=schedule.batch_size)
    check_splits(splits)
    for name in ("train", "validation", "test"):
        if len(splits[name]) < 2:
            plural = "" if len(splits[name]) == 1 else "s"
            raise ValueError(
                f"{name} has {len(splits[name])} token{plural}, and needs two: one to read, one to predict"
            )
        least, most = map(int, torch.aminmax(splits[name]))
        if least < 0 or most >= model.vocabulary_size:
            raise ValueError(
                f"{name} has tokens from {least} to {most}, and the model's are 0 to {model.vocabulary_size - 1}: is "
                "the text encoded with another vocabulary?"
            )
    learner = _Reader(model, splits, schedule)
    head = model.head if isinstance(model.head, HebbianSoftmax) else None
    limit = 0 if head is None else head.limit
    try:
        return train_epochs(
            learner,
            schedule,
            folder,
            steps_per_epoch=math.ceil((len(learner.text) - 1) / schedule.segment),
            seed=seed,
            identity={"data": hash_tensors({name: (splits[name],) for name in splits})},
            shared=True,
            title=title,
            progress=progress,
        )
    finally:
        if head is not None:
            head.limit = limit


class _Reader:
    """A language model and its texts: a segment a step, the state carried to the next, in this process's streams."""

    complete = False

    def __init__(self, model: LSTMLanguageModel, splits: Mapping[str, Tensor], schedule: LanguageSchedule) -> None:
        self.model: nn.Module = model
        self.scored: nn.Module = model
        self.network, self.splits, self.schedule = model, splits, schedule
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            model.parameters(), lr=schedule.learning_rate, fused=True
        )
        if isinstance(model.head, HebbianSoftmax):
            model.head.attach(self.optimizer)
        self.text = cut_streams(splits["train"], schedule.batch_size)
        cut_streams(splits["validation"], schedule.validation_streams)  # long enough, before training begins
        self.sampled: SampledSoftmax | None = None
        if schedule.sampled:
            counts = torch.bincount(self.text.flatten().long(), minlength=model.vocabulary_size)
            self.sampled = SampledSoftmax(counts, schedule.sampled)
        self.text = processes.own_part(self.text, dim=1)
        self.state: list[Tensor] | None = None  # hidden and cell at the end of the last segment, each [layers,B,H]

    @property
    def carried(self) -> list[Tensor] | None:
        return None if self.state is None else [processes.gather(part, dim=1) for part in self.state]

    @carried.setter
    def carried(self, whole: list[Tensor] | None) -> None:
        self.state = None if whole is None else [processes.own_part(each, dim=1) for each in whole]

    def loss(self, epoch: int, index: int) -> Tensor:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.schedule.bfloat16):
            return self._read(epoch, index) / processes.count()

    def _read(self, epoch: int, index: int) -> Tensor:
        start = index * self.schedule.segment
        part = self.text[start : start + self.schedule.segment + 1].long().to(next(self.model.parameters()).device)
        state = None if self.state is None else LSTMLanguageModelState(*self.state).to(part.device)
        head = self.network.head
        hebbian = head if isinstance(head, HebbianSoftmax) else None
        if hebbian is not None and epoch >= self.schedule.epochs - self.schedule.plain_epochs:
            hebbian.limit = 0  # `train_language_model` gives it back
        if self.sampled is None or epoch == self.schedule.epochs - 1:
            loss, state = self.network.loss(part[:-1], part[1:], state)
        else:
            h, state = self.network.encode(part[:-1], state)
            targets = part[1:]
            dropped = F.dropout(h, self.network.output_dropout if hebbian is None else hebbian.dropout, training=True)
            loss = self.sampled(dropped.flatten(0, 1), head.weight, head.bias, targets.flatten())
            if hebbian is not None:
                hebbian.remember(h, targets, loss)
        if self.schedule.carry_state:
            self.state = [tensor.detach() for tensor in state]
        return loss

    @processes.in_main
    def score(self, step: int) -> tuple[Record, str]:
        loss = evaluate_language_model(
            self.network, self.splits["validation"], streams=self.schedule.validation_streams
        )
        perplexity = to_perplexity(loss)
        note = f"step {step}: validation perplexity {perplexity:.2f}"
        return {"validation_loss": loss, "validation_perplexity": perplexity}, note

    @processes.in_main
    def test(self, step: int) -> Record:
        loss = evaluate_language_model(self.network, self.splits["test"])
        return {"test_loss": loss, "test_perplexity": to_perplexity(loss)}
