"""The delta family: linear attention, with a decay, with the delta rule, with both, and with a matrix of rank one.

The names and the order of the tensors are those of flash-linear-attention. The other arguments are given by name,
queries and keys are taken as they are, neither normalised nor summed up, and decays above one are refused.
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fastweights.checks import check_choice
from fastweights.ops import _native
from fastweights.ops._operator import Operation
from fastweights.ops.autocast import without_autocast
from fastweights.ops.delta import cpu, reference, triton
from fastweights.ops.delta.reference import DeltaInputs
from fastweights.ops.plain import is_plain

__all__ = ["IMPLEMENTATIONS", "delta_rule", "dplr_delta_rule", "gated_delta_rule", "linear_attention", "simple_gla"]

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_KERNELS: dict[str, Any] = {"cpu": cpu, "triton": triton}
_WHOLE = ("starts", "lengths", "cu_seqlens")  # of whole numbers


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Write every value in place of what a decaying state holds for its key (Yang et al. 2024, equation 10).

    With S = exp(g_t) S_{t-1}, the state becomes S_t = S + beta_t k_t (v_t - S^T k_t)^T, and the output is
    o_t = scale S_t^T q_t.

    Args:
        q: the queries, [B,T,H,K]; or of fewer heads than the rest, each of them for as many consecutive heads, as in
            flash-linear-attention, Qwen3-Next and Mamba-2.
        k: the keys, as q; a key of length one and beta = 1 replace what was there.
        v: the values, [B,T,H,V].
        g: the logs of the decays, at most 0, [B,T,H]; or of each channel of the keys its own, [B,T,H,K], as Kimi
            delta attention has them. Minus infinity keeps nothing. None keeps everything.
        beta: how much of the correction is written, [B,T,H], from 0 to 2; None writes all of it, as 1 does. Above 1,
            what the state holds for a key of length one changes its sign, without which no linear recurrence follows a
            parity (Grazzi et al. 2025).
        scale: the factor of the outputs; None is 1 / sqrt(K).
        initial_state: [B,H,K,V]; None starts from zeros.
        output_final_state: return the state after each last valid step too.
        starts: where the state is zeros before the step, [B,T] bool.
        lengths: valid steps of each sequence, int64 [B], from 0 to T.
        cu_seqlens: where each of N sequences packed into one row begins, and where the last ends, int64 or int32 [N+1],
            from 0 to T; B is 1. The states, before and after, are then [N,H,K,V].
        impl: "auto", "reference", "cpu" or "triton", which takes keys of up to 512 features. "auto" never takes it: it
            was compiled and checked in Triton's interpreter, and has not run on a GPU yet.

    Returns:
        The outputs [B,T,H,V] in the dtype of v, zero past a length, and the state [B,H,K,V] or [N,H,K,V], or None. What
        is below float32 is computed in float32, which is the state's dtype then too. Gradients of any order go through
        in reverse mode; forward mode (`torch.func.jvp`, `hessian`) needs impl="reference".

    Raises:
        ValueError: a shape does not fit, there is no step, or `impl` is unknown; on a CPU, a g is above 0, a beta not
            between 0 and 2, a length not between 0 and T, or cu_seqlens do not ascend from 0 to T.
        TypeError: what should be a tensor is not one, the scale is no number, q, k and v differ in their dtypes, or
            starts, lengths or cu_seqlens have another dtype than theirs.
        KernelError: the implementation that was asked for by name cannot compute this.

    Examples:
        >>> import torch
        >>> from fastweights.ops.delta import gated_delta_rule
        >>> q, k, v = torch.randn(3, 2, 7, 4, 8).unbind()  # each [B,T,H,K], here with V = K
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> g, beta = -torch.rand(2, 7, 4), torch.rand(2, 7, 4)
        >>> o, state = gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 7, 4, 8]), torch.Size([2, 4, 8, 8]))
    """
    return _run(q, k, v, g, beta, True, scale, initial_state, output_final_state, starts, lengths, cu_seqlens, impl)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Write every value in place of what the state holds for its key (Schlag, Irie & Schmidhuber 2021, equation 24).

    The state becomes S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, and the output is o_t = scale S_t^T q_t. The
    arguments, results and errors are those of `gated_delta_rule`.

    Examples:
        >>> import torch
        >>> from fastweights.ops.delta import delta_rule
        >>> key = torch.nn.functional.normalize(torch.randn(1, 1, 1, 8), dim=-1).expand(1, 2, 1, 8)
        >>> value = torch.randn(1, 2, 1, 3)  # the second value takes the place of the first
        >>> o, _ = delta_rule(key, key, value, None, scale=1.0)
        >>> torch.allclose(o, value, atol=1e-6)
        True
    """
    return _run(q, k, v, None, beta, True, scale, initial_state, output_final_state, starts, lengths, cu_seqlens, impl)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    beta: Tensor | None = None,
    skip: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Add every value to what a decaying state holds for its key: linear attention that forgets.

    The state becomes S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T, and the output is o_t = scale S_t^T q_t (Yang et al.
    2024, table 1, as in Mamba-2, whose step sizes are beta; with a g for each key it is their gated linear attention).
    The arguments, results and errors are those of `gated_delta_rule`, but beta may be any numbers. With skip, [H],
    skip v_t is added to o_t: the D of Mamba-2.

    Examples:
        >>> import torch
        >>> from fastweights.ops.delta import simple_gla
        >>> one = torch.ones(1, 3, 1, 1)
        >>> o, state = simple_gla(one, one, one, torch.full((1, 3, 1), 0.5).log(), output_final_state=True)
        >>> o.flatten().tolist(), state.flatten().tolist()
        ([1.0, 1.5, 1.75], [1.75])
    """
    return _run(
        *(q, k, v, g, beta, False, scale, initial_state, output_final_state, starts, lengths, cu_seqlens, impl),
        skip=skip,
    )


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Add every value to what the state holds for its key (Schlag, Irie & Schmidhuber 2021, equation 4).

    The state becomes S_t = S_{t-1} + k_t v_t^T, and the output is o_t = scale S_t^T q_t. The arguments, results and
    errors are those of `gated_delta_rule`.

    Examples:
        >>> import torch
        >>> from fastweights.ops.delta import linear_attention
        >>> one = torch.ones(1, 3, 1, 1)
        >>> o, _ = linear_attention(one, one, one, starts=torch.tensor([[False, False, True]]))
        >>> o.flatten().tolist()
        [1.0, 2.0, 1.0]
    """
    return _run(q, k, v, None, None, False, scale, initial_state, output_final_state, starts, lengths, cu_seqlens, impl)


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Change the state by a matrix that is diagonal plus one of rank one, and add every value for its key.

    The state becomes S_t = diag(exp(gk_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T, and the output is
    o_t = scale S_t^T q_t (Peng et al. 2025, "RWKV-7", equation 17). With w a decay's log for each channel, the rules of
    this year's models are calls of it:

        RWKV-7              q = r, gk = w, a = -kappa, b = kappa * eta; scale = 1, for kappa of length one
        Kimi delta          gk = w, a = exp(w) * k, b = -beta * k, and beta * k as the key; `gated_delta_rule` is faster
        Gated DeltaNet-2    gk = w, a = exp(w) * erase * k, b = -k, and write * v as the value
        Comba               gk = w, a = exp(w) * p, b = -beta * k, and beta * k as the key

    where beta, and Comba's w, of [B,T,H] are `beta[..., None]` and `w[..., None]` in the products.

    Args:
        q: the queries, [B,T,H,K].
        k: the keys, [B,T,H,K].
        v: the values, [B,T,H,V].
        a: what the state before the step is read with, [B,T,H,K].
        b: where it is written, [B,T,H,K].
        gk: the logs of the decays, at most 0, [B,T,H,K]; [B,T,H] where all channels decay alike, None where none does.
            Minus infinity in all channels is a start: nothing is kept, and `a` reads zeros.
        scale: the factor of the outputs; None is 1 / sqrt(K).
        initial_state: [B,H,K,V]; None starts from zeros.
        output_final_state: return the state after each last valid step too.
        starts: where the state is zeros before the step, [B,T] bool.
        lengths: valid steps of each sequence, int64 [B], from 0 to T.
        cu_seqlens: where packed sequences begin and the last ends, [N+1], as `gated_delta_rule` has it.
        impl: "auto", "reference" or "cpu"; "triton" is refused.

    Returns:
        The outputs [B,T,H,V] and the state [B,H,K,V] or [N,H,K,V], or None, as `gated_delta_rule` returns them.
        Nothing keeps the state from growing where a and b do not. With keys of length one Kimi delta's cannot grow but
        by what is written. One step of RWKV-7 or Gated DeltaNet-2 has no eigenvalue beyond 1, but several steps in turn
        can have, where there is hardly a decay.

    Raises:
        ValueError: as `gated_delta_rule`.
        TypeError: as `gated_delta_rule`.
        KernelError: "cpu" was asked for by name, and it cannot compute this.

    Examples:
        >>> import torch
        >>> from fastweights.ops.delta import dplr_delta_rule
        >>> r, k, v, kappa = torch.randn(4, 2, 7, 3, 8).unbind()  # each [B,T,H,K], here with V = K
        >>> kappa, rate = torch.nn.functional.normalize(kappa, dim=-1), torch.rand(2, 7, 3, 8)
        >>> w = -torch.rand(2, 7, 3, 8)
        >>> o, state = dplr_delta_rule(r, k, v, -kappa, kappa * rate, w, scale=1.0, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 7, 3, 8]), torch.Size([2, 3, 8, 8]))
    """
    _check_tensors({"q": q, "k": k, "v": v, "a": a, "b": b}, {"gk": gk})
    if gk is None:
        gk = torch.zeros_like(k)
    elif k.dim() == 4 and gk.shape == k.shape[:3]:
        gk = gk.unsqueeze(-1).expand(k.shape)
    return _run(
        q, k, v, gk, None, False, scale, initial_state, output_final_state, starts, lengths, cu_seqlens, impl, a, b
    )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    correct: bool,
    scale: float | None,
    state: Tensor | None,
    output_final_state: bool,
    starts: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    impl: str,
    a: Tensor | None = None,
    b: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    check_choice(IMPLEMENTATIONS, impl=impl)
    optional = {"g": g, "beta": beta, "skip": skip, "initial_state": state}
    optional |= {"starts": starts, "lengths": lengths, "cu_seqlens": cu_seqlens}
    _check_tensors({"q": q, "k": k, "v": v}, optional)
    if scale is not None and (not isinstance(scale, Real) or isinstance(scale, bool)):
        raise TypeError(f"scale must be a number, got {scale!r}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    dtype = torch.promote_types(v.dtype, torch.float32)
    if starts is not None:
        g = _cut(v, g, starts, dtype)
    own = (q, k, v, g, beta, a, b, skip, state)
    tensors = [tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype) for tensor in own]
    if cu_seqlens is not None and cu_seqlens.dtype == torch.int32:  # flash-linear-attention has both
        cu_seqlens = cu_seqlens.long()
    inputs = DeltaInputs._make((*tensors, lengths, cu_seqlens))
    if scale is None:
        scale = max((1, *k.shape[-1:])) ** -0.5  # where there is no key, the check of the shapes says so
    # The Triton kernels have not run on a GPU yet: who wants them asks for them.
    kernel = _native.choose(inputs.v, impl, lambda: "not by itself" if impl == "auto" else triton.unavailable(inputs))
    if kernel != "reference":
        outputs, final, _ = _OPERATION(inputs, scale, correct, kernel)
    else:
        reference.check_inputs(inputs)
        if v.is_cpu and is_plain(inputs):  # elsewhere the look at the numbers would wait, or find none
            reference.check_numbers(inputs, correct)
        with without_autocast(v.device.type):
            outputs, final = reference.delta(inputs, scale, correct)
    return outputs if outputs.dtype == v.dtype else outputs.to(v.dtype), final if output_final_state else None


def _check_tensors(required: dict[str, Any], optional: dict[str, Any]) -> None:
    for name, tensor in (required | optional).items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in required):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}: torch.as_tensor({name})")
        if tensor is not None and name not in _WHOLE and not tensor.is_floating_point():
            raise TypeError(f"{name} must be of real numbers, got {tensor.dtype}")


def _cut(v: Tensor, g: Tensor | None, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logs of the decays with minus infinity at every start."""
    if v.dim() != 4 or starts.shape != v.shape[:2]:
        raise ValueError(f"starts must be [B,T], {list(v.shape[:2])} here, got {list(starts.shape)}")
    if starts.dtype != torch.bool:
        raise TypeError(f"starts must be bool, got {starts.dtype}")
    g = v.new_zeros(v.shape[:3], dtype=dtype) if g is None else g
    if g.shape[:2] != starts.shape:
        return g  # the check of the shapes says so
    return g.masked_fill(starts.view(*starts.shape, *[1] * (g.dim() - 2)), -torch.inf)


def _forward(inputs: DeltaInputs, scale: float, correct: bool, impl: str, keep_trace: bool) -> tuple[Tensor, ...]:
    return _KERNELS[impl].forward(inputs, scale, correct, keep_trace)  # type: ignore[no-any-return]


def _backward(
    grads: tuple[Tensor | None, Tensor | None], kept: tuple[Tensor], inputs: DeltaInputs, *options: Any
) -> list[Tensor]:
    scale, correct, impl, _ = options
    grad_outputs = torch.zeros_like(inputs.v) if grads[0] is None else grads[0]
    gradients = _KERNELS[impl].backward(grad_outputs, grads[1], kept[0], inputs, scale, correct)
    return [inputs.v.new_empty(0) if gradient is None else gradient for gradient in gradients]


def _fake_forward(
    inputs: DeltaInputs, scale: float, correct: bool, impl: str, keep_trace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    reference.check_inputs(inputs)
    empty = inputs.v.new_empty
    trace = empty(cpu.trace_shape(inputs) if keep_trace else 0)
    return empty(inputs.v.shape), empty(reference.state_shape(inputs)), trace


def _fake_backward(grads: Any, kept: Any, inputs: DeltaInputs, *options: Any) -> list[Tensor]:
    return [inputs.v.new_empty(0 if tensor is None else tensor.shape) for tensor in inputs[:-2]]


_OPERATION = Operation(
    "delta",
    DeltaInputs,
    "float scale, bool correct, str impl",
    fixed=2,
    results=3,
    differentiable=2,
    kept=(2,),
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    reference=lambda inputs, scale, correct, impl: reference.delta(inputs, scale, correct),
)
