"""The kernels of the block as PyTorch operators, and their derivatives of any order, forwards and backwards.

Where the codes stay the same, everything is linear: each function's derivatives are made of the others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops._operator import map_examples, register
from fastweights.ops.conv_block import cpu

_PLACE, _POSITIVE = 3, 4  # csrc/pooling.hpp


def _fold(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """Return batches of images under vmap as one batch."""
    placed = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    )
    return [tensor.flatten(0, 1) for tensor in placed]


def _unfold(info: Any, *tensors: Tensor) -> tuple[Any, Any]:
    parts = [t.reshape(info.batch_size, t.shape[0] // max(1, info.batch_size), *t.shape[1:]) for t in tensors]
    return (parts[0], 0) if len(parts) == 1 else (tuple(parts), (0,) * len(parts))


def _map_pool(info: Any, in_dims: tuple[Any, ...], images: Tensor, slope: float) -> tuple[Any, Any]:
    return _unfold(info, *pool_operator(*_fold(info, in_dims, images), slope))


def _map_spread(info: Any, in_dims: tuple[Any, ...], gradients: Tensor, codes: Tensor, *rest: Any) -> tuple[Any, Any]:
    return _unfold(info, spread_operator(*_fold(info, in_dims, gradients, codes), *rest))


def _map_convolve(
    info: Any, in_dims: tuple[Any, ...], images: Tensor, weight: Tensor, bias: Tensor, slope: float
) -> tuple[Any, Any]:
    if in_dims[1] is None and in_dims[2] is None:
        return _unfold(info, *convolve_operator(*_fold(info, in_dims, images), weight, bias, slope))
    return map_examples(convolve_operator, info, in_dims, (images, weight, bias, slope)), (0, 0)


def _map_taps(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    *tensors, slope = arguments
    return _unfold(info, taps_operator(*_fold(info, in_dims, *tensors), slope))


def _fake_taps(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
    count, inputs = images.shape[:2]
    return images.new_empty(count, gradients.shape[1], 1 + 9 * inputs, dtype=cpu.widen(images.dtype))


pool_operator = register("pool", cpu.pool, lambda images, slope: cpu.empty_pooled(images, images.shape[1]), _map_pool)
spread_operator = register(
    "pool_spread",
    cpu.spread,
    lambda gradients, codes, height, width, slope: cpu.empty(
        (*gradients.shape[:2], height, width), gradients, gradients.dtype
    ),
    _map_spread,
)
convolve_operator = register(
    "convolve_and_pool",
    cpu.convolve,
    lambda images, weight, bias, slope: cpu.empty_pooled(images, len(weight)),
    _map_convolve,
)
taps_operator = register("convolution_taps", cpu.sum_taps, _fake_taps, _map_taps)


class Pooling(torch.autograd.Function):
    """Run the pooling: the pooled images, and their codes, uint8."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        return pool_operator(images, slope)  # type: ignore[no-any-return]

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
        return None if grad is None else _spread(grad, codes, *ctx.size, ctx.slope), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        (codes,) = ctx.saved_tensors
        return _gather(tangent, codes, ctx.slope), None


class Spread(torch.autograd.Function):
    """Return the gradient of the images, linear in that of the pooled ones."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Tensor, codes: Tensor, height: int, width: int, slope: float) -> Tensor:
        return spread_operator(gradients, codes, height, width, slope)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, *ctx.size, ctx.slope = inputs
        ctx.save_for_backward(codes)
        ctx.save_for_forward(codes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        return _gather(grad, codes, ctx.slope), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        (codes,) = ctx.saved_tensors
        return _spread(tangent, codes, *ctx.size, ctx.slope)  # type: ignore[no-any-return]


class Convolution(torch.autograd.Function):
    """Run the convolution and the pooling: the pooled images, and their codes, uint8."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        return convolve_operator(images, weight, bias, slope)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        images, weight, _, ctx.slope = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(images, weight, output[1])
        ctx.save_for_forward(images, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        images, weight, codes = ctx.saved_tensors
        images_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        of_images = of_weight = of_bias = None
        if images_needed:
            of_images = F.conv_transpose2d(_spread(grad, codes, *images.shape[2:], ctx.slope), weight, padding=1)
        if weight_needed or bias_needed:
            of_weight, of_bias = (part.to(weight.dtype) for part in _split(_taps(grad, codes, images, ctx.slope)))
        return of_images, of_weight, of_bias, None

    @staticmethod
    def jvp(ctx: Any, images: Tensor | None, weight: Tensor | None, bias: Tensor | None, _: None) -> tuple[Any, None]:
        at_images, at_weight, codes = ctx.saved_tensors
        tangent = torch.zeros_like(at_weight[:, 0, 0, 0]) if bias is None else bias
        tangent = F.conv2d(at_images, torch.zeros_like(at_weight) if weight is None else weight, tangent, padding=1)
        if images is not None:
            tangent = tangent + F.conv2d(images, at_weight, padding=1)
        return _gather(tangent, codes, ctx.slope), None


class Taps(torch.autograd.Function):
    """Return the gradients of bias and taps, [C,1 + 9 I]: linear in that of the pooled images, and in the images."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
        return taps_operator(gradients, codes, images, slope).sum(0)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.slope = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, codes, images = ctx.saved_tensors
        weight, bias = (part.to(images.dtype) for part in _split(grad))
        of_gradients = of_images = None
        if ctx.needs_input_grad[0]:
            of_gradients = _gather(F.conv2d(images, weight, bias, padding=1), codes, ctx.slope)
        if ctx.needs_input_grad[2]:
            of_images = F.conv_transpose2d(_spread(gradients, codes, *images.shape[2:], ctx.slope), weight, padding=1)
        return of_gradients, None, of_images, None

    @staticmethod
    def jvp(ctx: Any, gradients: Tensor | None, _: None, images: Tensor | None, __: None) -> Tensor:
        at_gradients, codes, at_images = ctx.saved_tensors
        tangent = torch.zeros_like(at_gradients) if gradients is None else gradients
        result: Tensor = _taps(tangent, codes, at_images, ctx.slope)
        return result if images is None else result + _taps(at_gradients, codes, images, ctx.slope)


_spread: Any = Spread.apply
_taps: Any = Taps.apply


def _gather(images: Tensor, codes: Tensor, slope: float) -> Tensor:
    """Pool images [N,C,H,W] by given codes: linear in the images, the transpose of the spreading."""
    height, width = images.shape[2:]
    fours = F.pad(images, (0, width % 2, 0, height % 2)).unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    chosen = fours.gather(4, (codes & _PLACE).long().unsqueeze(4)).squeeze(4)
    return torch.where(codes & _POSITIVE > 0, chosen, slope * chosen)


def _split(taps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the taps [C,I,3,3] and the bias [C] of both in one [C,1 + 9 I]."""
    return taps[:, 1:].reshape(len(taps), 3, 3, taps.shape[1] // 9).permute(0, 3, 1, 2), taps[:, 0]
