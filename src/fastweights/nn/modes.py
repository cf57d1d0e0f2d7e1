"""Evaluation mode for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode; afterwards, also after an error, every part has the mode that it had.

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
    # Not module.train(): it would also thaw the parts that their owner has frozen.
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
