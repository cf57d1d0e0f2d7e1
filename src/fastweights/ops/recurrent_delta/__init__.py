"""The recurrent delta rule: a matrix memory that a nonlinear hidden state writes and reads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.ops import _native
from fastweights.ops._operator import Operation, is_differentiated
from fastweights.ops.exporting import is_exporting_onnx
from fastweights.ops.lengths import take_last, take_recent
from fastweights.ops.plain import is_plain
from fastweights.ops.recurrent_delta import cpu, reference
from fastweights.ops.recurrent_delta.reference import FIXED, Inputs, StepInputs

__all__ = [
    "IMPLEMENTATIONS",
    "Result",
    "StepInputs",
    "StepResult",
    "recurrent_delta",
    "recurrent_delta_step",
]

IMPLEMENTATIONS = ("auto", "reference", "cpu")
_STEP_OPTIONAL = ("bias_ih", "taps", "taps_bias", "last")  # which may be None
_MOST_PRODUCTS = 4_000_000  # of a step; more are faster as products of matrices


class Result(NamedTuple):
    """The outputs of a run, and the state after the last valid step."""

    outputs: Tensor  # [T,B,H], zero past a length
    hidden: Tensor  # [B,H]
    memory: Tensor  # [B,N,W,W]
    last: Tensor | None  # [B,C-1,4H+2N]; None without a convolution


class StepResult(NamedTuple):
    """The outputs of a step, and the state after it, of which no tensor is a part of another."""

    outputs: Tensor  # [B,H]
    hidden: Tensor  # [B,H], the same numbers
    memory: Tensor  # [B,N,W,W]
    last: Tensor | None  # [B,C-1,4H+2N]; None without a convolution


def recurrent_delta(
    drive: Tensor,
    weight: Tensor,
    gain: Tensor,
    bias: Tensor,
    hidden: Tensor,
    memory: Tensor,
    *,
    taps: Tensor | None = None,
    taps_bias: Tensor | None = None,
    last: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    impl: str = "auto",
) -> Result:
    """Write and read a memory by the delta rule, with keys, values and queries from the input and the hidden state.

    A step is [z; q; k; v; a; b] = u_t + weight h, u the drive or a convolution of it over the steps, with q and k the
    SiLU of themselves and of length one, and v its SiLU, for each of N heads; then M <- sigmoid(a) M,
    M <- M + sigmoid(b) k (v - M^T k)^T, and the new hidden state h = relu(LN(z + M^T q)). `nn.DeltaFastWeightsRNN` is
    the layer, and says where it comes from.

    Args:
        drive: what the inputs add to the products, [T,B,4H+2N], rows: z, q, k and v, heads one behind the other, then a
            and b.
        weight: of the hidden state, [4H+2N,H].
        gain: of the layer norm, [H].
        bias: of the layer norm, [H].
        hidden: h before the first step, [B,H].
        memory: M before the first step, [B,N,W,W] with W = H / N, rows of keys.
        taps: of a convolution of the drive over the last C steps, the oldest first, [4H+2N,C]: each row by
            itself, as `ops.short_convolution` has it. None leaves it out.
        taps_bias: what the convolution adds, [4H+2N]; None is zero.
        last: the drive before the first step, [B,C-1,4H+2N]; None is zeros.
        lengths: valid steps of each sequence, int64 [B], from 0 to T.
        starts: the steps before which a sequence restarts, bool [T,B]: h, M and the drive before it are
            zeros there. None is nowhere.
        impl: "auto", "reference" or "cpu".

    Gradients of any order go through every implementation.

    Raises:
        ValueError: a shape does not fit, there is no step, a part of a convolution comes without taps, or `impl` is
            unknown.
        KernelError: "cpu" was asked for by name, and it cannot compute this.

    Examples:
        >>> import torch
        >>> from fastweights.ops.recurrent_delta import recurrent_delta
        >>> size, heads = 6, 2
        >>> rows = 4 * size + 2 * heads
        >>> result = recurrent_delta(torch.randn(7, 3, rows), torch.randn(rows, size), torch.ones(size),
        ...                          torch.zeros(size), torch.zeros(3, size), torch.zeros(3, heads, 3, 3))
        >>> result.outputs.shape, result.memory.shape
        (torch.Size([7, 3, 6]), torch.Size([3, 2, 3, 3]))
    """
    check_choice(IMPLEMENTATIONS, impl=impl)
    inputs = Inputs(drive, weight, gain, bias, hidden, memory, taps, taps_bias, last, lengths, starts)
    if _native.choose(drive, impl, lambda: "there is no Triton kernel") == "cpu":
        outputs, end, _ = _OPERATION(inputs)
    else:
        _check(inputs)  # a kernel checks them itself
        steps, batch, _ = drive.shape
        _native.check_lengths(lengths, batch, drive.device)
        _native.check_flags({"starts": starts}, steps, batch, drive.device)
        outputs, end = reference.run(inputs)
    if taps is not None:
        last = _take_recent(inputs)
    return Result(outputs, take_last(outputs, lengths, hidden), end, last)


def _take_recent(inputs: Inputs) -> Tensor:
    """Return what the convolution still reads after the last valid step."""
    drive, before = inputs.drive.transpose(0, 1), inputs.last
    if before is None:
        assert inputs.taps is not None
        before = drive.new_zeros(len(drive), inputs.taps.shape[1] - 1, drive.shape[2])
    return take_recent(drive, before, inputs.lengths, None if inputs.starts is None else inputs.starts.t())


def recurrent_delta_step(inputs: StepInputs) -> StepResult | None:
    """Take one step of `nn.DeltaFastWeightsRNN` in one call of a kernel, as a stream wants it.

    The kernel multiplies the inputs too. It takes float32 or float64 on a processor, as long as it is the faster way:
    up to 4 million products, which are B 4H (D+H). It has no gradients.

    Args:
        inputs: x [B,D]; weight_ih [4H+2N,D], bias_ih [4H+2N], weight_hh [4H+2N,H], gain and bias [H], the parameters of
            the layer; hidden [B,H] and memory [B,N,W,W], its state; and taps [4H+2N,C], taps_bias [4H+2N] and last
            [B,C-1,4H+2N] of its convolution, None without one. bias_ih and taps_bias may be None too.

    Returns:
        The outputs [B,H] and the state after the step. None where the kernel cannot take it, or a gradient is needed:
        multiply and call `recurrent_delta`.

    Raises:
        ValueError: a shape does not fit.
        TypeError: a tensor has another dtype or device than x, or None is in its place.

    Examples:
        >>> import torch
        >>> from fastweights.ops.recurrent_delta import StepInputs, recurrent_delta_step
        >>> size, rows = 6, 26
        >>> inputs = StepInputs(torch.randn(3, 5), torch.randn(rows, 5), torch.zeros(rows), torch.randn(rows, size),
        ...                     torch.ones(size), torch.zeros(size), torch.zeros(3, size), torch.zeros(3, 1, 6, 6))
        >>> result = recurrent_delta_step(inputs)
        >>> result is None or result.outputs.shape == (3, 6)
        True
    """
    x = inputs.x
    if _native.unavailable(x) is not None or is_exporting_onnx():
        return None
    for name, tensor in zip(StepInputs._fields, inputs, strict=True):
        if tensor is None and name not in _STEP_OPTIONAL:  # the kernel would read at address zero
            raise TypeError(f"{name} must be a tensor, got None")
    products = (x.numel() + inputs.hidden.numel()) * 4 * inputs.gain.numel()
    if products > _MOST_PRODUCTS or is_differentiated(inputs) or not is_plain(inputs):
        return None
    return StepResult._make(cpu.step(inputs))


def _check(inputs: Inputs) -> None:
    _native.check_tensors(inputs[:-FIXED], reference.shapes_of(inputs), inputs.drive, "drive")


def _forward(inputs: Inputs, keep_trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    return cpu.forward(inputs, keep_trace)


def _backward(
    grads: tuple[Tensor | None, Tensor | None], kept: tuple[Tensor, Tensor], inputs: Inputs, _: Any
) -> list[Tensor]:
    grad_outputs = torch.zeros_like(kept[0]) if grads[0] is None else grads[0]
    return cpu.backward(grad_outputs, grads[1], *kept, inputs)


def _fake_forward(inputs: Inputs, keep_trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check(inputs)
    empty = inputs.drive.new_empty
    trace = empty(cpu.count_trace(inputs) if keep_trace else 0)
    return empty(*inputs.drive.shape[:2], inputs.hidden.shape[1]), empty(inputs.memory.shape), trace


def _fake_backward(_grads: Any, _kept: Any, inputs: Inputs, _: Any) -> list[Tensor]:
    return [inputs.drive.new_empty(0 if tensor is None else tensor.shape) for tensor in inputs[:-FIXED]]


_OPERATION = Operation(
    "recurrent_delta",
    Inputs,
    "",
    fixed=FIXED,
    results=3,
    differentiable=2,
    kept=(0, 2),
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    reference=reference.run,
)
