"""A layer whose fast weights bind the classes of a task at first sight (Munkhdalai & Trischler 2018)."""

import math
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_between, check_choice, check_not_negative, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn.compiler import torch_func_is_active
from fastweights.ops.autocast import without_autocast
from fastweights.pretrained import Pretrained

Rule = Literal["hebbian", "gradient"]
SLOPE = 0.2  # slope of the leaky ReLU in fwCNN and the layers with fast weights: the default of the paper's framework
_MAPPING_SIZE = 40  # units of the network that maps gradients to fast weights (appendix A)


class FastWeightsLinear(Pretrained, nn.Module):
    """A linear layer with slow weights W, learnt over all tasks, and fast weights M, written again for each task.

    Slow and fast weights act side by side on the same input (Munkhdalai & Trischler 2018, eq 4, s a leaky ReLU)::

        h = s(W x + b) + s(M^T x)

    M is written from the task's labelled examples, its description. The Hebbian rule (eq 2) binds the input of
    an example, its key k, to a random projection R y of its one-hot label; R is drawn once and never learnt. The
    gradient rule (eq 5) maps the slow weights' error gradients to fast weights, each coordinate by the same small
    network g, which is learnt::

        hebbian    M = sum_i k_i (R y_i)^T
        gradient   M = g(sum_i k_i e_i^T)                 e_i = dL_i / d(W k_i + b)

    M is a sum. What is read grows with the examples and with the squared length of keys, so give keys numbers of about
    unit size; of a tenth of that a head needed four times as many steps of training. A class with more examples than
    others outweighs them; `FewShotClassifier` evens them out. R tells some H classes apart, whose projections are
    nearly orthogonal.

    All tasks are written and read at once. In the Hebbian rule gradients flow through the writing, into the keys: this
    is how representations learn to be bound. In the gradient rule keys and error gradients are constants to g.

    Args:
        in_features: D.
        out_features: H.
        num_classes: C, the largest number of classes in a task: the columns of R.
        rule: "hebbian" or "gradient".
        negative_slope: the slope of s below zero; 1 makes it the identity, as in a softmax layer.
        label_noise: in training, uniform noise between -`label_noise` and `label_noise` is added to the one-hot labels
            before R (appendix A: 0.01 for convolutional networks on mini-ImageNet).
        slow: use the slow weights W and b; without them h = s(M^T x).
        one_hot: bind to the one-hot labels themselves, without R, as in a softmax layer; then H is C.
        stop_gradient: no gradient flows through the writing; g of the gradient rule then stays as it is drawn.
        second_order: the gradient rule's error gradients are differentiated too; else they are constants to g.
        device: the device of parameters and buffers.
        dtype: the dtype of parameters and buffers.

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
        check_sizes(**sizes)
        check_choice(get_args(Rule), rule=rule)
        check_between(0, 1, negative_slope=negative_slope)
        check_not_negative(label_noise=label_noise)
        if rule == "gradient" and (one_hot or label_noise or not slow):
            raise ValueError(
                "the gradient rule needs slow weights, for it maps their gradients, and has no labels: it takes "
                "slow=True, no one_hot and no label_noise"
            )
        if rule == "hebbian" and second_order:
            raise ValueError("second_order acts on the error gradients of the gradient rule; the Hebbian rule has none")
        if one_hot and out_features != num_classes:
            raise ValueError(
                f"one_hot has one output for each class: out_features must be num_classes, got {out_features} and "
                f"{num_classes}"
            )
        self.in_features, self.out_features, self.num_classes = in_features, out_features, num_classes
        self.rule, self.negative_slope, self.label_noise = rule, negative_slope, label_noise
        self.slow, self.one_hot = slow, one_hot
        self.stop_gradient, self.second_order = stop_gradient, second_order
        kind = {"device": device, "dtype": dtype}
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(out_features, in_features, **kind)) if slow else None
        )
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **kind)) if slow else None)
        projected = rule == "hebbian" and not one_hot
        self.register_buffer("projection", torch.empty(out_features, num_classes, **kind) if projected else None)
        self.mapping = _mapping(kind) if rule == "gradient" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the slow weights, R and g again."""
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
        """Write the fast weights of each task from its description alone: nothing of another task is in them.

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
            sums = self.bind(keys, labels)
            with without_autocast(sums.device.type):
                return self._project(sums)
        if errors is None or labels is not None:
            raise ValueError("the gradient rule maps error gradients: write(keys, errors=errors)")
        self._check_keys(keys)
        memory = self._map_gradients(keys, errors)
        return memory.detach() if self.stop_gradient else memory

    def bind(self, keys: Tensor, labels: Tensor) -> Tensor:
        """Write by the Hebbian rule, but leave out R: sum_i k_i y_i^T, which is read like the memory of `write`.

        The outputs (eq 2) are the same in a fraction of the time and room: a task has fewer classes than the layer has
        outputs, and R is applied to what is read instead of what is written. With as many classes, this is `write`.

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
            raise ValueError("the gradient rule takes no labels: write(keys, errors=errors)")
        self._check_keys(keys)
        check_labels(labels, keys.shape[:-1], self.num_classes)
        with without_autocast(keys.device.type):
            keys = to_single(keys)
            values = F.one_hot(labels, self.num_classes).to(keys.dtype)
            if self.training and self.label_noise:
                values = values + torch.empty_like(values).uniform_(-self.label_noise, self.label_noise)
            sums = keys.mT @ values
            # Elsewhere the width tells whether R has been applied.
            if self.projection is not None and self.num_classes == self.out_features:
                sums = sums @ self.projection.T.to(sums.dtype)
        return sums.detach() if self.stop_gradient else sums

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Apply the slow and the fast weights: x [tasks,m,D] -> [tasks,m,H]; without a memory, s(W x + b) alone.

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
                read = self._activation(self._project(to_single(x) @ to_single(memory)))
        if self.weight is None:
            if read is None:
                raise ValueError("this layer has no slow weights: give it the memory that write returned")
            return read.to(x.dtype)
        h = self._activation(F.linear(x, self.weight, self.bias))
        return h if read is None else h + read.to(h.dtype)

    def extra_repr(self) -> str:
        return describe(
            vars(self),
            ["in_features", "out_features"],
            ["num_classes", "rule"],
            slow=True,
            one_hot=False,
            stop_gradient=False,
            second_order=False,
            label_noise=0.0,
        )

    def _activation(self, z: Tensor) -> Tensor:
        return z if self.negative_slope == 1 else F.leaky_relu(z, self.negative_slope)

    def _project(self, sums: Tensor) -> Tensor:
        """Apply R to sums [...,C] -> [...,H]; sums that have H columns are returned as they are."""
        if self.projection is None or sums.shape[-1] == self.out_features:
            return sums
        return sums @ self.projection.T.to(sums.dtype)

    def _check_keys(self, keys: Tensor) -> None:
        if keys.dim() != 3 or keys.shape[2] != self.in_features:
            raise ValueError(f"keys must be [tasks,n,{self.in_features}], got {list(keys.shape)}")
        if not keys.is_floating_point():
            raise ValueError(f"keys must be floating point, got {keys.dtype}")

    def _check_memory(self, x: Tensor, memory: Tensor) -> None:
        widths = (self.out_features,) if self.projection is None else (self.out_features, self.num_classes)
        fits = (memory.shape == (x.shape[0], self.in_features, width) for width in widths)
        if x.dim() != 3 or not any(fits):
            shapes = " or ".join(f"[tasks,{self.in_features},{width}]" for width in widths)
            raise ValueError(
                f"x must be [tasks,m,{self.in_features}] and memory {shapes} of as many tasks; got {list(x.shape)} and "
                f"{list(memory.shape)}"
            )

    def _map_gradients(self, keys: Tensor, errors: Tensor) -> Tensor:
        """Return M of eq 5: the gradients of all examples and tasks in one product, mapped by g."""
        if errors.shape != (*keys.shape[:2], self.out_features):
            raise ValueError(f"errors must be {[*keys.shape[:2], self.out_features]}, got {list(errors.shape)}")
        if not errors.is_floating_point():
            raise ValueError(f"errors must be floating point, got {errors.dtype}")
        if not self.second_order:
            keys, errors = keys.detach(), errors.detach()
        mapping: Any = self.mapping
        with without_autocast(keys.device.type):
            gradients = to_single(keys).mT @ to_single(errors)
            return to_single(map_numbers(mapping, gradients.to(mapping[0].weight.dtype)))


def check_labels(labels: Tensor, shape: torch.Size, num_classes: int) -> None:
    """Refuse labels that are not one class index an example, or name more classes than there are columns.

    Raises:
        ValueError: a label, or the shape or dtype of the labels, is wrong.
    """
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a tensor {list(shape)} int64, one a key; got a {type(labels).__name__}")
    if labels.shape != shape or labels.dtype != torch.int64:
        raise ValueError(f"labels must be {list(shape)} int64, one a key; got {list(labels.shape)} {labels.dtype}")
    # Under torch.func there are no numbers to look at, and looking would cut a compiled graph in two.
    if torch.compiler.is_compiling() or torch_func_is_active() or labels.numel() == 0:
        return
    least, most = map(int, labels.aminmax())
    if least < 0 or most >= num_classes:
        raise ValueError(
            f"labels must lie between 0 and {num_classes - 1}, the {num_classes} classes that there are columns for; "
            f"got {least} to {most}"
        )


def to_single(tensor: Tensor) -> Tensor:
    """Return the tensor in single precision at least."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _mapping(kind: dict[str, Any]) -> nn.Sequential:
    """Return the network g of the gradient rule."""
    return nn.Sequential(
        nn.Linear(1, _MAPPING_SIZE, **kind),
        nn.LeakyReLU(SLOPE),
        nn.Linear(_MAPPING_SIZE, _MAPPING_SIZE, **kind),
        nn.LeakyReLU(SLOPE),
        nn.Linear(_MAPPING_SIZE, 1, **kind),
    )


def map_numbers(network: nn.Sequential, x: Tensor) -> Tensor:
    """Map each number of x [...] by a small network of one input and one output -> [...].

    The result and all gradients, to the weights and to x, are those of the network. A network of three linear layers
    with leaky ReLU between them is a piecewise linear function. With 40 units a layer it has some hundreds of pieces;
    to look up a number's piece and take its line costs a twentieth of the 1,680 products of the network itself, forward
    and backward.
    """
    breaks, slopes, levels = _lines(network)
    piece = torch.bucketize(x.detach(), breaks)
    return slopes.take(piece) * x + levels.take(piece)


def _lines(network: nn.Sequential) -> tuple[Tensor, Tensor, Tensor]:
    """Return where pieces end [P - 1], in order, and the line of each piece: its slope [P] and its value at zero [P].

    P is the most that there can be, so that it does not depend on the weights; some pieces are empty.
    """
    first, second, third = (cast(nn.Linear, network[place]) for place in (0, 2, 4))
    weight, bias = first.weight[:, 0], first.bias
    with torch.no_grad():
        kinks = (
            _zeros(weight, bias).sort().values
        )  # points of the first layer between which none of its units changes side
        between = _inside(kinks)
        side = _sides(torch.outer(between, weight) + bias, network[1])
        rises, heights = (side * weight) @ second.weight.T, (side * bias) @ second.weight.T + second.bias
        # The kinks of the second layer in each of these spans, [K + 1, units]; a zero outside its span is none.
        low, high = _spans(kinks)
        zeros = _zeros(rises, heights)
        zeros = torch.where((zeros > low.unsqueeze(1)) & (zeros < high.unsqueeze(1)), zeros, kinks[0])
        breaks = torch.cat([kinks, zeros.flatten()]).sort().values
        places = torch.outer(_inside(breaks), weight) + bias
        side = _sides(places, network[1])
        upper_side = _sides((side * places) @ second.weight.T + second.bias, network[3])
    slopes = (upper_side * ((side * weight) @ second.weight.T)) @ third.weight[0]
    levels = (upper_side * ((side * bias) @ second.weight.T + second.bias)) @ third.weight[0] + third.bias
    return breaks, slopes, levels


def _zeros(rises: Tensor, heights: Tensor) -> Tensor:
    """Return where rise * x + height is zero, or 0 where it never is."""
    return (-heights / torch.where(rises == 0, torch.ones_like(rises), rises)).where(rises != 0, 0)


def _inside(breaks: Tensor) -> Tensor:
    """Return a place within each piece: before the first break, between two, after the last."""
    return torch.cat([breaks[:1] - 1, (breaks[1:] + breaks[:-1]) / 2, breaks[-1:] + 1])


def _spans(breaks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper end of each piece."""
    infinite = torch.full_like(breaks[:1], torch.inf)
    return torch.cat([-infinite, breaks]), torch.cat([breaks, infinite])


def _sides(z: Tensor, activation: nn.Module) -> Tensor:
    """Return the slope of a leaky ReLU at z."""
    slope: float = activation.negative_slope  # type: ignore[assignment]
    return torch.ones_like(z).where(z > 0, slope)
