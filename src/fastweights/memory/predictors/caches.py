"""The caches of Grave et al.: recent words are likely again where the model is in a state like theirs.

Both score a stream of activations and labels in blocks: a position by what was before it, the block itself included,
and remember the block then.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.checks import check_finite, check_positive, check_sizes
from fastweights.memory.predictors.past import Past, Recalled, count_ages, find_labels
from fastweights.memory.store.checks import check_stream, check_values, check_vectors
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.faiss_index import FaissIndex
from fastweights.ops.nearest import pick_nearest
from fastweights.ops.products import multiply

# Of a position and what it may see, held at once; and positions at once, whatever they may see.
_PAIRS = 2**22
_LEAST, _MOST = 16, 128
_NUMBERS = 2**22  # numbers of the keys that a block of the unbounded cache finds
_MOST_UNBOUNDED = 64  # its positions at once


class NeuralCache:
    """A memory of a stream's last activations and labels, which predicts the next label from the most similar ones.

    p(w) is proportional to the sum of exp(theta h . h_i) over the remembered positions i whose label is w (Grave et al.
    2016, "Improving neural language models with a continuous cache", equation 3; equation 1 of Rae et al. 2018). With
    nothing remembered yet every label is as likely as every other.

    Args:
        capacity: n, the greatest number of positions that are remembered; None for all of them.
        num_classes: V.
        theta: how much likeness counts; 0 is a unigram cache. It is in units of 1 / |h|^2: with a mean squared length L
            of the activations, values worth trying are from 1 / L (all positions count nearly alike) to 256 / L (the
            most similar one alone counts), and `AdaptiveLanguageModel.fit` tries those. The default is for activations
            such as a trained LSTM's of some hundred units, with an L of 10 to 100; of those with an L of less than 1 it
            makes little more than a unigram cache.

    Attributes:
        activations: the remembered activations, [m,d], the oldest first.
        labels: their labels, [m] int64.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> import torch
        >>> from fastweights.memory import NeuralCache
        >>> cache = NeuralCache(capacity=100, num_classes=10)
        >>> h, words = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]), torch.tensor([7, 2, 7])
        >>> cache.log_prob(h, words).exp()  # h [T,d], words [T] -> [T]: nothing known, 7 alone known, like where 7 was
        tensor([0.1000, 0.0000, 0.9370])
    """

    def __init__(self, capacity: int | None, num_classes: int, theta: float = 0.3) -> None:
        if capacity is not None:
            check_sizes(**{"capacity (None for no limit)": capacity})
        check_sizes(num_classes=num_classes)
        check_finite(theta=theta)
        self.capacity, self.num_classes, self.theta = capacity, num_classes, theta
        self.clear()

    def clear(self) -> None:
        """Forget everything, as at the beginning of another stream."""
        self._activations: Tensor | None = None  # [room,d]: what is remembered lies from _first to _end
        self._labels: Tensor | None = None
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def activations(self) -> Tensor:
        return torch.empty(0, 0) if self._activations is None else self._activations[self._first : self._end]

    @property
    def labels(self) -> Tensor:
        empty = torch.empty(0, dtype=torch.int64)
        return empty if self._labels is None else self._labels[self._first : self._end]

    @property
    def nbytes(self) -> int:
        """The bytes that are held, the room for more included."""
        return (
            0 if self._activations is None or self._labels is None else self._activations.nbytes + self._labels.nbytes
        )

    @torch.no_grad()
    def log_prob(self, h: Tensor, targets: Tensor) -> Tensor:
        """Score positions in their order, each by what was before it, and remember them.

        Args:
            h: activations of consecutive positions, [T,d].
            targets: their labels, [T] int64.

        Returns:
            log p(target), in nats, [T] in the dtype of h (float32 at least); minus infinity where no position that is
            remembered has the label: mix it with a model's (`mix`). Autocast does not change them.

        Raises:
            ValueError: wrong shapes, dtypes or labels, h is not finite or so long that products would overflow, or it
                has another precision (float64 or less) or device than what is remembered; nothing is remembered of it
                then.
        """
        check_stream(h, targets, None if self._activations is None else self._activations.shape[1], self.num_classes)
        h = h.detach().to(torch.promote_types(h.dtype, torch.float32))
        self._check(h, targets)
        return _score_stream(h, targets, self._block, self._score)

    @torch.no_grad()
    def remember(self, h: Tensor, targets: Tensor) -> None:
        """Remember positions without scoring them: activations [T,d], labels [T] int64.

        Raises:
            ValueError: as `log_prob`; nothing is remembered then.
        """
        check_stream(h, targets, None if self._activations is None else self._activations.shape[1], self.num_classes)
        h = h.detach().to(torch.promote_types(h.dtype, torch.float32))
        self._check(h, targets)
        self._append(h, targets)
        self._forget_oldest()

    @torch.no_grad()
    def recall(self, h: Tensor, past: Past, theta: float | None = None) -> Recalled:
        """Return how like queries [Q,d] are to the last positions of what is remembered and of their own past.

        The likeness is `theta` times a product; without it, with the cache's own.
        """
        scaled, labels = (self.theta if theta is None else theta) * h, past.labels
        likeness = multiply(scaled, past.keys)
        if len(self):
            likeness = torch.cat([multiply(scaled, self.activations.to(h.dtype)), likeness], 1)
            labels = torch.cat([self.labels, labels])
        hidden = past.hide(len(self), self.capacity)
        return Recalled(likeness.masked_fill_(hidden, -math.inf), labels, ~hidden.all(1))

    def _check(self, h: Tensor, targets: Tensor) -> None:
        """Refuse what would fail later, when something of it is remembered."""
        kept = h if self._activations is None else self._activations
        if h.dtype != kept.dtype:
            raise ValueError(
                f"the cache remembers activations in {kept.dtype}, got {h.dtype}: convert them, or clear() the cache"
            )
        if not h.device == targets.device == kept.device:
            raise ValueError(
                f"activations and targets must be on one device, that of the cache: it is on {kept.device}, got h on "
                f"{h.device} and targets on {targets.device}"
            )
        # No product of two such is longer, nor is any part of its sum; inf where the square itself overflows.
        products = h.square().sum(1) * max(1.0, abs(self.theta))
        far = products > torch.finfo(h.dtype).max / 16
        if bool(far.any()):
            index = int(far.nonzero()[0])
            raise ValueError(
                f"the activation at {index} is so long that theta h . h_i could overflow {h.dtype}: scale activations"
                f"{' or theta' if abs(self.theta) > 1 else ''} down, or use torch.float64"
            )

    def _block(self) -> int:
        """Return how many positions to score at once: they and what they may see make a bounded number of pairs."""
        seen = len(self) if self.capacity is None else self.capacity
        return max(_LEAST, min(_MOST, _PAIRS // (seen + 1)))

    def _score(self, h: Tensor, targets: Tensor) -> Tensor:
        known = len(self)
        self._append(h, targets)
        # Row t may see columns up to the one before its own, and no more of them than there is room for. What rows
        # differ in are two triangles, at either end.
        likeness = (self.theta * h) @ self.activations.T
        pairs = torch.ones(len(h), len(h), dtype=torch.bool, device=h.device)
        likeness[:, known:].masked_fill_(pairs.triu(), -math.inf)
        if self.capacity is not None:
            oldest = likeness[:, : len(h)]
            oldest.masked_fill_(pairs[:, : oldest.shape[1]].tril(known - self.capacity - 1), -math.inf)
        seen = torch.arange(len(h), device=h.device) + known > 0
        scores = log_share(Recalled(likeness, self.labels, seen), targets, self.num_classes)
        self._forget_oldest()
        return scores

    def _forget_oldest(self) -> None:
        if self.capacity is not None:
            self._first = max(self._first, self._end - self.capacity)

    def _append(self, h: Tensor, targets: Tensor) -> None:
        if self._activations is None or self._labels is None:
            self._activations, self._labels = _room(0, h), _room(0, targets)
        if self._end + len(h) > len(self._activations):
            # At most every other position is moved once in a while: room for as many again.
            room = 2 * (len(self) + len(h))
            activations, labels = _room(room, h), _room(room, targets)
            activations[: len(self)], labels[: len(self)] = self.activations, self.labels
            self._activations, self._labels = activations, labels
            self._first, self._end = 0, len(self)
        self._activations[self._end : self._end + len(h)] = h
        self._labels[self._end : self._end + len(h)] = targets
        self._end += len(h)


class UnboundedCache:
    """A memory of all activations and labels of a stream, which predicts the next label from the most similar ones.

    Grave, Cisse and Joulin 2017, "Unbounded cache model for online language modeling with open vocabulary", sum a
    kernel over the nearest neighbours N(h) of an activation, with a bandwidth that follows how dense the memory is::

        p(w)  is proportional to  sum over i in N(h) with label w of  K(|h - h_i| / b(h))
        K(x) = exp(-x^2 / 2),   b(h) = the distance of the farthest of the neighbours

    With nothing remembered yet every label is as likely as every other. With all positions as neighbours, activations
    of length 1 and a fixed bandwidth it is `NeuralCache` with theta = 1 / bandwidth^2.

    With a fixed bandwidth, over a memory to which the activations and next words of a training text were written, it is
    kNN-LM (Khandelwal et al. 2020, equation 2), exp(-|h - h_i|^2 / T) with the temperature T = 2 bandwidth^2; theirs is
    1. It goes on to remember the text that it scores. An exact search multiplies a position by all N keys: N d
    multiplications, some 20 milliseconds on one core for N = 2 million and d = 160. A `FaissIndex` looks at a part of
    them.

    Args:
        index: a memory whose values are class indices, large enough for the stream (in a full one the oldest entry
            makes room at every position, which is slow), or a `FaissIndex` of it.
        num_classes: V.
        neighbours: K; all positions where there are fewer. With a bandwidth that follows the neighbours the nearest
            counts at most 1.65 times as much as the farthest, so that K alone says how much likeness counts: with all
            positions as neighbours the cache is nearly one of single words. The default is for streams of 100,000
            positions and more; of 300 to 15,000 that were tried, about the square root of their number did well.
        bandwidth: b, the same everywhere, as kNN-LM has it; None for the distance of the farthest neighbour.

    Attributes:
        index: the memory or the `FaissIndex` that was given.
        store: the memory itself, also where a `FaissIndex` was given.

    Raises:
        ValueError: a number out of range, or a memory of other values.

    Examples:
        >>> import torch
        >>> from fastweights.memory import EpisodicMemory, UnboundedCache
        >>> cache = UnboundedCache(EpisodicMemory(capacity=100_000, key_size=2), num_classes=10, neighbours=2)
        >>> h, words = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]), torch.tensor([7, 2, 7])
        >>> cache.log_prob(h, words).exp()  # h [T,d], words [T] -> [T]: nothing known, 7 alone known, like where 7 was
        tensor([0.1000, 0.0000, 0.6225])
    """

    def __init__(
        self,
        index: EpisodicMemory | FaissIndex,
        num_classes: int,
        *,
        neighbours: int = 1024,
        bandwidth: float | None = None,
    ) -> None:
        self.index, self.store = index, index.store if isinstance(index, FaissIndex) else index
        check_sizes(num_classes=num_classes, neighbours=neighbours)
        self.num_classes, self.neighbours, self.bandwidth = num_classes, neighbours, bandwidth
        if bandwidth is not None:
            check_positive(**{"bandwidth (None to follow the neighbours)": bandwidth})
        if self.store.value_shape != () or self.store.value_dtype.is_floating_point:
            raise ValueError(f"the memory's values must be class indices, got {self.store}")

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
            h: activations of consecutive positions, [T,d].
            targets: their labels, [T] int64.

        Returns:
            log p(target), in nats, [T] in the dtype of h (float32 at least); minus infinity where no neighbour has the
            label: mix it with a model's (`mix`). They are computed in float64, whatever autocast says.

        Raises:
            ValueError: wrong shapes, dtypes or labels, h is not finite, or the memory's dtypes cannot hold them;
                nothing is remembered then. An index that has too few keys to train on refuses later: `train` it before.
            MemoryFileError: the disk refuses; what was scored before is remembered.
        """
        check_stream(h, targets, self.store.key_size, self.num_classes)
        with self.store.lock:
            keys, _ = check_vectors("h", h, self.store.key_size, self.store.dtype, self.store.device)
            labels = check_values(targets, len(keys), (), self.store.value_dtype, self.store.device).long()
            scores = _score_stream(keys, labels, self._block, self._score)
        return scores.to(h.device, torch.promote_types(h.dtype, torch.float32))

    def _block(self) -> int:
        """Return how many positions to score at once: of a full memory one, for it forgets another at the next."""
        free = self.store.capacity - len(self.store)
        return max(1, min(_MOST_UNBOUNDED, free, _NUMBERS // (self.neighbours * self.store.key_size)))

    def _score(self, h: Tensor, targets: Tensor) -> Tensor:
        recalled = self.recall(h, Past(h, targets, count_ages(0, len(h), h)))
        self.store.write(h, targets)
        return log_share(recalled, targets, self.num_classes)

    @torch.no_grad()
    def recall(self, h: Tensor, past: Past) -> Recalled:
        """Return how like queries [Q,d] are to the nearest of what the memory holds and of their own past."""
        recalled = self.compare(h, past)
        squares = -recalled.likeness
        return recalled._replace(likeness=-squares / self.scale(squares, self.bandwidth))

    @torch.no_grad()
    def compare(self, h: Tensor, past: Past) -> Recalled:
        """Return the same with minus the squared distances, which are not divided by anything, as the likeness."""
        squares = squared_distances(h, past.keys).masked_fill_(past.ages == 0, math.inf)
        labels = past.labels.expand(squares.shape)
        ages = past.ages  # entries of the memory are older still
        with self.store.lock:
            ring = self.store.entries()
            if ring.count:
                queries, count = h.to(ring.keys.device, ring.keys.dtype), min(self.neighbours, ring.count)
                indices, distances = self.index.find_nearest(ring, queries, count)
                squares = torch.cat([distances.to(h.device, torch.float64), squares], 1)
                labels = torch.cat([ring.values_at(indices).to(h.device, torch.int64), labels], 1)
                ages = torch.cat([past.ages.shape[1] + ring.count - indices.to(h.device), ages], 1)
        if squares.shape[1] > self.neighbours:
            places = pick_nearest(squares, h, self.neighbours, ages)
            squares, labels = squares.gather(1, places), labels.gather(1, places)
        seen = (squares < math.inf).any(1)
        return Recalled(-squares, labels, seen)

    def scale(self, squares: Tensor, bandwidth: float | None) -> Tensor:
        """Return what the squared distances [Q,K] are divided by, [Q,1]: 2 b^2, or 2 for the farthest without b."""
        if bandwidth is not None:
            return torch.full_like(squares[:, :1], 2 * bandwidth**2)
        farthest = squares.masked_fill(squares == math.inf, 0).amax(1, keepdim=True)
        return 2 * farthest.clamp(min=torch.finfo(farthest.dtype).tiny)  # all at no distance: all alike


def squared_distances(h: Tensor, keys: Tensor) -> Tensor:
    """Return squared distances [Q,S] in float64: of few and of float64 by difference, of many from products.

    The rounding of products is far below what equal states of float32 differ by, and above what those of float64 do.
    """
    exact = h.dtype == torch.float64 or len(h) * len(keys) <= _MOST_UNBOUNDED**2
    mode = "donot_use_mm_for_euclid_dist" if exact else "use_mm_for_euclid_dist"
    return torch.cdist(h.double(), keys.double(), compute_mode=mode).square_()


def _score_stream(
    h: Tensor, targets: Tensor, block: Callable[[], int], score: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Score and remember a stream, `block()` positions at a time."""
    scores, start = [h.new_empty(0)], 0
    with torch.autocast(h.device.type, enabled=False):
        while start < len(h):
            part = slice(start, start + block())
            scores.append(score(h[part], targets[part]))
            start = part.stop
    return torch.cat(scores)


def log_share(recalled: Recalled, targets: Tensor, num_classes: int) -> Tensor:
    """Return how much of the likeness of the positions seen is that of the target's label, a logarithm, [T].

    A target that sees nothing is as likely as every other.
    """
    likeness, labels, seen = recalled
    rows, columns = find_labels(labels, targets)
    shares = likeness.log_softmax(1)[rows, columns]
    rows, shares = rows[shares > -math.inf], shares[shares > -math.inf]
    most = likeness.new_full((len(likeness),), -math.inf).scatter_reduce_(0, rows, shares, "amax")
    share = torch.zeros_like(most).index_add_(0, rows, (shares - most[rows]).exp_()).log_().add_(most)
    # It is not a number where nothing was to be seen.
    return torch.where(seen, share, -math.log(num_classes))


def _room(count: int, like: Tensor) -> Tensor:
    # Made so that what begins under inference mode can go on outside of it.
    with torch.inference_mode(False):
        return torch.empty(count, *like.shape[1:], dtype=like.dtype, device=like.device)
