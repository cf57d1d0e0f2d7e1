"""Memory-based parameter adaptation of Sprechmann et al. 2018: a trained model fits itself to what a query is like."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.memory import _affine, _general, _low_rank
from fastweights.memory._checks import positive, vectors
from fastweights.memory._predictions import Predictions
from fastweights.memory.episodic import EpisodicMemory
from fastweights.memory.faiss_index import FaissIndex
from fastweights.memory.neighbours import Neighbours, check_classes, check_epsilon
from fastweights.nn import HebbianSoftmax
from fastweights.nn.modes import evaluating

_NUMBERS = 2**22  # that a block of queries makes, of neighbours' keys or of parameters: more would be fresh pages
_QUERIES = 1024  # that read what is stored together

Affine = tuple[Tensor, Tensor | None]  # a weight [V,d] and a bias [V]


class MbPA:
    """A trained model that adapts its output network to each query's neighbours in a memory, and forgets it again.

    For every query on its own (Sprechmann et al. 2018, algorithm 1), with h_k, v_k and w_k what `store.search` finds
    near its embedding::

        theta_x = theta;   steps times:  theta_x <- theta_x - lr grad J(theta_x)
        J       = sum_k w_k loss(output(h_k; theta_x), v_k) + penalty / 2 |theta_x - theta|^2

    The loss is cross entropy where the memory's values are integers, and the mean squared error where they are floating
    point. The model's own parameters and buffers are never written to, and it is read in evaluation mode;
    `torch.autocast` reaches `embed` alone. An affine output (`torch.nn.Linear`, `nn.HebbianSoftmax`) under SGD is
    adapted in closed form, without a copy of its weights; with one step the outputs at the entries are computed once
    and kept, as long as the weights stay as they are. Of a `torch.nn.Sequential` that begins with a `torch.nn.Linear`,
    large beside the number of neighbours, only the layers after that one are copied for each query.

    Args:
        embed: inputs [B,...] -> keys and queries [B,d].
        output: [B,d] -> [B,V]; all of its parameters adapt.
        store: the memory, whose values are class indices or targets, or a `FaissIndex` of it.
        neighbours: K; all entries where there are fewer.
        steps: T.
        lr: alpha, of the optimizer.
        penalty: beta, what it costs to leave the trained parameters.
        optimizer: "sgd", "rmsprop" or "adam", with the settings that torch has for them.
        epsilon: of the kernel.
        max_prediction_bytes: that the outputs at the entries may take; past it they are computed at each call.

    Raises:
        ValueError: a number out of range, a store that is no memory, or an affine output, or a first affine layer, of
            another width than its keys.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> torch.manual_seed(0).initial_seed()
        0
        >>> model = memory.MbPA(
        ...     torch.nn.Identity(), torch.nn.Linear(2, 3), memory.EpisodicMemory(100, 2), neighbours=2, lr=1.0, steps=5
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
        lr: float = 0.15,
        penalty: float = 0.0,
        optimizer: str = "sgd",
        epsilon: float = 1e-3,
        max_prediction_bytes: int = 2**29,
    ) -> None:
        if not isinstance(store, EpisodicMemory | FaissIndex):
            raise ValueError(f"store must be an EpisodicMemory or a FaissIndex, got {store!r}")
        positive("neighbours", neighbours)
        positive("steps", steps)
        for name, value in (("lr", lr), ("penalty", penalty), ("max_prediction_bytes", max_prediction_bytes)):
            if not isinstance(value, Real) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number, finite and not negative, got {value!r}")
        if optimizer not in _general.RULES:
            raise ValueError(f"optimizer must be one of {', '.join(_general.RULES)}, got {optimizer!r}")
        check_epsilon(epsilon)
        self.embed, self.output = embed, output
        self.index, self.store = store, store.store if isinstance(store, FaissIndex) else store
        self.neighbours, self.steps, self.lr, self.penalty = neighbours, steps, lr, penalty
        self.optimizer, self.epsilon = optimizer, epsilon
        self._predictions = Predictions(max_prediction_bytes)
        self._shortcuts()

    @torch.no_grad()
    def write(self, x: Tensor, y: Tensor, tag: str | None = None) -> None:
        """Remember examples: their embeddings and targets.

        Args:
            x: inputs [n,...].
            y: class indices [n], or targets [n,V].
            tag: a name under which `store.undo` takes them back.

        Raises:
            ValueError: what the memory refuses; nothing is written then.
        """
        self.store.write(self._embedded(x), y, tag)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Answer inputs [Q,...], each with parameters of its own: [Q,V]; the model's own while nothing is written.

        Raises:
            ValueError: embeddings of another width than the memory's keys, or not finite; an output of another width;
                values that are no classes of the output.
        """
        affine, parts = self._shortcuts()  # again: the output is the caller's to change
        queries = self._embedded(x)
        if queries.dim() != 2 or queries.shape[1] != self.store.key_size:
            raise ValueError(
                f"embeddings must be [Q,{self.store.key_size}], the memory's width, got {list(queries.shape)}"
            )
        first = next(self.output.parameters(), None)
        queries = queries if first is None else queries.to(first.dtype)
        # Steps of a learning rate in another precision would be other steps.
        with torch.autocast(queries.device.type, enabled=False), evaluating(self.output):
            if len(self.store) == 0 or len(queries) == 0:
                vectors("queries", queries, self.store.key_size, self.store.dtype, self.store.device)
                outputs: Tensor = self.output(queries)
                return outputs
            return self._adapted(queries, affine, parts)

    def _shortcuts(self) -> tuple[Affine | None, _low_rank.Parts | None]:
        """What spares SGD copies: the output as an affine map, or as one and the rest; refused at another width."""
        affine, parts = affine_of(self.output), _low_rank.parts_of(self.output)
        weight = affine[0] if affine else parts[0].weight if parts else None
        if weight is not None and weight.shape[1] != self.store.key_size:
            raise ValueError(
                f"the output takes {weight.shape[1]} numbers, and the memory's keys have {self.store.key_size}"
            )
        return (affine, parts) if self.optimizer == "sgd" else (None, None)

    def _embedded(self, x: Tensor) -> Tensor:
        with evaluating(self.embed):
            keys: Tensor = self.embed(x)
        return keys

    def _adapted(self, queries: Tensor, affine: Affine | None, parts: _low_rank.Parts | None) -> Tensor:
        count = min(self.neighbours, len(self.store))
        if affine is None:
            if parts is not None and not _low_rank.pays(parts[0], count):
                parts = None
            blocks = torch.split(queries, self._block(count, parts))
            return torch.cat([self._generally(block, parts) for block in blocks])
        once = self.steps == 1 and not self.store.value_dtype.is_floating_point
        rows = self._predictions.rows(self.store, *affine, softmax=once)
        size = max(1, _NUMBERS // (count * queries.shape[1]))
        if rows is not None and once:
            return torch.cat([self._once(block, size, rows, *affine) for block in torch.split(queries, _QUERIES)])
        return torch.cat([self._in_steps(block, rows, *affine) for block in torch.split(queries, size)])

    def _once(self, queries: Tensor, size: int, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One step, from the stored predictions."""
        found = []
        for block in torch.split(queries, size):
            indices, context = self._found(block, len(weight))
            found.append((context.values, rows[indices], _affine.pulls(block, context, bias, self.lr)))
        values, places, pull = (torch.cat(parts) for parts in zip(*found, strict=True))
        return _affine.adapted_once(queries, values, places, pull, self._predictions.stored, weight, bias)

    def _in_steps(self, queries: Tensor, rows: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        indices, context = self._found(queries, len(weight))

        def outputs(part: slice) -> Tensor:
            if rows is None:
                return nn.functional.linear(context.keys[part], weight, bias)
            places = rows[indices[part]]
            return self._predictions.stored[0].index_select(0, places.view(-1)).view(*places.shape, len(weight))

        return _affine.adapted(
            queries, context, outputs, weight, bias, steps=self.steps, lr=self.lr, penalty=self.penalty
        )

    def _generally(self, queries: Tensor, parts: _low_rank.Parts | None) -> Tensor:
        _, context = self._found(queries, self.output(queries[:1]).shape[1])
        told: dict[str, Any] = {"steps": self.steps, "lr": self.lr, "penalty": self.penalty}
        if parts is not None:
            return _low_rank.adapted(*parts, queries, *context, **told).detach()
        return _general.adapted(self.output, queries, *context, **told, optimizer=self.optimizer).detach()

    def _block(self, count: int, parts: _low_rank.Parts | None) -> int:
        """Queries at once, where each has parameters of its own."""
        first, copied = (None, self.output) if parts is None else parts
        numbers = sum(parameter.numel() for parameter in copied.parameters())
        if first is not None:
            numbers += count * (first.out_features + count)
        return max(1, _NUMBERS // (4 * numbers + count * self.store.key_size))

    def _found(self, queries: Tensor, outputs: int) -> tuple[Tensor, _affine.Context]:
        """Indices [Q,K], and what stands there, in the dtype of the queries."""
        found = self.index.search(queries, self.neighbours, epsilon=self.epsilon)
        keys, weights = found.keys.to(queries.dtype), found.weights.to(queries.dtype)
        return found.indices, _affine.Context(keys, self._values(found, queries.dtype, outputs), weights)

    def _values(self, found: Neighbours, dtype: torch.dtype, outputs: int) -> Tensor:
        values = found.values
        if not values.is_floating_point():
            return check_classes(values, outputs)
        if values.shape[2:] != (outputs,):
            raise ValueError(
                f"the output gives {outputs} numbers, and the memory holds targets {list(values.shape[2:])}"
            )
        return values.to(dtype)


def affine_of(output: nn.Module) -> Affine | None:
    """The weight [V,d] and the bias [V] of a network that is an affine map and nothing else, or None."""
    plain = type(output) in (nn.Linear, HebbianSoftmax) and not output._forward_hooks and not output._forward_pre_hooks
    if not plain:
        return None
    weight, bias = output.weight, output.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return weight.detach(), None if bias is None else bias.detach()
