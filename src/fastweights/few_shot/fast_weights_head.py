"""Fast weights above an encoder: the two top layers of the networks of Munkhdalai & Trischler 2018."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_choice, check_sizes
from fastweights.few_shot._checks import check_memory, check_queries
from fastweights.few_shot._layers import initialise_he
from fastweights.nn.fast_weights_linear import SLOPE, FastWeightsLinear, Rule, check_labels
from fastweights.pretrained import Pretrained

Weights = Literal["slow", "both", "fast"]


class FastWeights(NamedTuple):
    """The fast weights that a head has written for each task; None where a layer has none."""

    hidden: Tensor | None  # [tasks,D,C] of the Hebbian rule, as `FastWeightsLinear.bind` gives it; [tasks,D,H]
    softmax: Tensor | None  # [tasks,H,C]


class FastWeightsHead(Pretrained, nn.Module):
    """A hidden layer and a softmax layer, either with fast weights (Munkhdalai & Trischler 2018, figure 1).

    In the paper's network the hidden layer has slow weights and fast weights. The fast weights recall a random
    projection of the label, and the softmax layer learns to invert the projection. The other places are those of
    figure 2. The fast weights of a softmax layer bind the output of the hidden layer's slow weights to the one-hot
    labels, or the output of its fast weights where it has no slow ones.

    Args:
        in_features: D, the width of the encoder's features.
        num_classes: C, the most classes of a task.
        hidden_size: H, the units of the hidden layer.
        rule: the rule that writes all fast weights, "hebbian" or "gradient".
        hidden: the hidden layer's weights: "slow", "fast", or "both".
        softmax: the softmax layer's weights, likewise.
        inverse_start: the softmax layer's slow weights start as R^T, about the inverse of the projection R; else they
            are drawn, as in the paper. Drawn weights take hundreds of updates to find the inverse, in which the encoder
            learns next to nothing.
        label_noise: noise on the labels from which the hidden layer's fast weights are written in training.
        stop_gradient: no gradient flows through the writing; g of the gradient rule then stays as it is drawn.
        second_order: the gradient rule's error gradients are differentiated too.

    Attributes:
        hidden, softmax: the layers, each a `FastWeightsLinear`, or `torch.nn.Linear` where it is slow alone.

    Raises:
        ValueError: an argument that `FastWeightsLinear` refuses, an unknown place of weights, or no fast weights.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> head = few_shot.FastWeightsHead(64, num_classes=5)
        >>> memory = head.describe(torch.randn(8, 5, 64), torch.arange(5).expand(8, 5))
        >>> head.predict(torch.randn(8, 75, 64), memory).shape
        torch.Size([8, 75, 5])
        >>> ablation = few_shot.FastWeightsHead(64, num_classes=5, hidden="slow", softmax="both")
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        hidden_size: int = 288,
        rule: Rule = "hebbian",
        hidden: Weights = "both",
        softmax: Weights = "slow",
        inverse_start: bool = True,
        label_noise: float = 0.0,
        stop_gradient: bool = False,
        second_order: bool = False,
    ) -> None:
        super().__init__()
        check_choice(get_args(Weights), hidden=hidden, softmax=softmax)
        if rule == "gradient" and "fast" in (hidden, softmax):
            raise ValueError("rule='gradient' needs slow weights: set hidden and softmax to 'both' or 'slow'")
        check_sizes(in_features=in_features, num_classes=num_classes, hidden_size=hidden_size)
        if hidden == softmax == "slow":
            raise ValueError("neither layer has fast weights: set hidden or softmax to 'both' or 'fast'")
        self.in_features, self.num_classes = in_features, num_classes
        self.rule, self.inverse_start = rule, inverse_start
        shared: dict[str, Any] = {"rule": rule, "stop_gradient": stop_gradient, "second_order": second_order}
        self.hidden: nn.Module = nn.Linear(in_features, hidden_size)
        if hidden != "slow":
            self.hidden = FastWeightsLinear(
                in_features, hidden_size, num_classes, slow=hidden == "both", label_noise=label_noise, **shared
            )
        self.softmax: nn.Module = nn.Linear(hidden_size, num_classes)
        if softmax != "slow":
            self.softmax = FastWeightsLinear(
                hidden_size,
                num_classes,
                num_classes,
                slow=softmax == "both",
                one_hot=rule == "hebbian",
                negative_slope=1.0,
                **shared,
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again as He et al. 2015 do; those that start as R^T are set to it."""
        for layer in (self.hidden, self.softmax):
            if isinstance(layer, FastWeightsLinear):
                layer.reset_parameters()
            else:
                initialise_he(layer)
        if self.inverse_start and isinstance(self.hidden, FastWeightsLinear):
            projection, inverse = self.hidden.projection, _slow_weights(self.softmax)[0]
            if projection is not None and inverse is not None:
                inverse.data.copy_(projection.T)

    def describe(self, features: Tensor, labels: Tensor) -> FastWeights:
        """Write the fast weights of each task from features [tasks,n,D] and labels [tasks,n].

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        if features.shape[2:] != (self.in_features,):
            raise ValueError(f"features must be [tasks,n,{self.in_features}], got {list(features.shape)}")
        if not features.is_floating_point():
            raise ValueError(f"features must be floating point, got {features.dtype}")
        if self.rule == "gradient":  # the other looks at them as it writes
            check_labels(labels, features.shape[:-1], self.num_classes)
        hidden = softmax = None
        if isinstance(self.hidden, FastWeightsLinear):
            errors = self._find_hidden_errors(features, labels) if self.rule == "gradient" else None
            hidden = _write(self.hidden, features, labels, errors)
        if isinstance(self.softmax, FastWeightsLinear):
            # In one pass: the memory of the layer below is read in prediction, if that layer has slow weights too. Read
            # here too, it would be squared in the logits: they begin in the thousands, and training never recovers.
            h = self._apply_hidden(features, hidden if _slow_weights(self.hidden)[0] is None else None)
            errors = self._find_errors(h, labels) if self.rule == "gradient" else None
            softmax = _write(self.softmax, h, labels, errors)
        return FastWeights(hidden, softmax)

    def predict(self, features: Tensor, memory: FastWeights) -> Tensor:
        """Return logits [tasks,m,C] of features [tasks,m,D], read through the fast weights.

        Raises:
            ValueError: shapes do not fit, or the memory is not what `describe` of a head with fast weights in the same
                layers returned.
        """
        check_memory(memory, FastWeights)
        places = isinstance(self.hidden, FastWeightsLinear), isinstance(self.softmax, FastWeightsLinear)
        if (memory.hidden is not None, memory.softmax is not None) != places:
            raise ValueError("memory must be that of a head with fast weights in the same layers as this one")
        written = memory.hidden if memory.softmax is None else memory.softmax
        assert written is not None
        check_queries(features, written.shape[0], self.in_features)
        h = self._apply_hidden(features, memory.hidden)
        logits: Tensor = self.softmax(h) if memory.softmax is None else self.softmax(h, memory.softmax)
        return logits

    def _apply_hidden(self, features: Tensor, memory: Tensor | None) -> Tensor:
        if isinstance(self.hidden, FastWeightsLinear):
            h: Tensor = self.hidden(features, memory)
            return h
        return F.leaky_relu(self.hidden(features), SLOPE)

    def _find_errors(self, h: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy's gradient with respect to the slow weights' logits, [tasks,n,C]."""
        weight, bias = _slow_weights(self.softmax)
        return F.linear(h, weight, bias).softmax(-1) - F.one_hot(labels, self.num_classes).to(h.dtype)

    def _find_hidden_errors(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return its gradient with respect to the hidden layer's W x + b, [tasks,n,H], by the chain rule."""
        z = F.linear(features, *_slow_weights(self.hidden))
        passed = self._find_errors(F.leaky_relu(z, SLOPE), labels) @ _slow_weights(self.softmax)[0]
        return torch.where(z > 0, passed, SLOPE * passed)


def _write(layer: FastWeightsLinear, keys: Tensor, labels: Tensor, errors: Tensor | None) -> Tensor:
    return layer.bind(keys, labels) if errors is None else layer.write(keys, errors=errors)


def _slow_weights(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias  # type: ignore[return-value]
