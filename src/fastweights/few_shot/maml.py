"""Networks whose weights are all adapted to a task by gradient descent: MAML (Finn et al. 2017)."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from fastweights.checks import check_positive, check_sizes
from fastweights.few_shot._checks import check_tasks, get_feature_size
from fastweights.few_shot._layers import initialise_he
from fastweights.nn.fast_weights_linear import SLOPE, check_labels
from fastweights.pretrained import Pretrained

Weights = dict[str, Tensor]

_RATE_OF_A_CLASS = 0.02


class MAML(Pretrained, nn.Module):
    """A network that starts each task from weights learnt over all tasks (Finn et al. 2017, algorithm 2).

    A task's weights are reached from the shared ones by some steps of gradient descent on the cross entropy L of its
    description. Training differentiates the loss of the queries through these steps::

        w_0 = w        w_t+1 = w_t - lr dL(w_t) / dw_t        logits = f(queries; w_steps)

    f is the network that `FastWeightsHead` sits on, without fast weights: the encoder, a hidden layer, a leaky ReLU of
    slope 0.2 and a softmax layer, drawn as He et al. 2015. All of its weights are adapted. Labels are 0 to C - 1; a
    task may have fewer classes.

    Args:
        encoder: examples [N,...] -> features [N,D], with D in `features`. Its running statistics would mix the tasks:
            batch normalisation must have `track_running_stats=False`, as in the paper.
        num_classes: C, the most classes of a task.
        hidden_size: units of the hidden layer.
        steps: steps of gradient descent in training.
        test_steps: steps in evaluation; None for as many as in training. The paper has 1 and 3
            (Omniglot, 5 classes), 5 and 10 (mini-ImageNet).
        lr: the step size; None is 0.02 for each of the C classes, 0.1 for five: the loss is a mean over examples, of
            which one in C is a class's own, and with 0.1 tasks of thirty classes were not learnt. This is for features
            of about unit size, because a step moves logits by `lr` times a squared length. The paper has 0.4 (Omniglot)
            with batch normalisation.
        second_order: differentiate the steps' gradients too; False treats them as constants (the paper's first-order
            approximation).

    Attributes:
        network: f.

    Shapes: as `FewShotNetwork`: examples [E,...], description [tasks,n], labels [tasks,n] and queries [tasks,m] ->
    logits [tasks,m,C].

    Raises:
        ValueError: a size or number out of range, or an encoder with running statistics or without `features`; from the
            call, labels that are not one class index a described example.

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> network = few_shot.MAML(few_shot.ConvEncoder(1, 64, size=28), num_classes=5)
        >>> images, index = torch.rand(10, 1, 28, 28), torch.arange(10)[None]  # two of each class
        >>> network(images, index[:, :5], torch.arange(5)[None], index[:, 5:]).shape
        torch.Size([1, 5, 5])
        >>> with torch.no_grad():
        ...     memory = network.describe(images[None, :5], torch.arange(5)[None])
        >>> memory["softmax.weight"].shape                                     # [tasks,C,hidden_size]
        torch.Size([1, 5, 288])
        >>> network.predict(images[None, 5:], memory).shape
        torch.Size([1, 5, 5])
    """

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        hidden_size: int = 288,
        steps: int = 1,
        test_steps: int | None = None,
        lr: float | None = None,
        second_order: bool = True,
    ) -> None:
        super().__init__()
        test_steps = steps if test_steps is None else test_steps
        check_sizes(num_classes=num_classes, hidden_size=hidden_size, steps=steps, test_steps=test_steps)
        lr = _RATE_OF_A_CLASS * num_classes if lr is None else lr
        check_positive(lr=lr)
        _refuse_running_statistics(encoder)
        self.num_classes, self.steps, self.test_steps = num_classes, steps, test_steps
        self.lr, self.second_order = lr, second_order
        hidden, softmax = nn.Linear(get_feature_size(encoder), hidden_size), nn.Linear(hidden_size, num_classes)
        for layer in (hidden, softmax):
            initialise_he(layer)
        parts = {"encoder": encoder, "hidden": hidden, "activation": nn.LeakyReLU(SLOPE), "softmax": softmax}
        self.network = nn.Sequential(OrderedDict(parts))

    def forward(self, examples: Tensor, description: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        """Return logits [tasks,m,C] of the queries of each task, given its description.

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        check_tasks(description, labels, queries)
        check_labels(labels, description.shape, self.num_classes)
        # A task at a time: with vmap, which groups convolutions and takes no channels side by side, a training step of
        # four tasks took 1.5 times as long with ConvEncoder(1, 64, size=28) and 2.4 with (3, 32, size=84) on one core,
        # 1.9 and 5.3 times in bfloat16.
        return torch.stack(
            [
                functional_call(self.network, self._adapt(examples[described], task_labels), (examples[asked],))
                for described, task_labels, asked in zip(description, labels, queries, strict=True)
            ]
        )

    def describe(self, examples: Tensor, labels: Tensor) -> Weights:
        """Return the weights of tasks with examples [tasks,n,...] and labels [tasks,n]: by name, each [tasks,...].

        Raises:
            ValueError: no tasks, or shapes do not fit, or a label is not 0 to C - 1.
        """
        check_labels(labels, examples.shape[:2], self.num_classes)
        adapted = [self._adapt(described, task_labels) for described, task_labels in zip(examples, labels, strict=True)]
        return {name: torch.stack([weights[name] for weights in adapted]) for name in adapted[0]}

    def predict(self, examples: Tensor, memory: Weights) -> Tensor:
        """Return logits [tasks,m,C] of examples [tasks,m,...].

        Raises:
            ValueError: examples of another number of tasks than were described.
        """
        if len(examples) != (tasks := len(memory["softmax.weight"])):
            raise ValueError(f"examples must have the {tasks} tasks described, got {len(examples)}")
        logits = []
        for task, asked in enumerate(examples):
            weights = {name: stacked[task] for name, stacked in memory.items()}
            logits.append(functional_call(self.network, weights, (asked,)))
        return torch.stack(logits)

    def extra_repr(self) -> str:
        return f"steps={self.steps}, test_steps={self.test_steps}, lr={self.lr}, second_order={self.second_order}"

    def _adapt(self, examples: Tensor, labels: Tensor) -> Weights:
        """Return the weights of one task with examples [n,...] and labels [n]."""
        weights: Weights = dict(self.network.named_parameters())
        for _ in range(self.steps if self.training else self.test_steps):
            with torch.set_grad_enabled(self.second_order and torch.is_grad_enabled()):
                gradients = grad(self._loss)(weights, examples, labels)
            weights = {name: weight - self.lr * gradients[name] for name, weight in weights.items()}
        return weights

    def _loss(self, weights: Weights, examples: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.network, weights, (examples,)), labels)


def _refuse_running_statistics(encoder: nn.Module) -> None:
    for name, part in encoder.named_modules():
        if getattr(part, "running_mean", None) is not None:
            raise ValueError(
                f"the encoder has running statistics ({type(part).__name__} {name!r}), which tasks would share: build "
                "it with track_running_stats=False"
            )
