"""The kernel as PyTorch operators, and its derivatives, of any order: linear where the codes stay the same."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops._transforms import each_example
from fastweights.ops.convolution import cpu
from fastweights.ops.pooling._autograd import folded, gathered, spread, unfolded
from fastweights.ops.pooling.cpu import empty, pooled_shape


@torch.library.custom_op("fastweights::convolve_and_pool", mutates_args=())
def convolve_operator(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    return cpu.forward(images, weight, bias, slope)


@torch.library.custom_op("fastweights::convolution_taps", mutates_args=())
def taps_operator(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
    return cpu.backward(gradients, codes, images, slope)


@convolve_operator.register_fake
def _(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    shape = pooled_shape(images, len(weight))
    return empty(shape, images, images.dtype), empty(shape, images, torch.uint8)


@taps_operator.register_fake
def _(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
    count, inputs = images.shape[:2]
    return images.new_empty(count, gradients.shape[1], 1 + 9 * inputs, dtype=cpu.wide(images.dtype))


@convolve_operator.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], images: Tensor, weight: Tensor, bias: Tensor, slope: float
) -> tuple[Any, tuple[int, int]]:
    if in_dims[1] is None and in_dims[2] is None:
        pooled, codes = convolve_operator(*folded(info, in_dims, images), weight, bias, slope)
        return (unfolded(info, pooled), unfolded(info, codes)), (0, 0)
    return tuple(each_example(convolve_operator, info, in_dims, (images, weight, bias, slope))), (0, 0)


@taps_operator.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    *tensors, slope = arguments
    return unfolded(info, taps_operator(*folded(info, in_dims, *tensors), slope)), 0


class Convolution(torch.autograd.Function):
    """What the images give, and the codes of that, uint8."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, weight: Tensor, bias: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = convolve_operator(images, weight, bias, slope)
        return found

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
        of_images, of_weight, of_bias, _ = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None, None]
        if of_images:
            found[0] = F.conv_transpose2d(spread(grad, codes, *images.shape[2:], ctx.slope), weight, padding=1)
        if of_weight or of_bias:
            found[1:3] = (part.to(weight.dtype) for part in _parted(_taps(grad, codes, images, ctx.slope)))
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, images: Tensor | None, weight: Tensor | None, bias: Tensor | None, _: None) -> tuple[Any, None]:
        at, own, codes = ctx.saved_tensors
        tangent = torch.zeros_like(own[:, 0, 0, 0]) if bias is None else bias
        tangent = F.conv2d(at, torch.zeros_like(own) if weight is None else weight, tangent, padding=1)
        if images is not None:
            tangent = tangent + F.conv2d(images, own, padding=1)
        return gathered(tangent, codes, ctx.slope), None


class Taps(torch.autograd.Function):
    """The gradients of bias and taps, [C,1 + 9 I]: linear in that of what the images gave, and in the images."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Tensor, codes: Tensor, images: Tensor, slope: float) -> Tensor:
        found: Tensor = taps_operator(gradients, codes, images, slope)
        return found.sum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.slope = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, codes, images = ctx.saved_tensors
        weight, bias = (part.to(images.dtype) for part in _parted(grad))
        of_gradients = of_images = None
        if ctx.needs_input_grad[0]:
            of_gradients = gathered(F.conv2d(images, weight, bias, padding=1), codes, ctx.slope)
        if ctx.needs_input_grad[2]:
            of_images = F.conv_transpose2d(spread(gradients, codes, *images.shape[2:], ctx.slope), weight, padding=1)
        return of_gradients, None, of_images, None

    @staticmethod
    def jvp(ctx: Any, gradients: Tensor | None, _: None, images: Tensor | None, __: None) -> Tensor:
        at, codes, of = ctx.saved_tensors
        found: Tensor = _taps(torch.zeros_like(at) if gradients is None else gradients, codes, of, ctx.slope)
        return found if images is None else found + _taps(at, codes, images, ctx.slope)


_taps: Any = Taps.apply


def _parted(taps: Tensor) -> tuple[Tensor, Tensor]:
    """Taps [C,I,3,3] and bias [C], of both in one [C,1 + 9 I]."""
    return taps[:, 1:].reshape(len(taps), 3, 3, taps.shape[1] // 9).permute(0, 3, 1, 2), taps[:, 0]
