"""The predictors of an adaptive language model, kept in step with the memory that they read, and their settings."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.checks import check_positive
from fastweights.memory.language_model._causal_model import CausalModel, log_prob, log_softmax
from fastweights.memory.predictors.caches import NeuralCache, UnboundedCache, log_share
from fastweights.memory.predictors.fit import choose_setting
from fastweights.memory.predictors.mixtures import fit_weights
from fastweights.memory.predictors.ngram_cache import NGramCache
from fastweights.memory.predictors.past import Past, Recalled, count_ages
from fastweights.memory.predictors.stream_mbpa import StreamMbPA
from fastweights.memory.store.episodic import EpisodicMemory

# The memories of a model that is given no others.
_CACHE, _LAST, _STORED, _NEIGHBOURS = 2000, 4096, 100_000, 64
_PREDICTIONS = 2**28  # numbers that MbPA keeps at most, of 16 bits
_QUERIES = 256  # positions that are scored at once
# Candidates, divided by the mean squared length of a hidden state: for theta, and for 1 / bandwidth^2.
_SHARPNESS = tuple(2.0**power for power in range(9))
_RATES = tuple(10.0 ** (power / 2) for power in range(-2, 7))  # candidates for MbPA's learning rate, divided so too

_GROWTHS = tuple(2.0**power for power in range(1, 6))  # candidates of the n-gram cache
_PRIORS = tuple(4.0**power for power in range(-1, 8))

Setting = float | tuple[float, float] | None  # of the n-gram cache growth and prior
Candidate = tuple[str, Setting]  # a predictor's name, and the value of its setting


class Predictors:
    """Up to four predictors, and the memory of hidden states and next tokens that they read.

    The nearest neighbours and the n-grams are searched in the memory itself. The cache and MbPA have copies of its end:
    `follow` brings them into step with a memory that was changed, undone or read again.

    Args:
        network: the model.
        cache: as of `AdaptiveLanguageModel`, like the others.
        mbpa: of one step.
        knn: its memory is the memory.
        ngram: the same.
        store: the memory, if there is neither.

    Raises:
        ValueError: memories of other sizes than the model's.
    """

    def __init__(
        self,
        network: CausalModel,
        cache: NeuralCache | None,
        mbpa: StreamMbPA | None,
        knn: UnboundedCache | None,
        ngram: NGramCache | None,
        store: EpisodicMemory | None,
    ) -> None:
        self._network = network
        if cache is None and mbpa is None and knn is None and ngram is None:
            cache, mbpa, knn, ngram = self._make_all(store)
        self.cache, self.mbpa, self.knn, self.ngram = cache, mbpa, knn, ngram
        self.store = self._check(store)
        self.forget()

    def _make_all(
        self, store: EpisodicMemory | None
    ) -> tuple[NeuralCache, StreamMbPA | None, UnboundedCache, NGramCache]:
        network, mbpa = self._network, None
        if isinstance(network.head, nn.Linear):
            last = max(1, min(_LAST, _PREDICTIONS // network.classes))
            mbpa = StreamMbPA(network.head, last, neighbours=_NEIGHBOURS, half=True)
        if store is None:
            store = EpisodicMemory(_STORED, network.key_size, device=network.device)
        near = UnboundedCache(store, network.classes, neighbours=_NEIGHBOURS)
        return NeuralCache(_CACHE, network.classes), mbpa, near, NGramCache(store, network.classes)

    def _check(self, store: EpisodicMemory | None) -> EpisodicMemory:
        """Return the memory, after comparing the sizes of all with the model's."""
        classes, key_size = self._network.classes, self._network.key_size
        for name, given in (("cache", self.cache), ("knn", self.knn), ("ngram", self.ngram)):
            if given is not None and given.num_classes != classes:
                raise ValueError(
                    f"{name} has {given.num_classes} classes, and the model predicts {classes} tokens: make it with "
                    f"num_classes={classes}"
                )
        if self.mbpa is not None:
            if self.mbpa.output is not self._network.head:
                raise ValueError("mbpa must be a StreamMbPA around model.get_output_embeddings()")
            if self.mbpa.descent.steps != 1:
                raise ValueError(f"mbpa must take one step, got steps={self.mbpa.descent.steps}")
        for name, reader in (("knn", self.knn), ("ngram", self.ngram)):
            if reader is not None:
                if store not in (None, reader.store):
                    raise ValueError(f"store must be the memory of {name}, or be left out; all read one memory")
                store = reader.store
        if store is None:
            most = self._most_copied()
            if most is None:
                raise ValueError("a cache without a limit needs a memory of its own: give store=EpisodicMemory(...)")
            store = EpisodicMemory(most, key_size, device=self._network.device)
        if store.key_size != key_size or store.value_shape != () or store.value_dtype.is_floating_point:
            raise ValueError(f"the memory must have keys of width {key_size} and integers as values, got {store}")
        if store.device != self._network.device:
            raise ValueError(
                f"the memory is on {store.device}, the model on {self._network.device}: they must be on one"
            )
        return store

    def leave_out_ngrams(self, weights: int) -> None:
        """Do without n-grams where so many weights are one too few: until there were any, all were three."""
        if weights == len(self.names):
            self.ngram = None

    @property
    def names(self) -> list[str]:
        """Those of the predictors that there are, in the order of their weights."""
        given = {"cache": self.cache, "mbpa": self.mbpa, "knn": self.knn, "ngram": self.ngram}
        return [name for name, each in given.items() if each is not None]

    @property
    def nbytes(self) -> int:
        """The bytes that are held, the room for more included."""
        return self.store.nbytes + sum(each.nbytes for each in (self.cache, self.mbpa) if each is not None)

    def predict(self, h: Tensor, logits: Tensor, past: Past) -> list[Tensor]:
        """Return log p of all tokens, [Q,V] each, of the model and of each predictor.

        Args:
            h: hidden states, [Q,d].
            logits: the model's there, [Q,V].
            past: what each sees beside the memory, with the model's predictions if there is MbPA.
        """
        classes = self._network.classes
        found = [log_softmax(logits)]
        if self.cache is not None:
            found.append(self.cache.recall(h, past).spread(classes))
        if self.mbpa is not None:
            found.append(log_softmax(self.mbpa.recall(h, logits, past)))
        if self.knn is not None:
            found.append(self.knn.recall(h, past).spread(classes))
        if self.ngram is not None:
            found.append(self.ngram.recall(found[0], past))
        return [each.to(logits.dtype) for each in found]

    def score(self, ids: Tensor, context: int | None, *, stays: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return log p [T-1] of the model and of each predictor on a text, its hidden states and next tokens.

        Args:
            ids: the text, [T].
            context: the tokens of a window.
            stays: whether MbPA remembers it.
        """
        keys, labels, _ = self._network.nothing()
        scores: dict[str, list[Tensor]] = {name: [] for name in ("model", *self.names)}
        with contextlib.ExitStack() as stack:
            if self.mbpa is not None:
                if stays:
                    stack.callback(self.forget)  # an error leaves MbPA out of step
                else:
                    stack.enter_context(self.mbpa.rewinding(len(ids)))
            for h, logits, targets in self._network.windows(ids, context):
                keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
                if self.mbpa is None:
                    scores["model"].append(log_prob(logits, targets))
                else:
                    for name, part in zip(("model", "mbpa"), self.mbpa.score(h, targets, logits), strict=True):
                        scores[name].append(part)
                plain = scores["model"][-1]
                for start, past in self.pasts(keys, labels, len(h)):
                    some = slice(start, start + len(past.ages))
                    if self.cache is not None:
                        scores["cache"].append(self.share(self.cache.recall(h[some], past), targets[some]))
                    if self.knn is not None:
                        scores["knn"].append(self.share(self.knn.recall(h[some], past), targets[some]))
                    if self.ngram is not None:
                        counts = self.ngram.count(past, targets[some])
                        scores["ngram"].append(self.ngram.share(counts, plain[some]))
            if stays:
                stack.pop_all()
        return {name: torch.cat(parts).float() for name, parts in scores.items()}, keys, labels

    def share(self, recalled: Recalled, targets: Tensor) -> Tensor:
        """Return log p of the targets, [Q], from how like the queries are to what they see."""
        return log_share(recalled, targets, self._network.classes)

    def pasts(self, keys: Tensor, labels: Tensor, count: int) -> Iterator[tuple[int, Past]]:
        """Yield what the last `count` positions of a text see of it, some at a time, with the number of the first."""
        before = len(keys) - count
        for start in range(0, count, _QUERIES):
            queries = min(_QUERIES, count - start)
            end = before + start + queries
            first = 0
            whole = self.knn is not None or self.ngram is not None
            if not whole and self.cache is not None and self.cache.capacity is not None:
                first = max(0, end - queries - self.cache.capacity)  # what is before it is out of sight
            ages = count_ages(end - queries - first, queries, keys)
            yield start, Past(keys[first:end], labels[first:end], ages)

    def remember(self, texts: list[tuple[Tensor, Tensor]], tag: str | None, *, mbpa_knows: bool) -> None:
        """Write the hidden states and next tokens of texts to the memory.

        Args:
            texts: states [n,d] and tokens [n] of each.
            tag: as of `EpisodicMemory.write`.
            mbpa_knows: whether MbPA has scored them already, and so has them.
        """
        keys, labels = (torch.cat(part) for part in zip(*texts, strict=True))
        try:
            self.store.write(keys, labels, tag)
            if not mbpa_knows:
                return  # the next to read follows
            if self.cache is not None:
                self.cache.remember(keys, labels)
            self._seen = self._copied_numbers()
            if any(len(each) > len(self._seen) for each in (self.cache, self.mbpa) if each is not None):
                self.forget()  # the memory has room for fewer: what it has lost they must not know either
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Empty the copies; the next to read fills them."""
        for copy in (self.cache, self.mbpa):
            if copy is not None:
                copy.clear()
        self._seen = torch.empty(0, dtype=torch.int64)  # numbers of the entries that they have

    def check_weights(self) -> None:
        """Refuse a memory that was written with other weights than the model has now.

        Raises:
            ValueError: the weights were changed, and the memory is not empty.
        """
        if not self._network.changed():
            return
        if len(self.store):
            raise ValueError(
                f"the model's weights were changed, and the {len(self.store):,} entries of the memory are hidden "
                "states of those that it had: give the model its old weights back, undo() what was written, or make "
                "an AdaptiveLanguageModel with a new memory"
            )
        self._network.accept_weights()

    def follow(self) -> None:
        """Bring the copies into step with the memory.

        Raises:
            ValueError: as `check_weights`.
        """
        self.check_weights()
        with self.store.lock:
            numbers = self._copied_numbers()
            if torch.equal(numbers, self._seen):
                return
            old = numbers[numbers <= self._seen[-1]] if len(self._seen) else numbers[:0]
            if not (len(old) and torch.equal(old, self._seen[-len(old) :])):
                self.forget()
                old = numbers[:0]
            ring, first = self.store.entries(), len(self.store) - len(numbers) + len(old)
            for part in torch.split(torch.arange(first, len(self.store), device=self.store.device), _QUERIES):
                keys, labels = ring.keys_at(part).float(), ring.values_at(part).long()
                if self.cache is not None:
                    self.cache.remember(keys, labels)
                if self.mbpa is not None:
                    self.mbpa.score(keys, labels, self._network.logits_of(keys))
            self._seen = numbers

    def set(self, name: str, value: Any) -> None:
        """Give a predictor the value of its setting."""
        if self.cache is not None and name == "cache":
            self.cache.theta = value
        elif self.mbpa is not None and name == "mbpa":
            self.mbpa.descent = self.mbpa.descent._replace(lr=value)
        elif self.knn is not None and name == "knn":
            self.knn.bandwidth = value
        elif self.ngram is not None and name == "ngram":
            self.ngram.growth, self.ngram.prior = value

    def _most_copied(self) -> int | None:
        """Return how many entries the copies have at most; None for all."""
        capacities = [each.capacity for each in (self.cache, self.mbpa) if each is not None]
        return None if None in capacities else max((each for each in capacities if each is not None), default=0)

    def _copied_numbers(self) -> Tensor:
        """Return the numbers of the entries that the copies are to have, ascending."""
        numbers, most = self.store.numbers, self._most_copied()
        return numbers if most is None else numbers[max(0, len(numbers) - most) :]


def fit(
    network: CausalModel,
    predictors: Predictors,
    ids: Tensor,
    *,
    thetas: Any,
    bandwidths: Any,
    rates: Any,
    context: int | None,
) -> Tensor:
    """Give each predictor the best of its candidates, and return the weights, as `AdaptiveLanguageModel.fit` says."""
    thetas, bandwidths, rates = (
        _check_candidates("thetas", thetas),
        _check_candidates("bandwidths", bandwidths, none=True),
        _check_candidates("rates", rates),
    )
    scores: dict[Candidate, list[Tensor]] = {}
    keys, labels, _ = network.nothing()
    with contextlib.ExitStack() as stack:
        if predictors.mbpa is not None:
            stack.enter_context(predictors.mbpa.rewinding(len(ids)))
        for h, logits, targets in network.windows(ids, context):
            if not len(keys):
                length = float(h.square().sum(1).mean())
                thetas = thetas or [each / length for each in _SHARPNESS]
                bandwidths = bandwidths or [None, *(math.sqrt(length / each) for each in _SHARPNESS)]
                rates = rates or [each / length for each in _RATES]
            keys, labels = torch.cat([keys, h]), torch.cat([labels, targets])
            plain = log_prob(logits, targets).double()
            scores.setdefault(("model", None), []).append(plain)
            tried = (
                _try_rates(predictors, h, logits, targets, rates),
                _try_kernels(predictors, h, targets, keys, labels, thetas, bandwidths),
                _try_counts(predictors, plain, keys, labels),
            )
            for candidate, score in (each for some in tried for each in some):
                scores.setdefault(candidate, []).append(score.double())
    return _choose(predictors, {candidate: torch.cat(parts) for candidate, parts in scores.items()})


def _check_candidates(name: str, values: Any, *, none: bool = False) -> list[Any]:
    """Return the candidates of a setting, each once; an empty list where the usual ones are to be taken."""
    candidates = [] if values is None else values.tolist() if hasattr(values, "tolist") else list(values)
    for value in candidates:
        if not (none and value is None):
            check_positive(**{name: value})
    return list(dict.fromkeys(candidates))


def _try_rates(
    predictors: Predictors, h: Tensor, logits: Tensor, targets: Tensor, rates: Sequence[float]
) -> Iterator[tuple[Candidate, Tensor]]:
    """Yield log p of a window by MbPA with each rate; the last of them leaves it remembered."""
    mbpa = predictors.mbpa
    if mbpa is None:
        return
    before = mbpa.descent
    try:
        for rate in rates:
            mbpa.descent = before._replace(lr=rate)
            with mbpa.rewinding(len(h)) if rate != rates[-1] else contextlib.nullcontext():
                yield ("mbpa", rate), mbpa.score(h, targets, logits)[1]
    finally:
        mbpa.descent = before


def _try_kernels(
    predictors: Predictors,
    h: Tensor,
    targets: Tensor,
    keys: Tensor,
    labels: Tensor,
    thetas: Sequence[float],
    bandwidths: Sequence[float | None],
) -> Iterator[tuple[Candidate, Tensor]]:
    """Yield log p by the cache and by the neighbours, on parts of a window in their order; products are shared."""
    cache, knn = predictors.cache, predictors.knn
    for start, past in predictors.pasts(keys, labels, len(h)):
        some = slice(start, start + len(past.ages))
        if cache is not None:
            products = cache.recall(h[some], past, theta=1.0)
            for theta in thetas:
                scaled = products._replace(likeness=products.likeness * theta)
                yield ("cache", theta), predictors.share(scaled, targets[some])
        if knn is not None:
            compared = knn.compare(h[some], past)
            for bandwidth in bandwidths:
                scaled = compared._replace(likeness=compared.likeness / knn.scale(-compared.likeness, bandwidth))
                yield ("knn", bandwidth), predictors.share(scaled, targets[some])


def _try_counts(
    predictors: Predictors, plain: Tensor, keys: Tensor, labels: Tensor
) -> Iterator[tuple[Candidate, Tensor]]:
    """Yield log p of a window by the n-grams with each growth and prior, from the model's and from what is counted."""
    ngram = predictors.ngram
    if ngram is None:
        return
    for start, past in predictors.pasts(keys, labels, len(plain)):
        some = slice(start, start + len(past.ages))
        counts = ngram.count(past, labels[len(labels) - len(plain) :][some])
        for growth in _GROWTHS:
            for prior in _PRIORS:
                yield ("ngram", (growth, prior)), ngram.share(counts, plain[some], growth, prior)


def _choose(predictors: Predictors, scores: dict[Candidate, Tensor]) -> Tensor:
    """Take the best candidate of each predictor in a mixture with the model, and fit the weights of all."""
    plain = scores["model", None]
    chosen = [plain]
    for name in predictors.names:
        best = choose_setting(plain, {value: score for (each, value), score in scores.items() if each == name})
        chosen.append(scores[name, best])
        predictors.set(name, best)
    # As if each were right once more: none is ruled out by a text that is too short or too much alike to tell.
    return (fit_weights(chosen) * len(plain) + 1) / (len(plain) + len(chosen))
