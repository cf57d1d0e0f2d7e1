"""Tensors whose numbers can be looked at."""

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def is_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether these are no more than numbers in memory: no compiler, mode or transform stands between.

    Examples:
        >>> import torch
        >>> from fastweights.ops.plain import is_plain
        >>> is_plain((torch.zeros(2), None))
        True
    """
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))  # a subclass may keep its numbers elsewhere
        # torch has no public names for these questions.
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._is_tracing()
    )
