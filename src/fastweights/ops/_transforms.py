"""What all kernels' operators and autograd functions share: vmap by a loop, gradients of gradients by the reference."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def each_example(operator: Any, info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> list[Tensor]:
    """The operator on every example under vmap, its results stacked."""
    columns = [
        [argument] * info.batch_size if dim is None else argument.unbind(dim)
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]
    examples = list(zip(*columns, strict=True))
    if not examples:
        raise ValueError("vmap over no examples: leave the call out, or use impl='reference'")
    results = [operator(*example) for example in examples]
    return [torch.stack(column) for column in zip(*results, strict=True)]


def second_order(
    run: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    grads: Any,
    outer: Sequence[Tensor],
) -> tuple[Any, list[Tensor | None]]:
    """Differentiate a backward pass by differentiating the reference `run` twice.

    Args:
        run: the reference as a function of `inputs`, of which some may be None.
        inputs: what the backward pass gave gradients of.
        grads: the gradients of the results that it was given.
        outer: the gradients of what it gave, one for each input, those of absent inputs unused.

    Returns:
        The gradients of `grads` and of `inputs`.
    """
    given = [index for index, tensor in enumerate(inputs) if tensor is not None]

    def of_given(*tensors: Tensor) -> Any:
        placed: list[Tensor | None] = [None] * len(inputs)
        for index, tensor in zip(given, tensors, strict=True):
            placed[index] = tensor
        return run(*placed)

    def gradients(grads: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(of_given, *tensors)[1](grads)  # type: ignore[no-any-return]

    pull = torch.func.vjp(gradients, grads, *(inputs[index] for index in given))[1]
    first, *second = pull(tuple(outer[index] for index in given))
    placed: list[Tensor | None] = [None] * len(inputs)
    for index, gradient in zip(given, second, strict=True):
        placed[index] = gradient
    return first, placed
