"""The kernels as PyTorch operators: two custom operators, forward and backward, and the functions that call them.

The backward pass is a function of its own, so that the gradient of a gradient (which the kernels do not have) can be
that of the reference, asked for only when somebody differentiates twice.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.ops._transforms import each_example, second_order
from fastweights.ops.associative import cpu, reference, triton
from fastweights.ops.associative.reference import Constants

_INPUTS = 7  # drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths: the rest are no tensors
_CONSTANTS = 6  # decay .. eps: the first of the rest


@torch.library.custom_op("fastweights::associative", mutates_args=())
def forward_operator(
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    decay: float,
    rate: float,
    inner_steps: int,
    nonlinearity: str,
    normalize_initial: bool,
    eps: float,
    impl: str,
    form: str,
    keep_memory: bool,
    keep_trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    constants = Constants(decay, rate, inner_steps, nonlinearity, normalize_initial, eps)
    inputs = (drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths)
    if impl == "cpu":
        outputs, final, trace = cpu.forward(*inputs, constants, form, keep_memory and form == "matrix", keep_trace)
    else:
        outputs, final, trace = triton.forward(*inputs, constants, form), drive.new_empty(0), drive.new_empty(0)
    if keep_memory and final.numel() == 0:
        final = reference.final_memory(outputs, hidden, memory, lengths, constants)
    return outputs, final, trace


@torch.library.custom_op("fastweights::associative_backward", mutates_args=())
def backward_operator(
    grad_outputs: Tensor,
    outputs: Tensor,
    trace: Tensor,
    drive: Tensor,
    weight_hh: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    hidden: Tensor,
    memory: Tensor | None,
    lengths: Tensor | None,
    decay: float,
    rate: float,
    inner_steps: int,
    nonlinearity: str,
    normalize_initial: bool,
    eps: float,
    impl: str,
    form: str,
) -> list[Tensor]:
    constants = Constants(decay, rate, inner_steps, nonlinearity, normalize_initial, eps)
    inputs = (drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths)
    if impl == "cpu":
        gradients = cpu.backward(grad_outputs, outputs, *inputs, constants, form, trace)
    else:
        gradients = triton.backward(grad_outputs, outputs, *inputs, constants, form)
    # An operator cannot give None: an absent input's gradient is an empty tensor.
    return [drive.new_empty(0) if gradient is None else gradient for gradient in gradients]


@forward_operator.register_fake
def _(drive: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, batch, size = drive.shape
    *constants, impl, form, keep_memory, keep_trace = arguments[_INPUTS - 1 :]
    has_norm = arguments[1] is not None
    kept = impl == "cpu" and keep_trace
    trace = cpu.trace_size(drive, has_norm, Constants(*constants), form) if kept else 0
    memory = (batch, size, size) if keep_memory else (0,)
    return drive.new_empty(drive.shape), drive.new_empty(memory), drive.new_empty(trace)


@backward_operator.register_fake
def _(grad_outputs: Tensor, outputs: Tensor, trace: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = arguments[: _INPUTS - 1]
    return [grad_outputs.new_empty(0 if tensor is None else tensor.shape) for tensor in inputs]


@forward_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(each_example(forward_operator, info, in_dims, arguments)), (0, 0, 0)


@backward_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
    return each_example(backward_operator, info, in_dims, arguments), [0] * (_INPUTS - 1)


class Associative(torch.autograd.Function):
    """outputs [T,B,H], final memory [B,H,H] and trace; the arguments are those of `forward_operator`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = forward_operator(*arguments)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        outputs, _, trace = output
        ctx.mark_non_differentiable(trace)
        ctx.save_for_backward(outputs, trace, *inputs[:_INPUTS])
        *ctx.constants, _, _ = inputs[_INPUTS:]
        ctx.set_materialize_grads(False)  # most often nobody differentiates the final memory

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        outputs, trace, *inputs = saved
        *_, hidden, memory, lengths = inputs
        grad_outputs, grad_memory, _ = grads
        if grad_outputs is None:
            grad_outputs = torch.zeros_like(outputs)
        through_memory: list[Tensor | None] = [None, None]
        if grad_memory is not None:
            constants = Constants(*ctx.constants[:_CONSTANTS])
            written, *through_memory = reference.final_memory_backward(
                grad_memory, outputs, hidden, memory, lengths, constants
            )
            grad_outputs = grad_outputs + written
        # Nobody differentiates a gradient where gradients are switched off. A compiled backward pass is never
        # differentiated again, and Dynamo cannot trace a function within a function.
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        run: Any = backward_operator if plain else AssociativeBackward.apply
        gradients = run(grad_outputs, outputs, trace, *inputs, *ctx.constants)
        present = [None if tensor is None else gradient for tensor, gradient in zip(inputs, gradients, strict=False)]
        for index, more in zip((4, 5), through_memory, strict=True):
            if more is not None:
                present[index] = present[index] + more  # type: ignore[operator]
        return *present, None, *(None for _ in ctx.constants), None, None


class AssociativeBackward(torch.autograd.Function):
    """Gradients of the six inputs; its own gradient is that of the reference, differentiated twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(backward_operator(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_outputs, _, _, *rest = inputs
        ctx.save_for_backward(grad_outputs, *rest[:_INPUTS])
        ctx.constants = tuple(rest[_INPUTS:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        grad_outputs, *inputs, lengths = saved
        constants = Constants(*ctx.constants[:_CONSTANTS])

        def run(*tensors: Any) -> Tensor:
            return reference.recurrence(*(*tensors, lengths, constants))

        first, second = second_order(run, inputs, grad_outputs, grads)
        return first, None, None, *second, None, *(None for _ in ctx.constants)
