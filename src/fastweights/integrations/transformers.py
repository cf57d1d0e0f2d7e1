"""The fast-weight rules of transformers' own models, computed by the kernels of `ops` on a processor."""

import functools
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fastweights.errors import KernelError
from fastweights.ops import missing_kernels
from fastweights.ops.delta import gated_delta_rule

# Of each rule the function for a whole pass, and the one for a decoded token.
_RULES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
_CONVOLUTION = "causal_conv1d_fn"  # before the rule
_EPSILON = 1e-6  # transformers adds it to the square of a query's or a key's length


class _Place(NamedTuple):
    """A module of Python, or a layer, one of whose names stands for a function."""

    owner: Any
    name: str
    function: Callable[..., Any]  # transformers' own


class TransformersPatch:
    """A record of the functions that `patch_transformers` has replaced, which gives them back.

    Used as a context it is restored at the end.

    Attributes:
        models: the names of the patched models, sorted, such as "qwen3_next".
    """

    def __init__(self, places: list[_Place]) -> None:
        modules = [place.owner.__name__ for place in places if inspect.ismodule(place.owner)]
        self.models = sorted({module.split(".")[-1].removeprefix("modeling_") for module in modules})
        self._places, self._active = places, True
        for place in places:
            setattr(place.owner, place.name, self._replace(place.function))

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

    def _replace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)
        convolves = function.__name__ == _CONVOLUTION

        @functools.wraps(function)
        def patched(*arguments: Any, **options: Any) -> Any:
            options |= zip(names, arguments, strict=False)
            # A layer made meanwhile may keep this function for good.
            if not self._active or options[names[0]].device.type != "cpu":
                return function(**options)
            if convolves:
                return _convolve(function, options.pop(names[0]), **options)
            tensors = [options.pop(name) for name in names[:5]]
            return _run(*tensors, **options)

        patched._patch = self  # type: ignore[attr-defined]
        return patched


def patch_transformers(model: nn.Module | None = None) -> TransformersPatch:
    """Let the models of transformers that have a delta rule run it with our kernel, in training and in decoding.

    Those are Qwen3-Next, Qwen3.5 and OLMo Hybrid with the gated delta rule, Kimi Linear, GLM-5 Next and Bailing Hybrid
    with Kimi delta attention, and whatever other model has the functions that such models call on a processor:
    `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`, and in decoding `torch_recurrent_gated_delta_rule`
    and `recurrent_kimi_delta_attention`. They are replaced in every model of the installed version, loaded or not,
    until `restore`. The results are theirs but for rounding, with gradients; like theirs, the kernel computes in
    float32 and returns the query's dtype. Tensors on another device go to the function that was there.

    Sequences packed into one row (`cu_seq_lens_q`, `seq_idx`), which transformers refuses or mixes on a processor, are
    kept apart, by these rules and by the convolution before them.

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
        ValueError: bounds that a patched model gets for packed sequences are none of its row.

    Examples:
        >>> from fastweights import nn
        >>> patch = integrations.transformers.patch_transformers()       # doctest: +SKIP
        >>> patch.models                          # doctest: +SKIP
        ['bailing_hybrid', 'glm5_next', 'kimi_linear', 'olmo_hybrid', 'qwen3_5', 'qwen3_5_moe', 'qwen3_next']
        >>> patch.restore()                       # doctest: +SKIP
        >>> with integrations.transformers.patch_transformers():         # doctest: +SKIP
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
        for name in (*_RULES, _CONVOLUTION)
        if inspect.isfunction(vars(module).get(name))
    ]
    if any(hasattr(place.function, "_patch") for place in places):
        raise RuntimeError("transformers is patched already: call restore() of that patch first")
    functions = {place.function for place in places}
    for layer in () if model is None else model.modules():
        kept = [(name, value) for name, value in vars(layer).items() if inspect.isfunction(value)]
        places += [_Place(layer, name, value) for name, value in kept if value in functions]
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
            f"transformers {transformers.__version__} has no model with a delta rule: run "
            "`pip install --upgrade transformers`"
        )
    for model in models:
        importlib.import_module(f"transformers.models.{model}")


@functools.cache  # hundreds of files are read
def _find_models(folder: Path) -> list[str]:
    """Return the modules in a folder of models that define a rule."""
    definition = re.compile(rf"\ndef ({'|'.join(_RULES)})\(".encode())
    paths = sorted(path for path in folder.glob("*/modeling_*.py") if definition.search(path.read_bytes()))
    return [f"{path.parent.name}.{path.stem}" for path in paths]


def _run(
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
    bounds, flags = _find_bounds(**options)
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    # The convolution before it leaves the steps innermost: sums over features, and all gradients, would then be slow.
    query, key, value, g, beta = (tensor.float().contiguous() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
    if groups > 1:
        query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
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


def _find_bounds(
    *,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the bounds of packed sequences [N+1], or where in each row another one begins [B,T]; or None twice."""
    bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if bounds is not None or seq_idx is None:
        return bounds, None
    first = seq_idx.new_zeros(len(seq_idx), 1, dtype=torch.bool)
    return None, torch.cat((first, seq_idx[:, 1:] != seq_idx[:, :-1]), 1)


def _convolve(function: Callable[..., Tensor], hidden_states: Tensor, **options: Any) -> Tensor:
    """Return what a convolution of transformers makes of [B,C,T], of every packed sequence by itself."""
    bounds, flags = _find_bounds(**options)
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        options.pop(name, None)
    if flags is not None:
        inner = [row.nonzero().flatten() for row in flags]
        bounds_of_rows = [[0, *starts.tolist(), len(row)] for row, starts in zip(flags, inner, strict=True)]
    elif bounds is not None:
        bounds_of_rows = [bounds.tolist()] * len(hidden_states)
    else:
        return function(hidden_states, **options)
    rows = []
    for row, ends in zip(hidden_states, bounds_of_rows, strict=True):
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        lengths[0] += row.shape[1] - sum(lengths)  # with a cache, the last inputs before the row come first
        if min(lengths) < 0:
            raise ValueError(f"cu_seqlens must ascend from 0 to the number of steps, got {ends}")
        pieces = torch.split(row.unsqueeze(0), lengths, 2)
        rows.append(torch.cat([function(piece, **options) for piece in pieces if piece.shape[2] > 0], 2))
    return torch.cat(rows)
