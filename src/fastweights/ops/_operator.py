"""Kernels as PyTorch operators, and the one way in which those of a recurrence are differentiated.

The forward and the backward pass are custom operators with fake kernels and no autograd of their own. `Kernel` calls
the first and, for its gradient, the second. The kernels have no gradient of a gradient: `KernelBackward` takes that of
the reference, and only when somebody differentiates twice.
"""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fastweights.ops.autocast import without_autocast
from fastweights.ops.plain import is_plain

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?"}


def register(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    schema: str | None = None,
) -> Any:
    """Return `run` as the operator fastweights::<name>.

    Args:
        name: the name of the operator.
        run: the kernel; it changes none of its arguments and returns new tensors.
        fake: the same for tensors without numbers: it returns empty ones of the right shapes.
        vmap: the rule for `torch.vmap`, as `torch.library.register_vmap` takes it; None runs one example at a time.
        schema: the arguments and results; None reads them from the annotations of `run`.
    """
    operator = torch.library.custom_op(f"fastweights::{name}", run, mutates_args=(), schema=schema)
    operator.register_fake(fake)

    def run_each(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        results = map_examples(operator, info, in_dims, arguments)
        return results, type(results)([0] * len(results))

    operator.register_vmap(vmap or run_each)
    return operator


def map_examples(operator: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """Run an operator of several results on every example under vmap, and stack the results."""
    columns = [
        argument.unbind(dim) if isinstance(dim, int) else [argument] * info.batch_size
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]
    examples = list(zip(*columns, strict=True))
    if not examples:
        raise ValueError("vmap over no examples: leave the call out, or use impl='reference'")
    results = [operator(*example) for example in examples]
    return type(results[0])([torch.stack(column) for column in zip(*results, strict=True)])


def is_differentiated(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether autograd follows what is computed from these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class Operation:
    """A recurrence whose kernels are operators: `operation(inputs, *options)` runs it, with gradients of any order.

    The functions that it is made of take a NamedTuple of tensors, of which the last have no gradient, such as what says
    which steps count (`lengths`, `starts`), then the options, such as the implementation.

    Args:
        name: the operators are fastweights::<name> and fastweights::<name>_backward.
        inputs: the class of the inputs.
        options: the types and names of the options, as in an operator's schema; "" for none.
        fixed: the number of inputs, the last ones, that have no gradient.
        results: the number of tensors that the forward pass returns.
        differentiable: the number of them, the first ones, that have gradients.
        kept: the indices of those that the backward pass takes.
        forward: takes the inputs, the options and whether a backward pass will follow; returns the results.
        backward: takes the gradients of the differentiable results, None for one that nobody asked for, the kept
            results, the inputs, the options, and for each input whether its gradient is wanted. Returns a gradient for
            each input but the fixed ones, an empty tensor for one that is None.
        fake_forward: as `forward`, for tensors without numbers.
        fake_backward: as `backward`, for tensors without numbers.
        reference: takes the inputs and the options, and returns the differentiable results.
    """

    def __init__(
        self,
        name: str,
        inputs: Any,
        options: str,
        *,
        fixed: int = 1,
        results: int,
        differentiable: int,
        kept: tuple[int, ...],
        forward: Callable[..., Any],
        backward: Callable[..., list[Tensor]],
        fake_forward: Callable[..., Any],
        fake_backward: Callable[..., list[Tensor]],
        reference: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        self.inputs, self.differentiable, self.kept, self.reference = inputs, differentiable, kept, reference
        self.run = forward
        count = self.tensors = len(inputs._fields)
        self.fixed = fixed

        def run(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: function(inputs(*arguments[:count]), *arguments[count:])

        def run_backward(function: Callable[..., Any]) -> Callable[..., Any]:
            first, second = differentiable, differentiable + len(kept)

            def call(*arguments: Any) -> Any:
                # Autocast is on where `backward()` is called within it: it would round what a kernel leaves to torch.
                with without_autocast(arguments[second].device.type):
                    return function(
                        arguments[:first],
                        arguments[first:second],
                        inputs(*arguments[second : second + count]),
                        *arguments[second + count :],
                    )

            return call

        hints = get_type_hints(inputs)
        self.required = [(index, tensor) for index, (tensor, hint) in enumerate(hints.items()) if hint is Tensor]
        arguments = ", ".join(f"{_TYPES[hint]} {tensor}" for tensor, hint in hints.items())
        arguments += f", {options}" if options else ""
        given = ", ".join(f"Tensor? grad_{index}" for index in range(differentiable))
        given += "".join(f", Tensor result_{index}" for index in kept)
        # A schema with one result in parentheses is one without a tuple.
        told = "Tensor[]" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        schema = f"({arguments}, bool keep_trace) -> {told}"
        self.forward = register(name, run(forward), run(fake_forward), schema=schema)
        self.backward = register(
            f"{name}_backward",
            run_backward(backward),
            run_backward(fake_backward),
            schema=f"({given}, {arguments}, bool[] wanted) -> Tensor[]",
        )

    def __call__(self, inputs: Any, *options: Any) -> tuple[Tensor, ...]:
        for index, tensor in self.required:
            if inputs[index] is None:  # a kernel would read at address zero
                raise TypeError(f"{tensor} must be a tensor, got None")
        differentiated = is_differentiated(inputs)
        # The way through an operator takes longer than a small kernel.
        if not differentiated and is_plain(inputs):
            return self.run(inputs, *options, differentiated)  # type: ignore[no-any-return]
        # Dynamo cannot trace the function where there is nothing to differentiate.
        if torch.compiler.is_compiling() and not differentiated:
            return self.forward(*inputs, *options, differentiated)  # type: ignore[no-any-return]
        return Kernel.apply(self, *inputs, *options, differentiated)  # type: ignore[no-untyped-call, no-any-return]


class Kernel(torch.autograd.Function):
    """Run the forward pass of an operation; the gradients are those of its backward operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(operation.forward(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operation = ctx.operation = inputs[0]
        last = 1 + operation.tensors
        ctx.options = inputs[last:-1]
        ctx.mark_non_differentiable(*output[operation.differentiable :])
        ctx.save_for_backward(*(output[index] for index in operation.kept), *inputs[1:last])
        ctx.set_materialize_grads(False)  # most often nobody differentiates the final state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operation, saved = ctx.operation, ctx.saved_tensors
        inputs = saved[len(operation.kept) : -operation.fixed]
        # Nobody differentiates a gradient where gradients are switched off. A compiled backward pass is never
        # differentiated again, and Dynamo cannot trace a function within a function.
        plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        needed = ctx.needs_input_grad[1 : 1 + len(inputs)]
        wanted = [tensor is not None and (need or not plain) for tensor, need in zip(inputs, needed, strict=True)]
        arguments = (*grads[: operation.differentiable], *saved, *ctx.options, wanted)
        differentiable: Any = KernelBackward.apply
        gradients = operation.backward(*arguments) if plain else differentiable(operation, *arguments)
        present = [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]
        return None, *present, *(None for _ in (*range(operation.fixed), *ctx.options)), None


class KernelBackward(torch.autograd.Function):
    """Run the backward pass of an operation; its own gradient is that of the reference, differentiated twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operation: Operation, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(operation.backward(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operation, *arguments, _ = inputs
        first, second = ctx.operation.differentiable, ctx.operation.differentiable + len(ctx.operation.kept)
        last = second + ctx.operation.tensors
        ctx.save_for_backward(*arguments[:first], *arguments[second:last])
        ctx.options = arguments[last:]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        operation: Operation = ctx.operation
        grads = ctx.saved_tensors[: operation.differentiable]
        tensors = ctx.saved_tensors[operation.differentiable :]
        inputs, fixed = tensors[: -operation.fixed], tensors[-operation.fixed :]
        results = [index for index, grad in enumerate(grads) if grad is not None]
        present = [index for index, tensor in enumerate(inputs) if tensor is not None]

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            every = operation.reference(operation.inputs(*_place(present, tensors, len(inputs)), *fixed), *ctx.options)
            return tuple(every[index] for index in results)

        def differentiate(grads: tuple[Tensor, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
            return torch.func.vjp(run, *tensors)[1](grads)  # type: ignore[no-any-return]

        given = tuple(grads[index] for index in results)
        with without_autocast(tensors[0].device.type):
            pull = torch.func.vjp(differentiate, given, *(inputs[index] for index in present))[1]
            of_grads, *of_inputs = pull(tuple(outer[index] for index in present))
        return (
            None,
            *_place(results, of_grads, len(grads)),
            *(None for _ in operation.kept),
            *_place(present, of_inputs, len(inputs)),
            *(None for _ in (*fixed, *ctx.options)),
            None,
        )


# PyTorch asks for the signature at every call: with an answer at hand a small call takes a sixth less.
for _function in (Kernel, KernelBackward):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[attr-defined]


def _place(indices: list[int], tensors: Any, count: int) -> list[Tensor | None]:
    """Return a list of `count` places with the tensors at these indices, and None elsewhere."""
    placed: list[Tensor | None] = [None] * count
    for index, tensor in zip(indices, tensors, strict=True):
        placed[index] = tensor
    return placed
