"""Memory-based parameter adaptation over a stream, each position by those before it: Sprechmann et al. 2018, 4.3."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_positive, check_sizes
from fastweights.memory.predictors._adaptation import (
    WAY,
    Affine,
    Descent,
    adapt_affine,
    affine_of,
    choose_rates,
)
from fastweights.memory.predictors.past import Past
from fastweights.memory.store.checks import check_stream, check_vectors
from fastweights.memory.store.neighbours import Neighbours
from fastweights.ops import stream
from fastweights.ops.nearest import measure_pairs, pick_by_products
from fastweights.ops.products import multiply

_BLOCK = 2048  # positions at once: the predictions of all entries come from memory once for each block
_LEAST_BLOCK = 256  # where little is remembered, and where each position takes several steps
_SEARCHES = 256  # positions that are compared with all entries at once
_LOGITS = 2**22  # at once: they are near the processor still when they become what is stored
_NUMBERS = 2**22  # numbers of neighbours' keys at once


class StreamMbPA:
    """A softmax that adapts at each position of a stream to the most similar of the last ones, as a predictor.

    The same as to ask an `MbPA` around `output` at every position, and to write the position into its memory then, but
    that rounding may choose others among entries which are nearly equally far; and the stream is scored in blocks, for
    log p of the targets alone. Mix it with a model's and a cache's (`mix`): p = (1 - l_c - l_m) p_lm + l_c p_cache +
    l_m p_mbpa (Sprechmann et al. 2018, appendix B). Alone it is too sure of what its neighbours had, and costs more
    nats than the model does.

    Distances come from products of the activations, and from differences where those leave in doubt which entries are
    the K nearest. Of entries that are equally far, to rounding, the oldest are taken.

    A model may do more to the logits than the affine map does, such as to cap them: `score` takes those that it ends
    with. What adapts is then an affine map that is added to them, and is zero before the first step; where the logits
    are the affine map's own, this is the same.

    Args:
        output: a `torch.nn.Linear` or `nn.HebbianSoftmax`, activations [T,d] -> logits [T,V]. What it predicts at a
            position is computed when the position is scored: when its weights change, `clear` the memory.
        capacity: n, the greatest number of positions that are remembered. With one step their predictions are, V
            numbers each, and those of a block of up to 2,048 positions more. Room is taken as the stream goes on.
        neighbours: K; all positions where there are fewer.
        steps: T. More than one cost K V d a position, each.
        lr: alpha; None as of `MbPA`, 64 / sqrt(T) over the neighbours' squared length.
        penalty: beta, the cost of leaving the trained parameters; it changes nothing of the first step.
        epsilon: of the kernel.
        half: keep float32 predictions in 16 bits, which takes half the memory and less time. log p then differs by some
            2e-3 at a position, to either side, and much less in the mean.

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

    _predictions: Tensor  # [parts,rows,classes of a part], of one step

    def __init__(
        self,
        output: nn.Module,
        capacity: int,
        *,
        neighbours: int = 256,
        steps: int = 1,
        lr: float | None = None,
        penalty: float = 0.0,
        epsilon: float = 1e-3,
        half: bool = False,
    ) -> None:
        check_sizes(capacity=capacity, neighbours=neighbours)
        check_positive(epsilon=epsilon)
        self.output, self.capacity, self.neighbours = output, capacity, neighbours
        self.epsilon, self.half, self.descent = epsilon, half, Descent(steps, lr, penalty, "sgd")
        self.descent.check()
        self._affine()
        self.clear()

    def clear(self) -> None:
        """Forget everything, as at the beginning of another stream."""
        self._count = 0  # positions that were scored; a position's name is its number
        self._keys: Tensor | None = None  # [rows,d]; position i is in row i % rows

    def __len__(self) -> int:
        return min(self._count, self.capacity)

    @property
    def num_classes(self) -> int:
        """V, the classes of the output."""
        assert isinstance(self.output.weight, Tensor)
        return len(self.output.weight)

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
    def score(self, h: Tensor, targets: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what the output predicts as it is, too: log p(target) without and with adaptation, each [T].

        Both need the same product of the activations and the output's weights: of a model that is scored in any case
        the memory need not compute it again.

        Args:
            h: as of `log_prob`.
            targets: as of `log_prob`.
            logits: those that the model ends with, [T,V], if they are not to be computed here; with one step only.
        """
        affine, weight = self._affine() if logits is None else None, self.output.weight
        assert isinstance(weight, Tensor)
        width, classes = weight.shape[1], len(weight) if logits is None else logits.shape[1]
        check_stream(h, targets, width, classes)
        keys, lengths = check_vectors("h", h, width, _promote(weight), weight.device)
        if logits is not None and (len(logits) != len(keys) or self.descent.steps > 1):
            raise ValueError(
                f"logits must be [{len(keys)},V], and MbPA of one step, got {list(logits.shape)} and "
                f"{self.descent.steps} steps"
            )
        targets = targets.to(weight.device)
        plain, adapted = torch.empty_like(lengths), torch.empty_like(lengths)
        start = 0
        with torch.autocast(weight.device.type, enabled=False):
            while start < len(keys):
                rows = self._take_rows(keys, len(keys) - start, classes)
                part = slice(start, start + rows.stop - rows.start)
                own = None if logits is None else logits[part].to(keys.dtype)
                plain[part], adapted[part] = self._score(affine, keys[part], lengths[part], targets[part], rows, own)
                start = part.stop
        return plain, adapted

    @contextmanager
    def rewinding(self, count: int) -> Iterator[None]:
        """Remember, after the block, what was remembered before it: up to `count` positions are scored in the block."""
        if self._keys is None:
            try:
                yield
            finally:
                self.clear()
            return
        self._make_room(self._keys, count)  # now, because what is kept are views of the rows
        before = self._count
        rows = len(self._keys)
        first = before % rows
        runs = _cut_at_end(first, count, rows)
        places = [each[run] for run in runs for each in self._columns()]
        if self.descent.steps == 1:
            places += [self._predictions[:, run] for run in runs]
        kept = [each.clone() for each in places]
        try:
            yield
        finally:
            for each, values in zip(places, kept, strict=True):
                each.copy_(values)
            self._count = before

    @property
    def nbytes(self) -> int:
        """The bytes that are held, the room for more included."""
        if self._keys is None:
            return 0
        predictions = [self._predictions] if self.descent.steps == 1 else []
        return sum(each.nbytes for each in (*self._columns(), *predictions))

    def _columns(self) -> list[Tensor]:
        assert self._keys is not None
        return [self._keys, self._lengths, self._labels]

    @torch.no_grad()
    def recall(self, h: Tensor, logits: Tensor, past: Past) -> Tensor:
        """Return the logits [Q,V] of queries [Q,d], adapted to what is remembered and to their own past, by one step.

        Args:
            h: as of `log_prob`.
            logits: those that the model ends with, [Q,V].
            past: of each query, with predictions as `soften` gives them.
        """
        assert isinstance(self.output.weight, Tensor)
        h = h.to(_promote(self.output.weight))
        keys, labels, ages = past.keys.to(h.dtype), past.labels, past.ages
        products, lengths, rows = multiply(h, keys), keys.square().sum(1), 0
        if self._keys is not None:
            rows = len(self._keys)
            stored = (self._count - 1 - torch.arange(rows, device=h.device)) % rows + 1  # the youngest is 1 old
            stored = (past.counts.unsqueeze(1) + stored).masked_fill(stored > self._count, 0)
            labels, ages = torch.cat([self._labels, labels]), torch.cat([stored, ages], 1)
            products, lengths = torch.cat([multiply(h, self._keys), products], 1), torch.cat([self._lengths, lengths])
        outputs = logits.to(h.dtype, copy=True)
        if self._rounds(outputs):  # what adapts is what is kept
            outputs = self.soften(outputs).clamp_(min=torch.finfo(outputs.dtype).tiny).log_()
        if not len(labels):
            return outputs
        own = h.square().sum(1, keepdim=True)
        squares = torch.add(lengths, products, alpha=-2).add_(own).clamp_(min=0)
        squares.masked_fill_((ages <= 0) | (ages > self.capacity), torch.inf)

        def measure(queries: Tensor, entries: Tensor) -> Tensor:
            squares = torch.empty(len(queries), dtype=torch.float64, device=h.device)
            stored = entries < rows
            for source, offset, part in ((self._keys, 0, stored), (keys, rows, ~stored)):
                if source is not None:
                    squares[part] = measure_pairs(h[queries[part]], source[entries[part] - offset])
            return squares

        indices = pick_by_products(squares, h, min(self.neighbours, len(labels)), ages, measure)
        inside, distances = indices < rows, squares.gather(1, indices)
        queries, places = (distances < stream.CLOSE * own).nonzero(as_tuple=True)
        distances[queries, places] = measure(queries, indices[queries, places]).to(h.dtype)
        weights = (self.epsilon + distances).reciprocal_()  # 0 of what is hidden
        weights /= weights.sum(1, keepdim=True).clamp_(min=torch.finfo(h.dtype).tiny)
        pulls = products.gather(1, indices)
        if self.output.bias is not None:
            pulls += 1
        pulls.mul_(weights).mul_(self._rates(weights, lengths[indices])).masked_fill_(weights == 0, 0)
        outputs.scatter_add_(1, labels[indices], pulls)
        if rows:
            stream.subtract(outputs, self._predictions, indices.where(inside, 0), pulls.where(inside, 0))
        for query, (nearest, pull, stored) in enumerate(zip(indices, pulls, inside, strict=True)):
            those = ~stored & (pull != 0)
            if bool(those.any()):
                assert past.predictions is not None
                own_rows = nearest[those] - rows
                own_rows = own_rows if past.places is None else past.places[own_rows]
                outputs[query] -= pull[those] @ past.predictions[own_rows].to(h.dtype)
        return outputs

    def _rates(self, weights: Tensor, lengths: Tensor) -> float | Tensor:
        """Return the learning rate, or that of each query [Q,1], of neighbours' weights and squared lengths [Q,K]."""
        if self.descent.lr is not None:
            return self.descent.lr
        units = (weights * lengths).sum(1, keepdim=True) + (self.output.bias is not None)
        return choose_rates(units, self.descent, len(self.output.weight), squared=False)  # type: ignore[arg-type]

    def _rounds(self, like: Tensor) -> bool:
        """Return whether predictions of tensors like this one are kept in 16 bits."""
        return self.half and self.descent.steps == 1 and like.dtype == torch.float32

    def soften(self, logits: Tensor) -> Tensor:
        """Return the softmax of logits [n,V], as it is kept."""
        if not self._rounds(logits):
            return logits.softmax(1)
        width = stream.part_classes(torch.uint16)
        kept = logits.new_empty(-(-logits.shape[1] // width), len(logits), width, dtype=torch.uint16)
        stream.predict(logits.clone(memory_format=torch.contiguous_format), kept, 0)
        rows, p = torch.arange(len(logits), device=logits.device).unsqueeze(1), logits.new_zeros(logits.shape)
        stream.subtract(p, kept, rows, p.new_full(rows.shape, -1.0))
        return p

    def _affine(self) -> Affine:
        affine = affine_of(self.output)
        if affine is None:
            raise ValueError(
                "output must be a torch.nn.Linear or a HebbianSoftmax without hooks, got "
                f"{type(self.output).__name__}: MbPA adapts other networks"
            )
        dtype = _promote(affine.weight)
        return Affine(affine.weight.to(dtype), None if affine.bias is None else affine.bias.to(dtype))

    def _take_rows(self, keys: Tensor, most: int, classes: int) -> slice:
        """Return the rows for the next positions, at most as many, which are those of positions long out of sight."""
        if self._keys is None or self._keys.dtype != keys.dtype or self._keys.device != keys.device:
            self.clear()
            several = self.descent.steps > 1
            self._block = min(_BLOCK, _LEAST_BLOCK if several else max(_LEAST_BLOCK, self.capacity))
        self._make_room(keys, min(most, self._block), classes)
        assert self._keys is not None
        first = self._count % len(self._keys)
        return slice(first, min(first + min(most, self._block), len(self._keys)))

    # Made so that what begins under inference mode can go on outside of it.
    @torch.inference_mode(False)
    def _make_room(self, keys: Tensor, count: int, classes: int = 0) -> None:
        """Let the ring grow for so many more positions, up to its greatest length, before any row is used again.

        Args:
            keys: of the dtype and device of the rows.
            count: of positions.
            classes: V, where there are no rows yet.
        """
        # Whole blocks, so that none is cut in two by the end of the ring.
        longest = self._block * (1 + -(-self.capacity // self._block))
        held = 0 if self._keys is None else len(self._keys)
        wanted = min(self._count + count, longest)
        if wanted <= held:
            return
        # Half as many again, or a stream that comes word by word would be copied again and again.
        rows = min(longest, _LEAST_BLOCK * -(-max(wanted, 3 * held // 2) // _LEAST_BLOCK))
        made = [
            keys.new_zeros(rows, keys.shape[1]),
            keys.new_zeros(rows),
            torch.zeros(rows, dtype=torch.int64, device=keys.device),
        ]
        if self._keys is not None:
            for new, old in zip(made, self._columns(), strict=True):
                new[: self._count] = old[: self._count]
        if self.descent.steps == 1:
            # Softmax, in parts of the classes: a part of all entries stays near the processor.
            dtype = torch.uint16 if self._rounds(keys) else keys.dtype
            width = stream.part_classes(dtype)
            parts = -(-classes // width) if self._keys is None else len(self._predictions)
            predictions = keys.new_empty(parts, rows, width, dtype=dtype)
            if self._keys is not None:
                predictions[:, : self._count] = self._predictions[:, : self._count]
            self._predictions = predictions
        self._keys, self._lengths, self._labels = made

    def _score(
        self, affine: Affine | None, h: Tensor, lengths: Tensor, targets: Tensor, rows: slice, logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Score the positions of a block, and remember them in these rows."""
        assert self._keys is not None
        self._keys[rows], self._lengths[rows], self._labels[rows] = h, lengths, targets
        self._count += len(h)
        if self.descent.steps == 1:
            return self._step_once(affine, h, targets, rows, logits)
        assert affine is not None
        search = self._search(rows.start, self._count - len(h))
        nearest = stream.weigh(multiply(h, self._keys), self._keys, self._lengths, search)
        outputs = F.linear(h, affine.weight, affine.bias)
        target = targets.unsqueeze(1)
        plain = outputs.log_softmax(1).gather(1, target)[:, 0]
        size = max(1, _NUMBERS // (nearest.rows.shape[1] * h.shape[1]))
        for start in range(0, len(h), size):
            part = slice(start, start + size)
            near, squares, weights = (each[part] for each in nearest)
            neighbours = Neighbours(near, squares, weights, self._keys[near], self._labels[near])
            rates = self._rates(weights, self._lengths[near])
            outputs[part] = adapt_affine(affine, h[part], neighbours, self.descent, rates)
        return plain, outputs.gather(1, target)[:, 0] - outputs.logsumexp(1)

    def _search(self, first: int, seen: int) -> stream.Search:
        """Return how the positions in the rows from `first` on search, which so many went before."""
        lr = self.descent.lr
        neighbours, bias = min(self.neighbours, self.capacity), self.output.bias is not None
        rate = WAY if lr is None else lr
        return stream.Search(first, seen, self.capacity, neighbours, self.epsilon, bias, rate, relative=lr is None)

    def _step_once(
        self, affine: Affine | None, h: Tensor, targets: Tensor, rows: slice, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Do the same after one step, which needs no array of all classes for each position."""
        assert self._keys is not None
        ring = stream.StreamRows(self._keys, self._lengths, self._labels, self._predictions)
        parts, capacity, seen = [], self.capacity, self._count - len(h)
        products = h.new_empty(min(_SEARCHES, len(h)), len(self._keys))  # one for all: fresh pages cost as much again
        for start in range(0, len(h), _SEARCHES):
            part = h[start : start + _SEARCHES]
            room, own = products[: len(part)], rows.start + start
            spans = [slice(max(0, own - capacity), own + len(part))]
            if own < capacity and seen > rows.start:  # the ring has been full: they see the end of it, too
                spans.append(slice(own - capacity, None))
            for span in spans:
                room[:, span] = multiply(part, self._keys[span])
            parts.append(stream.find(room, ring, self._search(own, seen + start)))
        pulls = stream.Pulls(*(torch.cat(each) for each in zip(*parts, strict=True)))
        classes = len(self.output.weight) if given is None else given.shape[1]  # type: ignore[arg-type]
        plain, size = torch.empty_like(h[:, 0]), max(1, _LOGITS // classes)
        logits = h.new_empty(min(size, len(h)), classes)
        for start in range(0, len(h), size):
            some = slice(start, start + size)
            outputs = logits[: len(h[some])]
            if given is not None:
                outputs.copy_(given[some])
            else:
                assert affine is not None
                torch.mm(h[some], affine.weight.T, out=outputs)
                if affine.bias is not None:
                    outputs += affine.bias
            plain[some] = outputs.gather(1, targets[some].unsqueeze(1))[:, 0]
            plain[some] -= stream.predict(outputs, self._predictions, rows.start + start)
        adapted = stream.adapt(pulls, ring, first=rows.start, classes=classes)
        return plain, adapted if self._rounds(h) else plain + adapted


def _promote(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _cut_at_end(first: int, count: int, rows: int) -> list[slice]:
    """Return the rows of a ring that `count` entries take from `first` on: up to its end, and then from its start."""
    return [slice(first, min(rows, first + count)), slice(0, max(0, min(first, first + count - rows)))]
