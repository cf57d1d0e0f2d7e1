"""A layer whose fast weights bind the classes of a task at first sight (Munkhdalai & Trischler 2018)."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_sizes
from fastweights.nn._few_shot import SLOPE, check_labels, to_single
from fastweights.nn._piecewise import evaluated
from fastweights.ops.autocast import without_autocast

Rule = Literal["hebbian", "gradient"]
_MAPPING_SIZE = 40  # units of the network that maps gradients to fast weights (appendix A)


class FastWeightsLinear(nn.Module):
    """A linear layer with slow weights W, learnt over all tasks, and fast weights M, written anew for each task.

    Slow and fast weights act side by side on the same input (Munkhdalai & Trischler 2018, eq 4, s a leaky ReLU)::

        h = s(W x + b) + s(M^T x)

    What M is written from are the task's labelled examples, its description. The Hebbian rule (eq 2) binds the input of
    an example, its key k, to a random projection R y of its one-hot label; R is drawn once and never learnt. The
    gradient rule (eq 5) maps the slow weights' error gradients to fast weights, each coordinate by the same small
    network g, which is learnt::

        hebbian    M = sum_i k_i (R y_i)^T
        gradient   M = g(sum_i k_i e_i^T)                 e_i = dL_i / d(W k_i + b)

    All tasks are written and read at once. In the Hebbian rule gradients flow through the writing, into the keys: that
    is how representations learn to be bound. In the gradient rule keys and error gradients are constants to g.

    Args:
        in_features: D.
        out_features: H.
        num_classes: C, the most classes of a task: the columns of R.
        rule: "hebbian" or "gradient".
        negative_slope: of s; 1 makes it the identity, as in a softmax layer.
        label_noise: in training, uniform noise between -`label_noise` and `label_noise` is added to the one-hot labels
            before R (appendix A: 0.01 for convolutional networks on mini-ImageNet).
        slow: whether there are W and b; without them h = s(M^T x).
        one_hot: bind to the one-hot labels themselves, without R, as in a softmax layer; then H is C.
        stop_gradient: no gradient flows through the writing; g of the gradient rule then stays as it is drawn.
        second_order: the gradient rule's error gradients are differentiated too; else they are constants to g.
        device: of parameters and buffers.
        dtype: of parameters and buffers.

    Attributes:
        weight: [H,D], W, drawn as He et al. 2015; or None.
        bias: [H], b, zeros at first; or None.
        projection: [H,C], a buffer: R, uniform within 1 / sqrt(H) either way; or None.
        mapping: g, a network of three layers; or None.

    Raises:
        ValueError: a size that is no positive integer, an unknown rule, a number out of range, or arguments that do not
            go together.

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.FastWeightsLinear(64, 288, num_classes=5)
        >>> keys, labels = torch.randn(8, 5, 64), torch.arange(5).expand(8, 5)  # 8 tasks of 5 examples each
        >>> memory = layer.write(keys, labels)                                  # [tasks,D,H]
        >>> h = layer(torch.randn(8, 75, 64), memory)                           # 75 queries of each task
        >>> memory.shape, h.shape
        (torch.Size([8, 64, 288]), torch.Size([8, 75, 288]))
    """

    weight: Tensor | None
    bias: Tensor | None
    projection: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_classes: int,
        *,
        rule: Rule = "hebbian",
        negative_slope: float = 0.2,
        label_noise: float = 0.0,
        slow: bool = True,
        one_hot: bool = False,
        stop_gradient: bool = False,
        second_order: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        sizes = {"in_features": in_features, "out_features": out_features, "num_classes": num_classes}
        _check(sizes, rule, negative_slope, label_noise, slow, one_hot, second_order)
        self.in_features, self.out_features, self.num_classes = in_features, out_features, num_classes
        self.rule, self.negative_slope, self.label_noise = rule, negative_slope, label_noise
        self.slow, self.one_hot = slow, one_hot
        self.stop_gradient, self.second_order = stop_gradient, second_order
        made = {"device": device, "dtype": dtype}
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(out_features, in_features, **made)) if slow else None
        )
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **made)) if slow else None)
        projected = rule == "hebbian" and not one_hot
        self.register_buffer("projection", torch.empty(out_features, num_classes, **made) if projected else None)
        self.mapping = _mapping(made) if rule == "gradient" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the slow weights, R and g anew."""
        if self.weight is not None and self.bias is not None:
            nn.init.kaiming_normal_(self.weight)
            nn.init.zeros_(self.bias)
        if self.projection is not None:
            bound = 1 / math.sqrt(self.out_features)
            nn.init.uniform_(self.projection, -bound, bound)
        for layer in self.mapping or ():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def write(self, keys: Tensor, labels: Tensor | None = None, *, errors: Tensor | None = None) -> Tensor:
        """The fast weights of each task, from its description alone: what another task wrote is not in them.

        They are in single precision at least, and are read so, under autocast too.

        Shapes: keys [tasks,n,D], the layer's inputs; labels [tasks,n] int64, 0 to C - 1, for the Hebbian rule; errors
        [tasks,n,H] for the gradient rule, each example's error gradient with respect to W k + b, with no fast weights
        -> [tasks,D,H].

        Raises:
            ValueError: the rule needs the other of labels and errors, or shapes, dtypes or labels do not fit.

        Examples:
            >>> import torch
            >>> from fastweights import nn
            >>> layer = nn.FastWeightsLinear(4, 3, num_classes=2, rule="gradient")
            >>> layer.write(torch.randn(1, 6, 4), errors=torch.randn(1, 6, 3)).shape
            torch.Size([1, 4, 3])
        """
        if self.rule == "hebbian":
            if labels is None or errors is not None:
                raise ValueError("the hebbian rule binds keys to labels: write(keys, labels)")
            return self._projected(self.bind(keys, labels))
        if errors is None or labels is not None:
            raise ValueError("the gradient rule maps error gradients: write(keys, errors=errors)")
        self._check_keys(keys)
        memory = self._mapped(keys, errors)
        return memory.detach() if self.stop_gradient else memory

    def bind(self, keys: Tensor, labels: Tensor) -> Tensor:
        """What the Hebbian rule writes, before R: sum_i k_i y_i^T, to be read as what `write` gives.

        The same numbers (eq 2) in a fraction of the time and room: a task has fewer classes than the layer has outputs,
        and what is read is projected in place of what is written. Where it has as many, this is `write`.

        Shapes: keys [tasks,n,D], labels [tasks,n] int64, 0 to C - 1 -> [tasks,D,C].

        Raises:
            ValueError: the rule is the gradient's, or shapes, dtypes or labels do not fit.

        Examples:
            >>> import torch
            >>> from fastweights import nn
            >>> layer = nn.FastWeightsLinear(4, 3, num_classes=2)
            >>> keys, labels, x = torch.randn(1, 6, 4), torch.tensor([[0, 1, 0, 1, 0, 1]]), torch.randn(1, 5, 4)
            >>> torch.allclose(layer(x, layer.bind(keys, labels)), layer(x, layer.write(keys, labels)), atol=1e-6)
            True
        """
        if self.rule != "hebbian":
            raise ValueError("the gradient rule binds nothing: write(keys, errors=errors)")
        self._check_keys(keys)
        check_labels(labels, keys.shape[:-1], self.num_classes)
        with without_autocast(keys.device.type):
            keys = to_single(keys)
            values = F.one_hot(labels, self.num_classes).to(keys.dtype)
            if self.training and self.label_noise:
                values = values + torch.empty_like(values).uniform_(-self.label_noise, self.label_noise)
            sums = keys.mT @ values
            # Told from the projected by its width.
            if self.projection is not None and self.num_classes == self.out_features:
                sums = sums @ self.projection.T.to(sums.dtype)
        return sums.detach() if self.stop_gradient else sums

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Read: x [tasks,m,D] and memory -> [tasks,m,H]; without a memory, s(W x + b) alone.

        Shapes: memory [tasks,D,H] of `write`, or [tasks,D,C] of `bind`.

        Raises:
            ValueError: shapes or dtypes do not fit, or there are neither slow weights nor a memory.
        """
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x must be [tasks,m,{self.in_features}], got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"x must be floating point, got {x.dtype}")
        read = None
        if memory is not None:
            self._check_memory(x, memory)
            with without_autocast(x.device.type):
                read = self._activation(self._projected(to_single(x) @ to_single(memory)))
        if self.weight is None:
            if read is None:
                raise ValueError("this layer has no slow weights: give it the memory that write returned")
            return read.to(x.dtype)
        h = self._activation(F.linear(x, self.weight, self.bias))
        return h if read is None else h + read.to(h.dtype)

    def extra_repr(self) -> str:
        said = f"{self.in_features}, {self.out_features}, num_classes={self.num_classes}, rule={self.rule!r}"
        changed = {"slow": True, "one_hot": False, "stop_gradient": False, "second_order": False, "label_noise": 0.0}
        return said + "".join(
            f", {name}={value}" for name, usual in changed.items() if (value := getattr(self, name)) != usual
        )

    def _activation(self, z: Tensor) -> Tensor:
        return z if self.negative_slope == 1 else F.leaky_relu(z, self.negative_slope)

    def _projected(self, sums: Tensor) -> Tensor:
        """[...,H] of sums [...,C] by R, and what has H columns already as it is."""
        if self.projection is None or sums.shape[-1] == self.out_features:
            return sums
        with without_autocast(sums.device.type):
            return sums @ self.projection.T.to(sums.dtype)

    def _check_keys(self, keys: Tensor) -> None:
        if keys.dim() != 3 or keys.shape[2] != self.in_features:
            raise ValueError(f"keys must be [tasks,n,{self.in_features}], got {list(keys.shape)}")
        if not keys.is_floating_point():
            raise ValueError(f"keys must be floating point, got {keys.dtype}")

    def _check_memory(self, x: Tensor, memory: Tensor) -> None:
        widths = (self.out_features,) if self.projection is None else (self.out_features, self.num_classes)
        if x.dim() != 3 or tuple(memory.shape) not in {(len(x), self.in_features, width) for width in widths}:
            shapes = " or ".join(f"[tasks,{self.in_features},{width}]" for width in widths)
            raise ValueError(
                f"x must be [tasks,m,{self.in_features}] and memory {shapes} of as many tasks; got {list(x.shape)} and "
                f"{list(memory.shape)}"
            )

    def _mapped(self, keys: Tensor, errors: Tensor) -> Tensor:
        """Eq 5: the gradients of all examples and tasks in one product."""
        if errors.shape != (*keys.shape[:2], self.out_features):
            raise ValueError(f"errors must be {[*keys.shape[:2], self.out_features]}, got {list(errors.shape)}")
        if not errors.is_floating_point():
            raise ValueError(f"errors must be floating point, got {errors.dtype}")
        if not self.second_order:
            keys, errors = keys.detach(), errors.detach()
        mapping: Any = self.mapping
        with without_autocast(keys.device.type):
            gradients = to_single(keys).mT @ to_single(errors)
            return to_single(evaluated(mapping, gradients.to(mapping[0].weight.dtype)))


def _check(
    sizes: dict[str, int], rule: str, slope: float, noise: float, slow: bool, one_hot: bool, second_order: bool
) -> None:
    check_sizes(**sizes)
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be one of {', '.join(get_args(Rule))}, got {rule!r}")
    if not 0 <= slope <= 1:
        raise ValueError(f"negative_slope must be between 0 and 1, got {slope}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"label_noise must be finite and not negative, got {noise}")
    if rule == "gradient" and (one_hot or noise or not slow):
        raise ValueError("the gradient rule is of slow weights' gradients: no one_hot, no label_noise, and slow=True")
    if rule == "hebbian" and second_order:
        raise ValueError("second_order is of the gradient rule's error gradients; the Hebbian rule has none")
    if one_hot and sizes["out_features"] != sizes["num_classes"]:
        raise ValueError(
            f"one_hot binds to one output a class: out_features must be num_classes, got {sizes['out_features']} and "
            f"{sizes['num_classes']}"
        )


def _mapping(made: dict[str, Any]) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(1, _MAPPING_SIZE, **made),
        nn.LeakyReLU(SLOPE),
        nn.Linear(_MAPPING_SIZE, _MAPPING_SIZE, **made),
        nn.LeakyReLU(SLOPE),
        nn.Linear(_MAPPING_SIZE, 1, **made),
    )
