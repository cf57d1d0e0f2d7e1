"""A softmax that takes one step at each position of a stream, on the positions before it: the definition.

A position t finds the K nearest keys h_k among the last entries, with the weights w_k, proportional to
1 / (epsilon + |h_k - h_t|^2), their sum 1. One step of gradient descent on the weighted cross entropy of their labels
y_k, from the trained weights W and b, changes the logits of h_t by

    sum_k pull_k (onehot(y_k) - p_k),    pull_k = rate w_k (h_k . h_t + 1)

with p_k the softmax at entry k as it was; the 1 is the bias's (Sprechmann et al. 2018, equations 4 to 6). With a rate
in units of the neighbours' squared length, the rate is divided by sum_k w_k (|h_k|^2 + 1).

Entries lie in a ring of rows: position i of the stream in row i modulo their number. Positions that are given together
lie in consecutive rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.nearest import measure_pairs, pick_by_products

# Of the squared lengths: a squared distance below it comes from a difference, as rounding is much of it in a product.
CLOSE = 2**-5
ROW_BYTES = 64  # an entry's row in a part of the classes: a line of a processor's caches
_NUMBERS = 2**22  # logits at once
_LEAST = 1e-37  # of a sum of probabilities whose logarithm is taken


class StreamRows(NamedTuple):
    """The remembered positions, a row for each."""

    keys: Tensor  # [rows,d]
    lengths: Tensor  # [rows], squared
    labels: Tensor  # [rows] int64
    predictions: Tensor  # [parts,rows,classes of a part], the softmax at each; uint16 holds the upper half of a float32


class Search(NamedTuple):
    """The positions that look for neighbours, the entries that they may see, and the step that they take."""

    first: int  # the row of the first position
    seen: int  # the positions before it, ever
    capacity: int  # how many of the last positions each may see
    neighbours: int  # K, at most the capacity
    epsilon: float  # of the kernel
    bias: bool  # the softmax has one
    rate: float  # of the step
    relative: bool  # the rate is in units of one over the neighbours' weighted mean squared length


class Pulls(NamedTuple):
    """The rows that positions adapt to, and by how much."""

    offsets: Tensor  # [T,K] int32, places of their rows in a part, in bytes
    pulls: Tensor  # [T,K]
    ordered: Tensor  # [T,K] int64, a label above the place of its neighbour, ascending
    counts: Tensor  # [T] int32, how many of the K there are


class Weighed(NamedTuple):
    """The nearest entries of positions; where there are fewer than K the position's own row stands, with no weight."""

    rows: Tensor  # [T,K] int64
    squares: Tensor  # [T,K], squared distances
    weights: Tensor  # [T,K], each row's sum 1


def part_classes(dtype: torch.dtype) -> int:
    """Return how many classes a part of the predictions has: as many as fill a line of a processor's caches."""
    return ROW_BYTES // dtype.itemsize


def predict(logits: Tensor, predictions: Tensor, first: int) -> Tensor:
    """Store the softmax of logits [T,V] in the rows from `first` on, and return its normalisers [T]."""
    width = predictions.shape[2]
    padded = F.pad(logits.softmax(1), (0, len(predictions) * width - logits.shape[1]))
    parts = padded.view(len(logits), len(predictions), width).transpose(0, 1)
    predictions[:, first : first + len(logits)] = _store(parts) if predictions.dtype == torch.uint16 else parts
    return logits.logsumexp(1)


def weigh(products: Tensor, keys: Tensor, lengths: Tensor, search: Search) -> Weighed:
    """Return the nearest entries of each position, as `find` does, with their weights."""
    count = len(keys)
    places = torch.arange(count, device=keys.device)
    own = places[search.first : search.first + len(products)].unsqueeze(1)
    ages = (own - places) % count
    visible = (search.seen + own - search.first).clamp(max=search.capacity)
    h, own_lengths = keys[own[:, 0]], lengths[own]
    squares = torch.add(lengths, products, alpha=-2).add_(own_lengths).clamp_(min=0)
    squares.masked_fill_((ages == 0) | (ages > visible), torch.inf)

    def measure(queries: Tensor, entries: Tensor) -> Tensor:
        return measure_pairs(h[queries], keys[entries])

    nearest = pick_by_products(squares, h, min(search.neighbours, count), ages, measure)
    squares = squares.gather(1, nearest)
    queries, columns = (squares < CLOSE * own_lengths).nonzero(as_tuple=True)
    squares[queries, columns] = measure(queries, nearest[queries, columns]).to(h.dtype)
    weights = (search.epsilon + squares).reciprocal_()  # 0 of what is hidden
    nearest = torch.where(weights > 0, nearest, own)
    return Weighed(nearest, squares, weights / weights.sum(1, keepdim=True).clamp_(min=torch.finfo(h.dtype).tiny))


def find(products: Tensor, rows: StreamRows, search: Search) -> Pulls:
    """Return what the nearest of the last entries before each of the positions pull."""
    nearest, _, weights = weigh(products, rows.keys, rows.lengths, search)
    pulls = search.rate * weights * (products.gather(1, nearest) + search.bias).masked_fill_(weights == 0, 0)
    if search.relative:
        units = (weights * (rows.lengths[nearest] + search.bias)).sum(1, keepdim=True)
        pulls /= units.clamp_(min=torch.finfo(pulls.dtype).tiny)
    order = (weights == 0).to(torch.int8).argsort(dim=1, stable=True)  # those that there are come first
    nearest, pulls = nearest.gather(1, order), pulls.gather(1, order)
    columns = torch.arange(nearest.shape[1], device=nearest.device)
    ordered = (rows.labels[nearest] << 32 | columns).sort(dim=1).values
    return Pulls((ROW_BYTES * nearest).int(), pulls, ordered, (weights > 0).sum(1).int())


def adapt(pulls: Pulls, rows: StreamRows, *, first: int, classes: int) -> Tensor:
    """Return what log p of their own labels gains, of the positions in the rows from `first` on, [T].

    Of predictions that are rounded, uint16, it is log p itself: the softmax that adapts is the rounded one.
    """
    rounded = rows.predictions.dtype == torch.uint16
    gains, size = torch.empty_like(pulls.pulls[:, 0]), max(1, _NUMBERS // classes)
    for start in range(0, len(gains), size):
        part = slice(start, start + size)
        pull, nearest = pulls.pulls[part], pulls.offsets[part].long() // ROW_BYTES
        own = torch.arange(first + start, first + start + len(pull), device=pull.device)
        change = pull.new_zeros(len(pull), classes).scatter_add_(1, rows.labels[nearest], pull)
        subtract(change, rows.predictions, nearest, pull)
        p = torch.zeros_like(change)
        subtract(p, rows.predictions, own.unsqueeze(1), -torch.ones_like(pull[:, :1]))
        target = rows.labels[own].unsqueeze(1)
        gain = change.gather(1, target)
        if rounded:
            gain += p.gather(1, target).clamp_(min=torch.finfo(p.dtype).tiny).log_()
        else:
            gain += p.sum(1, keepdim=True).log_()  # 0 but for rounding
        most = change.amax(1, keepdim=True).clamp_(min=0)
        sums = p.mul_((change - most).exp_()).sum(1, keepdim=True).clamp_(min=_LEAST)
        gains[part] = (gain - most - sums.log_())[:, 0]
    return gains


def subtract(outputs: Tensor, predictions: Tensor, nearest: Tensor, pulls: Tensor) -> None:
    """Subtract from outputs [T,V] the stored rows [T,K] int64, weighted by pulls [T,K]; a pull of 0 skips its row."""
    width = predictions.shape[2]
    used = torch.unique(nearest[pulls != 0])  # rows that were never written hold anything, and 0 times NaN is NaN
    if not len(used):
        return
    places = torch.searchsorted(used, nearest).clamp_(max=len(used) - 1)
    for part, of_part in zip(predictions, torch.split(outputs, width, 1), strict=True):
        stored = _read(part.view(torch.int32)[used]) if part.dtype == torch.uint16 else part[used]
        taken = F.embedding_bag(places, stored, per_sample_weights=pulls, mode="sum")
        of_part -= taken[:, : of_part.shape[1]]


# In 16 bits, the upper half of a float32, two share a word: class i, and class i + 16 of the part. The upper one is
# read with the lower one's bits behind its own, and is rounded so that this is nearest.


def _read(words: Tensor) -> Tensor:
    """Return what is stored in 16 bits, two in a word [n,width / 2] int32, as float32 [n,width]."""
    lines = words.view(len(words), -1, ROW_BYTES // 4)
    return torch.cat([(lines << 16).view(torch.float32), lines.view(torch.float32)], 2).flatten(1)


def _store(values: Tensor) -> Tensor:
    """Round float32 [parts,n,32], none of them negative, to 16 bits."""
    low, high = (each.contiguous().view(torch.int32) for each in values.chunk(2, -1))
    low = (low + 0x8000) >> 16
    return ((high + 0x8000 - low).clamp_(min=0) & ~0xFFFF | low).view(torch.uint16)
