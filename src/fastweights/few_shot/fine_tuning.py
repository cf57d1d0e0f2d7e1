"""Plain fine-tuning: a classifier of all training classes, with a softmax layer fitted again to each task."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_not_negative, check_positive, check_sizes
from fastweights.few_shot._checks import check_described, check_memory, check_queries, get_feature_size
from fastweights.few_shot._layers import initialise_he
from fastweights.few_shot.network import FewShotNetwork
from fastweights.nn.fast_weights_linear import to_single
from fastweights.ops.autocast import without_autocast
from fastweights.pretrained import Pretrained


class SoftmaxLayers(NamedTuple):
    """The softmax layer of each task."""

    weight: Tensor  # [tasks,D,C]
    bias: Tensor  # [tasks,1,C]


class Tasks(Protocol):
    """The part of `fastweights.tasks.episodes.Episodes` that the loss of `FineTuning` needs."""

    @property
    def examples(self) -> Tensor: ...
    @property
    def description(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def queries(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def classes(self) -> Tensor: ...


class FineTuningHead(Pretrained, nn.Module):
    """A softmax layer fitted to each task by gradient descent, the encoder frozen (Chen et al. 2019, section 3.2).

    From zeros, `steps` steps on the mean cross entropy of the described examples and half of `weight_decay` times the
    squared weights; x is an example's features, divided by their length::

        p_i = softmax(W^T x_i + b)      W <- W - lr (mean_i x_i (p_i - y_i)^T + weight_decay W)
                                        b <- b - lr mean_i (p_i - y_i)

    All tasks are fitted at once. No gradient flows through the fitting, and there is nothing to learn. A class with ten
    times the examples of the others is answered too often, with a hundred times always: give classes equally many.
    The answers do not depend on how long the steps go on, but how sure they are does: of hundreds of classes 100 steps
    leave the probabilities far below how often they are right.

    Args:
        num_classes: C, the most classes of a task.
        steps: the number of steps of gradient descent.
        lr: the step size.
        weight_decay: the weight decay of W.

    Raises:
        ValueError: a number out of range; from `describe`, labels that are not one class index an example.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> head = few_shot.FineTuningHead(num_classes=5)
        >>> layers = head.describe(torch.randn(8, 5, 64), torch.arange(5).expand(8, 5))
        >>> head.predict(torch.randn(8, 75, 64), layers).shape
        torch.Size([8, 75, 5])
    """

    # On synthetic classes (Gaussian, of decaying spectrum; behind a leaky ReLU; far from zero; of examples of unlike
    # lengths) features divided by their own lengths were classified as well as those divided by their task's mean
    # length, and far better where lengths differ. To take off the task's mean first helped far from zero alone, and did
    # harm elsewhere. A step of 0.1 had not converged after 100, one of 10 diverged far from zero: in the unit ball the
    # loss has a curvature of at most 1, and all steps below 2 descend.
    def __init__(self, num_classes: int, *, steps: int = 100, lr: float = 1.0, weight_decay: float = 0.001) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, steps=steps)
        check_positive(lr=lr)
        check_not_negative(weight_decay=weight_decay)
        self.num_classes, self.steps, self.lr, self.weight_decay = num_classes, steps, lr, weight_decay

    @torch.no_grad()
    def describe(self, features: Tensor, labels: Tensor) -> SoftmaxLayers:
        """Fit a layer to each task, in single precision at least, from features [tasks,n,D] and labels [tasks,n].

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        check_described(features, labels, self.num_classes)
        x = F.normalize(to_single(features), dim=-1)
        y = F.one_hot(labels, self.num_classes).to(x.dtype)
        weight = x.new_zeros(len(x), x.shape[2], self.num_classes)
        bias = x.new_zeros(len(x), 1, self.num_classes)
        with without_autocast(x.device.type):  # small steps are lost in half precision
            for _ in range(self.steps):
                errors = (torch.baddbmm(bias, x, weight).softmax(-1) - y) / x.shape[1]
                weight = weight - self.lr * (x.mT @ errors + self.weight_decay * weight)
                bias = bias - self.lr * errors.sum(1, keepdim=True)
        return SoftmaxLayers(weight, bias)

    def predict(self, features: Tensor, memory: SoftmaxLayers) -> Tensor:
        """Return logits [tasks,m,C] of features [tasks,m,D].

        Raises:
            ValueError: shapes do not fit, or the memory is another head's.
        """
        check_memory(memory, SoftmaxLayers)
        check_queries(features, *memory.weight.shape[:2])
        with without_autocast(features.device.type):
            x = F.normalize(to_single(features), dim=-1)
            return torch.baddbmm(memory.bias.to(x.dtype), x, memory.weight.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.num_classes}, steps={self.steps}, lr={self.lr}, weight_decay={self.weight_decay}"


class FineTuning(FewShotNetwork):
    """A classifier of all training classes whose softmax layer is fitted again to each task.

    It is the baseline of Vinyals et al. 2016 and Chen et al. 2019: training ignores the tasks (`loss`), and the call
    fits a `FineTuningHead` to each task.

    Args:
        encoder: examples [N,...] -> features [N,D], with D in `features`.
        classes: K, the number of classes in the training set.
        num_classes, steps, lr, weight_decay: arguments of `FineTuningHead`.

    Attributes:
        classifier: a linear layer of K outputs, its weights drawn as He et al. 2015.

    Shapes: as `FewShotNetwork`.

    Raises:
        ValueError: a number out of range, or an encoder without `features`.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> from fastweights.tasks.episodes import EpisodeSampler
        >>> network = few_shot.FineTuning(few_shot.ConvEncoder(1, 64, size=28), classes=10, num_classes=5)
        >>> images, labels = torch.rand(40, 1, 28, 28), torch.arange(10).repeat_interleave(4)
        >>> sampler = EpisodeSampler(images, labels, ways=5, shots=1, queries=3)
        >>> tasks = sampler.draw(2, torch.Generator().manual_seed(0))
        >>> network.loss(tasks).shape
        torch.Size([])
        >>> network(tasks.examples, tasks.description, tasks.labels, tasks.queries).shape
        torch.Size([2, 15, 5])
    """

    def __init__(
        self,
        encoder: nn.Module,
        classes: int,
        num_classes: int,
        *,
        steps: int = 100,
        lr: float = 1.0,
        weight_decay: float = 0.001,
    ) -> None:
        super().__init__(encoder, FineTuningHead(num_classes, steps=steps, lr=lr, weight_decay=weight_decay))
        check_sizes(classes=classes)
        self.classifier = nn.Linear(get_feature_size(encoder), classes)
        initialise_he(self.classifier)

    def loss(self, episodes: Tasks) -> Tensor:
        """Return the mean cross entropy of these tasks' examples, each counted once, against their training classes.

        Shapes: as `Episodes`: examples [E,...], description and labels [tasks,n], queries and targets [tasks,m],
        classes [tasks,ways] -> a number.

        Raises:
            ValueError: a class that the classifier does not have.
        """
        least, most = (int(bound) for bound in episodes.classes.aminmax())
        if least < 0 or most >= self.classifier.out_features:
            raise ValueError(
                f"classes must lie between 0 and {self.classifier.out_features - 1}, those of the classifier; got "
                f"{least} to {most}"
            )
        # The cross entropy ignores -100: an example that is in no task keeps it.
        targets = torch.full((len(episodes.examples),), -100, device=episodes.classes.device)
        for index, labels in ((episodes.description, episodes.labels), (episodes.queries, episodes.targets)):
            targets[index.flatten()] = episodes.classes.gather(1, labels).flatten()
        return F.cross_entropy(self.classifier(self.features(episodes.examples)), targets)
