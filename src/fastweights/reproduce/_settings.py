"""What every experiment refuses before it trains, and how it goes through its runs."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fastweights.errors import RunError
from fastweights.runs import RunFolder

LARGEST = 2**31 - 1  # what every integer on the way to the kernels holds
MOST_THREADS = 256
OF_THE_MACHINE = ("threads", "device", "checkpoint_seconds")  # they may change on resume


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turn what torch and our own checks raise for settings that cannot run into one line for the user."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError) as error:  # torch raises the last two for a size or a device
        raise RunError(f"these settings cannot run: {str(error).splitlines()[0]}") from error


def check_settings(settings: Any, *, positive: Iterable[str], not_empty: Iterable[str]) -> None:
    """Refuse numbers out of range, lists that are empty or have something twice, and a device that is not there.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: torch has no such device.
    """
    for name in not_empty:
        if not getattr(settings, name):
            raise ValueError(f"{name} is empty: give at least one")
    for name in (*positive, "threads"):
        value = getattr(settings, name)
        if min(value if isinstance(value, tuple) else (value,)) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if twice := [one for place, one in enumerate(values) if one in values[:place]]:
            raise ValueError(f"{field.name} has {twice[0]} twice: give each once")
        for number in values:
            if isinstance(number, int) and abs(number) > LARGEST:
                raise ValueError(f"{field.name} must be at most {LARGEST:,}, got {number}")
    if settings.threads > MOST_THREADS:
        raise ValueError(f"threads must be at most {MOST_THREADS}, got {settings.threads}")
    data_seed = getattr(settings, "data_seed", 0)  # of data that is drawn; real data has none
    for name, seeds in (("seeds", settings.seeds), ("data_seed", (data_seed,))):
        if min(seeds) < 0:
            raise ValueError(f"{name} must not be negative, got {min(seeds)}")
    torch.ones(1, device=settings.device).item()  # the device is there, and holds numbers


def make_ready(experiment: str, members: Iterable[RunFolder], *, fresh: bool) -> None:
    """See that every folder can be used, and then, with `fresh`, remove the runs that are there.

    Raises:
        RunError: a folder holds a run with other settings, or is in use, or they lie beside runs of another experiment.
    """
    members = list(members)
    for path in {member.path.parent / "result.json" for member in members}:
        with contextlib.suppress(OSError, ValueError):  # none is there yet, or it is written anew
            found = json.loads(path.read_text()).get("experiment", experiment)
            if found != experiment:
                raise RunError(f"{path.parent} holds runs of {found}, not of {experiment}: give another --output")
    for member in members:
        if fresh:
            member.require_free()  # all of them, before the first is removed
        else:
            member.check()
    for member in members if fresh else ():
        member.remove()
