"""One module for each table or figure of a paper: its settings, its presets, and the run itself."""

import ast
import dataclasses
import difflib
import importlib
import pkgutil
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from fastweights.errors import FastWeightsError


def experiments() -> dict[str, str]:
    """Every experiment's name, `paper/experiment`, and what it is in a line; nothing heavy is imported.

    Examples:
        >>> from fastweights.reproduce import experiments
        >>> print(experiments()["ba2016/associative-retrieval"])
        Associative retrieval, table and figure 3 of Ba et al. 2016: IRNN, LSTM, Associative LSTM, fast weights.
    """
    folder = Path(__file__).parent
    found = {}
    for module in pkgutil.iter_modules([str(folder)]):
        if module.name.startswith("_"):
            continue
        docstring = ast.get_docstring(ast.parse((folder / f"{module.name}.py").read_text())) or ""
        paper, _, experiment = module.name.partition("_")
        found[f"{paper}/{experiment.replace('_', '-')}"] = docstring.partition("\n")[0]
    return found


def load(name: str) -> ModuleType:
    """The module of an experiment: `Settings`, `PRESETS`, `run(settings, folder)` and `check(settings)`.

    Raises:
        FastWeightsError: there is no such experiment.
    """
    known = experiments()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}? " if close else ""
        raise FastWeightsError(f"there is no experiment {name!r}: {hint}`fastweights list` shows all")
    return importlib.import_module(f"{__name__}.{name.replace('/', '_').replace('-', '_')}")


def command(experiment: str, preset: str, default: Any, settings: Any) -> str:
    """The command line that gives these settings: what differs from the preset, as options.

    Examples:
        >>> from fastweights.reproduce import command, load
        >>> module = load("ba2016/associative-retrieval")
        >>> quick = module.PRESETS["quick"]
        >>> command(module.EXPERIMENT, "quick", quick, dataclasses.replace(quick, seeds=(1, 2), layer_norm=False))
        'fastweights reproduce ba2016/associative-retrieval --seeds 1 2 --no-layer-norm'
    """
    words = ["fastweights", "reproduce", experiment]
    words += [] if preset == "quick" else ["--preset", preset]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value == getattr(default, field.name):
            continue
        option = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, tuple) else [value])]
    return shlex.join(words)
