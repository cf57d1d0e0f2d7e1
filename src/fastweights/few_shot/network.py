"""The few-shot network: an encoder, and a head that binds its features to the labels of a task."""

from typing import Any

import torch
from torch import Tensor, nn

from fastweights.few_shot._checks import check_tasks
from fastweights.pretrained import Pretrained

# Where no gradient is wanted, the work is cut into blocks, so that it fits into a computer's RAM.
_EXAMPLES_AT_ONCE = 1000  # examples encoded at once
_TASKS_AT_ONCE = 50  # tasks described and answered at once


class FewShotNetwork(Pretrained, nn.Module):
    """An encoder under a head: describe a task with labelled examples, then predict the labels of others.

    The encoder is shared by all tasks and sees each example once, however many tasks have it; only the
    head's memory differs from task to task. Labels are 0 to C - 1; a task may have fewer classes.

    Args:
        encoder: examples [N,...] -> features [N,D].
        head: a module that binds features to labels, all tasks at once, such as `FastWeightsHead`, `MatchingHead` or
            `PrototypeHead`. Its `describe(features, labels)` takes features [tasks,n,D] and labels [tasks,n] and
            returns a memory; its `predict(features, memory)` returns logits [tasks,m,C] of features [tasks,m,D]; its
            `num_classes` is C.

    Shapes: the call takes examples [E,...], description [tasks,n] (which of the examples), labels [tasks,n], queries
    [tasks,m] (which of the examples), as `fastweights.tasks.episodes.Episodes` has them, and gives logits [tasks,m,C].

    Examples:
        >>> import torch
        >>> from fastweights import few_shot
        >>> network = few_shot.FewShotNetwork(
        ...     few_shot.ConvEncoder(1, 64, size=28), few_shot.FastWeightsHead(64, num_classes=5)
        ... )
        >>> images = torch.rand(10, 1, 28, 28)                             # two of each class
        >>> memory = network.describe(images[None, :5], torch.arange(5)[None])
        >>> network.predict(images[None, 5:], memory).shape                # [tasks,m,C]
        torch.Size([1, 5, 5])
        >>> index = torch.arange(10)[None]                                 # or both at once
        >>> network(images, index[:, :5], torch.arange(5)[None], index[:, 5:]).shape
        torch.Size([1, 5, 5])
    """

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head: Any = head

    @property
    def num_classes(self) -> int:
        return int(self.head.num_classes)

    def forward(self, examples: Tensor, description: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        """Return logits [tasks,m,C] of the queries of each task, given its description.

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        check_tasks(description, labels, queries)
        features = self.features(examples)
        if torch.is_grad_enabled() or torch.compiler.is_exporting():  # a graph is of any number of examples
            return self._answer(features, description, labels, queries)
        # Fast weights of many tasks would not fit into memory side by side.
        parts = zip(*(torch.split(index, _TASKS_AT_ONCE) for index in (description, labels, queries)), strict=True)
        return torch.cat([self._answer(features, *part) for part in parts])

    def describe(self, examples: Tensor, labels: Tensor) -> Any:
        """Return the head's memory of tasks with examples [tasks,n,...] and labels [tasks,n].

        Raises:
            ValueError: shapes do not fit, or a label is not 0 to C - 1.
        """
        return self.head.describe(self._encode_tasks(examples), labels)

    def predict(self, examples: Tensor, memory: Any) -> Tensor:
        """Return logits [tasks,m,C] of examples [tasks,m,...].

        Raises:
            ValueError: shapes do not fit, or the memory is another head's.
        """
        logits: Tensor = self.head.predict(self._encode_tasks(examples), memory)
        return logits

    def features(self, examples: Tensor) -> Tensor:
        """Return features [N,D] of examples [N,...]."""
        if torch.is_grad_enabled() or torch.compiler.is_exporting() or len(examples) <= _EXAMPLES_AT_ONCE:
            features: Tensor = self.encoder(examples)
            return features
        return torch.cat([self.encoder(part) for part in torch.split(examples, _EXAMPLES_AT_ONCE)])

    def _answer(self, features: Tensor, description: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        memory = self.head.describe(features[description], labels)
        logits: Tensor = self.head.predict(features[queries], memory)
        return logits

    def _encode_tasks(self, examples: Tensor) -> Tensor:
        if examples.dim() < 2:
            raise ValueError(f"examples must be [tasks,n,...], got {list(examples.shape)}")
        features = self.features(examples.flatten(0, 1))
        return features.view(*examples.shape[:2], features.shape[1])
