"""The scores of a language model and of its memories on a text, from one pass over it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_sizes
from fastweights.memory import Predictor, StreamMbPA
from fastweights.memory.store.checks import as_token_ids, check_token_ids
from fastweights.nn.modes import evaluating
from fastweights.runs import Progress
from fastweights.tasks.text import cut_streams

_LOGITS = 2**23  # logits computed at once: few enough to stay in the processor's cache
_STEPS = 128  # steps at once, of pieces side by side


StreamMemory = Predictor  # the name of before


def score_text(
    model: nn.Module,
    tokens: Tensor,
    memories: Mapping[str, Predictor] | None = None,
    *,
    by_state: Collection[str] = (),
    segment: int = 2048,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Score every token of a text after its first one by the model alone, and by each memory alone, in one pass.

    The text is one stream: the model's state is carried on from its beginning to its end. Memories go on from what they
    remember; `clear` them where a text has nothing to do with the one before. What is held does not grow with the
    text, but for the scores themselves and what an unbounded memory remembers. What the model's softmax predicts is
    computed once, also where a `StreamMbPA` adapts it.

    Any number of memories may be given, so a search over the settings of a cache costs one pass on validation. The
    mixture of the model and the memories is fitted from the same pass, as in the example.

    Args:
        model: a language model such as `nn.LSTMLanguageModel`: `encode(tokens [T,1], state)` gives the input of the
            softmax [T,1,d], which is what memories remember, and the next state; `head` is the softmax. It is read in
            evaluation mode and is left as it was.
        tokens: the text, [N] integers.
        memories: predictors by name.
        by_state: the names of those that are given the hidden states of the last layer in place of the input of the
            softmax, as in Grave et al. 2016; not for `StreamMbPA`, which adapts the softmax. The model must have `read`
            and `project`, as `nn.LSTMLanguageModel` has.
        segment: the tokens that are read at once; they change the time that it takes and nothing else.
        progress: a receiver of progress, a step for each segment.

    Returns:
        log p of each token after the first, in nats, [N-1] float32: "model", and each memory by its name.

    Raises:
        ValueError: not one text of at least two tokens of the model, a memory of another vocabulary or called "model",
            or `by_state` has the name of no memory that can be given states, or the model has none.

    Examples:
        >>> import torch
        >>> from fastweights import evaluation, memory, nn
        >>> model, validation, test = nn.LSTMLanguageModel(50, 8, 8), torch.arange(600) % 7, torch.arange(500) % 7
        >>> thetas = (0.1, 1.0, 10.0)
        >>> memories = {f"cache {theta}": memory.NeuralCache(100, 50, theta) for theta in thetas}
        >>> memories["MbPA"] = memory.StreamMbPA(model.head, 100, neighbours=16)
        >>> scores = evaluation.score_text(model, validation, memories)   # one pass for all three values of theta
        >>> best = max((name for name in scores if "cache" in name), key=lambda name: scores[name].mean())
        >>> chosen = ["model", best, "MbPA"]
        >>> weights = memory.fit_weights([scores[name] for name in chosen])  # the mixture, from the same pass
        >>> for each in memories.values():
        ...     each.clear()
        >>> scores = evaluation.score_text(model, test, {name: memories[name] for name in chosen[1:]})
        >>> mixed = memory.mix([scores[name] for name in chosen], weights)
        >>> evaluation.perplexity(mixed) < evaluation.perplexity(scores["model"])
        True
    """
    check_sizes(segment=segment)
    memories, progress = dict(memories or {}), progress or Progress()
    head, state = head_of(model), None
    tokens = check_text(tokens, count_classes(head))
    _check_memories(memories, count_classes(head))
    _check_by_state(model, memories, by_state)
    count = len(tokens) - 1
    scores = {name: torch.empty(count) for name in ("model", *memories)}
    progress.start("scoring", -(-count // segment), 0)
    with evaluating(model), torch.no_grad():
        for start in range(0, count, segment):
            part = slice(start, min(start + segment, count))
            window = _take_window(model, tokens.unsqueeze(1), part)
            if by_state:
                states, state = model.read(window[:-1], state)  # type: ignore[operator]
                h = model.project(states)  # type: ignore[operator]
            else:
                h, state = model.encode(window[:-1], state)  # type: ignore[operator]
                states = h
            h, states, targets, plain = h.squeeze(1), states.squeeze(1), window[1:].squeeze(1), None
            for name, memory in memories.items():
                if isinstance(memory, StreamMbPA) and memory.output is head:
                    plain, scores[name][part] = memory.score(h, targets)
                else:
                    scores[name][part] = memory.log_prob(states if name in by_state else h, targets)
            scores["model"][part] = _score_softmax(head, h, targets) if plain is None else plain
            progress.update(-(-part.stop // segment), -float(scores["model"][: part.stop].mean()))
    return scores


def evaluate_language_model(model: nn.Module, tokens: Tensor, *, streams: int = 1) -> float:
    """Return the cross entropy of each token of a text but the first, in nats; its exponential is the perplexity.

    Args:
        model: as `score_text` takes it; its state is carried from the first token to the last.
        tokens: the text, [N] integers.
        streams: pieces of the text that are read side by side, each from zeros: faster, and a little worse.

    Raises:
        ValueError: not one text of at least two tokens of the model, or of fewer than two for each stream.
    """
    head, state, total = head_of(model), None, 0.0
    side_by_side = cut_streams(check_text(tokens, count_classes(head)), streams)
    steps = len(side_by_side) - 1
    with evaluating(model), torch.no_grad():
        for start in range(0, steps, _STEPS):
            h, targets, state = encode(model, side_by_side, slice(start, min(start + _STEPS, steps)), state)
            total -= float(_score_softmax(head, h.flatten(0, 1), targets.flatten()).double().sum())
    return total / (steps * streams)


def check_text(tokens: Any, classes: int | None) -> Tensor:
    """Return one text [N] of at least two tokens, 0 to V - 1; None: of any vocabulary."""
    ids = as_token_ids(tokens)
    if ids.dim() != 1 or len(ids) < 2:
        raise ValueError(f"tokens must be one text [N] of two integers or more, got {list(ids.shape)} {ids.dtype}")
    return ids if classes is None else check_token_ids(ids, classes)


def count_classes(head: nn.Module) -> int | None:
    """Return how many words a softmax predicts, None where it does not say."""
    weight = getattr(head, "weight", None)
    return len(weight) if isinstance(weight, Tensor) else None


def _check_memories(memories: Mapping[str, Predictor], classes: int | None) -> None:
    """Refuse memories of another vocabulary than the model's."""
    if "model" in memories:
        raise ValueError('"model" names the scores of the model itself: give the memory another name')
    for name, memory in memories.items():
        own = getattr(memory, "num_classes", classes)
        if own != classes:
            raise ValueError(
                f"the memory {name!r} has {own} classes, and the model predicts {classes} words: make it with "
                f"num_classes={classes}, or around this model's softmax"
            )


def _check_by_state(model: nn.Module, memories: Mapping[str, Predictor], by_state: Collection[str]) -> None:
    """Refuse names of memories that cannot be given the states of the model's last layer."""
    for name in by_state:
        if name not in memories:
            raise ValueError(
                f"by_state names {name!r}, which is none of the memories {', '.join(memories) or '(none)'}"
            )
        if isinstance(memories[name], StreamMbPA):
            raise ValueError(f"by_state names {name!r}, a StreamMbPA: it adapts the softmax, and takes its input")
    if by_state and not (hasattr(model, "read") and hasattr(model, "project")):
        raise ValueError(
            f"by_state needs a model with `read` and `project`, like nn.LSTMLanguageModel; got {type(model).__name__}"
        )


def encode(model: nn.Module, tokens: Tensor, part: slice, state: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the input of the softmax at a part of texts [N,B], [T,B,d], the next tokens [T,B], and the state."""
    window = _take_window(model, tokens, part)
    h, state = model.encode(window[:-1], state)  # type: ignore[operator]
    return h, window[1:], state


def _take_window(model: nn.Module, tokens: Tensor, part: slice) -> Tensor:
    """Return the tokens [n+1,B] of a part and the one after it, where the model is."""
    return tokens[part.start : part.stop + 1].to(next(model.parameters()).device, torch.int64)


def head_of(model: nn.Module) -> nn.Module:
    """Return the softmax of a language model."""
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module) or not hasattr(model, "encode"):
        raise ValueError(
            f"a language model must have `encode` and `head`, like nn.LSTMLanguageModel; got {type(model).__name__}"
        )
    return head


def _score_softmax(head: nn.Module, h: Tensor, targets: Tensor) -> Tensor:
    size = max(1, _LOGITS // len(head.weight))  # type: ignore[arg-type]
    parts = zip(torch.split(h, size), torch.split(targets, size), strict=True)
    return torch.cat([-F.cross_entropy(head(some).float(), words, reduction="none") for some, words in parts])


def perplexity(log_prob: Tensor) -> float:
    """Return the perplexity of scored tokens: exp of minus the mean of log p [N], in nats.

    Examples:
        >>> import torch
        >>> from fastweights.evaluation import perplexity
        >>> round(perplexity(torch.tensor([0.5, 0.125]).log()), 6)
        4.0
    """
    if log_prob.dim() != 1 or not len(log_prob):
        raise ValueError(f"perplexity takes log p of at least one token, [N], got {list(log_prob.shape)}")
    return float((-log_prob.double().mean()).exp())


class FrequencyBucket(NamedTuple):
    """The tokens of a text whose words are about equally frequent in training.

    Attributes:
        least: the least number of occurrences in training.
        most: the greatest one, or None where there is no limit.
        tokens: how many tokens of the text are such.
        perplexity: theirs; NaN where there are none.
    """

    least: int
    most: int | None
    tokens: int
    perplexity: float

    @property
    def name(self) -> str:
        """The bucket in words."""
        if self.most is None:
            return f"{self.least:,} and more"
        if self.most == 0:
            return "never seen"
        return f"{self.least:,} to {self.most:,}"


def by_frequency(
    log_prob: Tensor, targets: Tensor, counts: Tensor, edges: Sequence[int] | int = (100, 1_000, 10_000)
) -> tuple[FrequencyBucket, ...]:
    """Return the perplexity of tokens by how often their words occur in training, the rarest words first.

    Args:
        log_prob: log p of each token, in nats, [N], as `score_text` gives it.
        targets: these tokens, [N] integers: the text without its first one.
        counts: how often each word of the vocabulary occurs in training, [V] integers.
        edges: where a bucket ends and the next one begins, ascending: with 100, 1,000 and 10,000 the buckets are those
            of table 2 of Rae et al. 2018. Or a number of buckets that are about equal in tokens, as in figure 8 of
            Sprechmann et al. 2018: words of one frequency stay together.

    Returns:
        The buckets; words that never occur in training have their own one, if the text has any.

    Raises:
        ValueError: other shapes, a token that has no count, or edges that do not ascend.

    Examples:
        >>> import torch
        >>> from fastweights.evaluation import by_frequency
        >>> counts = torch.tensor([0, 5, 2_000])       # of three words
        >>> targets, p = torch.tensor([2, 1, 2, 0]), torch.tensor([0.5, 0.1, 0.5, 0.01])
        >>> for bucket in by_frequency(p.log(), targets, counts, edges=(100,)):
        ...     print(f"{bucket.name}: perplexity {bucket.perplexity:.0f} of {bucket.tokens} tokens")
        never seen: perplexity 100 of 1 tokens
        1 to 99: perplexity 10 of 1 tokens
        100 and more: perplexity 2 of 2 tokens
    """
    if log_prob.dim() != 1 or log_prob.shape != targets.shape or counts.dim() != 1:
        raise ValueError(
            f"by_frequency needs log p [N], targets [N] and counts [V], got {list(log_prob.shape)}, "
            f"{list(targets.shape)} and {list(counts.shape)}"
        )
    targets = targets.long()
    if len(targets) and (int(targets.min()) < 0 or int(targets.max()) >= len(counts)):
        raise ValueError(f"targets must be 0 to {len(counts) - 1}, got {int(targets.min())} to {int(targets.max())}")
    often = counts.to(targets.device)[targets]
    if isinstance(edges, int):
        check_sizes(edges=edges)
        ordered = often[often > 0].sort().values
        limits = {int(ordered[len(ordered) * number // edges]) for number in range(1, edges)} if len(ordered) else set()
        edges = sorted(limits - {int(ordered[0])}) if limits else []
    if list(edges) != sorted(set(edges)) or (len(edges) and edges[0] < 2):
        raise ValueError(f"edges must be ascending integers of at least 2, got {edges}")
    lower, upper = [0, 1, *edges], [0, *(edge - 1 for edge in edges), None]
    buckets = []
    for least, most in zip(lower, upper, strict=True):
        inside = (often >= least) & (often <= (often if most is None else most))
        of_bucket = log_prob[inside]
        if len(of_bucket) or most != 0:
            buckets.append(
                FrequencyBucket(least, most, len(of_bucket), perplexity(of_bucket) if len(of_bucket) else float("nan"))
            )
    return tuple(buckets)
