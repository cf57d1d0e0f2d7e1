"""Room for new classes in a trained classifier's last layer."""

import torch
from torch import nn

from fastweights.checks import check_sizes


def widen_output(output: nn.Linear, classes: int = 1) -> nn.Linear:
    """Return a copy of a last layer with rows for further classes; its old rows are the same, `output` stays as it is.

    A new row is the mean of the old ones, weights and bias. So the logit of a new class is the mean of the old classes'
    logits: never above their greatest, whatever the input, and the class is not answered before something is learnt
    about it. It costs the old classes the probability of such a logit, which is least where the layer is sure.

    Args:
        output: [B,d] -> [B,V].
        classes: n, how many to add.

    Returns:
        A layer [B,d] -> [B,V+n], in the dtype and on the device of the other.

    Raises:
        TypeError: a layer that is no plain `torch.nn.Linear`.
        ValueError: `classes` is not a positive integer.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> head = torch.nn.Linear(64, 10)
        >>> wide = memory.widen_output(head)
        >>> wide.out_features, torch.equal(wide.weight[:10], head.weight)
        (11, True)
    """
    if type(output) is not nn.Linear:
        raise TypeError(
            f"widen_output takes a torch.nn.Linear, got {type(output).__name__}; a HebbianSoftmax has grow() for new "
            "classes"
        )
    check_sizes(classes=classes)
    weight, bias = output.weight, output.bias
    shape = output.in_features, output.out_features + classes
    wide = nn.Linear(*shape, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        for old, new in ((weight, wide.weight), (bias, wide.bias)):
            if old is not None:
                new[: len(old)] = old
                new[len(old) :] = old.mean(0)
                new.requires_grad_(old.requires_grad)
    return wide.train(output.training)
