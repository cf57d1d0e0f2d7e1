"""The fast-weight rules of transformers' own models, computed by the kernels of `ops` on a processor."""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fastweights.errors import KernelError
from fastweights.ops import missing_kernels
from fastweights.ops.delta import gated_delta_rule, simple_gla
from fastweights.ops.packed import check_cu_seqlens
from fastweights.ops.selective_scan import selective_scan, selective_state_update
from fastweights.ops.short_convolution import short_convolution

_EPSILON = 1e-6  # transformers adds it to the square of a query's or a key's length


class _Place(NamedTuple):
    """A module of Python, a class of layers, or a layer, one of whose names stands for a function."""

    owner: Any
    name: str
    function: Callable[..., Any]  # transformers' own


class TransformersPatch:
    """A record of the functions that `patch_transformers` has replaced, which gives them back.

    Used as a context it is restored at the end.

    Attributes:
        models: the names of the patched models, sorted, such as "qwen3_next".
        rules: the functions of whole passes that are replaced, by module and name, sorted, such as
            ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule").
    """

    def __init__(self, places: list[_Place]) -> None:
        modules = [place.owner.__name__ for place in places if inspect.ismodule(place.owner)]
        modules += [place.owner.__module__ for place in places if inspect.isclass(place.owner)]
        self.models = sorted({module.split(".")[-1].removeprefix("modeling_") for module in modules})
        self.rules = sorted(
            (place.owner.__name__, place.name)
            for place in places
            if inspect.ismodule(place.owner) and place.name in _PASSES
        )
        self._places, self._active = places, True
        for place in places:
            setattr(place.owner, place.name, self._replace(place))

    def restore(self) -> None:
        """Give transformers its own functions back, the same objects; a second call does nothing."""
        if self._active:
            self._active = False
            for place in self._places:
                setattr(place.owner, place.name, place.function)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _replace(self, place: _Place) -> Callable[..., Any]:
        function = place.function
        if inspect.isclass(place.owner):
            return self._replace_method(function, _METHODS[place.owner.__name__])
        names = list(inspect.signature(function).parameters)
        ours = _FUNCTIONS[function.__name__]
        if ours is _convolve and hasattr(place.owner, "mamba_selective_scan"):
            ours = _refuse_bounds

        around = function.__name__ in _AROUND
        first = names[:5] if function.__name__ in _RULES else names[:1]
        needed = frozenset(first)

        @functools.wraps(function)
        def patched(*arguments: Any, **options: Any) -> Any:
            options |= zip(names, arguments, strict=False)
            # A layer made meanwhile may keep this function for good. What lacks an argument is told so by theirs.
            if not self._active or not options.keys() >= needed or options[first[0]].device.type != "cpu":
                return function(**options)
            tensors = [options.pop(name) for name in first]
            return ours(function, *tensors, **options) if around else ours(*tensors, **options)

        patched._patch = self  # type: ignore[attr-defined]
        return patched

    def _replace_method(self, function: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
            given = next((each for each in (*arguments, *options.values()) if isinstance(each, Tensor)), None)
            if not self._active or given is None or given.device.type != "cpu":
                return function(layer, *arguments, **options)
            return ours(function, layer, *arguments, **options)

        patched._patch = self  # type: ignore[attr-defined]
        return patched


def patch_transformers(model: nn.Module | None = None) -> TransformersPatch:
    """Let the models of transformers that have a fast-weight rule run it with our kernels, in training and decoding.

    Those are Qwen3-Next, Qwen3.5 and OLMo Hybrid with the gated delta rule; Kimi Linear, GLM-5 Next and Bailing Hybrid
    with Kimi delta attention; Mamba-2, Bamba, Falcon-H1, Granite MoE Hybrid, Nemotron-H and Zamba2 with the decay of
    Mamba-2; MiniMax with a decay that stays; Mamba, Falcon Mamba, Jamba and Zamba with the scan of Mamba; and whatever
    other model has the functions that these call on a processor, such as `chunk_kimi_delta_attention`. They are
    replaced in every model of the installed version, loaded or not, until `restore`. The results are theirs but for
    rounding, with gradients; like theirs, the kernels compute in float32. Tensors on another device go to the function
    that was there.

    Sequences packed into one row (`cu_seq_lens_q`, `seq_idx`), which transformers refuses or mixes on a processor, are
    kept apart, by these rules and by the convolution before them. They are refused where the rest of a model would mix
    them: with a cache, in the models of Mamba's scan, and in Mamba-2, Granite MoE Hybrid and GLM-5 Next.

    Args:
        model: a model that is loaded already, needed where its layers keep the functions as attributes, as in earlier
            versions of transformers. It is changed in place, until `restore`.

    Returns:
        A patch, with `restore()`; used as a context, it is restored at the end.

    Raises:
        ImportError: transformers is not installed, or has no such model.
        KernelError: our kernel cannot run here.
        TypeError: `model` is no loaded model.
        RuntimeError: transformers is patched already.
        ValueError: bounds that a patched model gets for packed sequences are none of its row, or it cannot keep packed
            sequences apart, or has a cache.

    Examples:
        >>> from fastweights.integrations.transformers import patch_transformers
        >>> patch = patch_transformers()          # doctest: +SKIP
        >>> patch.models                          # doctest: +SKIP
        ['bailing_hybrid', 'bamba', 'falcon_h1', 'falcon_mamba', 'glm5_next', 'granitemoehybrid', 'jamba', ...]
        >>> patch.restore()                       # doctest: +SKIP
        >>> with patch_transformers():            # doctest: +SKIP
        ...     model.generate(ids)
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a loaded model, a torch.nn.Module, got {model!r}")
    if missing := missing_kernels():
        raise KernelError(f"patch_transformers needs the C++ kernels, but {missing}")
    _import_models()
    places = [
        _Place(module, name, vars(module)[name])
        for path, module in list(sys.modules.items())
        if path.startswith(("transformers.models.", "transformers_modules."))  # the second are models from the hub
        and not vars(module).keys().isdisjoint(_RULES)
        for name in _FUNCTIONS
        if inspect.isfunction(vars(module).get(name))
    ]
    places += [
        _Place(vars(module)[name], "forward", vars(module)[name].forward)
        for path, module in list(sys.modules.items())
        if path.startswith("transformers.models.")
        for name in _METHODS
        if inspect.isclass(vars(module).get(name))
    ]
    if any(hasattr(place.function, "_patch") for place in places):
        raise RuntimeError("transformers is patched already: call restore() of that patch first")
    functions = {place.function for place in places}
    for layer in () if model is None else model.modules():
        # A layer that was made under an earlier patch has kept that one's function.
        kept = {
            name: inspect.unwrap(value, stop=lambda function: not hasattr(function, "_patch"))
            for name, value in vars(layer).items()
            if inspect.isfunction(value)
        }
        places += [_Place(layer, name, function) for name, function in kept.items() if function in functions]
    return TransformersPatch(places)


def _import_models() -> None:
    """Import the models of transformers that have a rule: what is loaded later would go unpatched."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("patch_transformers needs transformers: run `pip install '.[hf]'` in the checkout") from error
    models = _find_models(Path(transformers.__file__).parent / "models")
    if not models:
        raise ImportError(
            f"transformers {transformers.__version__} has no model with a fast-weight rule: run "
            "`pip install --upgrade transformers`"
        )
    for model in models:
        importlib.import_module(f"transformers.models.{model}")


@functools.cache  # hundreds of files are read
def _find_models(folder: Path) -> list[str]:
    """Return the modules in a folder of models that define a rule."""
    definition = re.compile(rf"\n(def ({'|'.join(_RULES)})|class ({'|'.join(_METHODS)}))\(".encode())
    paths = sorted(path for path in folder.glob("*/modeling_*.py") if definition.search(path.read_bytes()))
    return [f"{path.parent.name}.{path.stem}" for path in paths]


def _run_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what transformers' functions do: query and key [B,T,heads,K], each of them for consecutive heads of value."""
    bounds, flags = _find_bounds(output_final_state, **options)
    dtype = query.dtype
    # The convolution before it leaves the steps innermost: sums over features, and all gradients, would then be slow.
    query, key, value, g, beta = (tensor.float().contiguous() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
    outputs, state = gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        starts=flags,
        cu_seqlens=bounds,
    )
    return outputs.to(dtype), state


def _run_mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    *,
    D: Tensor | None = None,  # noqa: N803, the name of transformers
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """Do what transformers' function does: a decay for each head of [B,T,heads,V], which share keys and queries."""
    bounds, flags = _find_bounds(return_final_states, **options)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    x, keys, queries = (tensor.float().contiguous() for tensor in (hidden_states, keys, queries))
    outputs, state = simple_gla(
        queries,
        keys,
        x,
        rates.float() * dt,
        beta=dt,
        skip=None if D is None else D.float(),
        scale=1.0,
        initial_state=None if initial_states is None else initial_states.float().transpose(2, 3),
        output_final_state=return_final_states,
        starts=flags,
        cu_seqlens=bounds,
    )
    return outputs if state is None else (outputs, state.transpose(2, 3).contiguous())


def _run_mamba(
    hidden_states: Tensor,
    dt: Tensor,
    rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    *,
    D: Tensor | None = None,  # noqa: N803, the name of transformers
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Do what transformers' function does, all of it tensors [B,channels,T]."""
    tensors = (hidden_states, dt, rates, keys, queries, D, z, delta_bias)
    return selective_scan(*tensors, delta_softplus=delta_softplus, return_last_state=return_last_state)


def _attend(
    _: object,
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: object = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Do what a layer of MiniMax does, which has no function for its rule: a decay for each head that stays."""
    bounds, flags = _find_bounds(past_key_values is not None, **options)
    batch, steps = hidden_states.shape[:2]
    heads, size = layer.num_attention_heads, layer.head_dim
    mixed = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        mixed = (mixed * attention_mask.unsqueeze(2)).to(mixed.dtype)
    earlier = None if past_key_values is None else past_key_values.get_linear_cache(layer.layer_idx)
    query, key, value = mixed.view(batch, steps, heads, 3 * size).float().split(size, 3)
    outputs, state = simple_gla(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        -layer.slope_rate.float().view(heads).expand(batch, steps, heads),
        scale=1.0,
        initial_state=None if earlier is None else earlier.float(),
        output_final_state=True,
        starts=flags,
        cu_seqlens=bounds,
    )
    outputs = layer.norm(outputs.to(mixed.dtype).reshape(batch, steps, heads * size))
    # Under autocast theirs is in single precision too: in half of it a text's rounding would add up.
    later = state.to(torch.promote_types(mixed.dtype, layer.slope_rate.dtype))  # type: ignore[union-attr]
    if past_key_values is not None:
        past_key_values.set_linear_cache(layer.layer_idx, later)
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * outputs), later


def _update(function: Callable[..., Tensor], state: Tensor, **options: Any) -> Tensor:
    """Do what transformers' functions do for a decoded token, which change the state in place, without gradients."""
    if torch.is_grad_enabled():
        given = (state, *options.values())
        if any(isinstance(each, Tensor) and each.requires_grad for each in given):
            return function(state, **options)
    get = options.get
    return selective_state_update(
        state,
        options["hidden_states"],
        options["dt"],
        options["A"],
        options["B"],
        options["C"],
        get("D"),
        get("z"),
        get("dt_bias"),
        get("dt_softplus", False),
    )


def _find_bounds(
    cached: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the bounds of packed sequences [N+1], or where in each row another one begins [B,T]; or None twice.

    Raises:
        ValueError: there are some, and a cache.
    """
    bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if cached and not (bounds is None and seq_idx is None):
        raise ValueError(
            "packed sequences (cu_seq_lens_q, seq_idx) need use_cache=False: with a cache the attention of "
            "transformers lets one run into the next"
        )
    if bounds is not None or seq_idx is None:
        return bounds, None
    first = seq_idx.new_zeros(len(seq_idx), 1, dtype=torch.bool)
    return None, torch.cat((first, seq_idx[:, 1:] != seq_idx[:, :-1]), 1)


def _convolve(
    hidden_states: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """Return what a convolution of transformers makes of [B,C,T], of every packed sequence by itself."""
    bounds, flags = _find_bounds(**options)
    batch, _, steps = hidden_states.shape
    if bounds is not None:
        check_cu_seqlens(bounds, batch, hidden_states.device)
        ends = bounds.tolist()
        if ends != sorted(ends) or ends[0] != 0 or ends[-1] > steps:
            raise ValueError(f"cu_seqlens must ascend from 0 to the number of steps, {steps} here, got {ends}")
        places = [
            steps - ends[-1] + end for end in ends[1:-1]
        ]  # with a cache, the last inputs before the row come first
        flags = hidden_states.new_zeros(batch, steps + 1, dtype=torch.bool)
        flags[:, places] = True  # of a sequence without steps at the end, past the last
        flags = flags[:, :steps]
    elif flags is not None:
        flags = torch.nn.functional.pad(flags, (steps - flags.shape[1], 0))
    # The layers turn steps and channels round for transformers' own function, and again what it returns.
    x, silu = hidden_states.transpose(1, 2), activation in ("silu", "swish")
    y = short_convolution(
        x.to(weight.dtype), weight, bias, activation="silu" if silu else None, starts=flags
    ).transpose(1, 2)
    return _activate(y, None if silu else activation).to(hidden_states.dtype)


def _convolve_token(
    function: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Do what transformers' function does for a decoded token [B,C,1], which changes the state [B,C,S] in place.

    A product and a sum: torch's grouped convolution takes several times as long for so few numbers.
    """
    taps = weight.shape[1]
    if hidden_states.shape[2] != 1 or conv_state.shape[2] < taps - 1:
        options = {"conv_state": conv_state, "weight": weight, "bias": bias, "activation": activation}
        return function(hidden_states, **options)
    inputs = torch.cat((conv_state, hidden_states), 2)
    conv_state.copy_(inputs[:, :, -conv_state.shape[2] :])
    y = (inputs[:, :, -taps:].float() * weight.float()).sum(2, keepdim=True)
    y = (y if bias is None else y + bias.unsqueeze(1)).to(weight.dtype)
    return _activate(y, activation).to(hidden_states.dtype)


def _activate(y: Tensor, activation: str | None) -> Tensor:
    """Return what a function of transformers makes of numbers, by its name there."""
    if activation is None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)  # type: ignore[no-any-return]


def _refuse_packed(function: Callable[..., Any], model: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Run a model whose layers are not told where packed sequences begin, or whose attention is not."""
    if any(bounds is not None for bounds in _find_bounds(**options)):
        raise ValueError(
            f"packed sequences (cu_seq_lens_q, seq_idx) cannot be kept apart in a {type(model).__name__} of "
            "transformers on a processor: give each sequence a row of its own, padded"
        )
    return function(model, *arguments, **options)


def _refuse_bounds(hidden_states: Tensor, **options: Any) -> Tensor:
    """Run a convolution before a scan that no layer tells where packed sequences begin."""
    if any(bounds is not None for bounds in _find_bounds(**options)):
        raise ValueError(
            "packed sequences (cu_seq_lens_q, seq_idx) cannot be kept apart here, because the layers of this model do "
            "not hand them on to mamba_selective_scan: give each sequence a row of its own, padded"
        )
    return _convolve(hidden_states, **options)


def _leave_bounds_out(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("cu_seqlens", "cu_seq_lens_q", "seq_idx")}


def _run_unfused(function: Callable[..., Any], projected_states: Tensor, **options: Any) -> Any:
    """Call the function of a whole layer in one kernel: on a processor it does nothing but refuse packed sequences."""
    return function(projected_states, **_leave_bounds_out(options))


# Of each rule the function for a whole pass, and with them those for a decoded token that have the same arguments.
_PASSES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _run_delta,
    "chunk_kimi_delta_attention": _run_delta,
    "mamba2_chunk_scan": _run_mamba2,
    "mamba_selective_scan": _run_mamba,
}
_RULES = _PASSES | {"torch_recurrent_gated_delta_rule": _run_delta, "recurrent_kimi_delta_attention": _run_delta}
# These take transformers' own function too: steps of a decoded token, and a layer in one kernel.
_AROUND: dict[str, Callable[..., Any]] = {
    "mamba_selective_state_update": _update,
    "mamba2_selective_state_update": _update,
    "mamba2_split_conv1d_scan_combined": _run_unfused,
    "causal_conv1d_update": _convolve_token,
}
# Of classes the forward pass: of a layer, and of models that let packed sequences run into one another, or refuse them.
_METHODS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _attend} | dict.fromkeys(
    (
        *("JambaModel", "ZambaModel", "GraniteMoeHybridModel", "Glm5NextTextModel"),
        *("MambaModel", "FalconMambaModel", "Mamba2Model"),  # those below do not hand on to these what they are told
        *("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"),
    ),
    _refuse_packed,
)
_FUNCTIONS = _RULES | _AROUND | {"causal_conv1d_fn": _convolve}
