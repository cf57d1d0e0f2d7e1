"""Attention to the recent past: the recurrence of Ba et al. 2016, "Using fast weights to attend to the recent past"."""

import math
from typing import Any

import torch
from torch import Tensor

from fastweights.ops import _triton
from fastweights.ops._calls import IMPLEMENTATIONS, choose
from fastweights.ops.associative import cpu, reference, triton
from fastweights.ops.associative._autograd import Associative, forward_operator
from fastweights.ops.associative.reference import Constants, final_memory

__all__ = ["FORMS", "IMPLEMENTATIONS", "Constants", "associative", "associative_with_memory", "final_memory"]

MOST_INNER_STEPS = 10_000  # a typing error beyond any use, and what still fits every integer on the way
FORMS = ("auto", "attention", "matrix")


def associative(
    drive: Tensor,
    weight_hh: Tensor,
    hidden: Tensor,
    memory: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    lengths: Tensor | None = None,
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
        lengths: valid steps of each sequence, int64 [B], from 0 to T (the cpu kernel refuses others, the rest take
            them as 0 or T); outputs past them are zero.
        constants: decay, rate, inner_steps, nonlinearity, normalize_initial and eps.
        impl: "auto", "reference", "cpu" or "triton".
        form: "attention" reads the stored hidden states (eq 4: T^2 H for a sequence), "matrix" forms the fast matrix
            (eq 1: T H^2); "auto" takes the one that was measured to be faster for these sizes. The answer is the same.

    Gradients of any order, `torch.func.grad`, `jacrev` and `vmap` go through every implementation; forward mode
    (`torch.func.jvp`, `hessian`) through "reference" alone.

    Returns:
        h(1) .. h(T), [T,B,H]. `associative_with_memory` gives the fast matrix after the last of them too.

    Raises:
        ValueError: a constant is out of range, `impl` or `form` is unknown, there is no step, or half a layer norm is
            given.
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
    inputs = (drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths)
    return _run(inputs, constants, impl, form, keep_memory=False)[0]


def associative_with_memory(
    drive: Tensor,
    weight_hh: Tensor,
    hidden: Tensor,
    memory: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    lengths: Tensor | None = None,
    constants: Constants,
    impl: str = "auto",
    form: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run `associative`, and give the fast matrix too with which the next piece of the sequence begins.

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
    inputs = (drive, weight_hh, norm_weight, norm_bias, hidden, memory, lengths)
    return _run(inputs, constants, impl, form, keep_memory=True)


_Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]


def _run(inputs: _Inputs, constants: Constants, impl: str, form: str, *, keep_memory: bool) -> tuple[Tensor, Tensor]:
    drive, _, norm_weight, norm_bias, hidden, memory, lengths = inputs
    check_constants(constants)
    if drive.dim() != 3 or drive.shape[0] == 0:
        raise ValueError(f"drive must be [T,B,H] with at least one step, got shape {tuple(drive.shape)}")
    if drive.shape[2] == 0:
        raise ValueError(f"drive must have at least one unit, got shape {tuple(drive.shape)}")
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("norm_weight and norm_bias come together: give both, or neither")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    _check_inputs(inputs)
    impl = choose(drive, impl, lambda: _triton.unavailable(drive))
    if impl == "reference":
        outputs = reference.FORMS[form](*inputs, constants)
        final = final_memory(outputs, hidden, memory, lengths, constants) if keep_memory else drive.new_empty(0)
        return outputs, final
    if form == "auto":
        form = cpu.choose_form(drive, keep_memory) if impl == "cpu" else triton.choose_form(drive)
    differentiated = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    arguments = (
        *inputs,
        constants.decay,
        constants.rate,
        constants.inner_steps,
        constants.nonlinearity,
        constants.normalize_initial,
        constants.eps,
        impl,
        form,
        keep_memory,
        differentiated,
    )
    # Dynamo cannot trace the function where there is nothing to differentiate.
    run: Any = forward_operator if torch.compiler.is_compiling() and not differentiated else Associative.apply
    outputs, final, _ = run(*arguments)
    return outputs, final


def _check_inputs(inputs: _Inputs) -> None:
    drive, *others, lengths = inputs
    _, batch, size = drive.shape
    shapes = {
        "weight_hh": (size, size),
        "norm_weight": (size,),
        "norm_bias": (size,),
        "hidden": (batch, size),
        "memory": (batch, size, size),
    }
    for (name, shape), tensor in zip(shapes.items(), others, strict=True):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != drive.dtype or tensor.device != drive.device:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}, drive is {drive.dtype} on {drive.device}")
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must have shape {(batch,)}, got {tuple(lengths.shape)}")
    if lengths.dtype != torch.int64 or lengths.device != drive.device:
        raise TypeError(f"lengths must be int64 on {drive.device}, got {lengths.dtype} on {lengths.device}")


def check_constants(constants: Constants) -> None:
    """Refuse constants that no recurrence can have."""
    if not 0 <= constants.decay <= 1:
        raise ValueError(f"decay must lie between 0 and 1, got {constants.decay}")
    if not (math.isfinite(constants.rate) and constants.rate >= 0):
        raise ValueError(f"rate must be finite and not negative, got {constants.rate}")
    if not isinstance(constants.inner_steps, int) or not 1 <= constants.inner_steps <= MOST_INNER_STEPS:
        raise ValueError(
            f"inner_steps must be a whole number from 1 to {MOST_INNER_STEPS:,}, got {constants.inner_steps}"
        )
    if constants.nonlinearity not in reference.NONLINEARITIES:
        names = ", ".join(reference.NONLINEARITIES)
        raise ValueError(f"nonlinearity must be one of {names}, got {constants.nonlinearity!r}")
    if not (math.isfinite(constants.eps) and constants.eps > 0):
        raise ValueError(f"eps must be positive and finite, got {constants.eps}")
