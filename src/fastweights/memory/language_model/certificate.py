"""The certificate of an adaptive language model: what must be true of its scores, checked on a user's own text."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.memory.language_model.adaptive_language_model import AdaptiveLanguageModel
from fastweights.memory.store.checks import check_texts
from fastweights.nn.modes import evaluating
from fastweights.timing import medians

LEAST = 8  # tokens of a text
_MOST_SUM = 1e-5  # how far from one the probabilities of a position may add up to
_MOST_APART = 1e-4  # in probability: a score may be computed in another order than the whole distribution
_CUTS = (4, 2)  # the future is changed after a fourth and after a half of the text
_ROUNDS, _BUDGET = 3, 60.0  # rounds of timing, and seconds for all of them


class Check(NamedTuple):
    """One thing that must be true.

    Attributes:
        name: the thing, in words.
        passed: whether it is.
        detail: what was found.
    """

    name: str
    passed: bool
    detail: str


class Certificate(NamedTuple):
    """The report of `certify`.

    Attributes:
        checks: what was checked.
        tokens: how many tokens of text that was done on.
        plain_milliseconds: the time of a token that the model scores alone.
        adapted_milliseconds: the same with the memories.
        memory_bytes: what the memories hold.
    """

    checks: tuple[Check, ...]
    tokens: int
    plain_milliseconds: float
    adapted_milliseconds: float
    memory_bytes: int

    @property
    def passed(self) -> bool:
        """True if every check has passed."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}" for check in self.checks]
        adapted, plain, held = self.adapted_milliseconds, self.plain_milliseconds, self.memory_bytes / 2**20
        cost = f"     cost: {adapted:.2f} ms a token, {plain:.2f} without the memories; they hold {held:.1f} MiB"
        return "\n".join([*lines, cost])


@torch.no_grad()
def certify(lm: AdaptiveLanguageModel, input_ids: Tensor) -> Certificate:
    """Check that an adaptive language model is honest on a text, and measure what adapting costs.

    It is a probability model (all probabilities of a position add up to one), its scores are those of that model, no
    score depends on what comes later or on the very token that is asked for, the memory is as it was, and the model
    itself answers bit for bit as it did, while it is adapted and after `detach`. Scores that break one of these cannot
    be compared with others'.

    Args:
        lm: the model, with weights; afterwards it is as it was.
        input_ids: texts [B,T] of some dozen to some hundred tokens.

    Returns:
        `Certificate`; as a string it is a report of some lines.

    Raises:
        ValueError: texts shorter than eight tokens, or as `score`: of a model that is detached, too.

    Examples:
        >>> import torch, transformers
        >>> from fastweights import memory
        >>> config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> lm = memory.AdaptiveLanguageModel(model, cache=memory.NeuralCache(1000, 50), weights=[0.9, 0.1])
        >>> certificate = memory.certify(lm, torch.randint(50, (1, 30)))
        >>> certificate.passed, len(certificate.checks)
        (True, 6)
        >>> print(certificate)  # doctest: +SKIP
    """
    rows = check_texts(input_ids, None, lm.num_classes, lm.store.device)
    ids = torch.stack([row for row, _ in rows])
    if ids.shape[1] < LEAST:
        raise ValueError(f"certify takes texts [B,T] of at least {LEAST} tokens, got {list(ids.shape)}")
    numbers, keys, values = lm.store.numbers, lm.store.keys, lm.store.values
    weights = lm.fingerprint()
    plain = _logits(lm, ids)
    distribution, scores = lm.distribution(ids), lm.score(ids, remember=False)
    checks = [
        _check_sums(distribution),
        _check_scores(distribution, scores, ids),
        _check_future(lm, ids, scores),
        _check_own_token(lm, ids),
        Check(
            "the memory is as it was",
            all(map(torch.equal, (lm.store.numbers, lm.store.keys, lm.store.values), (numbers, keys, values))),
            f"{len(numbers):,} entries before and {len(lm.store):,} after scoring without remembering",
        ),
        _check_model(lm, ids, plain, weights),
    ]
    times = medians(
        {
            "plain": lambda: [lm.score_plain(row[None]) for row in ids],
            "adapted": lambda: lm.score(ids, remember=False),
        },
        _ROUNDS,
        _BUDGET,
    )
    tokens = ids.numel() - len(ids)
    a_token = {name: timing.milliseconds / tokens for name, timing in times.items()}
    return Certificate(tuple(checks), ids.numel(), a_token["plain"], a_token["adapted"], lm.memory_bytes)


def _logits(lm: AdaptiveLanguageModel, ids: Tensor) -> Tensor:
    """Return the logits of the model itself, called directly, of as much as it can read at once."""
    with evaluating(lm.model):
        logits: Tensor = lm.model(input_ids=ids[:, : lm.longest]).logits
    return logits


def _check_sums(distribution: Tensor) -> Check:
    worst = float((distribution.double().exp().sum(-1) - 1).abs().max())
    name = "the probabilities of all tokens add up to one"
    return Check(name, worst <= _MOST_SUM, f"to {worst:.1e} at {distribution.shape[:2].numel():,} positions")


def _check_scores(distribution: Tensor, scores: Tensor, ids: Tensor) -> Check:
    worst = float((distribution.gather(2, ids[:, 1:, None])[..., 0].exp() - scores.exp()).abs().max())
    name = "the scores are those of that distribution"
    return Check(name, worst <= _MOST_APART, f"to {worst:.1e} in probability")


def _check_future(lm: AdaptiveLanguageModel, ids: Tensor, scores: Tensor) -> Check:
    """Change all that comes after a token: scores up to it are the same bits."""
    changed, compared = 0, 0
    for cut in (ids.shape[1] // each for each in _CUTS):
        other = ids.clone()
        other[:, cut:] = _others(lm, ids[:, cut:])
        early = lm.score(other, remember=False)[:, : cut - 1]
        changed += int((early != scores[:, : cut - 1]).sum())
        compared += early.numel()
    name = "another future changes no earlier score, bit for bit"
    return Check(name, not changed, f"{changed} of {compared:,} scores changed")


def _check_own_token(lm: AdaptiveLanguageModel, ids: Tensor) -> Check:
    """Change a token itself: what was predicted for it is the same bits, and each is scored by that."""
    prefix = ids[:, : ids.shape[1] // 2]
    other = torch.cat([prefix[:, :-1], _others(lm, prefix[:, -1:])], 1)
    expected = lm.distribution(prefix)[:, -1]
    changed = int((lm.distribution(other)[:, -1] != expected).any(1).sum())
    apart = 0.0
    for text in (prefix, other):
        own = lm.score(text, remember=False)[:, -1].exp()
        apart = max(apart, float((expected.gather(1, text[:, -1:])[:, 0].exp() - own).abs().max()))
    name = "a token that is stored has not scored itself"
    detail = f"{changed} of {len(ids)} predictions depend on the token asked for; scores of both to {apart:.1e}"
    return Check(name, not changed and apart <= _MOST_APART, detail)


def _check_model(lm: AdaptiveLanguageModel, ids: Tensor, plain: Tensor, weights: str) -> Check:
    while_adapted = torch.equal(_logits(lm, ids), plain)
    lm.detach()
    try:
        detached = torch.equal(_logits(lm, ids), plain)
    finally:
        lm.attach()  # one that was detached has been refused
    same = lm.fingerprint() == weights
    found = {"while it is adapted": while_adapted, "after detach": detached, "in its weights": same}
    wrong = [name for name, right in found.items() if not right]
    return Check("the model itself is as it was, bit for bit", not wrong, f"it differs {', '.join(wrong) or 'nowhere'}")


def _others(lm: AdaptiveLanguageModel, ids: Tensor) -> Tensor:
    """Return other tokens than these, none of which is beyond the vocabulary."""
    return (ids + 1 + torch.arange(ids.shape[1], device=ids.device) % 3) % lm.num_classes
