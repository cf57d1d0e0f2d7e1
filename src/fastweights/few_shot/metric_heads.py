"""Heads that compare: Matching Networks (Vinyals et al. 2016) and Prototypical Networks (Snell et al. 2017)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_positive, check_sizes
from fastweights.few_shot._checks import check_described, check_memory, check_queries
from fastweights.nn.fast_weights_linear import to_single
from fastweights.ops.autocast import without_autocast
from fastweights.pretrained import Pretrained

_LEAST = 1e-12  # a probability below which its logarithm is cut off


class Described(NamedTuple):
    """The described examples of each task, kept as they are."""

    features: Tensor  # [tasks,n,D]
    labels: Tensor  # [tasks,n]


class Prototypes(NamedTuple):
    """The mean of each class's features."""

    means: Tensor  # [tasks,C,D]
    described: Tensor  # [tasks,C] bool: which classes have an example


class MatchingHead(Pretrained, nn.Module):
    """Attention over the described examples by cosine similarity (Vinyals et al. 2016, section 2.1.1).

    With c the cosine, f the encoder and n_i how many examples the class of example i has::

        P(y | x) = sum_i a_i y_i        a = softmax_i(scale c(f(x), f(x_i)) - log n_i)

    The logits are the logarithms of P. There is nothing to learn but the encoder; the full context embeddings of the
    paper are left out.

    Our reading: classes count alike, however many examples they have. In the paper's tasks all have equally many, and
    log n_i changes nothing. Without it and with `scale` 1, a class with three times the examples of the others was the
    answer to every query.

    Args:
        num_classes: C, the most classes of a task.
        scale: the factor of the cosines. The paper has 1, and a softmax of such cosines is never sure: with thirty
            classes none gets a probability above 0.2, and training goes on pulling at right answers. With 10 (where
            Gidaris & Komodakis 2018 begin) Omniglot is learnt in a tenth of the tasks.

    Raises:
        ValueError: `num_classes` is less than 1, or `scale` not positive and finite.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> head = few_shot.MatchingHead(num_classes=5)
        >>> memory = head.describe(torch.randn(8, 5, 64), torch.arange(5).expand(8, 5))
        >>> head.predict(torch.randn(8, 75, 64), memory).exp().sum(-1).allclose(torch.ones(8, 75))
        True
    """

    def __init__(self, num_classes: int, *, scale: float = 1.0) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes)
        check_positive(scale=scale)
        self.num_classes, self.scale = num_classes, float(scale)

    def describe(self, features: Tensor, labels: Tensor) -> Described:
        """Keep features [tasks,n,D] and labels [tasks,n].

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        check_described(features, labels, self.num_classes)
        return Described(features, labels)

    def predict(self, features: Tensor, memory: Described) -> Tensor:
        """Return log probabilities [tasks,m,C] of features [tasks,m,D]; that of a class without examples is -27.6.

        They are computed in single precision at least: float16 cannot hold the least probability.

        Raises:
            ValueError: shapes do not fit, or the memory is another head's.
        """
        check_memory(memory, Described)
        check_queries(features, memory.features.shape[0], memory.features.shape[2])
        with without_autocast(features.device.type):
            queries, described = (F.normalize(to_single(part), dim=-1) for part in (features, memory.features))
            members = F.one_hot(memory.labels, self.num_classes).to(described.dtype)  # [tasks,n,C]
            counts = members.sum(1).gather(1, memory.labels).unsqueeze(1)  # [tasks,1,n]
            attention = (self.scale * queries @ described.mT - counts.log()).softmax(-1)
            return (attention @ members).clamp(min=_LEAST).log()


class PrototypeHead(Pretrained, nn.Module):
    """The nearest class mean, by squared Euclidean distance (Snell et al. 2017, eq 2).

    The logits are the negative distances; there is nothing to learn but the encoder. Their order does not depend on the
    scale of the features, but how sure they are does: of features ten times as long the logits are a hundred times as
    large, and the probabilities too sure until the encoder has learnt a shorter one.

    Args:
        num_classes: C, the most classes of a task.

    Raises:
        ValueError: `num_classes` is less than 1.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> head = few_shot.PrototypeHead(num_classes=2)
        >>> memory = head.describe(torch.tensor([[[0.0, 0.0], [2.0, 0.0], [9.0, 0.0]]]), torch.tensor([[0, 0, 1]]))
        >>> head.predict(torch.tensor([[[1.0, 0.0], [8.0, 0.0]]]), memory)
        tensor([[[ -0., -64.],
                 [-49.,  -1.]]])
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes)
        self.num_classes = num_classes

    def describe(self, features: Tensor, labels: Tensor) -> Prototypes:
        """Return the means of features [tasks,n,D] by their labels [tasks,n], in single precision at least.

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        check_described(features, labels, self.num_classes)
        with without_autocast(features.device.type):
            x = to_single(features)
            members = F.one_hot(labels, self.num_classes).to(x.dtype)  # [tasks,n,C]
            counts = members.sum(1)
            return Prototypes((members.mT @ x) / counts.clamp(min=1).unsqueeze(-1), counts > 0)

    def predict(self, features: Tensor, memory: Prototypes) -> Tensor:
        """Return logits [tasks,m,C] of features [tasks,m,D]; -inf for a class without examples.

        They are computed in single precision at least.

        Raises:
            ValueError: shapes do not fit, or the memory is another head's.
        """
        check_memory(memory, Prototypes)
        check_queries(features, memory.means.shape[0], memory.means.shape[2])
        with without_autocast(features.device.type):
            # |x - m|^2 by products, about the middle of the means: far from it rounding would drown the differences.
            # Only described classes count: the others are zeros, which may lie far away.
            means = to_single(memory.means)
            middle = means.sum(1, keepdim=True) / memory.described.sum(1).clamp(min=1).view(-1, 1, 1)
            x, m = to_single(features) - middle, means - middle
            distances = x.square().sum(-1, keepdim=True) + m.square().sum(-1).unsqueeze(1) - 2 * x @ m.mT
        return (-distances).masked_fill(~memory.described.unsqueeze(1), -torch.inf)
