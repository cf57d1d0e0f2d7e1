"""One module for each table or figure of a paper: its settings, its presets, and the run itself."""

import ast
import dataclasses
import importlib
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

from fastweights.errors import FastWeightsError, did_you_mean

MACHINE_SETTINGS = ("threads", "device", "checkpoint_seconds")  # settings that change no number of a result


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment as the list of all shows it."""

    summary: str
    quick_minutes: int  # measured on two cores, for the preset quick
    data: str | None  # the name of the data set that it needs


def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, `paper/experiment`; nothing heavy is imported.

    Examples:
        >>> from fastweights.reproduce import experiments
        >>> experiment = experiments()["rae2018/omniglot-curriculum"]
        >>> experiment.summary.partition(":")[0], experiment.data
        ('Omniglot curriculum, figures 3, 8 and 9 of Rae et al. 2018', 'omniglot')
    """
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        source = path.read_text()
        if "\nPRESETS = {" in source:  # beside the experiments lie the parts that they share
            module = ast.parse(source)  # parsed, because importing it would import torch
            values = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
            minutes, data = (ast.literal_eval(values[name]) for name in ("QUICK_MINUTES", "DATA"))
            summary = (ast.get_docstring(module) or "").partition("\n")[0]
            found[f"{path.parent.name}/{path.stem.replace('_', '-')}"] = Experiment(summary, minutes, data)
    return found


def load(name: str) -> ModuleType:
    """Import the module of an experiment: `Settings`, `PRESETS`, `check(settings)` and `run(settings, folder)`.

    Raises:
        FastWeightsError: there is no such experiment.
    """
    known = experiments()
    if name not in known:
        hint = did_you_mean(name, known, cutoff=0.3)
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
