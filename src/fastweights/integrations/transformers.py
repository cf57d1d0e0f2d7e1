"""The gated delta rule of transformers' own models, computed by the kernel of `ops.delta` on a processor."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fastweights.errors import KernelError
from fastweights.ops import missing_kernels
from fastweights.ops.delta import gated_delta_rule

_RULES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)  # for a whole pass, and for a decoded token
_EPSILON = 1e-6  # transformers adds it to the square of a query's or a key's length


class _Place(NamedTuple):
    """A module of Python, or a layer, one of whose names stands for a rule."""

    owner: Any
    name: str
    rule: Callable[..., Any]  # transformers' own


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
            setattr(place.owner, place.name, self._replace(place.rule))

    def restore(self) -> None:
        """Give transformers its own functions back, the same objects; a second call does nothing."""
        if self._active:
            self._active = False
            for place in self._places:
                setattr(place.owner, place.name, place.rule)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _replace(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(rule).parameters)[5:]

        @functools.wraps(rule)
        def patched(
            query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *more: Any, **options: Any
        ) -> Any:
            options |= zip(names, more, strict=False)
            # A layer made meanwhile may keep this function for good.
            if not self._active or value.device.type != "cpu":
                return rule(query, key, value, g, beta, **options)
            return _run(query, key, value, g, beta, **options)

        patched._patch = self  # type: ignore[attr-defined]
        return patched


def patch_transformers(model: nn.Module | None = None) -> TransformersPatch:
    """Let the models of transformers that have a gated delta rule run it with our kernel, in training and in decoding.

    Those are Qwen3-Next, Qwen3.5 and OLMo Hybrid, and whatever other model has the functions that such models call on
    a processor: `torch_chunk_gated_delta_rule`, and in decoding `torch_recurrent_gated_delta_rule`. Both are replaced
    in every model of the installed version, loaded or not, until `restore`. The results are theirs but for rounding,
    with gradients; like theirs, the kernel computes in float32 and returns the query's dtype. Tensors on another device
    go to the function that was there.

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
        ValueError: a patched model reads packed sequences (`cu_seq_lens_q`, `seq_idx`), which on a processor
            transformers refuses too.

    Examples:
        >>> from fastweights import nn
        >>> patch = integrations.transformers.patch_transformers()       # doctest: +SKIP
        >>> patch.models                          # doctest: +SKIP
        ['olmo_hybrid', 'qwen3_5', 'qwen3_5_moe', 'qwen3_next', 'qwen4_exp']
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
        for name in _RULES
        if name in vars(module)
    ]
    if any(hasattr(place.rule, "_patch") for place in places):
        raise RuntimeError("transformers is patched already: call restore() of that patch first")
    rules = {place.rule for place in places}
    for layer in () if model is None else model.modules():
        bound = [(name, value) for name, value in vars(layer).items() if inspect.isfunction(value) and value in rules]
        places += [_Place(layer, name, rule) for name, rule in bound]
    return TransformersPatch(places)


def _import_models() -> None:
    """Import the models of transformers that have a gated delta rule: what is loaded later would go unpatched."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError("patch_transformers needs transformers: run `pip install '.[hf]'` in the checkout") from error
    models = _find_models(Path(transformers.__file__).parent / "models")
    if not models:
        raise ImportError(
            f"transformers {transformers.__version__} has no model with a gated delta rule: run "
            "`pip install --upgrade transformers`"
        )
    for model in models:
        importlib.import_module(f"transformers.models.{model}")


@functools.cache  # hundreds of files are read
def _find_models(folder: Path) -> list[str]:
    """Return the modules in a folder of models that define a gated delta rule."""
    definition = f"\ndef {_RULES[0]}(".encode()
    paths = sorted(path for path in folder.glob("*/modeling_*.py") if definition in path.read_bytes())
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
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Do what transformers' functions do: query and key [B,T,heads,K], each of them for consecutive heads of value."""
    if cu_seqlens is not None or seq_idx is not None:
        raise ValueError(
            "packed sequences (cu_seqlens, seq_idx) cannot be kept apart on a processor: give each sequence a row of "
            "its own, padded"
        )
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    # The convolution before it leaves the steps innermost: sums over features, and all gradients, would then be slow.
    query, key, value, g, beta = (tensor.float().contiguous() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPSILON) for x in (query, key))
    if groups > 1:
        query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
    outputs, state = gated_delta_rule(
        query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state
    )
    return outputs.to(dtype), state
