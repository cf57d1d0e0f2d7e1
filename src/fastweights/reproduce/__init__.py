"""One module for each table or figure of a paper: its settings, its presets, and the run itself."""

import dataclasses
import difflib
import importlib
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from fastweights.errors import FastWeightsError

MACHINE_SETTINGS = ("threads", "device", "checkpoint_seconds")  # of every experiment: they decide no number


def experiments() -> dict[str, str]:
    """Return each experiment's name, `paper/experiment`, and its summary of one line; nothing heavy is imported.

    Examples:
        >>> from fastweights.reproduce import experiments
        >>> print(experiments()["ba2016/associative-retrieval"])
        Associative retrieval, table and figure 3 of Ba et al. 2016: IRNN, LSTM, Associative LSTM, fast weights.
    """
    summaries = {}
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        source = path.read_text()
        if "\nPRESETS = {" in source:  # beside the experiments lie the parts that they share
            name = f"{path.parent.name}/{path.stem.replace('_', '-')}"
            summaries[name] = source.removeprefix('"""').partition("\n")[0]
    return summaries


def load(name: str) -> ModuleType:
    """Import the module of an experiment: `Settings`, `PRESETS`, `run(settings, folder)` and `check(settings)`.

    Raises:
        FastWeightsError: there is no such experiment.
    """
    known = experiments()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}? " if close else ""
        raise FastWeightsError(f"there is no experiment {name!r}: {hint}`fastweights list` shows all")
    return importlib.import_module(f"{__name__}.{name.replace('/', '.').replace('-', '_')}")


def command(experiment: str, preset: str, default: Any, settings: Any) -> str:
    """Return the command line that gives these settings: options for all that differs from the preset.

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
