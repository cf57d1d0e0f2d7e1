"""The unbounded cache of Grave et al. 2017: of everything that ever was, the moments that are most like this one."""

import math

import torch
from torch import Tensor

from fastweights.memory._checks import positive, stored_values, vectors
from fastweights.memory.episodic import EpisodicMemory
from fastweights.memory.faiss_index import FaissIndex
from fastweights.memory.neural_cache import check_stream

_MOST = 64  # positions at once
_NUMBERS = 2**22  # of keys that they find


class UnboundedCache:
    """A memory of all activations and labels of a stream, which predicts the next label from the most similar ones.

    Grave, Cisse and Joulin 2017, "Unbounded cache model for online language modeling with open vocabulary", sum a
    kernel over the nearest neighbours N(h) of an activation, with a bandwidth that follows how dense the memory is::

        p(w)  is proportional to  sum over i in N(h) with label w of  K(|h - h_i| / b(h))
        K(x) = exp(-x^2 / 2),   b(h) = the distance of the farthest of the neighbours

    With nothing remembered yet every label is as likely as every other. With all positions as neighbours, activations
    of length 1 and a fixed bandwidth it is `NeuralCache` with theta = 1 / bandwidth^2.

    Args:
        index: a memory whose values are class indices, large enough for the stream (in a full one the oldest entry
            makes room at every position, which is slow), or a `FaissIndex` of it.
        num_classes: V.
        neighbours: K; all positions where there are fewer.
        bandwidth: b, the same everywhere; None for the distance of the farthest neighbour.

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
        self.num_classes, self.neighbours = positive("num_classes", num_classes), positive("neighbours", neighbours)
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise ValueError(f"bandwidth must be a positive number, or None to follow the neighbours, got {bandwidth}")
        if self.store.value_shape != () or self.store.value_dtype.is_floating_point:
            raise ValueError(f"the memory's values must be class indices, got {self.store}")
        self.bandwidth = bandwidth

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
            ValueError: shapes, dtypes or labels are not such, h is not finite, or the memory's dtypes cannot hold them;
                nothing is remembered then. An index that has too few keys to train on refuses later: `train` it before.
            MemoryFileError: the disk refuses; what was scored before is remembered.
        """
        check_stream(h, targets, self.store.key_size, self.num_classes)
        keys, _ = vectors("h", h, self.store.key_size, self.store.dtype, self.store.device)
        labels = stored_values(targets, len(keys), (), self.store.value_dtype, self.store.device).long()
        scores = []
        start = 0
        with torch.autocast(keys.device.type, enabled=False):
            while start < len(keys):
                part = slice(start, start + self._block())
                scores.append(self._scored(keys[part], labels[part]))
                self.store.write(keys[part], labels[part])
                start = part.stop
        found = torch.cat(scores) if scores else keys.new_empty(0)
        return found.to(h.device, torch.promote_types(h.dtype, torch.float32))

    def _block(self) -> int:
        """How many positions are scored at once: of a full memory one, because it has forgotten another at the next."""
        free = self.store.capacity - len(self.store)
        return max(1, min(_MOST, free, _NUMBERS // (self.neighbours * self.store.key_size)))

    def _scored(self, h: Tensor, targets: Tensor) -> Tensor:
        # What the memory holds, and of the block itself what came before.
        keys = h.double()
        difference = torch.cdist(keys, keys, compute_mode="donot_use_mm_for_euclid_dist")
        later = torch.ones(len(h), len(h), dtype=torch.bool, device=h.device).triu()
        squares = difference.square_().masked_fill_(later, math.inf)
        labels = targets.expand(len(h), len(h))
        if len(self.store):
            found = self.index.search(h, self.neighbours)
            squares, labels = torch.cat([found.distances.double(), squares], 1), torch.cat([found.values, labels], 1)
        squares, places = squares.sort(dim=1, stable=True)  # of equal ones the oldest first
        squares, labels = squares[:, : self.neighbours], labels.gather(1, places)[:, : self.neighbours]
        if self.bandwidth is None:
            farthest = squares.masked_fill(squares == math.inf, 0).amax(1, keepdim=True)
            scale = 2 * farthest.clamp(min=torch.finfo(farthest.dtype).tiny)  # all at no distance: all alike
        else:
            scale = torch.full_like(squares[:, :1], 2 * self.bandwidth**2)
        likeness = -squares / scale
        every = likeness.logsumexp(1)
        right = likeness.masked_fill(labels != targets.unsqueeze(1), -math.inf).logsumexp(1)
        # Both are minus infinity where nothing was to be seen.
        return torch.where(squares[:, 0] < math.inf, right - every, -math.log(self.num_classes))
