"""The rules that `bench delta` times: their tensors, our functions, and those of transformers.

A function takes a rule's inputs and returns the outputs and the last state. The last input is the state before the
first step, but in a pass of Mamba, which begins with zeros in transformers. A case has `heads` heads of `size`
features, such as 16 of 128: a layer of Qwen3-Next and of Kimi Linear. The Mambas of that case are those of models with
128 numbers of state for each of 4,096 features (Mamba-2, in 64 heads), and 16 for each of 3,072 (Mamba), with rates and
sizes of steps as their models begin with: from -1 to -16, and from 0.001 to 0.1.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.delta import dplr_delta_rule, gated_delta_rule, simple_gla
from fastweights.ops.selective_scan import selective_scan, selective_state_update

GATED, KIMI, RWKV7, MAMBA2, MAMBA = "gated delta", "Kimi delta", "RWKV-7", "Mamba-2", "Mamba"
Draw = Callable[..., Tensor]  # of a shape, as torch.randn
Function = Callable[..., tuple[Tensor, Tensor]]
MAMBA2_HEADS, MAMBA_CHANNELS, MAMBA_PART = 4, 1.5, 8  # times the heads; times all features; features / state


@dataclass(frozen=True)
class Sizes:
    """How large a case is."""

    batch: int
    steps: int
    heads: int
    size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.steps, self.heads


@dataclass(frozen=True)
class Rule:
    """A rule of a fast-weight layer, in a pass or, with `token`, for one decoded token."""

    names: tuple[str, ...]  # of the inputs, in words
    draw: Callable[[Draw, Sizes, bool], list[Tensor]]  # the inputs; the last argument is `token`, and the next
    ours: Callable[[bool, str], Function]  # of an implementation
    theirs: Callable[[bool], Function] | None
    layer: str | None  # the rule of nn.FastWeightProgrammer
    state: Callable[[Sizes], tuple[int, ...]]  # the shape of the states
    outputs: Callable[[Sizes, bool], tuple[int, ...]]  # that of the outputs


def _find(model: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    # Where mamba_ssm or flash-linear-attention is installed, the name may stand for its kernel.
    return inspect.unwrap(getattr(module, name))  # type: ignore[no-any-return]


def _end(outputs: Tensor, end: Tensor | None) -> tuple[Tensor, Tensor]:
    assert end is not None
    return outputs, end


def _draw_keys(draw: Draw, sizes: Sizes) -> list[Tensor]:
    """Return queries and keys of length one, and values."""
    q, k, v = (draw(*sizes.shape, sizes.size) for _ in range(3))
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v]


def _delta_rule(channels: bool, model: str, names: tuple[str, str], layer: str) -> Rule:
    def draw_inputs(draw: Draw, sizes: Sizes, token: bool) -> list[Tensor]:
        g = F.logsigmoid(draw(*sizes.shape, *[sizes.size] * channels) + 4)
        return [*_draw_keys(draw, sizes), g, draw(*sizes.shape).sigmoid(), draw(*_square(sizes))]

    def ours(token: bool, impl: str) -> Function:
        return lambda q, k, v, g, beta, state: _end(
            *gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, impl=impl)
        )

    def theirs(token: bool) -> Function:
        function = _find(model, names[token])
        return lambda q, k, v, g, beta, state: function(q, k, v, g, beta, initial_state=state, output_final_state=True)

    words = ("q", "k", "v", "g", "beta", "the initial state")
    return Rule(words, draw_inputs, ours, theirs, layer, _square, _values)


def _square(sizes: Sizes) -> tuple[int, ...]:
    return sizes.batch, sizes.heads, sizes.size, sizes.size


def _values(sizes: Sizes, token: bool) -> tuple[int, ...]:
    return *sizes.shape, sizes.size


def _rwkv7() -> Rule:
    def draw_inputs(draw: Draw, sizes: Sizes, token: bool) -> list[Tensor]:
        r, k, v = _draw_keys(draw, sizes)
        removed = F.normalize(draw(*sizes.shape, sizes.size), dim=-1)
        written = removed * draw(*sizes.shape, sizes.size).sigmoid()
        w = F.logsigmoid(draw(*sizes.shape, sizes.size) + 4)
        return [r, k, v, -removed, written, w, draw(*_square(sizes))]

    def ours(token: bool, impl: str) -> Function:
        return lambda r, k, v, a, b, w, state: _end(
            *dplr_delta_rule(r, k, v, a, b, w, initial_state=state, output_final_state=True, impl=impl)
        )

    words = ("r", "k", "v", "a", "b", "w", "the initial state")
    return Rule(words, draw_inputs, ours, None, "rwkv7", _square, _values)


def _draw_steps(draw: Draw, *shape: int) -> Tensor:
    """Return sizes of steps from 0.001 to 0.1, as those of a Mamba are when its training begins."""
    logs: Tensor = math.log(0.001) + math.log(100) * torch.special.ndtr(draw(*shape))
    return logs.exp()


def _mamba2() -> Rule:
    """Mamba-2 as transformers calls it: heads of half as many features share their keys, the state is [B,H,P,N]."""

    def heads(sizes: Sizes) -> int:
        return MAMBA2_HEADS * sizes.heads

    def state_shape(sizes: Sizes) -> tuple[int, ...]:
        return sizes.batch, heads(sizes), max(1, sizes.size // 2), sizes.size

    def output_shape(sizes: Sizes, token: bool) -> tuple[int, ...]:
        steps = () if token else (sizes.steps,)
        return sizes.batch, *steps, heads(sizes), max(1, sizes.size // 2)

    def draw_inputs(draw: Draw, sizes: Sizes, token: bool) -> list[Tensor]:
        shape = output_shape(sizes, token)
        x, dt = draw(*shape), _draw_steps(draw, *shape[:-1])
        rates = -1 - 15 * torch.special.ndtr(draw(shape[-2]))
        keys, queries = (draw(*shape[:-2], 1, sizes.size) for _ in range(2))
        skip = draw(shape[-2])
        if token:  # as the layer gives them: the same for all features of a head
            dt, skip = (tensor.unsqueeze(-1).expand(*tensor.shape, shape[-1]) for tensor in (dt, skip))
            rates = rates[:, None, None].expand(*state_shape(sizes)[1:])
        return [x, dt, rates, keys, queries, skip, draw(*state_shape(sizes))]

    def ours(token: bool, impl: str) -> Function:
        if token:
            return lambda x, dt, rates, keys, queries, skip, state: (
                selective_state_update(state, x, dt, rates, keys, queries, skip, impl=impl),
                state,
            )

        def run(
            x: Tensor, dt: Tensor, rates: Tensor, keys: Tensor, queries: Tensor, skip: Tensor, state: Tensor
        ) -> tuple[Tensor, Tensor]:
            options: dict[str, Any] = {
                "scale": 1.0,
                "initial_state": state.mT,
                "output_final_state": True,
                "impl": impl,
            }
            outputs, end = _end(*simple_gla(queries, keys, x, rates * dt, beta=dt, skip=skip, **options))
            return outputs, end.mT

        return run

    def theirs(token: bool) -> Function:
        if token:
            update = _find("mamba2", "mamba2_selective_state_update")
            return lambda x, dt, rates, keys, queries, skip, state: (
                update(state, x, dt, rates, keys, queries, D=skip),
                state,
            )
        scan = _find("mamba2", "mamba2_chunk_scan")
        return lambda x, dt, rates, keys, queries, skip, state: scan(
            x, dt, rates, keys, queries, chunk_size=256, D=skip, initial_states=state, return_final_states=True
        )

    words = ("x", "dt", "A", "B", "C", "D", "the initial state")
    return Rule(words, draw_inputs, ours, theirs, None, state_shape, output_shape)


def _mamba() -> Rule:
    """Mamba as transformers calls it: tensors [B,D,T] whose channels lie next to one another, softplus and gate too."""

    def channels(sizes: Sizes) -> int:
        return int(MAMBA_CHANNELS * sizes.heads * sizes.size)

    def numbers(sizes: Sizes) -> int:
        return max(1, sizes.size // MAMBA_PART)

    def state_shape(sizes: Sizes) -> tuple[int, ...]:
        return sizes.batch, channels(sizes), numbers(sizes)

    def output_shape(sizes: Sizes, token: bool) -> tuple[int, ...]:
        return sizes.batch, channels(sizes), *(() if token else (sizes.steps,))

    def draw_inputs(draw: Draw, sizes: Sizes, token: bool) -> list[Tensor]:
        steps = () if token else (sizes.steps,)
        shape = (sizes.batch, *steps, channels(sizes))
        x, gate, dt = draw(*shape), draw(*shape), _draw_steps(draw, *shape).expm1().log()  # before its softplus
        keys, queries = (draw(sizes.batch, *steps, numbers(sizes)) for _ in range(2))
        rates = -torch.arange(1.0, numbers(sizes) + 1).expand(state_shape(sizes)[1:]).contiguous()
        if not token:
            x, dt, gate, keys, queries = (tensor.mT for tensor in (x, dt, gate, keys, queries))
        inputs = [x, dt, rates, keys, queries, draw(channels(sizes)), gate]
        return [*inputs, draw(*state_shape(sizes))] if token else inputs

    def ours(token: bool, impl: str) -> Function:
        if token:
            return lambda x, dt, rates, keys, queries, skip, gate, state: (
                selective_state_update(state, x, dt, rates, keys, queries, skip, gate, dt_softplus=True, impl=impl),
                state,
            )
        options: dict[str, Any] = {"delta_softplus": True, "return_last_state": True, "impl": impl}
        return lambda *inputs: selective_scan(*inputs, **options)

    def theirs(token: bool) -> Function:
        if token:
            update = _find("mamba", "mamba_selective_state_update")
            return lambda x, dt, rates, keys, queries, skip, gate, state: (
                update(state, x, dt, rates, keys, queries, D=skip, z=gate, dt_softplus=True),
                state,
            )
        scan = _find("mamba", "mamba_selective_scan")
        return lambda *inputs: scan(*inputs, delta_softplus=True, return_last_state=True)

    words = ("x", "dt", "A", "B", "C", "D", "the gate", "the initial state")
    return Rule(words, draw_inputs, ours, theirs, None, state_shape, output_shape)


RULES: dict[str, Rule] = {
    GATED: _delta_rule(
        False,
        "qwen3_next",
        ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        "gated_delta",
    ),
    KIMI: _delta_rule(
        True,
        "kimi_linear",
        ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        "kda",
    ),
    RWKV7: _rwkv7(),
    MAMBA2: _mamba2(),
    MAMBA: _mamba(),
}


def describe_state(rule: str, heads: int, size: int) -> str:
    """Return the sizes of a sequence's state.

    Examples:
        >>> describe_state("Mamba-2", 16, 128), describe_state("Mamba", 16, 128)
        ('64 x 64 x 128', '3072 x 16')
    """
    return " x ".join(str(each) for each in RULES[rule].state(Sizes(1, 1, heads, size))[1:])


def count_result_numbers(rule: str, sizes: Sizes) -> int:
    """Return how many numbers a training pass returns: outputs, last state, and the gradients of all inputs."""

    def draw(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    inputs = RULES[rule].draw(draw, sizes, False)
    results = [torch.Size(RULES[rule].state(sizes)), torch.Size(RULES[rule].outputs(sizes, False))]
    return sum(each.numel() for each in inputs) + sum(shape.numel() for shape in results)
