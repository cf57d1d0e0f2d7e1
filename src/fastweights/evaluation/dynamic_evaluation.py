"""Dynamic evaluation (Krause et al. 2018): the weights themselves follow the text, and decay to where they were."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fastweights.checks import check_not_negative, check_positive, check_sizes
from fastweights.evaluation.language_scores import check_text, encode, head_of
from fastweights.nn.modes import evaluating
from fastweights.runs import Progress

_AWAY = 10.0  # times the loss of a guess among all words: only a model that its own steps have carried off has that


def evaluate_dynamically(
    model: nn.Module,
    tokens: Tensor,
    statistics: dict[str, Tensor] | None = None,
    *,
    learning_rate: float,
    decay: float = 0.0,
    segment: int = 5,
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

    Args:
        model: a language model such as `nn.LSTMLanguageModel`, with `encode` and `head`; it is read in evaluation mode,
            and its weights are afterwards what they were, bit for bit, also after an error.
        tokens: the text, [N] integers.
        statistics: what `measure_gradients` returns for this model, or None.
        learning_rate: eta.
        decay: lambda.
        segment: the tokens that a step is made of; the state is carried on, and no gradient goes back into another.
        epsilon: where gradients were next to nothing in training, their size counts as this.
        progress: a receiver of progress, a step for each segment.

    Returns:
        log p of each token after the first, in nats, [N-1] float32.

    Raises:
        ValueError: a number out of range, not one text of at least two tokens, or statistics of another model.

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
    check_text(tokens)
    check_sizes(segment=segment)
    check_not_negative(learning_rate=learning_rate, decay=decay)
    check_positive(epsilon=epsilon)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    rates, returns = _rates(parameters, statistics, learning_rate, decay, epsilon)
    progress, count, total, away = progress or Progress(), len(tokens) - 1, 0.0, None
    scores, state = torch.empty(count), None
    start = {name: each.detach().clone() for name, each in parameters.items()}
    progress.start("dynamic evaluation", -(-count // segment), 0)
    try:
        with evaluating(model):
            for first in range(0, count, segment):
                part = slice(first, min(first + segment, count))
                losses, state, classes = _losses(model, tokens.unsqueeze(1), part, state)
                scores[part], cost = -losses.detach(), float(losses.detach().sum())
                if away is None and not cost < _AWAY * len(losses) * math.log(classes + 1):  # also of NaN
                    away = first
                gradients = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
                with torch.no_grad():
                    for (name, each), gradient in zip(parameters.items(), gradients, strict=True):
                        each.lerp_(start[name], returns[name])
                        if gradient is not None:
                            each.addcmul_(gradient, rates[name], value=-1)
                total += cost
                progress.update(-(-part.stop // segment), total / part.stop)
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


def measure_gradients(
    model: nn.Module, tokens: Tensor, *, streams: int = 100, segment: int = 5, most: int | None = None
) -> dict[str, Tensor]:
    """Return the root mean square of each weight's gradients over a training text, for `evaluate_dynamically`.

    The text is cut into streams side by side, and a gradient is that of the mean loss of a segment of all of them.

    Args:
        model: a language model with `encode` and `head`; it is read in evaluation mode and left as it was.
        tokens: the training text, [N] integers.
        streams: the number of streams.
        segment: the tokens of a segment, of each stream.
        most: the greatest number of segments that are read; None for the whole text.

    Returns:
        Of each parameter, by its name, a tensor of its shape.

    Raises:
        ValueError: a number out of range, or a text that is shorter than two tokens a stream.

    Examples:
        >>> import torch
        >>> from fastweights import evaluation, nn
        >>> model = nn.LSTMLanguageModel(50, 8, 8)
        >>> statistics = evaluation.measure_gradients(model, torch.randint(50, (2000,)), streams=20)
        >>> statistics["head.bias"].shape
        torch.Size([50])
    """
    check_text(tokens)
    check_sizes(streams=streams, segment=segment, **({} if most is None else {"most (None for all)": most}))
    steps = len(tokens) // streams
    if steps < 2:
        raise ValueError(f"{streams} streams need at least {2 * streams} tokens, got {len(tokens)}: give fewer streams")
    side_by_side = tokens[: steps * streams].view(streams, steps).t()
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    squares = {name: torch.zeros_like(each) for name, each in parameters.items()}
    state, count = None, 0
    with evaluating(model):
        for first in range(0, steps - 1, segment):
            if count == most:
                break
            losses, state, _ = _losses(model, side_by_side, slice(first, min(first + segment, steps - 1)), state)
            gradients = torch.autograd.grad(losses.mean(), list(parameters.values()), allow_unused=True)
            for square, gradient in zip(squares.values(), gradients, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
            count += 1
    return {name: (square / count).sqrt_() for name, square in squares.items()}


def _losses(model: nn.Module, tokens: Tensor, part: slice, state: Any) -> tuple[Tensor, Any, int]:
    """Return the loss of each token of a segment, tokens [N,B] -> [T B], the state, cut from the graph, and V."""
    with torch.enable_grad():
        h, targets, state = encode(model, tokens, part, state)
        logits = head_of(model)(h.flatten(0, 1)).float()
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    return losses, tree_map(Tensor.detach, state), logits.shape[1]


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
