"""Checks of tasks, descriptions and memories that several few-shot networks and heads make."""

from torch import Tensor, nn

from fastweights.checks import is_integer
from fastweights.nn.fast_weights_linear import check_labels


def check_tasks(description: Tensor, labels: Tensor, queries: Tensor) -> None:
    """Refuse parts of different numbers of tasks, or of no task.

    Raises:
        ValueError: the numbers differ, or are zero.
    """
    counts = description.shape[0], labels.shape[0], queries.shape[0]
    if not counts[0] == counts[1] == counts[2] or counts[0] == 0:
        raise ValueError(
            "description, labels and queries must have the same number of tasks, at least 1; got {}, {} and {}".format(
                *counts
            )
        )


def check_described(features: Tensor, labels: Tensor, num_classes: int) -> None:
    """Refuse a description that is not features [tasks,n,D] and a label for each of them.

    Raises:
        ValueError: a shape or a label is wrong.
    """
    if features.dim() != 3:
        raise ValueError(f"features must be [tasks,n,D], got {list(features.shape)}")
    check_labels(labels, features.shape[:2], num_classes)


def check_memory(memory: object, kind: type) -> None:
    """Refuse the memory of another kind of head.

    Raises:
        ValueError: `memory` is not of this kind.
    """
    if not isinstance(memory, kind):
        raise ValueError(f"memory must be the {kind.__name__} that describe returned, got a {type(memory).__name__}")


def check_queries(features: Tensor, tasks: int, width: int) -> None:
    """Refuse queries whose features are not [tasks,m,D] of the described tasks.

    Raises:
        ValueError: the shape is another.
    """
    if features.dim() != 3 or (features.shape[0], features.shape[2]) != (tasks, width):
        raise ValueError(f"features must be [{tasks},m,{width}], of the tasks described; got {list(features.shape)}")


def get_feature_size(encoder: nn.Module) -> int:
    """Return D, the width of an encoder's features [N,D], which it tells in its attribute `features`.

    Raises:
        ValueError: the encoder has no such attribute.
    """
    features = getattr(encoder, "features", None)
    if not is_integer(features):
        raise ValueError(
            f"{type(encoder).__name__} must give the width of its features in `features`, got {features!r}"
        )
    return int(features)
