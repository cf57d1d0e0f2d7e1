"""What a head needs to know of torch's optimizers: where its weight is, and how what they keep of it grows."""

from typing import Any

import torch
from torch import Tensor


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Torch's optimizer, out of what wraps it as `.optimizer` (accelerate does).

    Raises:
        TypeError: there is none inside.
    """
    inner = optimizer
    # A wrapper may itself claim to be an optimizer, and its hooks would never run.
    while (wrapped := getattr(inner, "optimizer", None)) is not None:
        inner = wrapped
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"attach takes an optimizer of torch.optim, got {type(optimizer).__name__}")
    return inner


def holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether an optimizer steps a parameter."""
    return _group(optimizer, parameter) is not None


def grown_state(optimizer: torch.optim.Optimizer, parameter: Tensor, rows: int) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter [V,...], with so many new rows as if they had never been stepped.

    Raises:
        ValueError: it keeps something that is not of the parameter's rows, as LBFGS does.
    """
    group = _group(optimizer, parameter)
    if group is None:
        return {}
    grown = {}
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.dim() == parameter.dim() and value.shape[0] == parameter.shape[0]:
            # The state of these two begins elsewhere than at zero.
            start = {"sum": group.get("initial_accumulator_value", 0.0), "step_size": group["lr"]}.get(name, 0.0)
            new = value.new_full((rows, *value.shape[1:]), float(start))
            grown[name] = torch.cat([value, new])
        elif isinstance(value, list) or (isinstance(value, Tensor) and value.dim() == 1):
            # Of all parameters in one line; numbers, and sums over the rows, stay as they are.
            raise ValueError(
                f"{type(optimizer).__name__} keeps {name!r} of all weights together, which cannot grow with one: grow "
                "the head before the first step, or make a new optimizer afterwards"
            )
    return grown


def _group(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any] | None:
    groups = (group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    return next(groups, None)
