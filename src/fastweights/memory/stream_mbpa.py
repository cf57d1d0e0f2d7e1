"""Memory-based parameter adaptation over a stream, each position by those before it: Sprechmann et al. 2018, 4.3."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_not_negative, check_positive, check_sizes
from fastweights.memory._adaptation import Affine, Descent, adapt_affine, adapt_once, affine_of, split_classes
from fastweights.memory._checks import check_stream, check_vectors
from fastweights.memory.neighbours import Neighbours
from fastweights.ops import stream

_BLOCK = 2048  # positions at once: the predictions of all entries come from memory once for each block
_PLAIN_BLOCK = 256  # where each needs an array of all classes
_SEARCHES = 256  # positions that are compared with all entries at once
_LOGITS = 2**22  # at once: they are near the processor still when they become what is stored
_NUMBERS = 2**22  # of neighbours' keys at once
# Of the squared lengths: a squared distance below it comes from a difference, as rounding is much of it in a product.
_CLOSE = 2**-5


class StreamMbPA:
    """A softmax that adapts at each position of a stream to the most similar of the last ones, as a predictor.

    The same as to ask an `MbPA` around `output` at every position, and to write the position into its memory then;
    but the stream is scored in blocks, for log p of the targets alone. Mix it with a model's and a cache's (`mix`): p =
    (1 - l_c - l_m) p_lm + l_c p_cache + l_m p_mbpa (Sprechmann et al. 2018, appendix B).

    Distances come from products of the activations: of entries that are equally far, to rounding, any may be among the
    K nearest, where `MbPA` takes the oldest.

    Args:
        output: a `torch.nn.Linear` or `nn.HebbianSoftmax`, activations [T,d] -> logits [T,V]. What it predicts at a
            position is computed when the position is scored: when its weights change, `clear` the memory.
        capacity: n, the greatest number of positions that are remembered. With one step their predictions are, n V
            numbers and those of a block.
        neighbours: K; all positions where there are fewer.
        steps: T. More than one cost K V d a position, each.
        lr: alpha.
        penalty: beta, the cost of leaving the trained parameters; it changes nothing of the first step.
        epsilon: of the kernel.
        half: keep float32 predictions in 16 bits, which takes half the memory and less time; log p then differs by some
            1e-4 at a position, to either side, and next to nothing in the mean. It needs the compiled kernels, and
            changes nothing without them.

    Raises:
        ValueError: a number out of range, or an output that is no affine map.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> head = torch.nn.Linear(2, 10)
        >>> _ = torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        >>> adapted = memory.StreamMbPA(head, capacity=5000, neighbours=2, lr=1.0)
        >>> h, words = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]), torch.tensor([7, 2, 7])
        >>> adapted.log_prob(h, words).exp()  # h [T,d], words [T] -> [T]: nothing known, 7 alone, like where 7 was
        tensor([0.1000, 0.0853, 0.9996])
    """

    def __init__(
        self,
        output: nn.Module,
        capacity: int,
        *,
        neighbours: int = 256,
        steps: int = 1,
        lr: float = 0.15,
        penalty: float = 0.0,
        epsilon: float = 1e-3,
        half: bool = False,
    ) -> None:
        check_sizes(capacity=capacity, neighbours=neighbours, steps=steps)
        check_not_negative(lr=lr, penalty=penalty)
        check_positive(epsilon=epsilon)
        self.output, self.capacity, self.neighbours = output, capacity, neighbours
        self.epsilon, self.half, self.descent = epsilon, half, Descent(steps, lr, penalty, "sgd")
        self._affine()
        self.clear()

    def clear(self) -> None:
        """Forget everything, as at the beginning of another stream."""
        self._count = 0  # of the positions that were scored: they have their number as a name
        self._keys: Tensor | None = None  # [rows,d]; position i is in row i % rows

    def __len__(self) -> int:
        return min(self._count, self.capacity)

    def log_prob(self, h: Tensor, targets: Tensor) -> Tensor:
        """Score positions in their order, each by what was before it, and remember them.

        Args:
            h: activations of consecutive positions, the inputs of the output, [T,d].
            targets: their labels, [T] int64.

        Returns:
            log p(target), in nats, [T], in the dtype of the output's weights (float32 at least).

        Raises:
            ValueError: wrong shapes, dtypes or labels, h is not finite or so long that squared distances would
                overflow, or tensors that are not on the output's device; nothing is remembered of it then.
        """
        return self.score(h, targets)[1]

    @torch.no_grad()
    def score(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the output predicts as it is, too: log p(target) without and with adaptation, each [T].

        Both need the same product of the activations and the output's weights: of a model that is scored in any case
        the memory need not compute it again.
        """
        affine = self._affine()
        weight = affine.weight
        check_stream(h, targets, weight.shape[1], len(weight))
        keys, lengths = check_vectors("h", h, weight.shape[1], weight.dtype, weight.device)
        targets = targets.to(weight.device)
        plain, adapted = torch.empty_like(lengths), torch.empty_like(lengths)
        start = 0
        with torch.autocast(weight.device.type, enabled=False):
            while start < len(keys):
                rows = self._take_rows(keys, len(keys) - start, len(weight))
                part = slice(start, start + rows.stop - rows.start)
                plain[part], adapted[part] = self._score(affine, keys[part], lengths[part], targets[part], rows)
                start = part.stop
        return plain, adapted

    def _affine(self) -> Affine:
        affine = affine_of(self.output)
        if affine is None:
            raise ValueError(
                "output must be a torch.nn.Linear or a HebbianSoftmax without hooks, got "
                f"{type(self.output).__name__}: MbPA adapts other networks"
            )
        dtype = torch.promote_types(affine.weight.dtype, torch.float32)
        return Affine(affine.weight.to(dtype), None if affine.bias is None else affine.bias.to(dtype))

    # Made so that what begins under inference mode can go on outside of it.
    @torch.inference_mode(False)
    def _take_rows(self, keys: Tensor, most: int, classes: int) -> slice:
        """Return the rows for the next positions, at most as many, which are those of positions long out of sight."""
        if self._keys is None or self._keys.dtype != keys.dtype or self._keys.device != keys.device:
            self.clear()
            native = self.descent.steps == 1 and stream.unavailable(keys) is None
            self._block = min(_BLOCK, max(_PLAIN_BLOCK, self.capacity)) if native else min(_BLOCK, _PLAIN_BLOCK)
            # Whole blocks, so that none is cut in two by the end of the ring.
            count = self._block * (1 + -(-self.capacity // self._block))
            self._keys = keys.new_zeros(count, keys.shape[1])
            self._lengths = keys.new_zeros(count)
            self._labels = torch.zeros(count, dtype=torch.int64, device=keys.device)
            self._numbers = torch.full((count,), -1, device=keys.device)  # of the positions; of none before all
            if self.descent.steps == 1:
                # Softmax, in parts of the classes: a part of all entries stays near the processor.
                dtype = torch.uint16 if self.half and native and keys.dtype == torch.float32 else keys.dtype
                width = stream.part_classes(dtype)
                self._predictions = keys.new_empty(-(-classes // width), count, width, dtype=dtype)
        first = self._count % len(self._keys)
        return slice(first, min(first + min(most, self._block), len(self._keys)))

    def _score(self, affine: Affine, h: Tensor, lengths: Tensor, targets: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Score the positions of a block, and remember them in these rows."""
        assert self._keys is not None
        numbers = torch.arange(self._count, self._count + len(h), device=h.device)
        self._keys[rows], self._lengths[rows], self._labels[rows], self._numbers[rows] = h, lengths, targets, numbers
        self._count += len(h)
        if self.descent.steps == 1 and stream.unavailable(h) is None:
            return self._score_with_kernels(affine, h, targets, rows)
        indices, distances, weights, likeness = self._find(h, lengths, numbers, rows)
        values = self._labels[indices]
        outputs = F.linear(h, affine.weight, affine.bias).log_softmax(1)
        target = targets.unsqueeze(1)
        plain = outputs.gather(1, target)[:, 0]
        if self.descent.steps == 1:
            self._predictions[:, rows] = split_classes(outputs.exp(), self._predictions.shape[2])
            if affine.bias is not None:
                likeness += 1
            pull = likeness.mul_(weights).mul_(self.descent.lr)
            adapt_once(outputs, self._predictions, values, indices, pull)
        else:
            size = max(1, _NUMBERS // (indices.shape[1] * h.shape[1]))
            for start in range(0, len(h), size):
                part = slice(start, start + size)
                near, far, weight, labels = indices[part], distances[part], weights[part], values[part]
                neighbours = Neighbours(near, far, weight, self._keys[near], labels)
                outputs[part] = adapt_affine(affine, h[part], neighbours, self.descent)
        return plain, outputs.gather(1, target)[:, 0] - outputs.logsumexp(1)

    def _score_with_kernels(self, affine: Affine, h: Tensor, targets: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Do the same after one step, without an array of all classes for each position."""
        assert self._keys is not None
        ring = stream.Ring(self._keys, self._lengths, self._labels, self._predictions)
        parts, capacity, seen = [], self.capacity, self._count - len(h)
        products = h.new_empty(min(_SEARCHES, len(h)), len(self._keys))  # one for all: fresh pages cost as much again
        for start in range(0, len(h), _SEARCHES):
            part = h[start : start + _SEARCHES]
            room, own = products[: len(part)], rows.start + start
            spans = [slice(max(0, own - capacity), own + len(part))]
            if own < capacity and seen > rows.start:  # the ring has been full: they see the end of it, too
                spans.append(slice(own - capacity, None))
            for span in spans:
                torch.mm(part, self._keys[span].T, out=room[:, span])
            nearest = stream.find(
                room,
                ring,
                first=own,
                seen=seen + start,
                capacity=capacity,
                neighbours=min(self.neighbours, capacity),
                bias=affine.bias is not None,
                rate=self.descent.lr,
                epsilon=self.epsilon,
                close=_CLOSE,
            )
            parts.append(nearest)
        neighbours = stream.Neighbours(*(torch.cat(each) for each in zip(*parts, strict=True)))
        plain, size = torch.empty_like(h[:, 0]), max(1, _LOGITS // len(affine.weight))
        logits = h.new_empty(min(size, len(h)), len(affine.weight))
        for start in range(0, len(h), size):
            some = slice(start, start + size)
            outputs = logits[: len(h[some])]
            torch.mm(h[some], affine.weight.T, out=outputs)
            if affine.bias is not None:
                outputs += affine.bias
            plain[some] = outputs.gather(1, targets[some].unsqueeze(1))[:, 0]
            plain[some] -= stream.predict(outputs, self._predictions, rows.start + start)
        return plain, plain + stream.adapt(neighbours, ring, first=rows.start, classes=len(affine.weight))

    def _find(self, h: Tensor, lengths: Tensor, numbers: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Return rows, squared distances, weights of each position's neighbours, and their products with it [T,K]."""
        assert self._keys is not None
        products = h @ self._keys.T
        age = numbers.unsqueeze(1) - self._numbers
        hidden = (age <= 0) | (age > self.capacity) | (self._numbers < 0)
        squares = torch.add(self._lengths, products, alpha=-2).add_(lengths.unsqueeze(1))
        squares.clamp_(min=0).masked_fill_(hidden, torch.inf)
        distances, indices = squares.topk(min(self.neighbours, len(self._keys)), dim=1, largest=False)
        # Of what lies close the weights need more than the rounding of a product leaves.
        queries, places = (distances < _CLOSE * lengths.unsqueeze(1)).nonzero(as_tuple=True)
        difference = self._keys[indices[queries, places]].sub_(h[queries])
        distances[queries, places] = difference.square_().sum(1)
        weights = (self.epsilon + distances).reciprocal_()  # 0 of what is hidden, where too little is to be seen
        # Rows that were never written hold anything: a weight of 0 does not take a NaN away.
        own = torch.arange(rows.start, rows.stop, device=h.device).unsqueeze(1)
        indices = torch.where(weights > 0, indices, own)
        weights /= weights.sum(1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny)
        return indices, distances, weights, products.gather(1, indices)
