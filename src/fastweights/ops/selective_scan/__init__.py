"""The selective scan of Mamba: a state of a few numbers for each channel, with decays that the input chooses.

The names, the order of the arguments and what they mean are those of mamba_ssm: of its `selective_scan_fn` and its
`selective_state_update`. Ours take real A alone, and B and C of every step that all channels share.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.errors import KernelError
from fastweights.ops import _native
from fastweights.ops._operator import Operation, is_differentiated
from fastweights.ops.autocast import without_autocast
from fastweights.ops.packed import check_bounds, check_cu_seqlens
from fastweights.ops.plain import is_plain
from fastweights.ops.selective_scan import cpu, reference
from fastweights.ops.selective_scan.reference import ScanInputs, UpdateInputs

__all__ = ["IMPLEMENTATIONS", "selective_scan", "selective_state_update"]

IMPLEMENTATIONS = ("auto", "reference", "cpu")


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Any:
    """Run a state space model whose steps the input chooses over sequences (Gu & Dao 2023, Mamba, algorithm 2).

    The state of a channel becomes x_t = exp(delta_t A) x_{t-1} + delta_t u_t B_t, its output is y_t = C_t x_t + D u_t,
    times silu(z_t). The backward pass takes time linear in T and keeps the states before chunks of 64 steps alone.

    Args:
        u: the inputs, [B,D,T].
        delta: the sizes of the steps, [B,D,T].
        A: the rates at which states decay, below 0, [D,N].
        B: what is written of an input, [B,N,T].
        C: what is read of a state, [B,N,T].
        D: how much of an input passes by, [D]; None is nothing.
        z: the gates of the outputs, [B,D,T]; None leaves them open.
        delta_bias: added to delta, [D].
        delta_softplus: delta is softplus of itself, after the bias.
        return_last_state: return the state after the last step too.
        initial_state: [B,D,N]; None starts from zeros.
        cu_seqlens: where each of S sequences packed into one row begins, and where the last ends, int64 or int32 [S+1],
            from 0 to T; B is 1. The states, before and after, are then [S,D,N].
        impl: "auto", "reference" or "cpu".

    Returns:
        The outputs [B,D,T] in the dtype of u; with `return_last_state` also the state [B,D,N] or [S,D,N]. What is below
        float32 is computed in float32, which is the state's dtype then too. Gradients of any order go through in
        reverse mode; forward mode (`torch.func.jvp`, `hessian`) needs impl="reference".

    Raises:
        ValueError: a shape does not fit, there is no step, `impl` is unknown, or cu_seqlens do not ascend from 0 to T.
        TypeError: what should be a tensor is not one, or has another dtype than a real floating one, or cu_seqlens are
            no integers.
        KernelError: "cpu" was asked for by name, and it cannot compute this.

    Examples:
        >>> import torch
        >>> from fastweights.ops.selective_scan import selective_scan
        >>> u, delta = torch.randn(2, 6, 9), torch.rand(2, 6, 9)          # [B,D,T]
        >>> A, B, C = -torch.rand(6, 4), torch.randn(2, 4, 9), torch.randn(2, 4, 9)
        >>> y, state = selective_scan(u, delta, A, B, C, delta_softplus=True, return_last_state=True)
        >>> y.shape, state.shape
        (torch.Size([2, 6, 9]), torch.Size([2, 6, 4]))
    """
    check_choice(IMPLEMENTATIONS, impl=impl)
    more = {"D": D, "z": z, "delta_bias": delta_bias, "initial_state": initial_state}
    _check_tensors(u, A, {"delta": delta, "B": B, "C": C, **more}, cu_seqlens)
    dtype = torch.promote_types(u.dtype, torch.float32)

    def turn(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).transpose(1, 2)

    x, steps, written, read = (turn(tensor) for tensor in (u, delta, B, C))
    bias, skip, state = (None if each is None else each.to(dtype) for each in (delta_bias, D, initial_state))
    if cu_seqlens is not None and cu_seqlens.dtype == torch.int32:
        cu_seqlens = cu_seqlens.long()
    gate = None if z is None else turn(z)
    inputs = ScanInputs(x, steps, A.to(dtype), written, read, bias, skip, gate, state, cu_seqlens)
    if _native.choose(inputs.u, impl, lambda: "there is no Triton kernel") == "cpu":
        outputs, last, _ = _OPERATION(inputs, delta_softplus)
    else:
        if cu_seqlens is not None and is_plain(inputs):
            check_bounds(cu_seqlens, u.shape[2])
        with without_autocast(u.device.type):
            outputs, last = reference.scan(inputs, delta_softplus)
    y = outputs.transpose(1, 2).to(u.dtype)
    return (y, last) if return_last_state else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """Take one step of a selective scan, as a model does that writes a text: the state changes in place.

    The step is that of `selective_scan`. With heads, as in Mamba-2, the channels of each are [H,P], and B and C are
    shared by the heads of a group.

    Args:
        state: [B,D,N] or [B,H,P,N]; it changes.
        x: the input, [B,D] or [B,H,P].
        dt: the size of the step, as x.
        A: the rates at which states decay, [D,N] or [H,P,N]; one that is expanded from [D,1] or [H,1,1] is read once.
        B: what is written of the input, [B,N] or [B,groups,N].
        C: what is read of the state, as B.
        D: how much of the input passes by, [D] or [H,P]; None is nothing.
        z: the gate of the output, as x; None leaves it open.
        dt_bias: added to dt, [D] or [H,P].
        dt_softplus: dt is softplus of itself, after the bias.
        impl: "auto", "reference" or "cpu", which takes a contiguous state in float32 or float64.

    Returns:
        The output, as x and in its dtype. No gradient goes through.

    Raises:
        ValueError: a shape does not fit, or `impl` is unknown.
        TypeError: what should be a tensor is not one, or has another dtype than a real floating one.
        RuntimeError: an input needs a gradient, outside `torch.no_grad()`: use `selective_scan` with T = 1.
        KernelError: "cpu" was asked for by name, and it cannot compute this.

    Examples:
        >>> import torch
        >>> from fastweights.ops.selective_scan import selective_state_update
        >>> state, x, dt = torch.zeros(2, 6, 4), torch.randn(2, 6), torch.rand(2, 6)
        >>> y = selective_state_update(state, x, dt, -torch.rand(6, 4), torch.randn(2, 4), torch.randn(2, 4))
        >>> y.shape
        torch.Size([2, 6])
    """
    check_choice(IMPLEMENTATIONS, impl=impl)
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    _check_update(state, given)
    if is_differentiated((state, *given.values())):
        raise RuntimeError(
            "selective_state_update changes the state in place and has no gradient: call it in torch.no_grad(), or use "
            "selective_scan with one step"
        )
    dtype = torch.promote_types(state.dtype, torch.float32)
    states, rates = state, A[..., 0] if A.stride(-1) == 0 else A
    rows: Sequence[Tensor | None] = (x, dt, z)
    channels: Sequence[Tensor | None] = (dt_bias, D)
    if state.dim() == 4:
        states, rates = state.flatten(1, 2), rates.flatten(0, 1)
        rows = [None if tensor is None else tensor.flatten(1) for tensor in rows]
        channels = [None if tensor is None else tensor.flatten() for tensor in channels]
    # A conversion to the dtype that is there takes as long as a good part of the kernel.
    own = [
        tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)
        for tensor in (*rows[:2], rates, B, C, *channels, rows[2])
    ]
    inputs = UpdateInputs._make(own)
    # In this order: a compiler cannot follow the question about a negation.
    fits = state.dtype == dtype and is_plain((state, *own)) and state.is_contiguous() and not state.is_neg()
    if impl == "cpu" and not fits:
        raise KernelError(
            "impl='cpu' was asked for, but it takes contiguous states in float32 or float64 alone, uncompiled; got a "
            f"state of {state.dtype}, with strides {state.stride()} for {list(state.shape)}"
        )
    if _native.choose(state, impl if fits else "reference", lambda: "there is no Triton kernel") == "cpu":
        y = cpu.update(states, inputs, dt_softplus)
    else:
        now, y = reference.update(states.to(dtype), inputs, dt_softplus)
        state.copy_(now.view(state.shape))
    if state.dim() == 4:
        y = y.view(x.shape)
    return y if y.dtype == x.dtype else y.to(x.dtype)


# The letters of each tensor's shape, with those of the channels left open.
_UPDATE_LETTERS = {
    "x": "B,{}",
    "dt": "B,{}",
    "A": "{},N",
    "B": "B,N",
    "C": "B,N",
    "D": "{}",
    "z": "B,{}",
    "dt_bias": "{}",
}


def _check_update(state: Tensor, given: dict[str, Tensor | None]) -> None:
    """Refuse tensors of one step whose shapes, dtypes and devices do not fit together.

    A decoded token asks for it in every layer: words are made for an error alone.
    """
    for name, tensor in (("state", state), *given.items()):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("state", "x", "dt", "A", "B", "C")):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}: torch.as_tensor({name})")
    if state.dim() not in (3, 4) or 0 in state.shape[1:]:
        raise ValueError(f"state must be [B,D,N] or [B,H,P,N], got {list(state.shape)}")
    batch, *channels, numbers = state.shape
    row, own, keys = (batch, *channels), tuple(channels), (batch, numbers)
    shapes = (row, row, (*own, numbers), keys, keys, own, row, own)
    device, groups = state.device, []
    for (name, tensor), shape in zip(given.items(), shapes, strict=True):
        if tensor is None:
            continue
        if name in ("B", "C") and len(own) == 2:
            found = tuple(tensor.shape)
            if len(found) != 3 or found[::2] != keys or found[1] == 0 or own[0] % found[1]:
                raise ValueError(
                    f"{name} must be [B,groups,N], [{batch}, groups, {numbers}] here, with groups that divide "
                    f"{own[0]} heads, got {list(found)}"
                )
            groups.append(found[1])
        elif tensor.shape != shape:
            letters = _UPDATE_LETTERS[name].format("D" if len(own) == 1 else "H,P")
            raise ValueError(f"{name} must be [{letters}], {list(shape)} here, got {list(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.device != device:
            raise TypeError(f"{name} must be of real numbers on {device}, got {tensor.dtype} on {tensor.device}")
    if len(set(groups)) > 1:
        raise ValueError(f"B and C must have as many groups, got {groups[0]} and {groups[1]}")
    if not state.is_floating_point():
        raise TypeError(f"state must be of real numbers on {device}, got {state.dtype} on {device}")


def _check_tensors(u: Tensor, rates: Tensor, more: dict[str, Tensor | None], cu_seqlens: Tensor | None) -> None:
    """Refuse tensors whose shapes, dtypes and devices do not fit together."""
    given = {"u": u, "A": rates, **more}
    for name, tensor in (given | {"cu_seqlens": cu_seqlens}).items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("u", "delta", "A", "B", "C")):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}: torch.as_tensor({name})")
    if u.dim() != 3 or 0 in u.shape[1:] or rates.dim() != 2 or rates.shape[0] != u.shape[1] or rates.shape[1] == 0:
        raise ValueError(
            "u must be [B,D,T] and A [D,N], with a channel, a step and a number of the state at least, got "
            f"{list(u.shape)} and {list(rates.shape)}"
        )
    batch, channels, steps = u.shape
    sequences = batch if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, u.device)
    numbers = rates.shape[1]
    shapes = {
        "delta": ("B,D,T", (batch, channels, steps)),
        "B": ("B,N,T", (batch, numbers, steps)),
        "C": ("B,N,T", (batch, numbers, steps)),
        "D": ("D", (channels,)),
        "z": ("B,D,T", (batch, channels, steps)),
        "delta_bias": ("D", (channels,)),
        "initial_state": ("B,D,N" if cu_seqlens is None else "S,D,N", (sequences, channels, numbers)),
    }
    for name, (letters, shape) in shapes.items():
        tensor = given[name]
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be [{letters}], {list(shape)} here, got {list(tensor.shape)}")
    for name, tensor in given.items():
        if tensor is not None and not (tensor.is_floating_point() and tensor.device == u.device):
            raise TypeError(f"{name} must be of real numbers on {u.device}, got {tensor.dtype} on {tensor.device}")


def _backward(
    grads: tuple[Tensor | None, Tensor | None], kept: tuple[Tensor], inputs: ScanInputs, softplus: bool, _: Any
) -> list[Tensor]:
    grad_outputs = torch.zeros_like(inputs.u) if grads[0] is None else grads[0]
    gradients = cpu.backward(grad_outputs, grads[1], kept[0], inputs, softplus)
    return [inputs.u.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _fake_forward(inputs: ScanInputs, softplus: bool, keep_trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    empty = inputs.u.new_empty
    trace = empty(cpu.trace_shape(inputs) if keep_trace else 0)
    return empty(inputs.u.shape), empty(reference.state_shape(inputs)), trace


def _fake_backward(_grads: Any, _kept: Any, inputs: ScanInputs, softplus: bool, _: Any) -> list[Tensor]:
    return [inputs.u.new_empty(0 if tensor is None else tensor.shape) for tensor in inputs[:-1]]


_OPERATION = Operation(
    "selective_scan",
    ScanInputs,
    "bool softplus",
    results=3,
    differentiable=2,
    kept=(2,),
    forward=cpu.forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    reference=reference.scan,
)
