"""Attention to the recent past: the recurrence of Ba et al. 2016, "Using fast weights to attend to the recent past"."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _triton
from fastweights.ops._native import IMPLEMENTATIONS, choose
from fastweights.ops._operator import Operation
from fastweights.ops.associative import cpu, reference, triton
from fastweights.ops.associative.reference import (
    FIXED,
    Constants,
    Inputs,
    attention_scores,
    check_inputs,
    final_memory,
)

__all__ = [
    "FORMS",
    "IMPLEMENTATIONS",
    "Constants",
    "Inputs",
    "associative",
    "associative_with_memory",
    "attention_scores",
    "final_memory",
]

FORMS = tuple(reference.FORMS)


def associative(
    drive: Tensor,
    weight_hh: Tensor,
    hidden: Tensor,
    memory: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    strengths: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    clears: Tensor | None = None,
    constants: Constants,
    impl: str = "auto",
    form: str = "auto",
) -> Tensor:
    """Run the fast-weights recurrence over a batch of sequences (Ba et al. 2016, eq 1 to 5).

    Args:
        drive: C x + b for every step, [T,B,H].
        weight_hh: the slow recurrent weights W, [H,H].
        hidden: h(0), [B,H].
        memory: the fast matrix as the sequence begins, before `hidden` is written into it, [B,H,H]; None is zeros.
        norm_weight: the gain of the layer norm, [H]; None switches the layer norm off.
        norm_bias: its bias, [H]; None where `norm_weight` is.
        strengths: what the rate of every step's write is multiplied by, [T,B]; None is ones. Step t writes h(t).
        lengths: valid steps of each sequence, int64 [B], from 0 to T (the cpu kernel refuses others, the rest take
            them as 0 or T); outputs past them are zero.
        starts: the steps before which a sequence restarts, bool [T,B]: its hidden state and fast matrix are zeros
            there, and no gradient goes further back. None is nowhere.
        clears: the steps that forget h(t) once it is written, bool [T,B]: W h(t) is left out of them. None is nowhere.
        constants: decay, rate, inner_steps, nonlinearity, normalize_initial, eps and hold_input, without which
            "reference" runs.
        impl: "auto", "reference", "cpu" or "triton".
        form: "attention" reads the stored hidden states (eq 4: T^2 H for a sequence), "matrix" forms the fast matrix
            (eq 1: T H^2); "auto" takes the one that was measured to be faster for these sizes. The answer is the same.

    `strengths` and `clears` make the multi-level network of section 4.2, which is told when to store.

    Gradients of any order, `torch.func.grad`, `jacrev` and `vmap` go through every implementation; forward mode
    (`torch.func.jvp`, `hessian`) through "reference" alone.

    Returns:
        h(1) .. h(T), [T,B,H]. `associative_with_memory` gives the fast matrix after the last of them too.

    Raises:
        ValueError: `impl` or `form` is unknown, a shape does not fit, there is no step, or half a layer norm is given.
        KernelError: the implementation that was asked for by name cannot run here.

    Examples:
        >>> import torch
        >>> from fastweights.ops.associative import Constants, associative
        >>> outputs = associative(torch.randn(7, 2, 5), 0.05 * torch.eye(5), torch.zeros(2, 5),
        ...                       norm_weight=torch.ones(5), norm_bias=torch.zeros(5),
        ...                       constants=Constants(decay=0.95, rate=0.5))
        >>> outputs.shape
        torch.Size([7, 2, 5])
    """
    inputs = Inputs(drive, weight_hh, norm_weight, norm_bias, hidden, memory, strengths, lengths, starts, clears)
    return _run(inputs, constants, impl, form, keep_memory=False)[0]


def associative_with_memory(
    drive: Tensor,
    weight_hh: Tensor,
    hidden: Tensor,
    memory: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    strengths: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    clears: Tensor | None = None,
    constants: Constants,
    impl: str = "auto",
    form: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run `associative`, and return also the fast matrix with which the next piece of the sequence begins.

    Returns:
        h(1) .. h(T), [T,B,H], and A(T-1), [B,H,H]: all but h(T) is written into it.

    Raises:
        ValueError: as `associative`.
        KernelError: as `associative`.

    Examples:
        >>> import torch
        >>> from fastweights.ops.associative import Constants, associative_with_memory
        >>> outputs, memory = associative_with_memory(torch.randn(7, 2, 5), 0.05 * torch.eye(5), torch.zeros(2, 5),
        ...                                           constants=Constants(decay=0.95, rate=0.01))
        >>> memory.shape
        torch.Size([2, 5, 5])
    """
    inputs = Inputs(drive, weight_hh, norm_weight, norm_bias, hidden, memory, strengths, lengths, starts, clears)
    return _run(inputs, constants, impl, form, keep_memory=True)


def _run(inputs: Inputs, constants: Constants, impl: str, form: str, *, keep_memory: bool) -> tuple[Tensor, Tensor]:
    drive = inputs.drive
    if drive.dim() != 3 or drive.shape[0] == 0:
        raise ValueError(f"drive must be [T,B,H] with at least one step, got shape {tuple(drive.shape)}")
    if drive.shape[2] == 0:
        raise ValueError(f"drive must have at least one unit, got shape {tuple(drive.shape)}")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    plain = None if constants.hold_input else "hold_input=False is in plain PyTorch alone"
    impl = choose(drive, impl, lambda: _triton.unavailable(drive), plain)
    if impl == "reference":
        check_inputs(inputs)  # a kernel checks them itself
        outputs = reference.FORMS[form](inputs, constants)
        if not keep_memory:
            return outputs, drive.new_empty(0)
        return outputs, _final_memory(outputs, inputs, constants)
    outputs, final, _ = _OPERATION(
        inputs,
        constants.decay,
        constants.rate,
        constants.inner_steps,
        constants.nonlinearity,
        constants.normalize_initial,
        constants.eps,
        form,
        keep_memory,
        impl,
    )
    return outputs, final


def _final_memory(outputs: Tensor, inputs: Inputs, constants: Constants) -> Tensor:
    steps: Any = {"starts": inputs.starts, "strengths": inputs.strengths}
    return final_memory(outputs, inputs.hidden, inputs.memory, inputs.lengths, constants, **steps)


_KERNELS: dict[str, Any] = {"cpu": cpu, "triton": triton}
_read_constants = lru_cache(Constants)  # an operator takes them one by one: they are not checked again at every call


def _read(inputs: Inputs, options: Sequence[Any]) -> tuple[Constants, str, bool, str]:
    """Return the constants, the form that runs, whether the final memory is wanted, and the implementation."""
    *numbers, form, keep_memory, impl = options
    if form == "auto":
        form = _KERNELS[impl].choose_form(inputs.drive, keep_memory)
    return _read_constants(*numbers), form, keep_memory, impl


def _forward(inputs: Inputs, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, keep_trace = options
    constants, form, keep_memory, impl = _read(inputs, others)
    empty = inputs.drive.new_empty
    if impl == "cpu":
        outputs, final, trace = cpu.forward(inputs, constants, form, keep_memory and form == "matrix", keep_trace)
    else:
        outputs, final, trace = triton.forward(inputs, constants, form), empty(0), empty(0)
    if keep_memory and final.numel() == 0:
        final = _final_memory(outputs, inputs, constants)
    return outputs, final, trace


def _backward(
    grads: tuple[Tensor | None, Tensor | None], kept: tuple[Tensor, Tensor], inputs: Inputs, *options: Any
) -> list[Tensor]:
    (grad_outputs, grad_memory), (outputs, trace) = grads, kept
    constants, form, keep_memory, impl = _read(inputs, options[:-1])
    if grad_outputs is None:
        grad_outputs = torch.zeros_like(outputs)
    of_hidden = of_memory = of_strengths = None
    if grad_memory is not None and keep_memory:  # a compiled graph has zeros for gradients that nobody asked for
        written, of_hidden, of_memory, of_strengths = reference.final_memory_backward(
            grad_memory,
            outputs,
            inputs.hidden,
            inputs.memory,
            inputs.lengths,
            constants,
            starts=inputs.starts,
            strengths=inputs.strengths,
        )
        grad_outputs = grad_outputs + written
    if impl == "cpu":
        gradients = cpu.backward(grad_outputs, outputs, inputs, constants, form, trace)
    else:
        gradients = triton.backward(grad_outputs, outputs, inputs, constants, form)
    results = [outputs.new_empty(0) if gradient is None else gradient for gradient in gradients]
    for index, more in ((4, of_hidden), (5, of_memory), (6, of_strengths)):
        if more is not None:
            results[index] = results[index] + more
    return results


def _fake_forward(inputs: Inputs, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, keep_trace = options
    check_inputs(inputs)
    *_, keep_memory, impl = others
    drive = inputs.drive
    _, batch, size = drive.shape
    trace = 0
    if impl == "cpu" and keep_trace:  # the form depends on the sizes: an exported graph without a trace takes any
        constants, form, _, _ = _read(inputs, others)
        trace = cpu.count_trace(inputs, constants, form)
    memory = (batch, size, size) if keep_memory else (0,)
    return drive.new_empty(drive.shape), drive.new_empty(memory), drive.new_empty(trace)


def _fake_backward(grads: Any, kept: Any, inputs: Inputs, *options: Any) -> list[Tensor]:
    return [inputs.drive.new_empty(0 if tensor is None else tensor.shape) for tensor in inputs[:-FIXED]]


def _reference(inputs: Inputs, *options: Any) -> tuple[Tensor, ...]:
    constants, _, keep_memory, _ = _read(inputs, options)
    outputs = reference.recurrence(inputs, constants)
    if not keep_memory:
        return (outputs,)
    return outputs, _final_memory(outputs, inputs, constants)


_OPERATION = Operation(
    "associative",
    Inputs,
    "float decay, float rate, int inner_steps, str nonlinearity, bool normalize_initial, float eps, "
    "str form, bool keep_memory, str impl",
    fixed=FIXED,
    results=3,
    differentiable=2,
    kept=(0, 2),
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    reference=_reference,
)
