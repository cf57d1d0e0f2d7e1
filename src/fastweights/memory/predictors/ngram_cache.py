"""The n-gram cache: what followed on the last tokens before is likely to follow on them again."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_positive, check_sizes
from fastweights.memory.predictors.past import Past, count_ages, find_labels
from fastweights.memory.store.checks import check_stream, check_values, check_vectors
from fastweights.memory.store.episodic import EpisodicMemory

_PAIRS = 2**23  # of a position and one that it may see, compared at once
_MOST = 256  # positions at once, whatever they may see
_NOTHING_BEFORE = -2  # no label, nor the -1 where a query's own past ends


class Counts(NamedTuple):
    """How many positions each query sees before which its last tokens stand too, by how many of them do.

    Attributes:
        right: [Q,order], of those that have the target's label.
        all: [Q,order].
    """

    right: Tensor
    all: Tensor


_MOST_LOG = 300 * math.log(10)  # of a match's weight: float64 holds sums of so large ones


class _Matches(NamedTuple):
    """Positions before which a query's last tokens stand too, in no order, M in all."""

    queries: Tensor  # [M]
    labels: Tensor  # [M]
    lengths: Tensor  # [M]: how many tokens stand there too, 1 to order


class NGramCache:
    """A memory of a stream's tokens, which predicts the next one from what followed on the same tokens before.

    Of each position i that is remembered n_i is the number of tokens before it that are also the last ones now, one
    after another, `order` at most. Positions with none do not count::

        p(w)  =  (sum over i with label w of growth^n_i  +  prior p_0(w))  /  (sum over all i of growth^n_i  +  prior)

    p_0 is the model's prediction where it is given, and otherwise every label is as likely as every other. So a long
    match outweighs many short ones, and where nothing matches the model alone speaks. It is the cache of n-grams of
    Jelinek et al. 1991, "A dynamic language model for speech recognition", with the longest matches counting most, as
    in prediction by partial matching (Cleary & Witten 1984). Nothing is learnt, and hidden states are not looked at:
    names, code and lines of a log that come again word for word are what it is good at.

    Args:
        store: a memory whose values are class indices: of a language model, or one for this cache alone, with
            keys of any width. What it holds is taken for one stream.
        num_classes: V.
        order: the greatest number of tokens that are compared.
        growth: how much more a match counts that is longer by one token.
        prior: how much p_0 counts. The default is for a model's prediction: of 4 to 4,096 it was best or nearly so on
            250 and 2,500 tokens of code and of a novel. Without a model, about 1.

    Attributes:
        store: the memory that was given.

    Raises:
        ValueError: a number out of range, growth ** order past 1e300, or a memory of other values.

    Examples:
        >>> import torch
        >>> from fastweights.memory import EpisodicMemory, NGramCache
        >>> cache = NGramCache(EpisodicMemory(capacity=1000, key_size=1), num_classes=10, growth=8, prior=2)
        >>> words = torch.tensor([7, 2, 5, 7, 2, 5])
        >>> cache.log_prob(torch.zeros(6, 1), words).exp()  # h [T,1] is not read, words [T] -> [T]; 7 is followed by 2
        tensor([0.1000, 0.1000, 0.1000, 0.1000, 0.8200, 0.9727])
    """

    def __init__(
        self, store: EpisodicMemory, num_classes: int, *, order: int = 8, growth: float = 8.0, prior: float = 1024.0
    ) -> None:
        check_sizes(num_classes=num_classes, order=order)
        check_positive(growth=growth, prior=prior)
        if order * math.log(growth) > _MOST_LOG:
            raise ValueError(f"growth ** order must be at most 1e300, got {growth:g} ** {order}: take a smaller order")
        if store.value_shape != () or store.value_dtype.is_floating_point:
            raise ValueError(f"the memory's values must be class indices, got {store}")
        self.store, self.num_classes, self.order, self.growth, self.prior = store, num_classes, order, growth, prior

    def clear(self) -> None:
        """Forget everything: empty the memory, and with it what others wrote there."""
        self.store.clear()

    @property
    def nbytes(self) -> int:
        """The bytes of the memory's keys and values, the room for more included."""
        return self.store.nbytes

    @torch.no_grad()
    def log_prob(self, h: Tensor, targets: Tensor) -> Tensor:
        """Score positions in their order, each by what was before it, and remember them.

        Args:
            h: what the memory has as keys, [T,d]; it is stored, and not read.
            targets: their labels, [T] int64.

        Returns:
            log p(target), in nats, [T] in the dtype of h (float32 at least).

        Raises:
            ValueError: wrong shapes, dtypes or labels, or the memory's dtypes cannot hold them; nothing is remembered
                then.
            MemoryFileError: the disk refuses; what was scored before is remembered.
        """
        check_stream(h, targets, self.store.key_size, self.num_classes)
        scores, start = [h.new_empty(0, dtype=torch.float64)], 0
        with self.store.lock:
            keys, _ = check_vectors("h", h, self.store.key_size, self.store.dtype, self.store.device)
            labels = check_values(targets, len(keys), (), self.store.value_dtype, self.store.device).long()
            while start < len(keys):
                stored = self._stored()
                part = slice(start, start + max(1, min(_MOST, _PAIRS // (len(stored) + _MOST))))
                seen = torch.cat([stored, labels[part]])  # the stream goes on
                past = Past(keys[:0], seen, count_ages(len(stored), len(labels[part]), keys))
                counts = self._count(seen[:0], past, labels[part])
                uniform = counts.all.new_full((len(counts.all),), -math.log(self.num_classes))
                scores.append(self.share(counts, uniform))
                self.store.write(keys[part], labels[part])
                start = part.stop
        return torch.cat(scores).to(h.device, torch.promote_types(h.dtype, torch.float32))

    @torch.no_grad()
    def count(self, past: Past, targets: Tensor) -> Counts:
        """Return what queries see of the memory and of their own past that speaks for targets [Q]."""
        return self._count(self._stored().to(targets.device), past, targets)

    def _count(self, stored: Tensor, past: Past, targets: Tensor) -> Counts:
        found = self._match(stored, past)
        counts = []
        for some in (found.labels == targets[found.queries], slice(None)):
            places = found.queries[some] * self.order + found.lengths[some] - 1
            counts.append(torch.bincount(places, minlength=len(past.ages) * self.order).view(-1, self.order).double())
        return Counts(*counts)

    def share(
        self, counts: Counts, log_model: Tensor, growth: float | None = None, prior: float | None = None
    ) -> Tensor:
        """Return log p [Q] float64 of the targets that were counted.

        Args:
            counts: of the targets.
            log_model: log p_0 of each target, [Q].
            growth: by default the cache's own.
            prior: by default the cache's own.
        """
        growth, prior = self.growth if growth is None else growth, self.prior if prior is None else prior
        weights = growth ** torch.arange(1, self.order + 1, device=counts.all.device, dtype=torch.float64)
        expected = prior * log_model.double().exp()
        return ((counts.right @ weights + expected) / (counts.all @ weights + prior)).log()

    @torch.no_grad()
    def recall(self, log_model: Tensor, past: Past, *, own: bool = True) -> Tensor:
        """Return log p of all classes [Q,V] float64, from the model's [Q,V], the memory and the queries' own past.

        Args:
            log_model: log p_0, [Q,V].
            past: of each query.
            own: whether what followed in a query's own past counts, or in the memory alone.
        """
        found = self._match(self._stored().to(log_model.device), past, own=own)
        weights = self.growth ** found.lengths.double()
        p = self.prior * log_model.double().exp()
        total = weights.new_full((len(p),), self.prior).index_add_(0, found.queries, weights)
        p.view(-1).index_add_(0, found.queries * p.shape[1] + found.labels, weights)
        return (p / total.unsqueeze(1)).log()

    @torch.no_grad()
    def measure_longest(self, past: Past) -> Tensor:
        """Return how many of the last tokens of each query stand together in the memory, `order` at most, [Q]."""
        found = self._match(self._stored().to(past.ages.device), past, own=False)
        return found.lengths.new_zeros(len(past.ages)).scatter_reduce_(0, found.queries, found.lengths, "amax")

    def _stored(self) -> Tensor:
        """Return the labels that the memory holds, [N] int64, the oldest first."""
        return self.store.values.long()

    def _match(self, stored: Tensor, past: Past, *, own: bool = True) -> _Matches:
        """Return the positions of the memory, and of each query's own past, before which its last tokens stand too."""
        before = torch.cat([stored.new_full((self.order,), _NOTHING_BEFORE), stored])
        size = max(1, _PAIRS // (1 + past.ages.shape[1]))
        parts = [_Matches(*(stored.new_empty(0),) * 3)]
        for start in range(0, len(past.ages), size):
            some = past._replace(ages=past.ages[start : start + size])
            tokens = _align(some, stored, self.order)
            found = [self._match_memory(tokens, stored, before)]
            found += [self._match_past(tokens, some.counts)] if own else []
            parts += [part._replace(queries=part.queries + start) for part in found]
        return _Matches(*map(torch.cat, zip(*parts, strict=True)))

    def _match_memory(self, own: Tensor, stored: Tensor, before: Tensor) -> _Matches:
        last = self.order - 1  # the token before the first one
        queries, places = find_labels(before[last:-1], own[:, 0].contiguous())
        lengths = _lengthen(own, queries, self.order, lambda some, k: before[places[some] + (last - k)])
        return _Matches(queries, stored[places], lengths)

    def _match_past(self, own: Tensor, counts: Tensor) -> _Matches:
        before = own.where(own >= 0, _NOTHING_BEFORE)
        alike = own[:, :1] == before[:, 1 : own.shape[1] - self.order + 1]
        alike &= torch.arange(alike.shape[1], device=own.device) < counts.unsqueeze(1)
        queries, places = alike.nonzero(as_tuple=True)
        lengths = _lengthen(own, queries, self.order, lambda some, k: before[queries[some], places[some] + (1 + k)])
        return _Matches(queries, own[queries, places], lengths)


def _align(past: Past, stored: Tensor, order: int) -> Tensor:
    """Return the labels that each query sees of its own past, the last one first, and those stored before: [Q,L+order].

    Where they end there is -1.
    """
    width = past.ages.shape[1] + order
    own = past.labels.new_full((len(past.ages), width + 1), -1)
    own.scatter_(
        1, (past.ages - 1) % (width + 1), past.labels.expand(past.ages.shape)
    )  # in the last one what is not seen
    own = own[:, :-1]
    stored = stored[max(0, len(stored) - order) :].flip(0)
    places = past.counts.unsqueeze(1) + torch.arange(len(stored), device=own.device)
    return own.scatter(1, places, stored.expand(places.shape))


def _lengthen(own: Tensor, queries: Tensor, order: int, before: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return how many tokens before some positions are the last ones of their queries, from one to `order`.

    Args:
        own: of `_align`.
        queries: of each position, [M].
        order: of the cache.
        before: of some positions, given by their numbers, the token that stands before them and k others.
    """
    lengths, alike = torch.ones_like(queries), torch.arange(len(queries), device=queries.device)
    for k in range(1, order):
        alike = alike[before(alike, k) == own[queries[alike], k]]
        lengths[alike] += 1
    return lengths
