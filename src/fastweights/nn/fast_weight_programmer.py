"""Fast weight programmers: linear attention and its decays and delta rules, as one layer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.checks import check_choice, check_integers, check_sizes
from fastweights.nn._describe import describe
from fastweights.nn._recurrent import RecurrentLayer, RecurrentState, mask_of
from fastweights.nn.short_convolution import ShortConvolution
from fastweights.ops import delta

RULES = ("sum", "decay", "delta", "gated_delta", "kda", "gated_delta_2", "rwkv7")
_BY_ROW = ("kda", "gated_delta_2", "rwkv7")  # each row of the memory decays by itself
_RANK_ONE = ("gated_delta_2", "rwkv7")  # how much is taken away is chosen for each row too
_CORRECTING = ("delta", "gated_delta", *_BY_ROW)
_DOUBLED = _CORRECTING[:-1]  # may write twice as much, `negative_eigenvalues`; RWKV-7's rule has those by itself
_DECAYING = ("decay", "gated_delta", *_BY_ROW)
_KEPT = 4.0  # the decay's bias at the start: sigmoid(4), 0.98 of the memory, is left after a step


class _Parts(NamedTuple):
    memory: Tensor
    convolution: Tensor


class FastWeightProgrammerState(RecurrentState, _Parts):
    """The state that a fast weight programmer hands from one piece of a sequence to the next.

    For an unbatched sequence both lack the batch axis.

    Attributes:
        memory: [B,H,F,V], the fast weights of each head: rows are features of a key, columns those of a value.
        convolution: [B,W-1,H(2K+V)], the last inputs of the short convolution; [B,0,H(2K+V)] without one.

    Examples:
        >>> import torch
        >>> from fastweights.nn import FastWeightProgrammerState
        >>> state = FastWeightProgrammerState(memory=torch.zeros(2, 4, 8, 8), convolution=torch.zeros(2, 3, 96))
        >>> state.detach().memory.shape
        torch.Size([2, 4, 8, 8])
    """


class FastWeightProgrammer(RecurrentLayer[FastWeightProgrammerState]):
    """Heads of fast weights that are written with keys and values, and read with queries, at every step.

    The rules are linear attention (Katharopoulos et al. 2020; Schlag, Irie & Schmidhuber 2021, eq 4), the same with a
    decay (Mamba-2's), the delta rule (Schlag, Irie & Schmidhuber 2021, eq 24), the gated delta rule (Yang, Kautz &
    Hatamizadeh 2025, eq 10), the same with a decay for each row of the memory (Kimi Team 2025, "Kimi Linear", eq 1),
    with gates for each row and column too (Gated DeltaNet-2, arXiv 2605.22791), and that of RWKV-7 (Peng et al. 2025,
    eq 17). For each head:

        q, k, v = silu(convolution(in_proj x))          [K], [K], [V]; silu of v, the feature map f of q and k
        alpha = sigmoid(decay x)                        what is kept of the memory; 1 by "sum" and "delta"
        beta = sigmoid(rate x)                          how much is written; 1 by "sum" and "decay"
        N = diag(alpha) M
        M = N + f(k) v^T                                "sum", "decay"
        M = N + beta f(k) (v - N^T f(k))^T              "delta", "gated_delta", "kda": in place of what it holds
        M = N + f(k) (gamma * v - N^T (beta * f(k)))^T  "gated_delta_2": gamma = sigmoid(write x)
        M = N - (beta * c) (M^T c)^T + d v^T            "rwkv7": c = removal * f(k), scaled to length 1,
                                                        d = (1 + replacement * (beta - 1)) * f(k)
        o = M^T f(q) / sqrt(F)
        y = out_proj [norm(o) * silu(gate x)]           of all heads; the norm is an RMS norm of each head's V features

    The feature maps: "silu" is silu, scaled to length 1 (Yang et al. 2024, "Parallelizing linear transformers with the
    delta rule over sequence length"); "elu" is elu + 1, and "dpfp" is Schlag, Irie & Schmidhuber's deterministic
    parameter-free projection with nu = 1, r_i r_{i-1} of r = relu([k; -k]), which has F = 2K features; both are scaled
    to a sum of 1, as theirs are.

    alpha is a number for each head, by the last three rules [F]; beta a number, by the last two [F]; gamma is [V].

    Parameters: `in_proj.weight` [H(2K+V),E], rows: queries, keys and values of all heads; `convolution.weight`
    [H(2K+V),W] and `convolution.bias`; `decay` and `rate` [H,E] or [HF,E], `write` [HV,E], `removal` and `replacement`
    [H,F], which start at 1, of the rules that have them; `gate` [HV,E]; `norm.weight` [V]; `out_proj.weight` [E,HV].
    They start as `torch.nn.Linear` and `torch.nn.Conv1d`
    do, but `decay.bias`, which is 4, so that 0.98 of the memory is kept in a step, and half of it in 38. All maps have
    a bias. To hold what came 200 steps before was learnt from this start in one run of six, and from one that keeps
    more in all six (`torch.nn.init.constant_(layer.decay.bias, 8)`: half is left after 2,000 steps), which recalled as
    well.

    Args:
        embed_dim: E, the number of features of an input and of an output.
        num_heads: H.
        rule: "sum", "decay", "delta", "gated_delta", "kda", "gated_delta_2" or "rwkv7".
        key_size: K of a head, at least 2; None is E / H.
        value_size: V of a head, at least 2; None is E / H.
        feature_map: "silu", "elu" or "dpfp".
        convolution: W, the steps that the short convolution of queries, keys and values reads; 0 leaves it out.
        output_gate: gate what is read.
        negative_eigenvalues: twice the beta, up to 2: a write can turn around what the memory holds for a key, without
            which no linear recurrence follows a parity (Grazzi et al. 2025). Of the delta rules alone; "rwkv7" can as
            it is, for it multiplies what it holds for a key by alpha - beta.
        batch_first: x and the outputs are [B,T,...]; the state is not affected.
        impl: "auto", "reference", "cpu" or "triton", of the rule; the convolution has no such kernel, and takes "auto".
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a size or a name is out of range, num_heads does not divide embed_dim where a size is None,
            `negative_eigenvalues` is set for a rule without beta, or for "rwkv7", or `impl` is "triton" for "rwkv7" or
            "gated_delta_2".

    Examples:
        >>> import torch
        >>> from fastweights import nn
        >>> layer = nn.FastWeightProgrammer(embed_dim=32, num_heads=4)
        >>> y, state = layer(torch.randn(7, 3, 32))              # x [T,B,E]
        >>> y.shape, state.memory.shape, state.convolution.shape # [T,B,E], [B,H,F,V], [B,W-1,H(2K+V)]
        (torch.Size([7, 3, 32]), torch.Size([3, 4, 8, 8]), torch.Size([3, 3, 96]))
        >>> y, state = layer(torch.randn(1, 3, 32), state)       # goes on where the first piece ended
    """

    removal: nn.Parameter | None
    replacement: nn.Parameter | None
    _state_type = FastWeightProgrammerState

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rule: str = "gated_delta",
        key_size: int | None = None,
        value_size: int | None = None,
        feature_map: str = "silu",
        convolution: int = 4,
        output_gate: bool = True,
        negative_eigenvalues: bool = False,
        batch_first: bool = False,
        impl: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads)
        check_choice(RULES, rule=rule)
        check_choice(_FEATURE_MAPS, feature_map=feature_map)
        check_choice(delta.IMPLEMENTATIONS, impl=impl)
        check_integers(0, convolution=convolution)
        if None in (key_size, value_size) and embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim where no key_size and value_size are given, got {num_heads} heads "
                f"of {embed_dim} features"
            )
        if impl == "triton" and rule in _RANK_ONE:
            raise ValueError(f"impl='triton' has no kernel of rule={rule!r}: use 'auto'")
        if negative_eigenvalues and rule == "rwkv7":
            raise ValueError(
                "negative_eigenvalues=True does not go with rule='rwkv7', which has negative eigenvalues by itself and "
                "diverges with more: leave it out"
            )
        if negative_eigenvalues and rule not in _DOUBLED:
            raise ValueError(f"negative_eigenvalues needs the rule {', '.join(_DOUBLED)}, got rule={rule!r}")
        key_size = embed_dim // num_heads if key_size is None else key_size
        value_size = embed_dim // num_heads if value_size is None else value_size
        check_sizes(key_size=key_size, value_size=value_size)
        if 1 in (key_size, value_size):
            raise ValueError(
                f"key_size and value_size must be at least 2, got {key_size} and {value_size} with {num_heads} heads "
                f"of {embed_dim} features: normalised, one number is 1 or -1 whatever is read, and learns nothing"
            )
        self.input_size = self.hidden_size = self.embed_dim = embed_dim  # as those of other layers: of x and of y
        self.num_heads, self.key_size, self.value_size = num_heads, key_size, value_size
        self.rule, self.feature_map, self.negative_eigenvalues = rule, feature_map, negative_eigenvalues
        self.batch_first, self.impl = batch_first, impl
        options = {"device": device, "dtype": dtype}
        features = num_heads * (2 * key_size + value_size)
        self.in_proj = nn.Linear(embed_dim, features, **options)
        self.convolution = ShortConvolution(features, convolution, **options) if convolution else None
        rows = num_heads * self._features
        decays, rates = rows if rule in _BY_ROW else num_heads, rows if rule in _RANK_ONE else num_heads
        self.decay = nn.Linear(embed_dim, decays, **options) if rule in _DECAYING else None
        self.rate = nn.Linear(embed_dim, rates, **options) if rule in _CORRECTING else None
        self.write = nn.Linear(embed_dim, num_heads * value_size, **options) if rule == "gated_delta_2" else None
        for name in ("removal", "replacement"):
            ones = nn.Parameter(torch.ones(num_heads, self._features, **options)) if rule == "rwkv7" else None
            self.register_parameter(name, ones)
        self.gate = nn.Linear(embed_dim, num_heads * value_size, **options) if output_gate else None
        self.norm = nn.RMSNorm(value_size, eps=1e-6, **options)
        self.out_proj = nn.Linear(num_heads * value_size, embed_dim, **options)
        self._start_decay()

    def reset_parameters(self) -> None:
        """Reset all parameters: as `torch.nn.Linear` and `torch.nn.Conv1d`, but the decay keeps 0.98 of the memory."""
        parts = (self.in_proj, self.convolution, self.decay, self.rate, self.write, self.gate, self.norm, self.out_proj)
        for part in parts:
            if part is not None:
                part.reset_parameters()
        for ones in (self.removal, self.replacement):
            if ones is not None:
                nn.init.ones_(ones)
        self._start_decay()

    def _start_decay(self) -> None:
        if self.decay is not None:
            nn.init.constant_(self.decay.bias, _KEPT)

    @property
    def _dtype(self) -> torch.dtype:
        weight = self.in_proj.weight
        return weight.dtype if isinstance(weight, Tensor) else torch.float32  # of a quantised layer it is a method

    @property
    def _features(self) -> int:
        """F, of a query and of a key."""
        return 2 * self.key_size if self.feature_map == "dpfp" else self.key_size

    def _state_shapes(self, batch: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        last = 0 if self.convolution is None else self.convolution.steps - 1
        return {
            "memory": (*batch, self.num_heads, self._features, self.value_size),
            "convolution": (*batch, last, self.in_proj.out_features),
        }

    def _run(
        self, x: Tensor, state: FastWeightProgrammerState | None, lengths: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, FastWeightProgrammerState]:
        dtype, heads = self._dtype, self.num_heads
        x, starts = x.transpose(0, 1), None if starts is None else starts.t()  # the recurrence has the batch first
        memory, last = (None, None) if state is None else (tensor.to(dtype) for tensor in state)
        mixed = self.in_proj(x).to(dtype)
        if self.convolution is not None:
            impl = "auto" if self.impl == "triton" else self.impl  # it has no such kernel
            mixed, last = self.convolution(mixed, last, lengths=lengths, starts=starts, impl=impl)
        else:
            last = mixed[:, :0] + 0 if last is None else last.clone()
        keys, values = heads * self.key_size, heads * self.value_size
        q, k, v = (part.unflatten(2, (heads, -1)) for part in mixed.split((keys, keys, values), 2))
        map_features = _FEATURE_MAPS[self.feature_map]
        o, memory = self._recur(x, map_features(q), map_features(k), F.silu(v), memory, lengths, starts)
        o = self.norm(o).flatten(2)
        if self.gate is not None:
            o = o * F.silu(self.gate(x))
        y = self.out_proj(o)
        if lengths is not None:
            y = torch.where(mask_of(lengths, x.shape[1]).t().unsqueeze(2), y, torch.zeros_like(y))
        return y.transpose(0, 1), FastWeightProgrammerState(memory.to(dtype), last)

    def _recur(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        memory: Tensor | None,
        lengths: Tensor | None,
        starts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the rule over time: x [B,T,E], q and k [B,T,H,F], v [B,T,H,V] -> outputs [B,T,H,V] and the memory."""
        g: Any = None if self.decay is None else F.logsigmoid(self.decay(x))
        if self.rule in _BY_ROW:
            g = g.view(q.shape)
        beta: Any = None if self.rate is None else (2 if self.negative_eigenvalues else 1) * self.rate(x).sigmoid()
        if self.rule in _RANK_ONE:
            beta = beta.view(q.shape)
        options: dict[str, Any] = {
            "initial_state": memory,
            "output_final_state": True,
            "starts": starts,
            "lengths": lengths,
            "impl": self.impl,
        }
        o: Tensor
        if self.rule == "sum":
            o, end = delta.linear_attention(q, k, v, **options)
        elif self.rule == "decay":
            o, end = delta.simple_gla(q, k, v, g, **options)
        elif self.rule == "delta":
            o, end = delta.delta_rule(q, k, v, beta, **options)
        elif self.write is not None:  # "gated_delta_2"
            v = self.write(x).sigmoid().view(v.shape) * v
            o, end = delta.dplr_delta_rule(q, k, v, g.exp() * beta * k, -k, g, **options)
        elif self.removal is not None and self.replacement is not None:  # "rwkv7"
            removed = F.normalize(self.removal * k, dim=-1)
            k = (1 + self.replacement * (beta - 1)) * k
            o, end = delta.dplr_delta_rule(q, k, v, -removed, beta * removed, g, **options)
        else:
            o, end = delta.gated_delta_rule(q, k, v, g, beta, **options)
        assert end is not None
        return o, end

    def extra_repr(self) -> str:
        return describe(
            vars(self),
            ["embed_dim", "num_heads"],
            ["rule"],
            key_size=self.embed_dim // self.num_heads,
            value_size=self.embed_dim // self.num_heads,
            feature_map="silu",
            negative_eigenvalues=False,
            batch_first=False,
            impl="auto",
        )


def _map_silu(x: Tensor) -> Tensor:
    return F.normalize(F.silu(x), dim=-1)


def _map_elu(x: Tensor) -> Tensor:
    return _scale_to_one(F.elu(x) + 1)


def _map_dpfp(x: Tensor) -> Tensor:
    x = torch.cat((x, -x), -1).relu()
    return _scale_to_one(x * x.roll(1, -1))


def _scale_to_one(x: Tensor) -> Tensor:
    """Scale numbers that are not negative to a sum of 1 over the last axis; zeros stay zeros."""
    return x / (x.sum(-1, keepdim=True) + 1e-6)


_FEATURE_MAPS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": _map_silu, "elu": _map_elu, "dpfp": _map_dpfp}
