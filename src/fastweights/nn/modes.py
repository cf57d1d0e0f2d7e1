"""Evaluation mode for the time of a block."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_lock = threading.Lock()
_inside: dict[
    int, tuple[bool, int]
] = {}  # for the id of a part: its mode before, and the number of blocks that it is in


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode; afterwards, also after an error, every part has the mode that it had.

    Where several blocks share a part, of several threads or one inside another, the last to end restores it.

    Examples:
        >>> import torch
        >>> from fastweights.nn.modes import evaluating
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(2).eval(), torch.nn.Dropout())  # the first is frozen
        >>> with evaluating(model):
        ...     [part.training for part in model]
        [False, False]
        >>> [part.training for part in model]
        [False, True]
    """
    parts = list(module.modules())
    with _lock:
        for part in parts:
            training, blocks = _inside.get(id(part), (part.training, 0))
            _inside[id(part)] = training, blocks + 1
        module.eval()
    try:
        yield
    finally:
        # Not module.train(): it would also thaw the parts that their owner has frozen.
        with _lock:
            for part in parts:
                training, blocks = _inside.pop(id(part))
                if blocks > 1:
                    _inside[id(part)] = training, blocks - 1
                else:
                    part.training = training
