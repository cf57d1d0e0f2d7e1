"""Memory-based parameter adaptation of Sprechmann et al. 2018: a trained model fits itself to a query's neighbours."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_not_negative, check_positive, check_sizes
from fastweights.memory.predictors._adaptation import (
    Affine,
    Descent,
    FirstLayer,
    adapt_affine,
    adapt_first_layer,
    adapt_general,
    adapt_once,
    affine_of,
    choose_rates,
    largest_rates,
    measure_units,
    part_classes,
    pulls,
    split_classes,
)
from fastweights.memory.store.checks import as_tensor, check_vectors
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.faiss_index import FaissIndex
from fastweights.memory.store.neighbours import Neighbours, check_classes
from fastweights.memory.store.ring import Ring
from fastweights.nn import HebbianSoftmax
from fastweights.nn.modes import evaluating

_NUMBERS = 2**22  # the numbers that a block of queries may need: a larger block is slower, because its memory is fresh
_QUERIES = 1024  # queries that read the stored predictions together
_LOGITS = 2**24  # predictions that are computed at once


class MbPA:
    """A trained model that adapts its output network to each query's neighbours in a memory, and forgets it again.

    For every query on its own (Sprechmann et al. 2018, algorithm 1), with h_k, v_k and w_k the keys, values and weights
    that `store.search` returns for its embedding::

        theta_x = theta;   steps times:  theta_x <- theta_x - lr grad J(theta_x)
        J       = sum_k w_k loss(output(h_k; theta_x), v_k) + penalty / 2 |theta_x - theta|^2

    The loss is cross entropy where the memory's values are integers, and the mean squared error where they are floating
    point. The model's own parameters and buffers are never written to, and it is read in evaluation mode;
    `torch.autocast` reaches `embed` alone. Several threads may write and ask: an answer holds the memory's lock.

    An affine output (`torch.nn.Linear`, `nn.HebbianSoftmax`) under SGD is adapted in closed form, without a copy of its
    weights; with one step the outputs at the entries are computed once and kept, as long as the weights stay as they
    are. Of a `torch.nn.Sequential` that begins with a `torch.nn.Linear`, large beside the number of neighbours, only
    the layers after that one are copied for each query. Of an output that is no affine map, the default rate follows
    from how fast the outputs change along the gradient; where steps run away all the same, the network itself answers,
    and one warning says so.

    Old examples can crowd out a new class. Only the K neighbours of a query count, and of a class with five examples
    among thousands of others all K may be others': then the new class is never the answer, whatever the learning rate.
    Write some dozen examples of each old class rather than all of them, or use `AdaptiveClassifier`.

    Args:
        embed: inputs [B,...], or any one argument -> keys and queries [B,d].
        output: [B,d] -> [B,V]; all of its parameters adapt.
        store: the memory, whose values are class indices or targets, or a `FaissIndex` of it.
        neighbours: K; all entries where there are fewer. 256 and one step are the paper's for language; for classes 32
            neighbours and 20 steps were better wherever they were tried, and take longer.
        steps: T.
        lr: alpha, the learning rate of the optimizer. None, for SGD alone, is a rate of each query's own: V / 2 for
            targets that are numbers, 64 / sqrt(T) for classes, over the mean squared length of the neighbours' keys
            (each with a 1 for the bias). A rate with which steps towards numbers must diverge is not taken: these
            queries have that of None, and one warning says what the largest good one is.
        penalty: beta, the cost of leaving the trained parameters.
        optimizer: "sgd", "rmsprop" or "adam", with the settings that torch has for them.
        epsilon: of the kernel.
        max_prediction_bytes: the room for the outputs at the entries; past it they are computed at each call.

    Attributes:
        store: the memory itself, also where a `FaissIndex` was given.

    Raises:
        ValueError: a number out of range, a store that is no memory, or an affine output, or a first affine layer, of
            another width than its keys.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> torch.manual_seed(0).initial_seed()
        0
        >>> model = memory.MbPA(
        ...     torch.nn.Identity(), torch.nn.Linear(2, 3), memory.EpisodicMemory(100, 2), neighbours=2
        ... )
        >>> model.write(torch.tensor([[5.0, 0.0], [0.0, 5.0]]), torch.tensor([2, 1]))  # inputs [n,...], targets [n]
        >>> model(torch.tensor([[5.0, 0.0], [0.0, 5.0]])).argmax(1)                    # inputs [Q,...] -> [Q,V]
        tensor([2, 1])
    """

    def __init__(
        self,
        embed: nn.Module,
        output: nn.Module,
        store: EpisodicMemory | FaissIndex,
        *,
        neighbours: int = 256,
        steps: int = 1,
        lr: float | None = None,
        penalty: float = 0.0,
        optimizer: str = "sgd",
        epsilon: float = 1e-3,
        max_prediction_bytes: int = 2**29,
    ) -> None:
        if not isinstance(store, EpisodicMemory | FaissIndex):
            raise ValueError(f"store must be an EpisodicMemory or a FaissIndex, got {store!r}")
        Descent(steps, lr, penalty, optimizer).check()
        check_sizes(neighbours=neighbours)
        check_not_negative(max_prediction_bytes=max_prediction_bytes)
        check_positive(epsilon=epsilon)
        self.embed, self.output = embed, output
        self.store = store.store if isinstance(store, FaissIndex) else store
        self._search = store.search
        self.neighbours, self.steps, self.lr, self.penalty = neighbours, steps, lr, penalty
        self.optimizer, self.epsilon = optimizer, epsilon
        self._predictions = _Predictions(max_prediction_bytes)
        self._warned = False
        self._check_width()

    def __repr__(self) -> str:
        return (
            f"MbPA({type(self.embed).__name__}, {type(self.output).__name__}, {self.store!r}, "
            f"neighbours={self.neighbours}, steps={self.steps}, lr={self.lr}, penalty={self.penalty}, "
            f"optimizer={self.optimizer!r}, epsilon={self.epsilon})"
        )

    @torch.no_grad()
    def write(self, x: Any, y: Any, tag: str | None = None) -> None:
        """Remember examples: their embeddings and targets.

        Args:
            x: inputs [n,...], or whatever `embed` takes as its one argument.
            y: class indices [n], or targets [n,V].
            tag: a name under which `store.undo` takes them back.

        Raises:
            ValueError: the memory refuses the embeddings or targets, or the output has no such class, or gives targets
                of another width; nothing is written then.
        """
        keys = self._embed(x)
        if keys.dim() == 2 and keys.shape[1] == self.store.key_size and len(keys):  # else the memory says what is wrong
            self._check_targets(y, self._find_width(keys))
        self.store.write(keys, y, tag)

    @torch.no_grad()
    def __call__(self, x: Any) -> Tensor:
        """Answer inputs [Q,...], each with parameters of its own: [Q,V]; the model's own while nothing is written.

        Raises:
            ValueError: embeddings of another width than the memory's keys, or not finite; an output of another width;
                values that are no classes of the output.
        """
        self._check_width()  # again: the output is the caller's to change
        queries, key_size = self._embed(x), self.store.key_size
        if queries.dim() != 2 or queries.shape[1] != key_size:
            raise ValueError(f"embeddings must be [Q,{key_size}], the memory's width, got {list(queries.shape)}")
        queries = self._cast(queries)
        # Steps of a learning rate in another precision would be other steps.
        with torch.autocast(queries.device.type, enabled=False), evaluating(self.output), self.store.lock:
            ring = self.store.entries()
            if not ring.count or not len(queries):
                check_vectors("queries", queries, key_size, ring.keys.dtype, ring.keys.device)
                return self._run_output(queries)
            affine = affine_of(self.output) if self.optimizer == "sgd" else None
            answers = self._answer(queries, ring) if affine is None else self._answer_affine(affine, queries, ring)
            return self._replace_lost(answers, queries)

    def _check_width(self) -> None:
        output = getattr(self.output, "_orig_mod", self.output)
        first = output[0] if type(output) is nn.Sequential and len(output) else output
        if type(first) not in (nn.Linear, HebbianSoftmax) or output._forward_pre_hooks or first._forward_pre_hooks:
            return
        assert isinstance(first.weight, Tensor)
        width, key_size = first.weight.shape[1], self.store.key_size
        if width != key_size:
            raise ValueError(f"the output takes {width} numbers, and the memory's keys have {key_size}")

    def _find_width(self, keys: Tensor) -> int:
        """Return how many numbers the output gives."""
        if (affine := affine_of(self.output)) is not None:
            return len(affine.weight)
        with torch.autocast(keys.device.type, enabled=False), evaluating(self.output):
            return self._run_output(self._cast(keys[:1])).shape[1]

    def _check_targets(self, y: Any, width: int) -> None:
        if self.store.value_dtype.is_floating_point:
            if self.store.value_shape != (width,):
                raise ValueError(_say_other_width(width, self.store.value_shape))
            return
        labels = as_tensor("y", y)
        wrong = (labels < 0) | (labels >= width)
        if labels.dim() == 1 and bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"row {row} of y has the label {labels[row].item()}, and the output's classes are 0 to {width - 1}; "
                "nothing was changed: widen_output() makes room for new classes"
            )

    def _cast(self, keys: Tensor) -> Tensor:
        """Return keys in the dtype of the output's parameters."""
        first = next(self.output.parameters(), None)
        return keys if first is None else keys.to(first.dtype)

    def _run_output(self, keys: Tensor) -> Tensor:
        return _check_tensor("output", self.output(keys), "head(h).logits")

    def _embed(self, x: Any) -> Tensor:
        with evaluating(self.embed):
            return _check_tensor("embed", self.embed(x), "model(**x).last_hidden_state[:, 0]")

    def _answer(self, queries: Tensor, ring: Ring) -> Tensor:
        """Answer in blocks of queries that each have parameters of their own."""
        width = self._run_output(queries[:1]).shape[1]
        count = min(self.neighbours, ring.count)
        split = _first_layer_of(self.output, count) if self.optimizer == "sgd" else None
        numbers = sum(parameter.numel() for parameter in (split.rest if split else self.output).parameters())
        if split:
            numbers += count * (split.first.out_features + count)
        blocks = torch.split(queries, max(1, _NUMBERS // (4 * numbers + count * queries.shape[1])))
        descent, answers = self._descent, []
        for block in blocks:
            near = self._find(block, width)
            answers.append(
                adapt_first_layer(split, block, near, descent)
                if split
                else adapt_general(self.output, block, near, descent)
            )
        return torch.cat(answers)

    def _answer_affine(self, affine: Affine, queries: Tensor, ring: Ring) -> Tensor:
        """Answer without copies of the weights; after one step from the stored predictions, if there is room."""
        width = len(affine.weight)
        one_step = self.steps == 1 and not ring.values.is_floating_point()
        affine = self._predictions.add_to(affine, ring, softmax=one_step)
        size = max(1, _NUMBERS // (min(self.neighbours, ring.count) * queries.shape[1]))
        if one_step and affine.rows is not None:
            return torch.cat([self._answer_once(affine, block, size) for block in torch.split(queries, _QUERIES)])
        answers = []
        for block in torch.split(queries, size):
            near = self._find(block, width)
            rates = self._choose_rates(near, affine.bias, width)
            answers.append(adapt_affine(affine, block, near, self._descent, rates))
        return torch.cat(answers)

    def _answer_once(self, affine: Affine, queries: Tensor, size: int) -> Tensor:
        """Answer after one step, from the stored predictions."""
        assert affine.rows is not None
        assert affine.stored is not None
        values, rows, pull, width = [], [], [], len(affine.weight)
        for block in torch.split(queries, size):
            near = self._find(block, width)
            values.append(near.values)
            rows.append(affine.rows[near.indices])
            pull.append(pulls(block, near, affine.bias, self._choose_rates(near, affine.bias, width)))
        answers = F.linear(queries, affine.weight, affine.bias)
        adapt_once(answers, affine.stored, torch.cat(values), torch.cat(rows), torch.cat(pull))
        return answers

    @property
    def _descent(self) -> Descent:
        return Descent(self.steps, self.lr, self.penalty, self.optimizer)

    def _choose_rates(self, near: Neighbours, bias: Tensor | None, width: int) -> float | Tensor:
        """Return the learning rate of an affine output, or that of each query, [Q,1]: none with which steps diverge."""
        lr, squared = self.lr, near.values.is_floating_point()
        if lr is not None and not squared:
            return lr  # the gradient of cross entropy is bounded
        good = choose_rates(measure_units(near, bias), self._descent, width, squared=squared).unsqueeze(1)
        if lr is None:
            return good
        # `good` is of the sum of all eigenvalues, which seldom leaves the largest in doubt.
        if bool((lr < 2 * good).all()):
            return lr
        most = largest_rates(near, bias, self._descent, width).unsqueeze(1)
        wrong = lr >= most
        if bool(wrong.any()):
            self._warn(
                f"lr={lr} is too large for {int(wrong.sum())} of {len(wrong)} queries: each step would lead further "
                "away from their neighbours. They take the rate of lr=None instead; the largest rate that is good for "
                f"all of them is {float(most.min()) / 2:.2g}"
            )
        return torch.where(wrong, good, lr)

    def _replace_lost(self, answers: Tensor, queries: Tensor) -> Tensor:
        """Let the network itself answer where steps have led nowhere: the answer is not finite there."""
        lost = ~answers.isfinite().flatten(1).all(1)
        if not bool(lost.any()):
            return answers
        own = self._run_output(queries[lost])
        if bool(own.isfinite().all()):  # else it is the network's own fault
            self._warn(
                f"the steps of {int(lost.sum())} of {len(lost)} queries led further away from the neighbours, with "
                f"lr={self.lr} and steps={self.steps}: the network itself answers these. Give a smaller lr"
                f"{'' if self.lr is None or self.optimizer != 'sgd' else ', or lr=None'}"
            )
        answers[lost] = own
        return answers

    def _warn(self, words: str) -> None:
        """Warn once, not at every query."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"{words}. This warning comes once", stacklevel=5)

    def _find(self, queries: Tensor, width: int) -> Neighbours:
        """Search, and return keys, weights and targets in the dtype of the queries, classes as int64."""
        neighbours, dtype = self._search(queries, self.neighbours, epsilon=self.epsilon), queries.dtype
        values = neighbours.values
        if not values.is_floating_point():
            try:
                values = check_classes(values, width)
            except ValueError as error:
                raise ValueError(f"{error}{self._count_lacking(width)}") from None
        elif values.shape[2:] != (width,):
            raise ValueError(_say_other_width(width, values.shape[2:]))
        else:
            values = values.to(dtype)
        return neighbours._replace(keys=neighbours.keys.to(dtype), values=values, weights=neighbours.weights.to(dtype))

    def _count_lacking(self, width: int) -> str:
        """Return words on the memory's labels that the output has no class for."""
        values = self.store.values
        lacking = values[(values < 0) | (values >= width)]
        if values.dim() > 1 or not len(lacking):
            return ""
        label = int(lacking[0])
        return (
            f": {len(lacking)} of its {len(values)} entries have labels that the output lacks, such as {label}. Give "
            f"it more classes with widen_output(), or forget those: store.remove_class({label}), or store.undo() of "
            "the tag that they were written under"
        )


def _say_other_width(width: int, shape: Sequence[int]) -> str:
    return f"the output gives {width} numbers, and the memory holds targets {list(shape)}"


def _check_tensor(name: str, outcome: Any, example: str) -> Tensor:
    if not isinstance(outcome, Tensor):
        raise ValueError(
            f"{name} must return a tensor, got {type(outcome).__name__}: wrap it in a torch.nn.Module whose forward "
            f"returns one, such as {example}"
        )
    return outcome


def _first_layer_of(output: nn.Module, count: int) -> FirstLayer | None:
    """Return a first affine layer and the rest, where a step moves less without a copy, or None."""
    if type(output) is not nn.Sequential or len(output) < 2:
        return None
    first, rest = output[0], output[1:]
    if type(first) is not nn.Linear or any(part._forward_hooks or part._forward_pre_hooks for part in (output, first)):
        return None
    if {id(parameter) for parameter in first.parameters()} & {id(parameter) for parameter in rest.parameters()}:
        return None
    # It passes over K (h + K) numbers, and the copy's d h several times.
    moves_less = count * (first.out_features + count) < first.in_features * first.out_features / 2
    return FirstLayer(first, rest) if moves_less else None


class _Predictions:
    """An affine output's predictions at every entry of a memory, computed again when the weights change.

    Rows stay where they are while entries come and go around them.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._stored = torch.empty(0, 0, 0)  # [parts,rows,width]
        self._made_of: tuple[object, ...] = ()  # all that they depend on, but for the numbers in the weights
        self._weights: list[Tensor] = []  # copies of those
        self._numbers = np.empty(0, np.int64)  # the entries that have a row, ascending
        self._rows = np.empty(0, np.int64)  # the row of each of those entries
        self._at = torch.empty(0, dtype=torch.int64)

    # Made so that what begins under inference mode can go on outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def add_to(self, affine: Affine, ring: Ring, *, softmax: bool) -> Affine:
        """Return the output with its predictions and the row of every entry; without, where there is no room for them.

        They are the softmax, in parts of the classes, or the outputs as they are, in one part.
        """
        weight = affine.weight
        width = part_classes(weight.dtype) if softmax else len(weight)
        shape = -(-len(weight) // width), ring.capacity, width
        if math.prod(shape) * weight.element_size() > self.most_bytes:
            return affine
        weights = [weight] if affine.bias is None else [weight, affine.bias]
        made_of = (ring.identity, softmax, weight.dtype, weight.device, weight.shape)
        if made_of != self._made_of or not _equal(weights, self._weights):
            self._made_of = made_of
            self._weights = [tensor.clone() for tensor in weights]
            self._stored = weight.new_zeros(shape)
            self._numbers = self._rows = np.empty(0, np.int64)
        numbers = ring.ordered_numbers()
        if not np.array_equal(numbers, self._numbers):
            self._follow(ring, numbers, affine, softmax)
        return affine._replace(stored=self._stored, rows=self._at)

    def _follow(self, ring: Ring, numbers: np.ndarray, affine: Affine, softmax: bool) -> None:
        stays = np.isin(self._numbers, numbers, assume_unique=True)
        kept, rows = self._numbers[stays], self._rows[stays]
        new = ~np.isin(numbers, kept, assume_unique=True)
        free = np.ones(ring.capacity, bool)
        free[rows] = False
        chosen = np.flatnonzero(free)[: int(new.sum())]
        placed = np.empty(len(numbers), np.int64)
        placed[~new], placed[new] = rows, chosen
        weight = affine.weight
        keys = ring.keys_at(torch.as_tensor(np.flatnonzero(new), device=ring.keys.device)).to(weight.dtype)
        size = max(1, _LOGITS // len(weight))
        for first in range(0, len(keys), size):
            part = torch.as_tensor(chosen[first : first + size], device=weight.device)
            outputs = F.linear(keys[first : first + size], weight, affine.bias)
            predictions = split_classes(outputs.softmax(1) if softmax else outputs, self._stored.shape[2])
            self._stored.index_copy_(1, part, predictions)
        self._numbers, self._rows = numbers, placed
        self._at = torch.as_tensor(placed, device=weight.device)


def _equal(weights: list[Tensor], copies: list[Tensor]) -> bool:
    """Compare number by number: torch does not count writes through `.data`, and they may keep any sum."""
    return len(weights) == len(copies) and all(map(_same_bits, weights, copies))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Integers of 64 bits are compared in less than half of the time of floats.
    begins = (each.storage_offset() * each.element_size() for each in (a, b))
    if a.shape != b.shape or not a.is_contiguous() or any(place % 8 for place in (*begins, a.nbytes)):
        return torch.equal(a, b)
    return torch.equal(a.view(-1).view(torch.int64), b.view(-1).view(torch.int64))
