"""The predictors of an adaptive language model as components of its mixture: one class for each, all with one face."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.memory.language_model._causal_model import (
    PROBABILITIES,
    QUERIES,
    CausalModel,
    Window,
    log_softmax,
)
from fastweights.memory.predictors.caches import NeuralCache, UnboundedCache, log_share
from fastweights.memory.predictors.ngram_cache import NGramCache
from fastweights.memory.predictors.past import Past, Recalled
from fastweights.memory.predictors.predictor import Reader
from fastweights.memory.predictors.stream_mbpa import StreamMbPA
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.faiss_index import FaissIndex

# The memories of a model that is given no others.
_CACHE, _LAST, _STORED, _NEIGHBOURS = 2000, 4096, 100_000, 64
_PREDICTIONS = 2**28  # numbers that MbPA keeps at most, of 16 bits
# Candidates, divided by the mean squared length of a hidden state: for theta, and for 1 / bandwidth^2.
_SHARPNESS = tuple(2.0**power for power in range(9))
_RATES = tuple(10.0 ** (power / 2) for power in range(-2, 7))  # candidates for MbPA's learning rate, divided so too
_GROWTHS = tuple(2.0**power for power in range(1, 6))  # candidates of the n-gram cache
_PRIORS = tuple(4.0**power for power in range(-1, 8))
_PRECISE = torch.float32, torch.float64  # what a reader may return
_MOST_SUM = 1e-4  # how far from 0 the logarithm of the sum of a reader's probabilities may be

Setting = float | tuple[float, float] | None  # of the n-gram cache growth and prior
Index = EpisodicMemory | FaissIndex


class Component(ABC):
    """A predictor as a component of the mixture; what is defined here is right for one without settings or a copy.

    Attributes:
        name: of a built-in one its keyword of `AdaptiveLanguageModel`, and its key in the file.
        arguments: those of the predictor that are saved.
        chosen: those that `fit` chooses.
        copies: whether the predictor keeps a copy of the memory's end.
        searches: whether it has the memory itself, as its `store`.
        reach: how many of the last positions of the text at hand it looks at; None for all.
    """

    name: str
    arguments: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    copies = searches = False
    reach: int | None = None

    def __init__(self, predictor: Any, network: CausalModel) -> None:
        self.predictor, self.network = predictor, network
        self.check()

    def check(self) -> None:
        """Refuse a predictor of other sizes than the model's."""
        given, classes = self.predictor.num_classes, self.network.classes
        if given != classes:
            raise ValueError(
                f"{self.name} has {given} classes, and the model predicts {classes} tokens: make it with "
                f"num_classes={classes}"
            )

    @abstractmethod
    def predict(self, h: Tensor, logits: Tensor, log_model: Tensor, past: Past) -> Tensor:
        """Return log p of all tokens, [Q,V].

        Args:
            h: hidden states, [Q,d].
            logits: the model's there, [Q,V].
            log_model: its log p, [Q,V].
            past: what each sees beside the memory, with the model's predictions if there is MbPA.
        """

    @abstractmethod
    def score(self, window: Window) -> Tensor:
        """Return log p of a window's targets, [c]; the windows of a text come in their order."""

    def rewinding(self, count: int) -> AbstractContextManager[None]:
        """Take out of the copy, after the block, what scores of up to `count` positions have left there."""
        return nullcontext()

    def remember(self, keys: Tensor, labels: Tensor, *, scored: bool) -> None:  # noqa: B027
        """Take positions of the memory into the copy, which were scored just now or not."""

    def list_candidates(self, length: float) -> list[Any]:
        """Return the usual candidates, with hidden states of this mean squared length."""
        return [None]

    def try_candidates(self, window: Window, candidates: Sequence[Any]) -> Iterator[tuple[Setting, Tensor]]:
        """Yield log p of targets with each of the candidates, part of the window after part."""
        yield candidates[0], self.score(window)

    def choose(self, value: Any) -> None:
        """Take a candidate as the setting."""
        for name, each in zip(self.chosen, value if isinstance(value, tuple) else (value,), strict=False):
            setattr(self.predictor, name, each)

    @property
    def settings(self) -> dict[str, float | None]:
        """Return the settings that `fit` chooses, by their names."""
        return {name: getattr(self.predictor, name) for name in self.chosen}

    def describe(self) -> dict[str, Any]:
        """Return the arguments that `load` takes."""
        return {name: getattr(self.predictor, name) for name in self.arguments}

    @staticmethod
    def load(facts: dict[str, Any], network: CausalModel, index: Index) -> Any:
        """Return the predictor that was described, over the memory or an index of it."""
        raise NotImplementedError


class _SimilarityComponent(Component):
    """A predictor by how like positions are, whose candidates share what they compare."""

    def predict(self, h: Tensor, logits: Tensor, log_model: Tensor, past: Past) -> Tensor:
        recalled: Recalled = self.predictor.recall(h, past)
        return recalled.spread(self.network.classes)

    def score(self, window: Window) -> Tensor:
        parts, recall = window.parts(), self.predictor.recall
        return torch.cat([self._share(recall(window.h[some], past), window.targets[some]) for some, past in parts])

    def try_candidates(self, window: Window, candidates: Sequence[Any]) -> Iterator[tuple[Setting, Tensor]]:
        for some, past in window.parts():
            compared = self._compare(window.h[some], past)
            for value in candidates:
                scaled = compared._replace(likeness=self._scale(compared.likeness, value))
                yield value, self._share(scaled, window.targets[some])

    def _share(self, recalled: Recalled, targets: Tensor) -> Tensor:
        return log_share(recalled, targets, self.network.classes)

    @abstractmethod
    def _compare(self, h: Tensor, past: Past) -> Recalled:
        """Return what all candidates have in common."""

    @abstractmethod
    def _scale(self, likeness: Tensor, value: Any) -> Tensor:
        """Return the likeness that a candidate makes of it."""


class CacheComponent(_SimilarityComponent):
    """The continuous cache, which keeps the last positions itself."""

    name, arguments, chosen, copies = "cache", ("capacity", "num_classes", "theta"), ("theta",), True
    predictor: NeuralCache

    def __init__(self, predictor: NeuralCache, network: CausalModel) -> None:
        super().__init__(predictor, network)
        self.reach = predictor.capacity

    def remember(self, keys: Tensor, labels: Tensor, *, scored: bool) -> None:
        self.predictor.remember(keys, labels)

    def list_candidates(self, length: float) -> list[Any]:
        return [each / length for each in _SHARPNESS]

    def _compare(self, h: Tensor, past: Past) -> Recalled:
        return self.predictor.recall(h, past, theta=1.0)

    def _scale(self, likeness: Tensor, value: float) -> Tensor:
        return likeness * value

    @staticmethod
    def load(facts: dict[str, Any], network: CausalModel, index: Index) -> NeuralCache:
        return NeuralCache(**facts)


class MbPAComponent(Component):
    """Memory-based parameter adaptation, which keeps the last positions and the model's predictions there."""

    name, copies = "mbpa", True
    predictor: StreamMbPA
    reach = 0  # what it has scored of the text is in the copy

    def check(self) -> None:
        if self.predictor.output is not self.network.head:
            raise ValueError("mbpa must be a StreamMbPA around model.get_output_embeddings()")
        if self.predictor.descent.steps != 1:
            raise ValueError(f"mbpa must take one step, got steps={self.predictor.descent.steps}")

    def predict(self, h: Tensor, logits: Tensor, log_model: Tensor, past: Past) -> Tensor:
        return log_softmax(self.predictor.recall(h, logits, past))

    def score(self, window: Window) -> Tensor:
        window.plain, adapted = self.predictor.score(window.h, window.targets, window.logits)
        return adapted

    def rewinding(self, count: int) -> AbstractContextManager[None]:
        return self.predictor.rewinding(count)

    def remember(self, keys: Tensor, labels: Tensor, *, scored: bool) -> None:
        if not scored:  # or it has them already
            self.predictor.score(keys, labels, self.network.logits_of(keys))

    def list_candidates(self, length: float) -> list[Any]:
        return [each / length for each in _RATES]

    def try_candidates(self, window: Window, candidates: Sequence[Any]) -> Iterator[tuple[Setting, Tensor]]:
        before = self.predictor.descent
        try:
            for rate in candidates:
                self.choose(rate)
                # The last of them leaves the window remembered.
                with self.rewinding(len(window.h)) if rate != candidates[-1] else nullcontext():
                    yield rate, self.predictor.score(window.h, window.targets, window.logits)[1]
        finally:
            self.predictor.descent = before

    def choose(self, value: Any) -> None:
        self.predictor.descent = self.predictor.descent._replace(lr=value)

    @property
    def settings(self) -> dict[str, float | None]:
        return {"rate": self.predictor.descent.lr}

    def describe(self) -> dict[str, Any]:
        mbpa, descent = self.predictor, self.predictor.descent
        sizes = {"capacity": mbpa.capacity, "neighbours": mbpa.neighbours}
        return {**sizes, "lr": descent.lr, "penalty": descent.penalty, "epsilon": mbpa.epsilon, "half": mbpa.half}

    @staticmethod
    def load(facts: dict[str, Any], network: CausalModel, index: Index) -> StreamMbPA:
        return StreamMbPA(network.head, **facts)


class KNNComponent(_SimilarityComponent):
    """The nearest neighbours in the memory."""

    name, arguments, chosen, searches = "knn", ("num_classes", "neighbours", "bandwidth"), ("bandwidth",), True
    predictor: UnboundedCache

    def list_candidates(self, length: float) -> list[Any]:
        return [None, *(math.sqrt(length / each) for each in _SHARPNESS)]

    def _compare(self, h: Tensor, past: Past) -> Recalled:
        return self.predictor.compare(h, past)

    def _scale(self, likeness: Tensor, value: float | None) -> Tensor:
        return likeness / self.predictor.scale(-likeness, value)

    @staticmethod
    def load(facts: dict[str, Any], network: CausalModel, index: Index) -> UnboundedCache:
        return UnboundedCache(index, **facts)


class NGramComponent(Component):
    """The n-gram cache, which falls back on the model's own prediction."""

    name, arguments, chosen, searches = "ngram", ("num_classes", "order", "growth", "prior"), ("growth", "prior"), True
    predictor: NGramCache

    def predict(self, h: Tensor, logits: Tensor, log_model: Tensor, past: Past) -> Tensor:
        return self.predictor.recall(log_model, past)

    def score(self, window: Window) -> Tensor:
        own = [(self.predictor.growth, self.predictor.prior)]
        return torch.cat([score for _, score in self.try_candidates(window, own)])

    def list_candidates(self, length: float) -> list[Any]:
        return [(growth, prior) for growth in _GROWTHS for prior in _PRIORS]

    def try_candidates(self, window: Window, candidates: Sequence[Any]) -> Iterator[tuple[Setting, Tensor]]:
        for some, past in window.parts():
            counts = self.predictor.count(past, window.targets[some])
            for growth, prior in candidates:
                yield (growth, prior), self.predictor.share(counts, window.plain[some], growth, prior)

    @staticmethod
    def load(facts: dict[str, Any], network: CausalModel, index: Index) -> NGramCache:
        return NGramCache(index.store if isinstance(index, FaissIndex) else index, **facts)


class ReaderComponent(Component):
    """A predictor of a user's own, whose answers are checked."""

    predictor: Reader

    def __init__(self, name: str, reader: Reader, store: EpisodicMemory, network: CausalModel) -> None:
        self.name, self._store = name, store
        super().__init__(reader, network)

    def check(self) -> None:
        pass  # `check_readers` has

    def predict(self, h: Tensor, logits: Tensor, log_model: Tensor, past: Past) -> Tensor:
        found: Tensor = self.predictor.recall(self._store, h, log_model, past)
        shape, place, tensor = log_model.shape, log_model.device, isinstance(found, Tensor)
        if not tensor or (found.shape, found.device) != (shape, place) or found.dtype not in _PRECISE:
            got = f"{list(found.shape)} {found.dtype} on {found.device}" if tensor else type(found).__name__
            raise ValueError(
                f"the reader {self.name!r} must return log p of all tokens, {list(shape)} in torch.float32 or "
                f"torch.float64 on {place}, got {got}"
            )
        sums = found.logsumexp(1)
        wrong = ~(sums.abs() <= _MOST_SUM)  # true of NaN too
        if bool(wrong.any()):
            raise ValueError(
                f"the reader {self.name!r} must return log p of all tokens, whose probabilities have the sum 1, got "
                f"the sum {float(sums[wrong][0].exp()):.6g}"
            )
        return found

    def score(self, window: Window) -> Tensor:
        scores = []
        for some, past in window.parts(max(1, min(QUERIES, PROBABILITIES // self.network.classes))):
            logits = window.logits[some]
            found = self.predict(window.h[some], logits, log_softmax(logits), past)
            scores.append(found.gather(1, window.targets[some].unsqueeze(1))[:, 0])
        return torch.cat(scores)


BUILT_IN: tuple[type[Component], ...] = (CacheComponent, MbPAComponent, KNNComponent, NGramComponent)


def check_readers(readers: Mapping[str, Reader] | None) -> dict[str, Reader]:
    """Return predictors of a user's own by name, after refusing what is none."""
    if readers is None:
        return {}
    if not isinstance(readers, Mapping):
        raise ValueError(f"readers must be a dict from names to predictors, got {type(readers).__name__}")
    taken = ["model", *(kind.name for kind in BUILT_IN)]
    for name, reader in readers.items():
        if not isinstance(name, str) or not name or name in taken:
            raise ValueError(f"the name of a reader must be a word other than {', '.join(taken)}, got {name!r}")
        try:
            inspect.signature(reader.recall).bind(*[None] * 4)
        except (AttributeError, TypeError):
            raise ValueError(
                f"the reader {name!r} must be an object with a method recall(store, h, log_model, past), as "
                f"fastweights.memory.Reader says, got {reader!r:.100}"
            ) from None
    return dict(readers)


def make_default(network: CausalModel, store: EpisodicMemory | None) -> dict[str, Any]:
    """Return the predictors of a model that is given none, by name."""
    mbpa = None
    if isinstance(network.head, nn.Linear):
        last = max(1, min(_LAST, _PREDICTIONS // network.classes))
        mbpa = StreamMbPA(network.head, last, neighbours=_NEIGHBOURS, half=True)
    if store is None:
        store = EpisodicMemory(_STORED, network.key_size, device=network.device)
    return {
        "cache": NeuralCache(_CACHE, network.classes),
        "mbpa": mbpa,
        "knn": UnboundedCache(store, network.classes, neighbours=_NEIGHBOURS),
        "ngram": NGramCache(store, network.classes),
    }


def make_components(
    network: CausalModel, given: Mapping[str, Any], readers: Mapping[str, Reader], store: EpisodicMemory | None
) -> tuple[list[Component], EpisodicMemory]:
    """Return the components of the predictors that are given, in the order of their weights, and the memory of all.

    Raises:
        ValueError: predictors or a memory of other sizes than the model's.
    """
    components = [kind(given[kind.name], network) for kind in BUILT_IN if given[kind.name] is not None]
    for each in components:
        if each.searches:
            if store not in (None, each.predictor.store):
                raise ValueError(f"store must be the memory of {each.name}, or be left out; all read one memory")
            store = each.predictor.store
    if store is None:
        most = count_copied(components)
        if most is None:
            raise ValueError("a cache without a limit needs a memory of its own: give store=EpisodicMemory(...)")
        most = max(most, _STORED) if readers else most
        store = EpisodicMemory(most, network.key_size, device=network.device)
    if store.key_size != network.key_size or store.value_shape != () or store.value_dtype.is_floating_point:
        raise ValueError(f"the memory must have keys of width {network.key_size} and integers as values, got {store}")
    if store.device != network.device:
        raise ValueError(f"the memory is on {store.device}, the model on {network.device}: they must be on one")
    own = [ReaderComponent(name, reader, store, network) for name, reader in readers.items()]
    return [*components, *own], store


def count_copied(components: Sequence[Component]) -> int | None:
    """Return how many entries of the memory the copies have at most; None for all."""
    capacities = [each.predictor.capacity for each in components if each.copies]
    return None if None in capacities else max(capacities, default=0)
