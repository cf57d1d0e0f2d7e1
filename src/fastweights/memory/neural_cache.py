"""The neural cache of Grave et al. 2016: recent words are likely again where the model is in a state like theirs."""

import math

import torch
from torch import Tensor

from fastweights.memory._checks import positive

# Of a position and what it may see, held at once; and positions at once, whatever they may see.
_PAIRS = 2**22
_LEAST, _MOST = 16, 256


class NeuralCache:
    """A memory of the last activations and labels of a stream, which predicts the next label from those it is like.

    p(w) is proportional to the sum of exp(theta h . h_i) over the remembered positions i whose label is w (Grave et al.
    2016, "Improving neural language models with a continuous cache", equation 3; equation 1 of Rae et al. 2018). With
    nothing remembered yet every label is as likely as every other.

    Args:
        capacity: n, how many positions are remembered; None for all of them.
        num_classes: V.
        theta: how much likeness counts; 0 is a unigram cache.

    Attributes:
        activations: what is remembered, [m,d], the oldest first.
        labels: theirs, [m] int64.

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
            positive("capacity (None for no limit)", capacity)
        positive("num_classes", num_classes)
        if not math.isfinite(theta):
            raise ValueError(f"theta must be finite, got {theta}")
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
            ValueError: shapes, dtypes or labels are not such, h is not finite or so long that products would overflow,
                or it has another precision (float64 or less) or device than what is remembered; nothing is remembered
                of it then.
        """
        check_stream(h, targets, None if self._activations is None else self._activations.shape[1], self.num_classes)
        h = h.detach().to(torch.promote_types(h.dtype, torch.float32))
        self._check(h, targets)
        scores = []
        start = 0
        with torch.autocast(h.device.type, enabled=False):
            while start < len(h):
                block = self._block()
                scores.append(self._scored(h[start : start + block], targets[start : start + block]))
                start += block
        return torch.cat(scores) if scores else h.new_empty(0)

    def _check(self, h: Tensor, targets: Tensor) -> None:
        """What would fail later, when something of it is remembered."""
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
        """How many positions are scored at once: so that they and what they may see make a bounded number of pairs."""
        seen = len(self) if self.capacity is None else self.capacity
        return max(_LEAST, min(_MOST, _PAIRS // (seen + 1)))

    def _scored(self, h: Tensor, targets: Tensor) -> Tensor:
        known = len(self)
        self._append(h, targets)
        # Row t may see columns up to the one before its own, and no more of them than there is room for.
        visible = torch.ones(len(h), len(self), dtype=torch.bool, device=h.device).tril_(known - 1)
        if self.capacity is not None:
            visible.triu_(known - self.capacity)
        likeness = (h @ self.activations.T).mul_(self.theta).masked_fill_(~visible, -math.inf)
        every = likeness.logsumexp(1)
        right = likeness.masked_fill_(self.labels != targets.unsqueeze(1), -math.inf).logsumexp(1)
        self._forget()
        # Both are minus infinity where nothing was to be seen.
        return torch.where(visible.any(1), right - every, -math.log(self.num_classes))

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

    def _forget(self) -> None:
        if self.capacity is not None:
            self._first = max(self._first, self._end - self.capacity)


def _room(count: int, like: Tensor) -> Tensor:
    # Made so that what begins under inference mode can go on outside of it.
    with torch.inference_mode(False):
        return torch.empty(count, *like.shape[1:], dtype=like.dtype, device=like.device)


def check_stream(h: Tensor, targets: Tensor, width: int | None, num_classes: int) -> None:
    """Activations [T,d], of a known width or of any, and labels [T].

    Raises:
        ValueError: they are not such.
    """
    if h.dim() != 2 or len(h) != len(targets) or targets.dim() != 1 or h.shape[1] != (width or h.shape[1]):
        raise ValueError(
            f"log_prob takes activations [T,{width or 'd'}] and targets [T], got h {list(h.shape)} and targets "
            f"{list(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be class indices, int64, got {targets.dtype}")
    wrong = (targets < 0) | (targets >= num_classes)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"target {int(targets[index])} at {index} is not one of the {num_classes} classes, 0 to {num_classes - 1}"
        )
    if not h.dtype.is_floating_point or not bool(torch.isfinite(h).all()):
        raise ValueError(f"activations must be finite floating-point numbers, got {h.dtype} with NaN or infinity")
