"""The kernel's derivatives, of any order: it is linear where its codes stay the same."""

from typing import Any

import torch
from torch import Tensor

from fastweights.ops.pooling import cpu


class _Pooling(torch.autograd.Function):
    """What the images give, and the codes of that, uint8."""

    @staticmethod
    def forward(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        return cpu.forward(images, slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        images, ctx.slope = inputs
        ctx.size = tuple(images.shape[2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return _spread(grad, codes, ctx.size, ctx.slope), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return _gather(tangent, codes, ctx.slope), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], images: Tensor, slope: float) -> tuple[Any, Any]:
        (folded,) = _folded(info, in_dims, images)
        pooled, codes = pooling(folded, slope)
        return (_unfolded(info, pooled), _unfolded(info, codes)), (0, 0)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(gradients: Tensor, codes: Tensor, size: tuple[int, int], slope: float) -> Tensor:
        return cpu.spread(gradients, codes, size, slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, ctx.size, ctx.slope = inputs
        ctx.save_for_backward(codes)
        ctx.save_for_forward(codes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (codes,) = ctx.saved_tensors
        return _gather(grad, codes, ctx.slope), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (codes,) = ctx.saved_tensors
        return _spread(tangent, codes, ctx.size, ctx.slope)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], gradients: Tensor, codes: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return _unfolded(info, _spread(*_folded(info, in_dims, gradients, codes), *rest)), 0


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(images: Tensor, codes: Tensor, slope: float) -> Tensor:
        return cpu.gather(images, codes, slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, codes, ctx.slope = inputs
        ctx.size = tuple(images.shape[2:])
        ctx.save_for_backward(codes)
        ctx.save_for_forward(codes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (codes,) = ctx.saved_tensors
        return _spread(grad, codes, ctx.size, ctx.slope), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (codes,) = ctx.saved_tensors
        return _gather(tangent, codes, ctx.slope)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], images: Tensor, codes: Tensor, slope: float) -> tuple[Tensor, int]:
        return _unfolded(info, _gather(*_folded(info, in_dims, images, codes), slope)), 0


def _folded(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """Batches of images, under vmap, as one."""
    placed = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    )
    return [tensor.flatten(0, 1) for tensor in placed]


def _unfolded(info: Any, tensor: Tensor) -> Tensor:
    return tensor.reshape(info.batch_size, -1, *tensor.shape[1:])


# Typed: torch's `apply` is not.
pooling: Any = _Pooling.apply
_spread: Any = _Spread.apply
_gather: Any = _Gather.apply
