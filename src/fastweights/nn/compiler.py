"""Code that `torch.compile` leaves to Python, and a test whether torch.func is at work."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def outside_graphs(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Keep a function out of compiled graphs, as `torch.compiler.disable` does, but load no compiler for it.

    Loading the compiler takes as long as importing torch, and 140 MiB: it happens where something is compiled.

    Examples:
        >>> import torch
        >>> from fastweights.nn.compiler import outside_graphs
        >>> outside_graphs(lambda labels: int(labels.max()))(torch.tensor([2, 0]))
        2
    """
    disabled: Callable[_Parameters, _Result] | None = None

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        nonlocal disabled
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return run


def torch_func_is_active() -> bool:
    """Return whether torch.func is at work: its tensors stand for others, and have no numbers to read or keep."""
    return torch._C._are_functorch_transforms_active()  # torch has no public name for this question
