"""The kernel as PyTorch operators, and its derivatives, of any order: it is linear where its codes stay the same."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.pooling import cpu

_PLACE, _POSITIVE = 3, 4  # csrc/pooling.hpp


@torch.library.custom_op("fastweights::pool", mutates_args=())
def pool_operator(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    return cpu.forward(images, slope)


@torch.library.custom_op("fastweights::pool_spread", mutates_args=())
def spread_operator(gradients: Tensor, codes: Tensor, height: int, width: int, slope: float) -> Tensor:
    return cpu.spread(gradients, codes, height, width, slope)


@pool_operator.register_fake
def _(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    shape = cpu.pooled_shape(images, images.shape[1])
    return cpu.empty(shape, images, images.dtype), cpu.empty(shape, images, torch.uint8)


@spread_operator.register_fake
def _(gradients: Tensor, codes: Tensor, height: int, width: int, slope: float) -> Tensor:
    return cpu.empty((*gradients.shape[:2], height, width), gradients, gradients.dtype)


@pool_operator.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], images: Tensor, slope: float) -> tuple[Any, tuple[int, int]]:
    pooled, codes = pool_operator(*folded(info, in_dims, images), slope)
    return (unfolded(info, pooled), unfolded(info, codes)), (0, 0)


@spread_operator.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], gradients: Tensor, codes: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return unfolded(info, spread_operator(*folded(info, in_dims, gradients, codes), *rest)), 0


class Pooling(torch.autograd.Function):
    """What the images give, and the codes of that, uint8."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = pool_operator(images, slope)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        images, ctx.slope = inputs
        ctx.size = tuple(images.shape[2:])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        (codes,) = ctx.saved_tensors
        return None if grad is None else spread(grad, codes, *ctx.size, ctx.slope), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return gathered(tangent, codes, ctx.slope), None


class Spread(torch.autograd.Function):
    """The gradient of the images, linear in that of what they gave."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Tensor, codes: Tensor, height: int, width: int, slope: float) -> Tensor:
        found: Tensor = spread_operator(gradients, codes, height, width, slope)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, *ctx.size, ctx.slope = inputs
        ctx.save_for_backward(codes)
        ctx.save_for_forward(codes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        return gathered(grad, codes, ctx.slope), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (codes,) = ctx.saved_tensors
        found: Tensor = spread(tangent, codes, *ctx.size, ctx.slope)
        return found


spread: Any = Spread.apply


def gathered(images: Tensor, codes: Tensor, slope: float) -> Tensor:
    """What images [N,C,H,W] would give with these codes: linear in them, the transpose of the spreading."""
    height, width = images.shape[2:]
    fours = F.pad(images, (0, width % 2, 0, height % 2)).unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    chosen = fours.gather(4, (codes & _PLACE).long().unsqueeze(4)).squeeze(4)
    return torch.where(codes & _POSITIVE > 0, chosen, slope * chosen)


def folded(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """Batches of images, under vmap, as one."""
    placed = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    )
    return [tensor.flatten(0, 1) for tensor in placed]


def unfolded(info: Any, tensor: Tensor) -> Tensor:
    return tensor.reshape(info.batch_size, tensor.shape[0] // max(1, info.batch_size), *tensor.shape[1:])
