"""The settings of all components and the weights of the mixture, from one pass over a validation text."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.checks import check_positive
from fastweights.memory.language_model._causal_model import Window
from fastweights.memory.language_model._components import Component, Setting
from fastweights.memory.predictors.fit import choose_setting
from fastweights.memory.predictors.mixtures import fit_weights


def fit(
    components: Sequence[Component],
    windows: Iterable[Window],
    count: int,
    *,
    thetas: Any,
    bandwidths: Any,
    rates: Any,
) -> Tensor:
    """Give each component the best of its candidates, and return the weights, as `AdaptiveLanguageModel.fit` says.

    Args:
        components: of the mixture.
        windows: of the text.
        count: the text's positions, at most.
        thetas: candidates, like the others; None for the usual ones.
        bandwidths: of knn.
        rates: of MbPA.
    """
    candidates = {
        "cache": _check_candidates("thetas", thetas),
        "knn": _check_candidates("bandwidths", bandwidths, none=True),
        "mbpa": _check_candidates("rates", rates),
    }
    plain: list[Tensor] = []
    scores: dict[str, dict[Setting, list[Tensor]]] = {each.name: {} for each in components}
    with contextlib.ExitStack() as stack:
        for each in components:
            stack.enter_context(each.rewinding(count))
        for window in windows:
            if not plain:
                length = float(window.h.square().sum(1).mean())
                candidates = {
                    each.name: candidates.get(each.name) or each.list_candidates(length) for each in components
                }
            plain.append(window.plain.double())
            for each in components:
                for value, score in each.try_candidates(window, candidates[each.name]):
                    scores[each.name].setdefault(value, []).append(score.double())
    chosen = [torch.cat(plain)]
    for each in components:
        tried = {value: torch.cat(parts) for value, parts in scores[each.name].items()}
        best = choose_setting(chosen[0], tried)
        chosen.append(tried[best])
        each.choose(best)
    # As if each were right once more: none is ruled out by a text that is too short or too much alike to tell.
    return (fit_weights(chosen) * len(chosen[0]) + 1) / (len(chosen[0]) + len(chosen))


def _check_candidates(name: str, values: Any, *, none: bool = False) -> list[Any]:
    """Return the candidates of a setting, each once; an empty list where the usual ones are to be taken."""
    candidates = [] if values is None else values.tolist() if hasattr(values, "tolist") else list(values)
    for value in candidates:
        if not (none and value is None):
            check_positive(**{name: value})
    return list(dict.fromkeys(candidates))
