"""What is searched: a range or a list of choices for each setting, checked against the experiment's Settings."""

import dataclasses
import difflib
import itertools
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastweights.errors import RunError

if TYPE_CHECKING:
    import optuna

Value = bool | int | float | str | None

OF_THE_MACHINE = ("threads", "device", "checkpoint_seconds")  # of every experiment: they decide no number
MOST_POINTS = 100_000
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
        """The values that are the first to be out of a setting's range."""
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
        """All of them: no order says which is the first to be out of range."""
        return self.values

    def suggest(self, name: str, trial: "optuna.Trial") -> Value:
        return trial.suggest_categorical(name, self.values)


Space = dict[str, Range | Choices]


def parse(settings_type: type, words: Sequence[str]) -> Space:
    """The search space that `NAME=LOW:HIGH`, `NAME=LOW:HIGH:log` and `NAME=A,B,C` describe, sorted by name.

    A setting that takes several values, such as `hidden_sizes`, gets a single one in each trial.

    Raises:
        RunError: an unknown setting, or values that it cannot take; the message says what would be right.

    Examples:
        >>> from fastweights.reproduce.ba2016.associative_retrieval import Settings
        >>> from fastweights.sweep import parse
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
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise RunError(f"the experiment has no setting {name!r}: {hint}`--help` of `reproduce` lists all")
        if name in OF_THE_MACHINE:
            raise RunError(f"{name} decides how fast a run is, not what it learns, and cannot be searched")
        if name in space:
            raise RunError(f"{name} is searched twice: give it once, with all its values")
        space[name] = _dimension(name, text.strip(), hints[name])
    return dict(sorted(space.items()))


def grid(space: Space) -> list[dict[str, Value]]:
    """Every combination of the values; a range of integers stands for each of them.

    Raises:
        RunError: a range of other numbers, which has no end of values, or more than 100,000 combinations.

    Examples:
        >>> from fastweights.sweep import Choices, Range, grid
        >>> grid({"inner_steps": Range(1, 2), "decay": Choices((0.9,))})
        [{'inner_steps': 1, 'decay': 0.9}, {'inner_steps': 2, 'decay': 0.9}]
    """
    values: dict[str, Sequence[Value]] = {}
    for name, dimension in space.items():
        if isinstance(dimension, Choices):
            values[name] = dimension.values
        elif isinstance(dimension.low, int) and isinstance(dimension.high, int):
            if dimension.log:
                raise RunError(f"a grid takes every integer of {name}={dimension}: leave out :log, or list choices")
            values[name] = range(dimension.low, dimension.high + 1)
        else:
            raise RunError(f"a grid has no end over {name}={dimension}: list choices, such as {name}=A,B,C")
    points = math.prod(map(len, values.values()))
    if points > MOST_POINTS:
        raise RunError(f"the grid has {points:,} points, more than {MOST_POINTS:,}: use --sampler random or tpe")
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def applied(settings: Any, params: dict[str, Value]) -> Any:
    """The settings with the values of a trial in place.

    Examples:
        >>> from fastweights.reproduce.ba2016.associative_retrieval import Settings
        >>> from fastweights.sweep import applied
        >>> applied(Settings(), {"hidden_sizes": 20}).hidden_sizes
        (20,)
    """
    hints = typing.get_type_hints(type(settings))
    whole = {name: (value,) if typing.get_origin(hints[name]) is tuple else value for name, value in params.items()}
    return dataclasses.replace(settings, **whole)


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
    """The type of a single value, and whether it may be none."""
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
    wanted = {bool: "true or false", int: "whole numbers", float: "numbers", str: "words"}.get(kind, "")
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
        wanted = "finite numbers" if kind is float else wanted
    raise RunError(f"{name} takes {wanted}{' or none' if optional else ''}, got {text!r}")
