"""The parts that all experiments share: settings of some models alone, refusals, and the one `run`."""

import bisect
import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastweights import processes
from fastweights.checks import check_integers, check_sizes
from fastweights.errors import RunError, one_line
from fastweights.files import remove_parts
from fastweights.reproduce import MACHINE_SETTINGS, command
from fastweights.reproduce._members import Members, set_threads, train_free, train_member, working_beside
from fastweights.runs import Member, Record, RunFolder, show_progress, write_result
from fastweights.runs.records import read_json

LARGEST = 2**31 - 1  # the largest number that every integer on the way to the kernels holds
MOST_THREADS = 256
_REFUSED = 64  # sizes in a row that a layer may refuse: one of 64 heads takes every 64th
TABLE_SETTINGS = ("models", "seeds", "data_dir")  # they choose members and find the data
# Settings of some experiments that choose rows with names of their own, points of a curve or a folder, or that decide
# how and not what is computed.
_ROW_SETTINGS = (
    "hidden_sizes",
    "ways",
    "shots",
    "memories",
    "tested",
    "encoders",
    "half",
    "rivals",
    "kinds",
    "sets",
    "cells",
    "layer",
)

T = TypeVar("T")


def only(models: str | tuple[str, ...], default: T, text: str, *, recorded_as: str | None = None) -> T:
    """Declare a setting that concerns these models alone; `--help` shows their names before the text.

    With `recorded_as` the member's settings.json has it under that name, such as one model's own number of epochs.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     epochs: int = 5
        ...     decay: float = only("fast-weights", 0.9, "Fraction of the fast matrix kept after each step.")
        >>> settings_of(Settings(), "fast-weights"), settings_of(Settings(), "lstm")
        ({'epochs': 5, 'decay': 0.9}, {'epochs': 5})
    """
    names = (models,) if isinstance(models, str) else models
    about = {"help": f"{', '.join(names)}: {text}", "only": names, "recorded_as": recorded_as}
    setting: T = dataclasses.field(default=default, metadata=about)
    return setting


def except_for(models: tuple[str, ...], default: T, text: str, *, null: bool = False) -> T:
    """Declare a setting that concerns all models but these; with `null` the others' settings.json has null for it."""
    about = {"help": f"all but {', '.join(models)}: {text}", "except_for": models, "null": null}
    setting: T = dataclasses.field(default=default, metadata=about)
    return setting


def settings_of(settings: Any, model: str, *, without: Collection[str] = ()) -> Record:
    """Return the settings that decide the numbers of a model, in the order of the fields.

    Args:
        settings: an experiment's, a dataclass whose fields may be declared by `only` and `except_for`.
        model: as `--models` names it.
        without: names of further settings that decide which members there are, but no number of one.
    """
    record, renamed = {}, {}
    for field in dataclasses.fields(settings):
        about, value, concerns = field.metadata, _plain(getattr(settings, field.name)), _concerns(field, model)
        if field.name in MACHINE_SETTINGS or field.name in TABLE_SETTINGS or field.name in without:
            continue
        if concerns and about.get("recorded_as"):
            renamed[about["recorded_as"]] = value
        elif concerns or about.get("null"):
            record[field.name] = value if concerns else None
    return record | renamed


def changes_of(settings: Any, preset: Any, *models: str) -> Record:
    """Return each setting that decides a number of these models and is not the preset's: its value, and the preset's.

    Examples:
        >>> from fastweights.reproduce import load
        >>> module = load("ba2016/associative-retrieval")
        >>> settings = module.Settings(decay=0.95, epochs=2, hidden_sizes=(20,), threads=2)
        >>> changes_of(settings, module.PRESETS["quick"], "fast-weights")
        {'epochs': [2, 30], 'decay': [0.95, 0.9]}
    """
    without = (*MACHINE_SETTINGS, *TABLE_SETTINGS, *_ROW_SETTINGS)
    pairs = {
        field.name: [_plain(getattr(each, field.name)) for each in (settings, preset)]
        for field in dataclasses.fields(settings)
        if field.name not in without and any(_concerns(field, model) for model in models)
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value  # as JSON has it


def _concerns(field: "dataclasses.Field[Any]", model: str) -> bool:
    about = field.metadata
    return model in about.get("only", (model,)) and model not in about.get("except_for", ())


def least_error(member: Member) -> float:
    """Return the least validation error of a member's epochs, infinity where it has none."""
    errors = [record.get("validation_error") for record in member.epochs]
    return min((error for error in errors if isinstance(error, (int, float))), default=math.inf)


def read_settings(kind: type[T], member: Member, folder: Path) -> T:
    """Return a member's own settings, which need not be the defaults of `kind`, an experiment's dataclass.

    Raises:
        RunError: one of them is of another type.
    """
    own = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in member.settings:
            own[field.name] = value = member.settings[field.name]
            right = type(field.default)
            plain = field.default is None or type(value) is right or (right is float and type(value) is int)
            if not plain:
                path = folder / member.name / "settings.json"
                raise RunError(f"{path}: {field.name} is {value!r}; it must be of type {right.__name__}")
    return kind(**own)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what torch and our own checks raise for settings that cannot run into one line for the user."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError) as error:  # torch raises the last two for a size or a device
        raise RunError(f"these settings cannot run: {one_line(error)}") from error


def check_settings(settings: Any, *, sizes: Collection[str], lists: Collection[str] = ("models", "seeds")) -> None:
    """Refuse numbers out of range, lists that are empty or have something twice, and a device that is not there.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: torch has no such device.
    """
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(settings).items()}
    for name in lists:
        if not values[name]:
            raise ValueError(f"{name} is empty: give at least one value")
    for name in (*sizes, "threads"):
        for value in values[name]:
            check_sizes(**{name: value})
    for name, several in values.items():
        for place, value in enumerate(several):
            if value in several[:place]:
                raise ValueError(f"{name} has {value} twice: give each value once")
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:,}, got {value}")
    if settings.threads > MOST_THREADS:
        raise ValueError(f"threads must be at most {MOST_THREADS}, got {settings.threads}")
    for name in ("seeds", "data_seed"):  # data that is not drawn has no seed
        for value in values.get(name, ()):
            check_integers(0, **{name: value})
    if hasattr(settings, "device"):  # scikit-learn computes on the processor
        torch.ones(1, device=settings.device).item()  # the device is there, and holds numbers


def find_size(count: Callable[[int], int], target: int) -> int:
    """Return the size with which a number that grows with it comes closest to a target; of two as close, the larger.

    Args:
        count: of a size from 1 on. A size that it refuses with a ValueError is passed over.
        target: the number.

    Raises:
        ValueError: it refuses too many sizes in a row.

    Examples:
        >>> find_size(lambda size: 8 * size**2, 20_000)
        50
    """

    def first(size: int) -> tuple[int, int]:
        """Return the first size from this one on that is not refused, and its number."""
        for each in range(size, size + _REFUSED):
            try:
                return each, count(each)
            except ValueError as error:
                refusal = error
        raise refusal

    beyond = 1
    while first(beyond)[1] < target:
        beyond *= 2
    # The least size that leads to the target: the one before it is not refused, or both would lead to the same.
    least = bisect.bisect_left(range(beyond), target, lo=beyond // 2 + 1, key=lambda size: first(size)[1])
    sizes = [first(least)[0], max(1, least - 1)]
    return min(sizes, key=lambda size: abs(first(size)[1] - target))


def make_ready(experiment: str, members: Collection[RunFolder], *, fresh: bool) -> None:
    """Check that every folder can be used, and then, with `fresh`, remove the runs that are there.

    Raises:
        RunError: a folder holds a run with other settings, or is in use, or lies beside runs of another experiment.
    """
    folders = {member.path.parent for member in members}
    for folder in folders:
        try:
            present = read_json(folder / "result.json").get("experiment", experiment)
        except RunError:  # there is none yet, or it is damaged and is written again
            continue
        if present != experiment:
            raise RunError(f"{folder} holds runs of {present}, not of {experiment}: give another --output")
    for member in members:
        if fresh:
            member.require_free()  # all of them, before the first is removed
        else:
            member.check()
    for member in members if fresh else ():
        member.remove()
    for folder in folders:
        remove_parts(folder, seconds=3600)  # another process may be writing younger ones


def run_of(name: str) -> Callable[..., None]:
    """Return the function that runs the experiment of a module, which has its parts.

    The module has `EXPERIMENT`, `PRESETS`, `check(settings)` and `prepare(settings, folder)`, which returns `Members`.
    """

    def run(
        settings: Any,
        folder: str | os.PathLike[str],
        *,
        preset: str = "quick",
        fresh: bool = False,
        workers: int = 1,
    ) -> None:
        """Train the members in turn, each resumed where a killed process was, and write result.json after each.

        The processes that torchrun started all call this function and train each member together; the main one writes.

        Args:
            settings: of the experiment.
            folder: of the run; the members' folders lie in it.
            preset: from which the settings started.
            fresh: start over.
            workers: members that are trained side by side, each in a process of its own; the numbers stay the same.

        Raises:
            RunError: settings out of range, or a folder that cannot be used; both are found before training starts.
            DataError: the data set is missing or damaged.
            TrainingError: the numbers are not finite.
        """
        module = sys.modules[name]
        module.check(settings)
        if workers > 1:
            processes.refuse_several("--workers")
        members: Members = module.prepare(settings, Path(folder))
        if members.alone and workers > 1:
            raise RunError(f"{module.EXPERIMENT} measures times: leave --workers out, or other processes count too")

        @processes.in_main
        def prepare_folders() -> None:
            make_ready(module.EXPERIMENT, members.folders.values(), fresh=fresh)
            for member in members.folders.values():
                if not (members.alone or members.has_finished(member)):
                    member.load()  # refuses a damaged one before the table is written without its score

        prepare_folders()
        about: Record = {
            "experiment": module.EXPERIMENT,
            "preset": preset,
            "command": command(module.EXPERIMENT, preset, module.PRESETS[preset], settings),
            "changes": {
                member.path.name: changes_of(settings, module.PRESETS[preset], *_models(key))
                for key, member in members.folders.items()
            },
        }

        @processes.in_main
        def write_table() -> None:
            write_result(folder, **about, **members.table())

        with set_threads(settings.threads), show_progress() as progress:
            write_table()
            keys = [key for key, member in members.folders.items() if not members.has_finished(member)]
            if (others := min(workers, len(keys)) - 1) > 0:
                done = set()
                with working_beside(name, settings, Path(folder), others, progress):
                    for key in train_free(members, keys, progress):
                        done.add(key)
                        write_table()
                # What another process has trained is looked at once more: it may have to be scored again, or have
                # ended too early.
                keys = [key for key in keys if key not in done and not members.has_finished(members.folders[key])]
            for key in keys:
                train_member(members, key, progress)
                write_table()
            write_table()

    return run


def _models(key: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the names of the models of a member: its key begins with one, with several, or with a row that has it."""
    first = getattr(key[0], "model", key[0])
    return first if isinstance(first, tuple) else (first,)


def resume(folder: RunFolder, beginning: Record) -> Record:
    """Return the state of the last checkpoint, with the metrics as they were then; without one, save `beginning`.

    Raises:
        RunError: the checkpoint is damaged, or the disk refuses.
    """
    state = folder.begin(beginning)
    if state is not beginning and not (state.get("finished") or state.get("result")):
        folder.rewind(state)
        folder.note_environment()
    return state
