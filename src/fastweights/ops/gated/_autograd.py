"""The kernels of the two networks as PyTorch operators, and the functions that differentiate them.

As in `ops.associative`, each backward pass is a function of its own, whose gradient is that of the reference.
"""

from typing import Any

import torch
from torch import Tensor

from fastweights.ops._transforms import each_example, second_order
from fastweights.ops.gated import _triton_products, cpu, reference

_KERNELS: dict[str, Any] = {"cpu": cpu, "triton": _triton_products}


def _plain() -> bool:
    """Whether nobody differentiates a gradient: Dynamo cannot trace a function within a function either."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


@torch.library.custom_op("fastweights::gated_slow", mutates_args=())
def slow_operator(
    drive: Tensor,
    weight_hh: Tensor,
    weight_z: Tensor,
    bias_z: Tensor,
    hidden: Tensor,
    lengths: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inners, states = _KERNELS[impl].slow_forward(drive, weight_hh, weight_z, bias_z, hidden, lengths)
    return inners, states


@torch.library.custom_op("fastweights::gated_slow_backward", mutates_args=())
def slow_backward_operator(
    grad_inners: Tensor,
    grad_states: Tensor | None,
    inners: Tensor,
    states: Tensor,
    drive: Tensor,
    weight_hh: Tensor,
    weight_z: Tensor,
    bias_z: Tensor,
    hidden: Tensor,
    lengths: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (drive, weight_hh, weight_z, bias_z, hidden, lengths)
    results = _KERNELS[impl].slow_backward(grad_inners, grad_states, inners, states, *inputs)
    grad_drive, grad_z, grad_hidden = results
    rows_z, rows_inner = _rows(grad_z, impl), _rows(inners, impl)
    # The first step's state is `hidden`; a copy with the others behind it would be a pass over all of them.
    of_hh = torch.addmm(grad_drive[0].t() @ hidden, grad_drive[1:].flatten(0, 1).t(), states[:-1].flatten(0, 1))
    return grad_drive, of_hh, rows_z.t() @ rows_inner, rows_z.sum(0), grad_hidden


def _empty_inners(like: Tensor, impl: str) -> Tensor:
    return cpu.empty_sequences(like, like.shape[2]) if impl == "cpu" else torch.empty_like(like)


def _rows(tensor: Tensor, impl: str) -> Tensor:
    """The rows of a tensor [T,B,...], in the order in which the implementation lays them: C++ keeps sequences whole."""
    return (tensor.transpose(0, 1) if impl == "cpu" else tensor).flatten(0, 1)


@slow_operator.register_fake
def _(drive: Tensor, weight_hh: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _empty_inners(drive, arguments[-1]), drive.new_empty(*drive.shape[:2], weight_hh.shape[1])


@slow_backward_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in arguments[4:9])


@slow_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(each_example(slow_operator, info, in_dims, arguments)), (0, 0)


@slow_backward_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(each_example(slow_backward_operator, info, in_dims, arguments)), (0,) * 5


class SlowNetwork(torch.autograd.Function):
    """The inner units and the states of `reference.slow_network`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        results: tuple[Tensor, Tensor] = slow_operator(*arguments)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.impl = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inners, states, *inputs = ctx.saved_tensors
        grad_inners = torch.zeros_like(inners) if grads[0] is None else grads[0]
        run: Any = slow_backward_operator if _plain() else SlowNetworkBackward.apply
        return *run(grad_inners, grads[1], inners, states, *inputs, ctx.impl), None, None


class SlowNetworkBackward(torch.autograd.Function):
    """Its gradients; their gradients are those of the reference, differentiated twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(slow_backward_operator(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_inners, grad_states, _, states, *rest, _ = inputs
        ctx.save_for_backward(grad_inners, torch.zeros_like(states) if grad_states is None else grad_states, *rest)
        ctx.without = grad_states is None

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        grad_inners, grad_states, *inputs, lengths = ctx.saved_tensors

        def run(*tensors: Any) -> tuple[Tensor, Tensor]:
            return reference.slow_network(*(*tensors, lengths))

        (of_inners, of_states), of_inputs = second_order(run, inputs, (grad_inners, grad_states), outer)
        return of_inners, None if ctx.without else of_states, None, None, *of_inputs, None, None


@torch.library.custom_op("fastweights::gated_fast", mutates_args=())
def fast_operator(
    inners: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
    keep_trace: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = _KERNELS[impl]
    results = kernel.fast_forward(inners, weight, bias, x, hidden, fast_1, fast_2, lengths, eps, keep_trace)
    outputs, last_1, last_2, trace = results
    return outputs, last_1, last_2, trace


@torch.library.custom_op("fastweights::gated_fast_backward", mutates_args=())
def fast_backward_operator(
    grad_outputs: Tensor | None,
    grad_fast_1: Tensor | None,
    grad_fast_2: Tensor | None,
    outputs: Tensor,
    trace: Tensor,
    inners: Tensor,
    weight: Tensor,
    bias: Tensor,
    x: Tensor,
    hidden: Tensor,
    fast_1: Tensor,
    fast_2: Tensor,
    lengths: Tensor | None,
    eps: float,
    matrices: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = (grad_outputs, grad_fast_1, grad_fast_2)
    given = (inners, weight, bias, x, hidden, fast_1, fast_2, lengths, eps)
    results = _KERNELS[impl].fast_backward(*grads, outputs, trace, *given, matrices=matrices)
    of_inners, of_weight, of_bias, of_x, of_hidden, of_fast_1, of_fast_2 = results
    return of_inners, of_weight, of_bias, of_x, of_hidden, of_fast_1, of_fast_2


@fast_operator.register_fake
def _(inners: Tensor, weight: Tensor, bias: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, hidden, fast_1, fast_2, *_, keep_trace, impl = given
    trace = x.new_empty(_KERNELS[impl].trace_size(weight, x, hidden) if keep_trace else 0)
    outputs = x.new_empty(*x.shape[:2], hidden.shape[1])
    return outputs, x.new_empty(fast_1.shape), x.new_empty(fast_2.shape), trace


@fast_backward_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    inners, *others, _, _, matrices, impl = arguments[5:]
    shapes = [tensor.shape for tensor in others]
    if not matrices:
        shapes[-2:] = torch.Size([0]), torch.Size([0])
    return _empty_inners(inners, impl), *(t.new_empty(shape) for t, shape in zip(others, shapes, strict=True))


@fast_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(each_example(fast_operator, info, in_dims, arguments)), (0,) * 4


@fast_backward_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(each_example(fast_backward_operator, info, in_dims, arguments)), (0,) * 7


class FastNetwork(torch.autograd.Function):
    """The outputs and the last fast matrices of `reference.fast_network`, and the trace of the steps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor, Tensor] = fast_operator(*arguments)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.eps, _, ctx.impl = inputs
        outputs, _, _, trace = output
        ctx.mark_non_differentiable(trace)
        ctx.save_for_backward(outputs, trace, *tensors)
        ctx.set_materialize_grads(False)  # most often nobody differentiates the last matrices

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # A state is most often cut from the graph, and its matrices are most of what there is to write.
        matrices = any(ctx.needs_input_grad[5:7]) or not _plain()
        run: Any = fast_backward_operator if _plain() else FastNetworkBackward.apply
        *others, of_1, of_2 = run(*grads[:3], *ctx.saved_tensors, ctx.eps, matrices, ctx.impl)
        of_matrices = (of_1, of_2) if matrices else (None, None)
        return *others, *of_matrices, None, None, None, None


class FastNetworkBackward(torch.autograd.Function):
    """Its gradients; their gradients are those of the reference, differentiated twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(fast_backward_operator(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *grads, outputs, _ = inputs[:5]
        *tensors, ctx.eps, _, _ = inputs[5:]
        likes = (outputs, *tensors[5:7])
        placed = [torch.zeros_like(like) if g is None else g for g, like in zip(grads, likes, strict=True)]
        ctx.without = [g is None for g in grads]
        ctx.save_for_backward(*placed, *tensors)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, lengths = ctx.saved_tensors
        grads, inputs = tuple(tensors[:3]), tensors[3:]

        def run(*tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
            return reference.fast_network(*(*tensors, lengths, ctx.eps))

        of_grads, of_inputs = second_order(run, inputs, grads, outer)
        first = [None if without else g for without, g in zip(ctx.without, of_grads, strict=True)]
        return *first, None, None, *of_inputs, None, None, None, None
