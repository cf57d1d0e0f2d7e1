"""Dynamic evaluation (Krause et al. 2018): the weights themselves follow the text, and decay to where they were."""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fastweights.checks import check_not_negative, check_positive, check_sizes
from fastweights.evaluation.language_scores import check_text, count_classes, encode, head_of
from fastweights.nn.modes import evaluating
from fastweights.runs import Progress

RATES: tuple[float, ...] = tuple(10.0 ** (power / 2) for power in range(-8, -1))  # 1e-4 to 0.1, two a power of ten

_AWAY = 10.0  # times the loss of a guess among all words: only a model that its own steps have carried off has that


def evaluate_dynamically(
    model: nn.Module,
    tokens: Tensor,
    statistics: dict[str, Tensor] | None = None,
    *,
    learning_rate: float,
    decay: float = 0.0,
    segment: int = 5,
    context: int | None = None,
    bos_token_id: int | None = None,
    epsilon: float = 2e-5,
    progress: Progress | None = None,
) -> Tensor:
    """Score a text while the weights follow it: a step of gradient descent after each segment, back by a decay.

    Krause et al. 2018, "Dynamic evaluation of neural sequence models". A segment is scored, and then the weights take a
    step on the mean of its losses L, before the next one is scored. With the root mean squares s of gradients on
    training data, from `measure_gradients`, it is the form that the paper found best (RMS with a global prior)::

        theta <- theta - learning_rate grad L / (s + epsilon) + min(1, decay s / mean(s)) (theta_0 - theta)

    mean(s) being the mean over the parameters of their means. Without, it is plain gradient descent::

        theta <- theta - learning_rate grad L + decay (theta_0 - theta)

    The paper's code searches a learning rate of 3e-5 to 1e-4 and a decay of 1e-3 to 5e-3, for segments of 5 tokens and
    statistics of 100 streams; both grow with the segment. Measure the statistics on the whole training text: a word
    that is not in it has none, moves by learning_rate / epsilon times its gradient, and may carry all off. A rate that
    is right for a small vocabulary may be too large for another of ten times as many words; where the weights were
    carried off, a warning says so.

    A causal language model of transformers is read window after window of `context` tokens. What it keeps of the
    segments before, keys and values, stays as it was computed, until the window ends. A model that remembers otherwise,
    such as Mamba, reads the beginning of the window again for each segment.

    Args:
        model: a language model such as `nn.LSTMLanguageModel`, with `encode` and `head`, or a causal language model of
            transformers. The parameters that require a gradient follow the text. It is read in evaluation mode, and its
            weights are afterwards what they were, bit for bit, also after an error.
        tokens: the text, [N] integers.
        statistics: what `measure_gradients` returns for this model, or None.
        learning_rate: eta; `choose_learning_rate` tries several on another text.
        decay: lambda.
        segment: the tokens that a step is made of; the state is carried on, and no gradient goes back into another.
            Transformers take larger ones: 128 is a good beginning.
        context: for a model of transformers, the tokens that it reads at once, at most as many as it can; None for
            so many.
        bos_token_id: for a model of transformers, the token that every window begins with, if the model was trained
            with one; it is not scored.
        epsilon: where gradients were next to nothing in training, their size counts as this.
        progress: a receiver of progress, a step for each segment.

    Returns:
        log p of each token after the first, in nats, [N-1] float32.

    Raises:
        ValueError: a number out of range, not one text of at least two tokens, statistics of another model, a model of
            no kind that is named above, without a weight that requires a gradient, or with weights of less than 32
            bits, which small steps would not change.

    Examples:
        >>> import torch
        >>> from fastweights import evaluation, nn
        >>> _ = torch.manual_seed(0)
        >>> model, train, test = nn.LSTMLanguageModel(50, 8, 8), torch.randint(50, (2000,)), torch.arange(500) % 7
        >>> statistics = evaluation.measure_gradients(model, train, streams=20)
        >>> follows = evaluation.evaluate_dynamically(model, test, statistics, learning_rate=1e-3, decay=1e-3)
        >>> evaluation.perplexity(follows) < evaluation.perplexity(evaluation.score_text(model, test)["model"])
        True
    """
    check_sizes(segment=segment)
    check_not_negative(learning_rate=learning_rate, decay=decay)
    check_positive(epsilon=epsilon)
    reader = _find_reader(model, context, bos_token_id)
    tokens = check_text(tokens, reader.classes)
    parameters = _following(model)
    rates, returns = _rates(parameters, statistics, learning_rate, decay, epsilon)
    progress, count, total, away = progress or Progress(), len(tokens) - 1, 0.0, None
    scores, state = torch.empty(count), None
    start = {name: each.detach().clone() for name, each in parameters.items()}
    segments = list(reader.cut(count, segment))
    progress.start("dynamic evaluation", len(segments), 0)
    try:
        with evaluating(model):
            for number, now in enumerate(segments, 1):
                losses, state, classes = _losses(reader, tokens.unsqueeze(1), now, state)
                scores[now.part], cost = -losses.detach(), float(losses.detach().sum())
                if away is None and not cost < _AWAY * len(losses) * math.log(classes + 1):  # also of NaN
                    away = now.start
                gradients = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
                with torch.no_grad():
                    for (name, each), gradient in zip(parameters.items(), gradients, strict=True):
                        each.lerp_(start[name], returns[name])
                        if gradient is not None:
                            each.addcmul_(gradient, rates[name], value=-1)
                total += cost
                progress.update(number, total / now.stop)
    finally:
        with torch.no_grad():
            for name, each in parameters.items():
                each.copy_(start[name])
    if away is not None:
        warnings.warn(
            f"dynamic evaluation has diverged: from token {away + 1} on the text costs more than "
            f"{_AWAY:.0f} times what a guess among all words does. Take a smaller learning_rate than {learning_rate:g}"
            + ("" if statistics is None else ", a greater epsilon, or statistics of more of the training text"),
            stacklevel=2,
        )
    return scores


def choose_learning_rate(
    model: nn.Module,
    tokens: Tensor,
    rates: Sequence[float] = RATES,
    *,
    segment: int = 5,
    context: int | None = None,
    bos_token_id: int | None = None,
    progress: Progress | None = None,
) -> float:
    """Return the learning rate with which `evaluate_dynamically` scores a text best, without statistics or decay.

    Args:
        model: as of `evaluate_dynamically`.
        tokens: a text that is not the one you report, [N] integers.
        rates: the rates to try. A rate that carries the weights off is the worst.
        segment: as of `evaluate_dynamically`: give what you will use.
        context: likewise.
        bos_token_id: likewise.
        progress: a receiver of progress, a step for each rate.

    Raises:
        ValueError: there are no rates, or as of `evaluate_dynamically`.

    Examples:
        >>> import torch
        >>> from fastweights import evaluation, nn
        >>> _ = torch.manual_seed(0)
        >>> model, validation = nn.LSTMLanguageModel(50, 8, 8), torch.arange(500) % 7
        >>> evaluation.choose_learning_rate(model, validation, (0.001, 1.0, 1e6))
        1.0
    """
    if not rates:
        raise ValueError("rates is empty: give learning rates to try")
    progress, costs = progress or Progress(), {}
    progress.start("learning rates", len(rates), 0)
    for number, rate in enumerate(rates, 1):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "dynamic evaluation has diverged")
            scores = evaluate_dynamically(
                model, tokens, learning_rate=rate, segment=segment, context=context, bos_token_id=bos_token_id
            )
        cost = -float(scores.double().mean())
        costs[rate] = cost if math.isfinite(cost) else math.inf
        progress.update(number, costs[rate])
    return min(costs, key=lambda rate: costs[rate])


def measure_gradients(
    model: nn.Module,
    tokens: Tensor,
    *,
    streams: int = 100,
    segment: int = 5,
    context: int | None = None,
    bos_token_id: int | None = None,
    most: int | None = None,
) -> dict[str, Tensor]:
    """Return the root mean square of each weight's gradients over a training text, for `evaluate_dynamically`.

    The text is cut into streams side by side, and a gradient is that of the mean loss of a segment of all of them.

    Args:
        model: as of `evaluate_dynamically`; it is read in evaluation mode and left as it was.
        tokens: the training text, [N] integers.
        streams: the number of streams.
        segment: the tokens of a segment, of each stream.
        context: as of `evaluate_dynamically`.
        bos_token_id: likewise.
        most: the greatest number of segments that are read; None for the whole text.

    Returns:
        Of each parameter, by its name, a tensor of its shape.

    Raises:
        ValueError: a number out of range, a text that is shorter than two tokens a stream, or a model that
            `evaluate_dynamically` refuses.

    Examples:
        >>> import torch
        >>> from fastweights import evaluation, nn
        >>> model = nn.LSTMLanguageModel(50, 8, 8)
        >>> statistics = evaluation.measure_gradients(model, torch.randint(50, (2000,)), streams=20)
        >>> statistics["head.bias"].shape
        torch.Size([50])
    """
    reader = _find_reader(model, context, bos_token_id)
    tokens = check_text(tokens, reader.classes)
    check_sizes(streams=streams, segment=segment, **({} if most is None else {"most (None for all)": most}))
    steps = len(tokens) // streams
    if steps < 2:
        raise ValueError(f"{streams} streams need at least {2 * streams} tokens, got {len(tokens)}: give fewer streams")
    side_by_side = tokens[: steps * streams].view(streams, steps).t()
    parameters = _following(model)
    squares = {name: torch.zeros_like(each) for name, each in parameters.items()}
    state, count = None, 0
    with evaluating(model):
        for now in reader.cut(steps - 1, segment):
            if count == most:
                break
            losses, state, _ = _losses(reader, side_by_side, now, state)
            gradients = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
            for square, gradient in zip(squares.values(), gradients, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
            count += 1
    return {name: (square / count).sqrt_() for name, square in squares.items()}


class _Segment(NamedTuple):
    """A part of a text that is predicted, and then learnt from."""

    start: int
    stop: int
    window: int = 0  # where the window begins, of a model of transformers
    ends: bool = False  # the window

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)


class _Reader(Protocol):
    """A model that is read segment after segment, and how its text is cut into them."""

    classes: int | None  # words of its vocabulary, where it says

    def cut(self, count: int, segment: int) -> Iterator[_Segment]:
        """Yield the segments of a text of `count` predictions."""

    def read(self, tokens: Tensor, now: _Segment, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Return logits [T,B,V] for a segment of texts [N,B], the next tokens [T,B], and the state, without a graph."""


class _Recurrent:
    """A language model with `encode` and `head`, whose state is carried from the first token to the last."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.head = model, head_of(model)
        self.classes = count_classes(self.head)

    def cut(self, count: int, segment: int) -> Iterator[_Segment]:
        return (_Segment(first, min(first + segment, count)) for first in range(0, count, segment))

    def read(self, tokens: Tensor, now: _Segment, state: Any) -> tuple[Tensor, Tensor, Any]:
        h, targets, state = encode(self.model, tokens, now.part, state)
        return self.head(h), targets, tree_map(Tensor.detach, state)


class _Windows:
    """A causal language model of transformers. The state is a window's keys and values; without, it is read again."""

    def __init__(self, model: Any, context: int | None, bos_token_id: int | None) -> None:
        name, config = type(model).__name__, model.config.get_text_config()
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder: give a causal language model")
        longest: int | None = getattr(config, "max_position_embeddings", None)
        if context is not None:
            check_sizes(context=context)
        if bos_token_id is not None and not 0 <= bos_token_id < config.vocab_size:
            raise ValueError(f"bos_token_id must be one of {config.vocab_size:,} tokens, got {bos_token_id}")
        self.classes: int | None = config.vocab_size
        self.model, self.bos = model, [] if bos_token_id is None else [bos_token_id]
        rooms = [each for each in (context, longest) if each is not None]
        self.window = min(rooms) - len(self.bos) if rooms else None
        if self.window == 0:
            raise ValueError("context must have room for bos_token_id and another token, got 1")
        self.keeps = self._keeps_keys()

    def cut(self, count: int, segment: int) -> Iterator[_Segment]:
        window = self.window or count
        for first in range(0, count, window):
            last = min(first + window, count)
            for start in range(first, last, segment):
                stop = min(start + segment, last)
                yield _Segment(start, stop, first, stop == last)

    def read(self, tokens: Tensor, now: _Segment, state: Any) -> tuple[Tensor, Tensor, Any]:
        first = now.start if state is not None else now.window
        ids, count = tokens[first : now.stop + 1].to(self.model.device, torch.int64), now.stop - now.start
        bos = self.bos if first == now.window and ids[0].tolist() != self.bos else []
        read = torch.cat([ids.new_tensor(bos)[:, None].expand(-1, ids.shape[1]), ids[:-1]]).t()
        goes_on = self.keeps and not now.ends
        cached = {} if state is None else {"past_key_values": state}  # some models have no such argument
        found = self.model(input_ids=read, use_cache=goes_on, **cached)
        if goes_on:
            state = found.past_key_values
            for layer in state.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return found.logits[:, -count:].transpose(0, 1), ids[-count:], state if goes_on else None

    def _keeps_keys(self) -> bool:
        """Return whether the model keeps keys and values of a window, and nothing else."""
        from transformers.cache_utils import DynamicLayer

        with evaluating(self.model), torch.no_grad():
            found = self.model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.model.device), use_cache=True)
        layers = getattr(getattr(found, "past_key_values", None), "layers", [None])
        return all(isinstance(layer, DynamicLayer) for layer in layers)


def _find_reader(model: nn.Module, context: int | None, bos_token_id: int | None) -> _Reader:
    if not hasattr(model, "encode") and hasattr(model, "get_output_embeddings") and hasattr(model, "config"):
        return _Windows(model, context, bos_token_id)
    if context is not None or bos_token_id is not None:
        raise ValueError("context and bos_token_id are for a causal language model of transformers: leave them out")
    return _Recurrent(model)


def _following(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that follow a text."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not parameters:
        raise ValueError("no weight of the model requires a gradient: model.requires_grad_(True) lets all follow")
    for name, each in parameters.items():
        if each.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {each.dtype}, too coarse for small steps: give model.float()")
    return parameters


def _losses(reader: _Reader, tokens: Tensor, now: _Segment, state: Any) -> tuple[Tensor, Any, int]:
    """Return the loss of each token of a segment, tokens [N,B] -> [T B], the state, cut from the graph, and V."""
    with torch.enable_grad():
        logits, targets, state = reader.read(tokens, now, state)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses, state, logits.shape[-1]


def _rates(
    parameters: dict[str, nn.Parameter],
    statistics: dict[str, Tensor] | None,
    learning_rate: float,
    decay: float,
    epsilon: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return, of each parameter, what its gradient is multiplied by, and the share of the way back that it goes."""
    if statistics is None:
        rate, share = torch.tensor(learning_rate), torch.tensor(min(1.0, decay))
        return dict.fromkeys(parameters, rate), dict.fromkeys(parameters, share)
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    if {name: tuple(each.shape) for name, each in statistics.items()} != shapes:
        raise ValueError("the statistics must come from this model, and its parameters have other names or shapes")
    mean = torch.stack([each.mean() for each in statistics.values()]).mean()
    rates = {name: learning_rate / (each + epsilon) for name, each in statistics.items()}
    return rates, {name: (decay / mean * each).clamp_(max=1) for name, each in statistics.items()}
