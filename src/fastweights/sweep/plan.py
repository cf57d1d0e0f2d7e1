"""A search as it was asked for: a range or choices for each setting, and how to search them."""

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastweights import reproduce
from fastweights.errors import RunError, did_you_mean

if TYPE_CHECKING:
    import optuna

Value = bool | int | float | str | None

DEFAULT_TRIALS = 30
METRICS = ("validation_error", "validation_loss")  # metrics of an experiment that names no others
_MOST_POINTS = 100_000
_LARGEST = 2**53  # optuna keeps a number as a double: larger integers would change
_FORMS = "NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C"


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included; with `log`, every factor is as likely as any other."""

    low: int | float
    high: int | float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low}:{self.high}" + (":log" if self.log else "")

    @property
    def ends(self) -> tuple[Value, ...]:
        """Both ends, to be checked against the setting's own range."""
        return self.low, self.high

    def suggest(self, name: str, trial: "optuna.Trial") -> Value:
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choices:
    """One of these values."""

    values: tuple[Value, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.values))

    @property
    def ends(self) -> tuple[Value, ...]:
        """All values, to be checked against the setting's own range, because they have no order."""
        return self.values

    def suggest(self, name: str, trial: "optuna.Trial") -> Value:
        return trial.suggest_categorical(name, self.values)


Space = dict[str, Range | Choices]
"""Maps the name of each searched setting to its range or its choices."""


@dataclass(frozen=True)
class Plan:
    """A search over the settings of an experiment; what cannot be searched is refused when the plan is made.

    Args:
        experiment: the name as `fastweights list` shows it.
        settings: the settings that all trials share.
        space: the ranges and choices, from `parse`.
        output: the folder of the search.
        preset: the preset that `settings` started from, for the command that the search prints.
        sampler: "tpe" learns from the trials so far, "random" does not, "grid" runs every combination.
        trials: the number of ended trials, over all workers; None is 30, or the whole grid.
        storage: an optuna URL; None is an SQLite file in `output`.
        metric: the key of the result's record that decides, averaged over the models, sizes and seeds of a trial.
        direction: "minimize" or "maximize".
        sampler_seed: the seed of the values: the k-th trial draws from this seed and k alone.

    Raises:
        RunError: settings, trials, metric or grid are not possible.

    Examples:
        >>> from pathlib import Path
        >>> from fastweights import reproduce
        >>> from fastweights.sweep import Plan, parse
        >>> settings = reproduce.load("ba2016/associative-retrieval").Settings()
        >>> space = parse(type(settings), ["decay=0.8,0.9,0.95", "inner_steps=1:2"])
        >>> Plan("ba2016/associative-retrieval", settings, space, Path("runs/mine"), sampler="grid").total
        6
    """

    experiment: str
    settings: Any
    space: Space
    output: Path
    preset: str = "quick"
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    trials: int | None = None
    storage: str | None = None
    metric: str = "validation_error"
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler_seed: int = 0

    def __post_init__(self) -> None:
        if self.trials is not None and not 1 <= self.trials <= _MOST_POINTS:
            raise RunError(f"--trials must lie between 1 and {_MOST_POINTS:,}, got {self.trials}")
        if not 0 <= self.sampler_seed < 2**32:
            raise RunError(f"--sampler-seed must lie between 0 and {2**32 - 1:,}, got {self.sampler_seed}")
        if self.metric.startswith("test"):
            raise RunError(f"--metric {self.metric}: settings are chosen by validation, never by the test score")
        module = reproduce.load(self.experiment)
        known = metrics_of(self.experiment)
        if self.metric not in known:
            raise RunError(f"the result has no {self.metric!r} to choose by; --metric can be {' or '.join(known)}")
        if self.sampler == "grid" and (self.trials or 0) > (points := math.prod(map(len, self.grid().values()))):
            raise RunError(f"the grid has {points} points: give at most --trials {points}, or leave it out")
        check = getattr(module, "check", None)
        if check is None:
            return
        check(self.settings)
        for name, dimension in self.space.items():
            for value in dimension.ends:
                try:
                    check(self.with_values({name: value}))
                except RunError as error:
                    raise RunError(f"--search {name}={dimension} cannot run: {error}") from None

    @property
    def total(self) -> int:
        """The number of trials after which the search ends."""
        whole = math.prod(map(len, self.grid().values())) if self.sampler == "grid" else DEFAULT_TRIALS
        return self.trials or whole

    def grid(self) -> dict[str, list[Value]]:
        """Return the values of each setting; a range of integers stands for each of them.

        Raises:
            RunError: a range of other numbers, which has no end of values, or more than 100,000 combinations.
        """
        values: dict[str, list[Value]] = {}
        for name, dimension in self.space.items():
            if isinstance(dimension, Choices):
                values[name] = list(dimension.values)
            elif not isinstance(dimension.low, int) or not isinstance(dimension.high, int):
                raise RunError(f"a grid has no end over {name}={dimension}: list choices, such as {name}=A,B,C")
            elif dimension.log:
                raise RunError(f"a grid takes every integer of {name}={dimension}: leave out :log, or list choices")
            else:
                # Its length is looked at before its values: there may be too many for any list.
                values[name] = range(dimension.low, dimension.high + 1)  # type: ignore[assignment]
        points = math.prod(map(len, values.values()))
        if points > _MOST_POINTS:
            raise RunError(f"the grid has {points:,} points, more than {_MOST_POINTS:,}: use --sampler random or tpe")
        return {name: list(each) for name, each in values.items()}

    def with_values(self, params: dict[str, Value]) -> Any:
        """Return the experiment's settings with the values of a trial in place.

        A setting of several values, such as `hidden_sizes`, gets one.
        """
        hints = typing.get_type_hints(type(self.settings))
        whole = {name: (value,) if typing.get_origin(hints[name]) is tuple else value for name, value in params.items()}
        return dataclasses.replace(self.settings, **whole)

    def folder(self, params: dict[str, Value]) -> Path:
        """Return the run folder of a trial, named by its settings, so that a retry finds its checkpoint."""
        text = json.dumps(_plain(self.with_values(params)), sort_keys=True)
        return self.output / "trials" / hashlib.sha256(text.encode()).hexdigest()[:12]

    def definition(self) -> dict[str, Any]:
        """Return what decides the trials, as plain JSON values: the same for everybody who works on this search."""
        own = {
            "experiment": self.experiment,
            "--sampler": self.sampler,
            "--sampler-seed": self.sampler_seed,
            "--metric": self.metric,
            "--direction": self.direction,
        }
        searched = {f"--search {name}": str(dimension) for name, dimension in self.space.items()}
        shared = {name: value for name, value in _plain(self.settings).items() if name not in self.space}
        return own | searched | shared


def _plain(settings: Any) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(settings) if field.name not in reproduce.MACHINE_SETTINGS)
    return dict(json.loads(json.dumps({name: getattr(settings, name) for name in names}, default=str)))


def metrics_of(experiment: str) -> tuple[str, ...]:
    """Return the scores that a search over an experiment's settings can choose by, the usual one first."""
    return tuple(getattr(reproduce.load(experiment), "METRICS", METRICS))


def parse(settings_type: type, words: Sequence[str]) -> Space:
    """Return the search space of `NAME=LOW:HIGH`, `NAME=LOW:HIGH:log` and `NAME=A,B,C`, sorted by name.

    A setting that takes several values, such as `hidden_sizes`, gets a single one in each trial.

    Raises:
        RunError: an unknown setting, or values that it cannot take; the message says what would be right.

    Examples:
        >>> from fastweights import reproduce
        >>> from fastweights.sweep import parse
        >>> Settings = reproduce.load("ba2016/associative-retrieval").Settings
        >>> parse(Settings, ["learning_rate=1e-4:1e-2:log", "inner_steps=1:3"])["inner_steps"]
        Range(low=1, high=3, log=False)
        >>> parse(Settings, ["identity_scale=0.05,0.5", "hidden_sizes=20,50"])["hidden_sizes"]
        Choices(values=(20, 50))
    """
    if not words:
        raise RunError(f"there is nothing to search: give --search {_FORMS}")
    hints = typing.get_type_hints(settings_type)
    names = [field.name for field in dataclasses.fields(settings_type)]
    space: Space = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise RunError(f"--search takes {_FORMS}, got {word!r}")
        if name not in names:
            hint = did_you_mean(name, names)
            raise RunError(f"the experiment has no setting {name!r}: {hint}`--help` of `reproduce` lists all")
        if name in reproduce.MACHINE_SETTINGS:
            raise RunError(f"{name} decides how fast a run is, not what it learns, and cannot be searched")
        if name in space:
            raise RunError(f"{name} is searched twice: give it once, with all its values")
        space[name] = _dimension(name, text.strip(), hints[name])
    return dict(sorted(space.items()))


def _dimension(name: str, text: str, hint: Any) -> Range | Choices:
    kind, optional = _element(name, hint)
    if kind in (int, float) and ":" in text:
        return _range(name, text, kind)
    values = tuple(_value(name, part.strip(), kind, optional) for part in text.split(","))
    for index, value in enumerate(values):
        if value in values[:index]:
            raise RunError(f"{name}={text} holds {value} twice: give every choice once")
    return Choices(values)


def _element(name: str, hint: Any) -> tuple[Any, bool]:
    """Return the type of a single value, and whether it may be none."""
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        if len(inner) == 1 or inner[1:] == (Ellipsis,):
            return _element(name, inner[0])
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = tuple(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
        hint, optional = (inner[0] if len(inner) == 1 else hint), len(inner) < len(typing.get_args(hint))
    if hint not in (bool, int, float, str) and typing.get_origin(hint) is not Literal:
        raise RunError(f"{name} takes more than a number, a word or a switch, and cannot be searched")
    return hint, optional


def _range(name: str, text: str, kind: type) -> Range:
    low_text, high_text, *more = text.split(":")
    if more not in ([], ["log"]):
        raise RunError(f"{name}={text} is no range: give {name}=LOW:HIGH or {name}=LOW:HIGH:log")
    low, high = (_value(name, part.strip(), kind, False) for part in (low_text, high_text))
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if low >= high:
        raise RunError(f"{name}={text}: the low end must be below the high end; for one value give {name}={low}")
    if more and low <= 0:
        raise RunError(f"{name}={text}: a range on a log scale must begin above 0, not at {low}")
    if kind is int and max(abs(low), abs(high)) > _LARGEST:
        raise RunError(f"{name}={text}: the ends of a range of integers must lie within {_LARGEST:,}")
    if not math.isfinite(high - low):
        raise RunError(f"{name}={text}: the range is too wide for a float")
    return Range(low, high, bool(more))


def _value(name: str, text: str, kind: Any, optional: bool) -> Value:
    if optional and text.lower() == "none":
        return None
    wanted = {bool: "true or false", int: "whole numbers", float: "finite numbers", str: "words"}.get(kind, "")
    if typing.get_origin(kind) is Literal:
        known = {str(choice): choice for choice in typing.get_args(kind)}
        if text in known:
            return typing.cast(Value, known[text])
        wanted = ", ".join(known)
    elif kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    elif kind is str and text:
        return text
    elif kind in (int, float):
        try:
            number: int | float = kind(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise RunError(f"{name} takes {wanted}{' or none' if optional else ''}, got {text!r}")
