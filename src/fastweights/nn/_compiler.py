"""What `torch.compile` leaves to Python."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def outside_graphs(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """As `torch.compiler.disable`, without loading the compiler where nothing is compiled.

    That alone takes as long as importing torch, and 140 MiB.

    Examples:
        >>> import torch
        >>> from fastweights.nn._compiler import outside_graphs
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
